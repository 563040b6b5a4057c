"""The systems S6 to S26 of the project's source documents: their counterparts here, and the tests of each."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SYSTEMS", "System"]

META = "suites/meta"


@dataclass(frozen=True)
class System:
    """A row of the table.

    Args:
        number: of the system in the documents.
        title: of the system.
        primitives: names in the suites' marker ``verifies``.
        tests: node ids, or their beginnings, of further tests besides the suites.
        benchmarks: beginnings of benchmark names in the saved results.
    """

    number: str
    title: str
    primitives: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    benchmarks: tuple[str, ...] = ()


SYSTEMS = (
    System(
        "S6",
        "fork launcher, notebook",
        tests=(
            f"{META}/processes/test_processes.py::test_a_script_without_main_guard",
            f"{META}/every_world/test_interactive.py",
        ),
        benchmarks=("test_start_of_two_ranks",),
    ),
    System(
        "S7",
        "spawn launcher",
        tests=(
            f"{META}/processes/test_processes.py::test_a_module_function_a_lambda",
            f"{META}/every_world/test_init_process_group.py::test_functions_that_set_up_and_clean_up",
        ),
        benchmarks=("test_start_of_two_ranks",),
    ),
    System(
        "S8",
        "MPI launcher and world",
        tests=(
            f"{META}/launched/test_launched.py::test_mpiexec",
            f"{META}/mpi/test_mpi.py",
            f"{META}/mpi/test_world.py",
            f"{META}/project/test_examples.py::test_synchronous_sgd_under_mpiexec",
        ),
        benchmarks=("test_distributed_data_parallel_on_mpi",),
    ),
    System(
        "S9",
        "launcher by environment, TCP or file; nodes",
        tests=(
            f"{META}/launched/test_launched.py::test_torchrun",
            f"{META}/launched/test_launched.py::test_two_nodes_meet",
        ),
        benchmarks=("test_meeting_of_two_ranks",),
    ),
    System(
        "S10",
        "ring pass",
        ("ring_pass",),
        tests=(f"{META}/project/test_examples.py::test_ring_pass",),
        benchmarks=("test_ring_pass",),
    ),
    System(
        "S11",
        "collectives",
        ("ring_all_reduce", "ring_reduce_scatter", "ring_all_gather", "star_broadcast", "tree_broadcast"),
        tests=(f"{META}/parity/test_parity.py",),
        benchmarks=("test_all_reduce",),
    ),
    System("S12", "initial weights", ("broadcast_parameters",), benchmarks=("test_initial_weights",)),
    System("S13", "gradient sync every k steps", ("sync_gradients",), benchmarks=("test_gradient_sync",)),
    System(
        "S14",
        "model averaging",
        ("average_parameters", "train_local_sgd", "LocalSGD", "DiLoCo"),
        benchmarks=("test_sync_every",),
    ),
    System(
        "S15",
        "synchronous SGD",
        ("train_synchronous",),
        tests=(f"{META}/project/test_examples.py::test_synchronous_sgd",),
        benchmarks=("test_epoch",),
    ),
    System("S16", "cost model", tests=("pdlcheck/bench/formulas.py",), benchmarks=("test_sync_every",)),
    System("S17", "DataParallel", ("DataParallel", "memory_by_worker"), benchmarks=("test_data_parallel",)),
    System(
        "S18",
        "DistributedDataParallel and hooks",
        ("DistributedDataParallel", "fp16_compress", "bf16_compress", "top_k", "power_sgd"),
        benchmarks=("test_distributed_data_parallel[", "test_comm_hooks"),
    ),
    System(
        "S19",
        "sampler, shards, digests",
        ("ShardSampler", "shard_indices", "shard_digest", "gather_shard_digests", "shard_digest_table"),
        benchmarks=("test_sampler",),
    ),
    System(
        "S20",
        "mixed precision",
        ("DistributedGradScaler", "MasterWeights", "clip_grad_norm", "saved_activation_bytes"),
        benchmarks=("test_clipping", "test_scaling", "test_saved_activations"),
    ),
    System(
        "S21",
        "checkpoints",
        ("save_checkpoint", "load_checkpoint", "latest_checkpoint", "resumable_steps"),
        benchmarks=("test_save", "test_load"),
    ),
    System("S22", "layer slicing", ("split_model",), benchmarks=("test_pipeline[",)),
    System(
        "S23",
        "pipelining",
        ("Pipeline", "gpipe", "one_f_one_b", "interleaved_1f1b", "pipedream", "require_valid_schedule"),
        tests=(f"{META}/project/test_examples.py::test_the_pipeline",),
        benchmarks=("test_pipeline", "test_bubble"),
    ),
    System(
        "S24",
        "fault tolerance",
        ("resumable_steps",),
        tests=(f"{META}/primitives/test_elastic.py",),
        benchmarks=("test_restart_of_a_worker",),
    ),
    System("S25", "the function network", ("FunctionNet", "function_samples"), benchmarks=("test_epoch",)),
    System(
        "S26",
        "LeNet and ConvNet on digits",
        ("LeNet", "ConvNet"),
        tests=(f"{META}/project/test_examples.py::test_convnet",),
        benchmarks=("test_networks_on_digits",),
    ),
)
