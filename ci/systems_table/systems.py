"""The systems S6 to S26 of the documents that the project was made from: what does each here, and which tests say so."""

from __future__ import annotations

from dataclasses import dataclass

SUITES = "suites"
META = "suites/meta"


@dataclass(frozen=True)
class System:
    """A row of the table.

    Args:
        primitives: names that the marker ``verifies`` of the suites carries.
        tests: node ids, or their beginnings, of what shows it beside the suites.
        benchmarks: names of benchmarks, or their beginnings, in the saved results.
    """

    number: str
    title: str
    primitives: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    benchmarks: tuple[str, ...] = ()


SYSTEMS = (
    System(
        "S6",
        "fork launcher",
        tests=(
            f"{META}/test_processes.py::test_a_script_without_main_guard",
            f"{META}/test_processes.py::test_a_module_function_a_lambda",
        ),
    ),
    System("S7", "spawn launcher", tests=(f"{META}/test_processes.py::test_ddp_keeps_replicas_equal",)),
    System(
        "S8",
        "MPI world",
        tests=(f"{META}/test_launched.py::test_mpiexec", f"{META}/test_mpi.py", f"{META}/test_mpi_world.py"),
    ),
    System(
        "S9",
        "launcher by environment, TCP or file; several nodes",
        tests=(f"{META}/test_launched.py::test_torchrun", f"{META}/test_launched.py::test_two_nodes_meet"),
    ),
    System("S10", "ring pass", ("ring_pass",)),
    System(
        "S11",
        "collectives",
        (
            *("ring_all_reduce", "ring_reduce_scatter", "ring_all_gather", "star_broadcast", "tree_broadcast"),
        ),
        tests=(f"{META}/test_parity.py",),
        benchmarks=("test_all_reduce",),
    ),
    System("S12", "initial weights", ("broadcast_parameters",)),
    System("S13", "gradient sync", ("sync_gradients",), benchmarks=("test_gradient_sync",)),
    System("S14", "model averaging", ("average_parameters", "train_local_sgd")),
    System("S15", "synchronous SGD", ("train_synchronous",)),
)
