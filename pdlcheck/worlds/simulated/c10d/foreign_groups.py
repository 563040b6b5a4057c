"""The detection of groups that are not the running rank's own.

Another rank or an earlier run made such a group, and kept it in a place that ranks share.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from traceback import walk_tb
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pdlcheck.errors import Unsupported
from pdlcheck.worlds.observe import Operation, WatchedGroup, short
from pdlcheck.worlds.observe.callsite import KIND_OF_FILE
from pdlcheck.worlds.simulated.engine.engine import SimulatedEngine
from pdlcheck.worlds.simulated.engine.observer import Observer
from pdlcheck.worlds.simulated.module_globals.mutable_state import CachedFunction
from pdlcheck.worlds.simulated.schedules.access import Post
from pdlcheck.worlds.simulated.scheduling.scheduler import current_rank

__all__ = ["SHARE_ATTRIBUTE", "Ended", "GroupOwnership", "explain_foreign_group"]

SHARE_ATTRIBUTE = "simulated ranks share this attribute"


class GroupOwnership(Observer):
    """The check of one run that each rank posts on its own end of a group.

    Without the check, the operation would count as one of the rank that made this end.

    Args:
        engine: carries out the operations of the run.
    """

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine

    def before_post(self, operation: Operation, post: Post) -> None:
        """Check the end on which the running rank posts.

        Raises:
            Unsupported: another rank made this end, or the group is on another engine than the running rank.
        """
        me = current_rank()
        if me is not None and not (me.rank == operation.signature.rank and me.engine is self._engine):
            if me.engine is not self._engine:
                raise _from_an_earlier_run(operation)
            raise _of_another_rank(operation, me.rank)


def _of_another_rank(operation: Operation, me: int) -> Unsupported:
    signature = operation.signature
    words = _set_by_hand(_frames(sys._getframe(1)), signature.rank) or (
        f"simulated ranks share module globals, while a process would have its own; give each rank those{_kept()} "
        "(pdlcheck_own_globals in an ini file, own_globals of get_world), keep it in the function that the ranks run, "
        "or run on processes (--world gloo)"
    )
    return Unsupported(
        f"rank {me} posts {signature.kind} on an object of {signature.group_text} that rank {signature.rank} "
        f"made, at {signature.where}: {words}"
    )


def explain_foreign_group(error: Exception) -> None:
    """Add a note to an error that torch raised on a rank because the group is unknown to it.

    The note states who made the group. There is no note if the running rank made it itself.
    """
    me, group = current_rank(), _asked_about(error)
    if me is None or group is None:
        return
    maker = group.members[group.rank()]
    if group.engine is me.engine and maker == me.rank:
        return  # the rank has destroyed its own group
    here = group.engine is me.engine
    made = f"by rank {maker}" if here else "in an earlier run"
    frames = [frame for frame, _ in walk_tb(error.__traceback__)][::-1]
    if words := _set_by_hand(frames, maker if here else None):
        error.add_note(f"this object of the group was made {made}: {words}")
        return
    error.add_note(
        f"this object of the group was made {made}: simulated ranks share module globals, while a process would have "
        f"its own; give each rank those{_kept()} (pdlcheck_own_globals in an ini file, own_globals of get_world), keep "
        "it in the function that the ranks run, or run on processes (--world gloo)"
    )


def _asked_about(error: Exception) -> WatchedGroup | None:
    """Return the group that a function of torch had as a local variable when it raised this; None without one."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code.co_filename != distributed_c10d.__file__:
        return None
    return next((value for value in trace.tb_frame.f_locals.values() if _is_group(value)), None)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _set_by_hand(frames: Iterable[FrameType], maker: int | None) -> str:
    """Return a message if one of these frames runs a function that was set as an attribute of another module's class.

    The message is empty if there is no such frame.
    """
    codes = {frame.f_code for frame in frames if KIND_OF_FILE[frame.f_code.co_filename] == "user"}
    for function in gc.get_referrers(*codes):
        if type(function) is not FunctionType or function.__code__ not in codes or not _holds_anothers(function):
            continue
        if (found := _attribute(function)) is not None:
            (attribute, module), code = found, function.__code__
            who = "a rank, or a test before, has set" if maker is None else f"rank {maker} has set"
            return (
                f"{attribute} is now {code.co_name}() of {short(code.co_filename)}:{code.co_firstlineno}, which {who}; "
                f"{SHARE_ATTRIBUTE}, while a process would have its own; set it with monkeypatch or mock.patch, which "
                f"act on one rank, name {module} in pdlcheck_own_globals, or run on processes (--world gloo)"
            )
    return ""


def _holds_anothers(function: FunctionType) -> bool:
    """Return whether the function encloses a group that is not the running rank's, or an object that has one."""
    me = current_rank()
    enclosed = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    groups = [part for value in enclosed for part in (value, *_parts(value)) if _is_group(part)]
    return any(me is None or one.engine is not me.engine or one.members[one.rank()] != me.rank for one in groups)


def _attribute(function: FunctionType) -> tuple[str, str] | None:
    """Return the attribute of another module's class that is this function, and that module; None if there is none."""
    own = function.__globals__.get("__name__")
    for names in gc.get_referrers(function):
        for owner in gc.get_referrers(names) if type(names) is dict else ():
            if issubclass(type(owner), type) and owner.__module__ != own:
                for name, value in vars(owner).items():
                    if value is function:
                        return f"{owner.__module__}.{owner.__qualname__}.{name}", owner.__module__
    return None


class Ended:
    """The engine of groups that are out of use, because their ranks have new ones."""

    def post(self, operation: Operation) -> dist.Work:
        """Raise ``Unsupported``, because the group was made in an earlier run."""
        raise _from_an_earlier_run(operation)


def _from_an_earlier_run(operation: Operation) -> Unsupported:
    me, signature = current_rank(), operation.signature
    words = _set_by_hand(_frames(sys._getframe(1)), None) or (
        "simulated ranks begin each run with new groups; make it anew in each run, or give each rank the "
        f"globals{_kept()} for itself (pdlcheck_own_globals in an ini file, own_globals of get_world), or run on "
        "processes (--world gloo)"
    )
    return Unsupported(
        f"rank {me.rank if me else signature.rank} posts {signature.kind} on an object of {signature.group_text} that "
        f"was made in an earlier run, at {signature.where}: {words}"
    )


def _kept() -> str:
    keepers = sorted(_keepers())
    return f" of {', '.join(keepers)}" if keepers else ""


def _keepers() -> set[str]:
    """Return the modules that hold groups: in a name, a container, an object, or the cache of a function."""
    return {
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in ("pdlcheck", "torch")
        and any(_is_group(part) for value in vars(module).values() for part in (value, *_parts(value)))
    }


def _is_group(value: Any) -> bool:
    return issubclass(type(value), WatchedGroup)  # isinstance() reads __class__, at which some objects warn


def _parts(value: Any) -> list[Any]:
    if type(value) in (list, tuple, set):
        return list(value)
    if type(value) is ModuleType:
        return []
    if type(value) is CachedFunction:
        held = gc.get_referents(value)  # the cached results, or a dict of them
        return [*held, *(inner for part in held if type(part) is dict for inner in part.values())]
    names = value if type(value) is dict else None
    with suppress(AttributeError):
        names = names or object.__getattribute__(value, "__dict__")  # bypasses __getattribute__ of the object's class
    return list(names.values()) if type(names) is dict else []
