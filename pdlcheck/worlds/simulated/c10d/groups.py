"""The creation of process groups on simulated ranks.

Every backend name gives a simulated group, and all ranks take part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch.distributed.distributed_c10d as c10d

from pdlcheck.compat.patches import Patch
from pdlcheck.compat.private import PrivateName
from pdlcheck.compat.torch.c10d import DEFAULT_TIMEOUT, NEW_GROUP, NOT_IN_GROUP, get_default_group
from pdlcheck.errors import CollectiveMismatch
from pdlcheck.operations.new_group import MEET
from pdlcheck.worlds.observe import (
    Operation,
    is_local,
    key_among,
    new_group,
    rank_by_rendezvous,
    require_known,
    require_valid,
    user_line,
)
from pdlcheck.worlds.simulated.c10d import monitored
from pdlcheck.worlds.simulated.engine.gloo_errors import is_consequence, never_joined
from pdlcheck.worlds.simulated.engine.origin import origin
from pdlcheck.worlds.simulated.observers.fault_injection import faults_of
from pdlcheck.worlds.simulated.scheduling.scheduler import current_rank

__all__ = ["BACKEND", "PATCHES", "name_backends"]

BACKEND = "sim"


def _simulated(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return the stand-in for ``_new_process_group_helper``.

    Every rank calls that function for each group, even a rank that is not a member.
    """

    @wraps(make)
    def helper(
        size: int, place: int | None, ranks: Sequence[int], backend: Any, store: Any, name: str, **rest: Any
    ) -> Any:
        me = current_rank()
        if me is None:
            return make(size, place, ranks, backend, store, name, **rest)
        require_known(backend)
        if me.c10d["default_pg"] is None:
            faults_of(me.engine).check_rendezvous(me.rank, rest.get("timeout"))
        else:
            _meet(me, str(name), tuple(ranks) or tuple(range(size)), rest.get("timeout"))
        made = make(size, place, ranks, BACKEND, store, name, **rest)
        name_backends(me)
        return made

    return helper


def name_backends(rank: Any) -> bool:
    """Make ``dist.get_backend()`` of a rank return gloo, which programs with CPU tensors expect.

    If messages between two ranks are matched in order, as on NCCL, it does not return gloo: a program must not rely on
    gloo then.

    Returns:
        True if a name has changed.
    """
    name = BACKEND if rank.engine.semantics.messages == "in_order" else "gloo"
    known = rank.c10d["pg_map"]
    others = {group: (name, *rest) for group, (present, *rest) in known.items() if present != name}
    known.update(others)
    return bool(others)


def _meet(me: Any, name: str, ranks: tuple[int, ...], timeout: timedelta | None) -> None:
    """Make a group together with the other ranks.

    All ranks make the same groups in the same order. With local synchronisation, only the members do. If ranks may be
    lost, members wait only for one another, as on gloo, so that survivors can make a group of their own.

    Raises:
        RuntimeError: a member is lost.
    """
    default = me.c10d["default_pg"]
    everyone, ranks = default.members, tuple(default.members[place] for place in ranks)
    local = is_local(name)
    if local and me.rank not in ranks:
        return
    name = key_among(name, default.among)
    made_as, waits_for = name, ranks if local else everyone
    faults = faults_of(me.engine)
    if faults.loses_ranks and not local:
        aside = me.rank not in ranks
        made_as, waits_for = (f"{name}, without {me.rank}", (me.rank,)) if aside else (name, ranks)
    signature = new_group(me.rank, made_as, ranks, waits_for)
    try:
        me.engine.post(Operation(signature, (), MEET, (_waited_for(),))).wait()
    except RuntimeError as error:
        if not is_consequence(error):
            raise
        lost = next(rank for rank in ranks if rank in faults.gone)
        raise never_joined(name, ranks.index(lost), timeout) from None


def _waited_for() -> c10d.BarrierOptions:
    options = c10d.BarrierOptions()
    options.asyncOp = False
    return options


def _refused(warn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the stand-in for ``_warn_not_in_group``, which raises.

    torch only warns and skips the call, so the tensor stays as it is.
    """

    @wraps(warn)
    def refuse(op_name: str) -> None:
        me = current_rank()
        if me is None or origin().torchs_own:
            return warn(op_name)  # type: ignore[no-any-return]
        line = f"rank {me.rank}: {op_name}, at {user_line()}"
        raise CollectiveMismatch(
            f"rank {me.rank} calls {op_name} on a group that it is not in; torch skips the call and leaves the tensor "
            f"as it is\n  {line}\n  call it on the members alone",
            what="the group",
            ranks=[line],
            odd=[me.rank],
        )

    return refuse


def _adopted(init: Callable[..., Any]) -> Callable[..., Any]:
    """Return the stand-in for ``init_process_group``: a program's first call takes the group that its rank has."""

    @wraps(init)
    def adopt(*args: Any, **kwargs: Any) -> None:
        me = current_rank()
        if me is None or me.c10d["default_pg"] is None or me.c10d["adopted"]:
            return init(*args, **kwargs)  # type: ignore[no-any-return]
        require_valid(init, args, kwargs, me.rank, me.c10d["default_pg"].size())
        me.c10d["adopted"] = True
        return None

    return adopt


def _asked(is_initialized: Callable[[], bool]) -> Callable[[], bool]:
    """Return the stand-in for ``is_initialized``, which code that needs the default group calls first.

    If a fault took the group, the stand-in raises an error that states this.
    """
    needs = get_default_group.__code__

    @wraps(is_initialized)
    def ask() -> bool:
        if is_initialized():
            return True
        me = current_rank()
        if me is not None and me.engine is not None and sys._getframe(1).f_code is needs:
            faults_of(me.engine).check_rendezvous(me.rank, unasked=True)
        return False

    return ask


def _exact(monitored_barrier: Callable[..., Any]) -> Callable[..., Any]:
    """Return the stand-in for ``monitored_barrier``, which torch supports on gloo only."""

    @wraps(monitored_barrier)
    def barrier(*args: Any, **kwargs: Any) -> None:
        (monitored_barrier if current_rank() is None else monitored.monitored_barrier)(*args, **kwargs)

    return barrier


def _without_libraries(default_timeout: Callable[..., Any]) -> Callable[..., Any]:
    """Return the stand-in for ``_get_default_timeout``, which asks for NCCL's timeout and warns without NCCL."""
    return wraps(default_timeout)(lambda name: default_timeout(name if current_rank() is None else BACKEND))


def _met(rendezvous: Callable[..., Any]) -> Callable[..., Any]:
    """Return the stand-in for ``rendezvous``, which finds the other processes by an address."""

    @wraps(rendezvous)
    def meet(url: Any, *args: Any, **kwargs: Any) -> Any:
        me = current_rank()
        if me is None:
            return rendezvous(url, *args, **kwargs)
        own = me.rank, len(me.engine.scheduler.ranks)
        asked = rank_by_rendezvous(url, *args, **kwargs)
        if asked in (None, own):
            return iter([(me.c10d["store"], *own)])
        address = url.partition("?")[0]
        return iter([(c10d.PrefixStore(f"{address} of {asked[1]}", me.c10d["store"]), *asked)])

    return meet


_STAND_INS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "init_process_group": (_adopted, "the first call of a program takes the group that its rank has"),
    "is_initialized": (_asked, "a rank whose group a fault took is told so"),
    "monitored_barrier": (_exact, "torch has it for gloo alone"),
    "rendezvous": (_met, "ranks find one another in this process"),
}
_PRIVATE_STAND_INS: dict[PrivateName, tuple[Callable[[Any], Any], str]] = {
    DEFAULT_TIMEOUT: (_without_libraries, "torch asks for NCCL's own, and warns without NCCL"),
    NEW_GROUP: (_simulated, "all ranks make each group, of any backend, as a simulated one"),
    NOT_IN_GROUP: (_refused, "torch warns and skips the call of a rank that is no member"),
}
PATCHES = (  # threads that are not ranks see no difference
    *(Patch(one.owner, one.attribute, make, why) for one, (make, why) in _PRIVATE_STAND_INS.items()),
    *(Patch(c10d, name, make, why, everywhere=name in c10d.__all__) for name, (make, why) in _STAND_INS.items()),
)
