"""The launch of this process, as torchrun, mpiexec or srun describe it in the environment.

Sources of the names: torch elastic's environment (RANK, LOCAL_RANK, ...), PMIx and Open MPI (OMPI_COMM_WORLD_*),
MPICH and Intel MPI (PMI_*, MPI_LOCAL*), Slurm (SLURM_*). They are tried in this order. An inner launcher sets its
variables over those of the allocation that it runs in, so Slurm comes last. There is one exception: if PMI_* and
SLURM_* agree, Slurm has set both, for MPICH programs that ``srun --mpi=pmi2`` starts. Then the names of the job and
node are Slurm's.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlparse

from pdlcheck.launch.key import given_key
from pdlcheck.launch.nesting import INSIDE

__all__ = ["INSIDE", "Launch", "is_loopback", "launch_of"]


@dataclass(frozen=True, slots=True)
class Launch:
    """One process of a launch.

    Args:
        launcher: ``torchrun``, ``mpiexec`` or ``srun``.
        rank, world_size: the rank of this process, and the number of all processes.
        local_rank, local_world_size: the same within the node of this process; None if the launcher does not set them.
        init_method: the meeting place: a file, or a place that ``torch.distributed.init_process_group`` takes.
        key: the secret of the launch; empty if the meeting file holds one.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    init_method: str
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class _Names:
    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    job: tuple[str, ...]


_PMI = _Names("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_ID", "PMI_PORT", "PMI_FD"))
_SLURM = _Names(
    "srun",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_TASKS_PER_NODE",
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
_LAUNCHERS = (
    _Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("TORCHELASTIC_RUN_ID", "MASTER_PORT")),
    _Names(
        "mpiexec",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _PMI,
    _SLURM,
)


def launch_of(environment: Mapping[str, str], init_method: str | None = None) -> Launch | None:
    """Return this process's place in a launch of several processes; None outside a launch.

    Args:
        environment: ``os.environ``, or a part of it.
        init_method: ``env://``, ``tcp://host:port`` or ``file:///path``. The default is ``env://``, the place that
            ``MASTER_ADDR`` and ``MASTER_PORT`` name. On one machine, a file in the directory for temporary files
            replaces it. On several machines, every place except a file needs a key in ``PDLCHECK_LAUNCH_KEY``.

    Raises:
        ValueError: a variable is not a number, a rank is out of range, ``init_method`` is not a place, or a launch on
            several nodes has no place or no key.
    """
    if INSIDE in environment:
        return None
    if init_method is not None:
        _check_place(init_method, environment)
    for names in _LAUNCHERS:
        if names.rank in environment and names.world_size in environment:
            if names is _PMI and _place(environment, _PMI) == _place(environment, _SLURM):
                continue
            rank, world_size = (_number(environment, name) for name in (names.rank, names.world_size))
            if world_size < 2:
                return None
            if not 0 <= rank < world_size:
                raise ValueError(
                    f"{names.rank}={rank} is no rank of {names.world_size}={world_size}, which has 0 to "
                    f"{world_size - 1}; unset both outside a launch"
                )
            local_rank, local_world_size = _on_this_node(names, environment, init_method, rank, world_size)
            place = _meeting_place(names, environment, init_method, local_world_size == world_size, world_size)
            key = b"" if place.startswith("file://") else given_key(environment)
            return Launch(names.launcher, rank, world_size, local_rank, local_world_size, place, key)
    return None


def _check_place(init_method: str, environment: Mapping[str, str]) -> None:
    place = urlparse(init_method)
    if place.scheme == "env":
        names_one = _names_place(environment)
    elif place.scheme == "tcp":
        names_one = bool(re.fullmatch(r"(\[.+\]|[^:]+):\d+", place.netloc))
    else:
        names_one = place.scheme == "file" and place.path.startswith("/") and not place.netloc
    if not names_one:
        raise ValueError(
            "--init-method must be tcp://HOST:PORT, file:///PATH, or env:// with MASTER_ADDR and MASTER_PORT set; "
            f"got {init_method!r}"
        )


def _place(environment: Mapping[str, str], names: _Names) -> tuple[str | None, str | None]:
    return environment.get(names.rank), environment.get(names.world_size)


def _on_this_node(
    names: _Names, environment: Mapping[str, str], init_method: str | None, rank: int, world_size: int
) -> tuple[int | None, int | None]:
    """Return the local rank and the local world size; None for a value that the environment does not define."""
    local_rank = _number(environment, names.local_rank) if names.local_rank in environment else None
    local_world_size: int | None
    if names is _SLURM:
        local_world_size = _tasks_of_this_node(environment, world_size)
    elif names.local_world_size not in environment and (
        _may_span_nodes(environment, init_method) or (_names_place(environment) and local_rank not in (None, rank))
    ):
        local_world_size = None
    else:
        local_world_size = _number(environment, names.local_world_size, world_size)
    if local_world_size == world_size:  # Open MPI may number the ranks of a node in another order
        local_rank = rank
    return local_rank, local_world_size


def _may_span_nodes(environment: Mapping[str, str], init_method: str | None) -> bool:
    """Return whether processes on other machines could also reach the meeting place."""
    place = urlparse(init_method or "env://")
    if place.scheme == "file":
        return True
    if place.scheme != "tcp" and not _names_place(environment):
        return False
    host = place.hostname if place.scheme == "tcp" else environment["MASTER_ADDR"]
    return host not in (None, "localhost", "::1") and not is_loopback(str(host))


def _names_place(environment: Mapping[str, str]) -> bool:
    return {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys()


def is_loopback(address: str) -> bool:
    """Return whether this IPv4 address is a loopback address: on each machine, it means that machine itself."""
    return address.startswith("127.")


def _tasks_of_this_node(environment: Mapping[str, str], default: int) -> int:
    """Return the number of tasks on this node.

    Slurm writes ``4(x2),1`` for 4 tasks on each of 2 nodes and 1 task on the third.
    """
    text = environment.get(_SLURM.local_world_size)
    if text is None:
        return default
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    tasks = [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]
    node = _number(environment, "SLURM_NODEID", 0)
    if None in parts or not 0 <= node < len(tasks):
        raise ValueError(
            f"{_SLURM.local_world_size} must be numbers of tasks, as 4(x2),1, one for node {node} among them, "
            f"got {text!r}; unset SLURM_PROCID outside a launch"
        )
    return tasks[node]


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ValueError(f"{name} must be a number, got {text!r}; unset it outside a launch") from None


def _meeting_place(
    names: _Names, environment: Mapping[str, str], init_method: str | None, is_one_node: bool, world_size: int
) -> str:
    """Return the place where the processes of the launch meet.

    On one machine it is a file of this user, because all users of the machine can read the data in torch's rendezvous.
    """
    if init_method is not None and init_method.startswith("file://"):
        return init_method
    has_place = init_method is not None or _names_place(environment)
    if is_one_node or (has_place and not _may_span_nodes(environment, init_method)):
        job = urlparse(init_method or "").netloc or _job(names, environment)
        name = "".join(letter if letter.isalnum() else "-" for letter in job)[-100:]
        return f"file://{tempfile.gettempdir()}/pdlcheck-{os.getuid()}-{name or os.getppid()}"
    if not has_place:
        raise ValueError(
            f"{world_size} processes on several nodes need a place to meet: set MASTER_ADDR and MASTER_PORT "
            "to rank 0's host and a free port there, or pass --init-method tcp://host:port or file:///shared/path"
        )
    return init_method or "env://"


def _job(names: _Names, environment: Mapping[str, str]) -> str:
    """Return text that is equal in all processes of this launch and different in other launches."""
    return "-".join(environment[name] for name in names.job if name in environment)
