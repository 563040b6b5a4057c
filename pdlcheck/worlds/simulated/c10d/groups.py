"""How process groups come to be on simulated ranks: any backend name gives a simulated one, and all ranks take part."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch.distributed.distributed_c10d as c10d

from pdlcheck.compat.patches import Patch
from pdlcheck.errors import CollectiveMismatch
from pdlcheck.worlds.simulated.c10d import monitored
from pdlcheck.worlds.simulated.network.losses import is_consequence, never_joined
from pdlcheck.worlds.simulated.network.origin import origin
from pdlcheck.worlds.simulated.turns.scheduler import current_rank
from pdlcheck.worlds.watch import (
    Operation,
    is_local,
    key_among,
    new_group,
    rank_by_rendezvous,
    require_known,
    require_valid,
    user_line,
)

__all__ = ["BACKEND", "PATCHES", "name_backends"]

BACKEND = "sim"


def _simulated(make: Callable[..., Any]) -> Callable[..., Any]:
    """Of ``_new_process_group_helper``, which every rank calls for each group, also those that are no members."""

    @wraps(make)
    def helper(
        size: int, place: int | None, ranks: Sequence[int], backend: Any, store: Any, name: str, **rest: Any
    ) -> Any:
        me = current_rank()
        if me is None:
            return make(size, place, ranks, backend, store, name, **rest)
        require_known(backend)
        if me.c10d["default_pg"] is None:
            me.network.suffering.gather(me.rank, rest.get("timeout"))
        else:
            _meet(me, str(name), tuple(ranks) or tuple(range(size)), rest.get("timeout"))
        made = make(size, place, ranks, BACKEND, store, name, **rest)
        name_backends(me)
        return made

    return helper


def name_backends(rank: Any) -> bool:
    """Have ``dist.get_backend()`` of a rank name gloo, as programs on CPU tensors look for; False if it does.

    Where messages between two ranks are matched in order, as NCCL does it, a program must not take gloo for granted.
    """
    name = BACKEND if rank.network.semantics.messages == "in_order" else "gloo"
    known = rank.c10d["pg_map"]
    others = {group: (name, *rest) for group, (present, *rest) in known.items() if present != name}
    known.update(others)
    return bool(others)


def _meet(me: Any, name: str, ranks: tuple[int, ...], timeout: timedelta | None) -> None:
    """All ranks make the same groups in the same order; with local synchronisation, the members do.

    Where ranks may be lost, members wait for one another alone, as on gloo: survivors can make a group of their own.
    """
    default = me.c10d["default_pg"]
    everyone, ranks = default.members, tuple(default.members[place] for place in ranks)
    local = is_local(name)
    if local and me.rank not in ranks:
        return
    name = key_among(name, default.among)
    made_as, waits_for = name, ranks if local else everyone
    if me.network.suffering.loses_ranks and not local:
        aside = me.rank not in ranks
        made_as, waits_for = (f"{name}, without {me.rank}", (me.rank,)) if aside else (name, ranks)
    signature = new_group(me.rank, made_as, ranks, waits_for)
    try:
        me.network.post(Operation(signature, (), "", (_waited_for(),))).wait()
    except RuntimeError as error:
        if not is_consequence(error):
            raise
        lost = next(rank for rank in ranks if rank in me.network.suffering.gone)
        raise never_joined(name, ranks.index(lost), timeout) from None


def _waited_for() -> c10d.BarrierOptions:
    options = c10d.BarrierOptions()
    options.asyncOp = False
    return options


def _refused(warn: Callable[..., Any]) -> Callable[..., Any]:
    """Of ``_warn_not_in_group``: torch warns and skips the call, so the tensor stays as it is."""

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
    """Of ``init_process_group``: the first call of a program takes the group that its rank has already."""

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
    """Of ``is_initialized``, which whatever needs the default group asks first: where a fault took it, say so."""
    needs = c10d._get_default_group.__code__

    @wraps(is_initialized)
    def ask() -> bool:
        if is_initialized():
            return True
        me = current_rank()
        if me is not None and me.network is not None and sys._getframe(1).f_code is needs:
            me.network.suffering.gather(me.rank, unasked=True)
        return False

    return ask


def _exact(monitored_barrier: Callable[..., Any]) -> Callable[..., Any]:
    """Of ``monitored_barrier``, which torch has for gloo alone."""

    @wraps(monitored_barrier)
    def barrier(*args: Any, **kwargs: Any) -> None:
        (monitored_barrier if current_rank() is None else monitored.monitored_barrier)(*args, **kwargs)

    return barrier


def _without_libraries(default_timeout: Callable[..., Any]) -> Callable[..., Any]:
    """Of ``_get_default_timeout``, which asks for NCCL's own and warns where torch has none."""
    return wraps(default_timeout)(lambda name: default_timeout(name if current_rank() is None else BACKEND))


def _met(rendezvous: Callable[..., Any]) -> Callable[..., Any]:
    """Of ``rendezvous``, which finds the other processes by an address."""

    @wraps(rendezvous)
    def meet(url: Any, *args: Any, **kwargs: Any) -> Any:
        me = current_rank()
        if me is None:
            return rendezvous(url, *args, **kwargs)
        own = me.rank, len(me.network.scheduler.ranks)
        asked = rank_by_rendezvous(url, *args, **kwargs)
        if asked in (None, own):
            return iter([(me.c10d["store"], *own)])
        address = url.partition("?")[0]
        return iter([(c10d.PrefixStore(f"{address} of {asked[1]}", me.c10d["store"]), *asked)])

    return meet


_STAND_INS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "_get_default_timeout": (_without_libraries, "torch asks for NCCL's own, and warns without NCCL"),
    "_new_process_group_helper": (_simulated, "all ranks make each group, of any backend, as a simulated one"),
    "_warn_not_in_group": (_refused, "torch warns and skips the call of a rank that is no member"),
    "init_process_group": (_adopted, "the first call of a program takes the group that its rank has"),
    "is_initialized": (_asked, "a rank whose group a fault took is told so"),
    "monitored_barrier": (_exact, "torch has it for gloo alone"),
    "rendezvous": (_met, "ranks find one another in this process"),
}
PATCHES = tuple(  # other threads than ranks see no difference
    Patch(c10d, name, make, why, everywhere=name in c10d.__all__) for name, (make, why) in _STAND_INS.items()
)
