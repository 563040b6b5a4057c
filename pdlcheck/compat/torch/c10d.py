"""The private names of ``torch.distributed``: its state, its process groups and its log."""

from __future__ import annotations

from functools import wraps
from typing import Any, Final

import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed_c10d

from pdlcheck.compat.private import name, take, uses

__all__ = [
    "DEFAULT_TIMEOUT",
    "KEEP_FORWARD_HANDLE",
    "LOG_ENTRY",
    "NEEDED_BY_SIM",
    "NEW_GROUP",
    "NOT_IN_GROUP",
    "HashStore",
    "WorldState",
    "device_types",
    "exclude_from_flight_recorder",
    "get_backend",
    "get_default_group",
    "log",
    "register_backend",
    "set_default_backend",
    "set_thread_isolation",
    "unregister_all_groups",
    "world_state",
]

_SIM: Final = "the simulated world"

# -- the functions that worlds replace -------------------------------------------------------------

NEW_GROUP: Final = name(
    "torch.distributed.distributed_c10d._new_process_group_helper",
    "the meeting of the ranks before they make a process group, and the check of init_process_group",
    lost="the simulated world and watched processes",
)
DEFAULT_TIMEOUT: Final = name(
    "torch.distributed.distributed_c10d._get_default_timeout",
    "the time limit of groups, without a look for NCCL and its warning",
    lost="the simulated world, and the check of init_process_group",
)
NOT_IN_GROUP: Final = name(
    "torch.distributed.distributed_c10d._warn_not_in_group",
    "an error where torch only warns of a call on a group that the rank is not in",
    lost=_SIM,
)
LOG_ENTRY: Final = name(
    "torch.distributed.c10d_logger._get_msg_dict",
    "log entries that simulated ranks leave empty",
    lost=_SIM,
)
KEEP_FORWARD_HANDLE: Final = name(
    "torch.distributed.Reducer._set_forward_pass_work_handle",
    "the Python half of the handle that join of DDP passes to C++",
    lost="DDP with join waits for ever, or fails, on watched groups",
)

# -- the state -------------------------------------------------------------------------------------

_STATE: Final = name(
    "torch.distributed.distributed_c10d._world",
    "the process groups of this process",
    lost="every world",
)
_STATE_CLASS: Final = name(
    "torch.distributed.distributed_c10d._World",
    "the base class of states that are separate for each simulated rank, or refuse reads",
    lost="every world",
)
_DEFAULT_GROUP: Final = name(
    "torch.distributed.distributed_c10d._get_default_group",
    "the group of monitored_barrier, and the function that asks for the default group",
    lost=_SIM,
)
_ISOLATION: Final = name(
    "torch._C._distributed_c10d._set_thread_isolation_mode",
    "names of groups that are separate for each simulated rank",
    lost=_SIM,
)
_UNREGISTER: Final = name(
    "torch._C._distributed_c10d._unregister_all_process_groups",
    "the removal of a simulated rank's groups",
    lost=_SIM,
)
_LOG: Final = name(
    "torch.distributed.c10d_logger._c10d_logger",
    "the log in which each simulated rank would write each exception",
    lost=_SIM,
)

HashStore: type[distributed_c10d.Store] = take(
    "torch._C._distributed_c10d.HashStore",  # torch.distributed has it too, except on Windows
    "a store that meets no other process, in the check of init_process_group",
    lost="every world",
)
WorldState: Any = _STATE_CLASS.value
get_default_group: Any = _DEFAULT_GROUP.value
log: Any = _LOG.value
set_thread_isolation: Any = _ISOLATION.value
unregister_all_groups: Any = _UNREGISTER.value

NEEDED_BY_SIM: Final = (
    _STATE,
    _STATE_CLASS,
    *(
        name(f"{_STATE_CLASS.path}.{field}", "process groups that are separate for each simulated rank", lost=_SIM)
        for field in ("default_pg", "pg_map", "pg_names")
    ),
    _DEFAULT_GROUP,
    _ISOLATION,
    _LOG,
    _UNREGISTER,
    LOG_ENTRY,
)


def world_state() -> Any:
    """Return torch's record of the process groups: the default group, and names, stores and numbers of all."""
    return distributed_c10d._world  # a program may replace it, as torch's own tests do


# -- process groups --------------------------------------------------------------------------------

device_types: Any = take(
    "torch.distributed.ProcessGroup._device_types",
    "the devices of the backends that are registered in a watched group",
    lost="DDP, FSDP and DCP on watched groups",
)
get_backend: Any = take(
    "torch.distributed.ProcessGroup._get_backend",
    "the backend of a watched group, which is the group itself",
    lost="DDP, FSDP and DCP on watched groups",
)
for _method in ("_set_sequence_number_for_group", "_get_sequence_number_for_group"):
    name(
        f"torch.distributed.ProcessGroup.{_method}",
        "the numbers of operations, which a watched group counts itself",
        lost="torch's own comparison of collectives on watched groups",
    )


@uses("torch.distributed.ProcessGroup._register_backend", lost="watched processes")
def register_backend(group: dist.ProcessGroup, device: Any, kind: Any, backend: Any) -> None:
    """Register the backend that carries out a group's operations on tensors of a device."""
    group._register_backend(device, kind, backend)


@uses("torch.distributed.ProcessGroup._set_default_backend", lost="watched processes")
def set_default_backend(group: dist.ProcessGroup, kind: Any) -> None:
    """Set the kind of backend that carries out a group's operations without tensors."""
    group._set_default_backend(kind)


def exclude_from_flight_recorder(kind: type[dist.ProcessGroup]) -> None:
    """Skip groups of a class in torch's flight recorder.

    Since 2.15 it asks C++ for the name of a group, and a group written in Python has none there. An older torch lacks
    the function, and needs no change. So it is in no table of private names.
    """
    attach = getattr(distributed_c10d, "_maybe_attach_flight_recorder", None)
    if attach is None:
        return

    @wraps(attach)
    def attach_to_others(pg: dist.ProcessGroup, *args: Any, **kwargs: Any) -> None:
        if not isinstance(pg, kind):
            attach(pg, *args, **kwargs)

    distributed_c10d._maybe_attach_flight_recorder = attach_to_others  # type: ignore[attr-defined]
