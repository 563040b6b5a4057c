"""Groups that are not the running rank's: made by another rank, or in an earlier run, and kept where ranks share it."""

from __future__ import annotations

import functools
import gc
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pdlcheck.errors import Unsupported
from pdlcheck.worlds.simulated.turns.scheduler import current_rank
from pdlcheck.worlds.watch import Operation, WatchedGroup

__all__ = ["Ended", "require_own_group", "tell_whose"]


def require_own_group(operation: Operation, network: object) -> None:
    """An operation would count as that of the rank whose end of the group it is posted on.

    Raises:
        Unsupported: that is another rank than the one that runs, or the group is on another network than that one.
    """
    me, signature = current_rank(), operation.signature
    if me is None or (me.rank == signature.rank and me.network is network):
        return
    if me.network is not network:
        raise _from_an_earlier_run(operation)
    there = _kept()
    raise Unsupported(
        f"rank {me.rank} posts {signature.kind} on an object of {signature.group_text} that rank {signature.rank} "
        f"made, at {signature.where}: simulated ranks share module globals, while a process would have its own; "
        f"give each rank those{there} (pdlcheck_own_globals in an ini file, own_globals of get_world), keep it in the "
        "function that the ranks run, or run on processes (--world gloo)"
    )


def tell_whose(error: Exception) -> None:
    """On a rank: torch does not know a group that it was asked about; a note says so where it is not the rank's."""
    me, group = current_rank(), _asked_about(error)
    if me is None or group is None:
        return
    maker = group._members[group.rank()]
    if group._engine is me.network and maker == me.rank:
        return  # its own, which it has destroyed
    made = f"by rank {maker}" if group._engine is me.network else "in an earlier run"
    error.add_note(
        f"this object of the group was made {made}: simulated ranks share module globals, while a process would have "
        f"its own; give each rank those{_kept()} (pdlcheck_own_globals in an ini file, own_globals of get_world), keep "
        "it in the function that the ranks run, or run on processes (--world gloo)"
    )


def _asked_about(error: Exception) -> WatchedGroup | None:
    """The group that a function of torch had when it raised this."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code.co_filename != distributed_c10d.__file__:
        return None
    return next((value for value in trace.tb_frame.f_locals.values() if _is_group(value)), None)


class Ended:
    """The engine of groups whose ranks have got others."""

    def post(self, operation: Operation) -> dist.Work:
        raise _from_an_earlier_run(operation)


def _from_an_earlier_run(operation: Operation) -> Unsupported:
    me, signature = current_rank(), operation.signature
    return Unsupported(
        f"rank {me.rank if me else signature.rank} posts {signature.kind} on an object of {signature.group_text} that "
        f"was made in an earlier run, at {signature.where}: simulated ranks begin each run with new groups; make it "
        f"anew in each run, or give each rank the globals{_kept()} for itself (pdlcheck_own_globals in an ini file, "
        "own_globals of get_world), or run on processes (--world gloo)"
    )


def _kept() -> str:
    keepers = sorted(_keepers())
    return f" of {', '.join(keepers)}" if keepers else ""


def _keepers() -> set[str]:
    """The modules that hold groups, in a name, a container, an object or what a function remembers."""
    return {
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in ("pdlcheck", "torch")
        and any(_is_group(part) for value in vars(module).values() for part in (value, *_parts(value)))
    }


def _is_group(value: Any) -> bool:
    return issubclass(type(value), WatchedGroup)  # some objects warn when they are asked for their class


def _parts(value: Any) -> list[Any]:
    if type(value) in (list, tuple, set):
        return list(value)
    if type(value) is ModuleType:
        return []
    if type(value) is functools._lru_cache_wrapper:
        held = gc.get_referents(value)  # what it remembers, or a dict of that
        return [*held, *(inner for part in held if type(part) is dict for inner in part.values())]
    names = value if type(value) is dict else None
    with suppress(AttributeError):
        names = names or object.__getattribute__(value, "__dict__")  # past what the object would do when asked
    return list(names.values()) if type(names) is dict else []
