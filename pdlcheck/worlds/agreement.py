"""The check that a function gives every rank the same result on simulated ranks and on processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from pdlcheck.errors import CheckFailed, SharedTensorWarning
from pdlcheck.worlds.arguments import check_world_size
from pdlcheck.worlds.protocol import World
from pdlcheck.worlds.registry import WORLDS, get_world

__all__ = ["check_same_on_worlds"]


def check_same_on_worlds(
    fn: Callable[..., Any],
    /,
    *args: Any,
    world_size: int,
    worlds: tuple[str | World, str | World] = ("sim", "gloo"),
    **kwargs: Any,
) -> list[Any]:
    """Check that ``fn`` gives every rank the same result on simulated ranks and on processes.

    The usual cause of a difference is that simulated ranks share the module globals of user code. The check then
    repeats the run with separate globals for each rank, and the message names the globals that cause the difference.
    Another cause is the order of sets: simulated ranks share it, and processes do not. The check then repeats the run
    on processes with one hash seed.

    Args:
        fn: called as ``fn(*args, **kwargs)`` on every rank.
        args: positional arguments of ``fn``.
        world_size: number of ranks, in both worlds.
        worlds: the simulated world and the other one. A world given by name is opened and closed here; a world object
            is left open. The processes of an open world keep the module state that earlier calls left.
        kwargs: keyword arguments of ``fn``.

    Returns:
        The result of each rank.

    Raises:
        AssertionError: a rank has another result, or only one of the worlds raises. The message names the globals that
            are the cause, or the loop over a set.
        Exception: the exception of the simulated run, if both worlds raise.

    Example:
        >>> check_same_on_worlds(lambda: 7, world_size=2)
        [7, 7]
    """
    __tracebackhide__ = True
    if not callable(fn):
        raise TypeError(f"check_same_on_worlds needs a function, got {fn!r}")
    check_world_size(world_size)
    _check_names(worlds)
    with ExitStack() as stack:
        simulated, real = [_opened(world, stack) for world in worlds]
        if not simulated.shares_process or real.shares_process:
            names = f"({simulated.name!r}, {real.name!r})"
            raise ValueError(f"worlds must be the simulated one and one of processes, in this order; got {names}")
        real.check()
        return _compare(fn, args, kwargs, simulated, real, world_size)


def _check_names(worlds: Any) -> None:
    if isinstance(worlds, str) or not isinstance(worlds, Sequence) or len(worlds) != 2:
        raise ValueError(f'worlds must be two, such as ("sim", "gloo"); got {worlds!r}')
    for world in worlds:
        if isinstance(world, str) and world not in WORLDS:
            raise ValueError(f"worlds must name some of {', '.join(sorted(WORLDS))}; got {world!r}")
        if not isinstance(world, str) and not hasattr(world, "shares_process"):
            raise TypeError(f"worlds must be names or worlds, as get_world returns them; got {world!r}")


def _opened(world: str | World, stack: ExitStack) -> World:
    if not isinstance(world, str):
        return world
    opened = get_world(world)
    stack.callback(opened.close)
    return opened


def _compare(
    fn: Callable[..., Any], args: Any, kwargs: Any, simulated: World, real: World, world_size: int
) -> list[Any]:
    __tracebackhide__ = True
    from pdlcheck.worlds.simulated.module_globals.cause import (  # these modules import torch
        Separate,
        find_cause,
        find_modules,
        told,
    )
    from pdlcheck.worlds.simulated.module_globals.import_time_reads import early_reads
    from pdlcheck.worlds.simulated.module_globals.run import UserState
    from pdlcheck.worlds.simulated.observers.set_order import take_found

    def run(world: World) -> list[Any] | Exception:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SharedTensorWarning)  # this check reports the consequences itself
                return world.run(fn, *args, world_size=world_size, **kwargs)
        except Exception as error:
            return error

    start = UserState(fn)
    on_real = run(real)  # first, because a simulated run changes the objects that a function sent by value refers to
    take_found()
    on_sim = run(simulated)
    loops = take_found()
    if isinstance(on_sim, Exception) and isinstance(on_real, Exception):
        raise on_sim
    if _alike(on_sim, on_real) and isinstance(on_sim, list):
        return on_sim

    def again(separate: Separate) -> list[Any] | Exception:
        with separate():
            return run(simulated)

    def with_own(names: Sequence[str]) -> list[Any] | Exception:
        given, simulated.own_globals = simulated.own_globals, (*simulated.own_globals, *names)  # type: ignore[attr-defined]
        try:
            return run(simulated)
        finally:
            simulated.own_globals = given  # type: ignore[attr-defined]

    def as_on_real(result: Any) -> bool:
        return _alike(result, on_real)

    finding = find_modules(find_cause(again, as_on_real, start, fn), with_own, as_on_real, start)
    details = [("likely cause", _CAUSES[finding.cause].format(real=real.name, shared=finding.shared))]
    if finding.cause == "other" and (reads := early_reads()):
        details = [("likely cause", _READ_EARLY), *(("", str(one)) for one in reads)]
    elif finding.cause == "other" and _is_of_hashes(run, on_sim, on_real, real):
        details = [("likely cause", _HASHES.format(real=real.name)), *(("", one) for one in loops)]
        details.append(("cure", "loop over sorted(...) or a list, not over a set; use hashlib, not hash()"))
    details += [("shared" if number == 0 else "", line) for number, line in enumerate(told(finding))]
    if finding.blamed and not finding.alone:
        details.append(("", "it takes them together"))
    if finding.modules:
        names = [*finding.modules]
        details.append(("cure", f'get_world("sim", own_globals={names}), or pdlcheck_own_globals in an ini file'))
    details.append(("case", f"world=sim,{real.name} world_size={world_size}"))
    width = max(len(name) for name, _ in details)
    head = f"{getattr(fn, '__name__', type(fn).__name__)}: {_difference(on_sim, on_real, real.name)}"
    raise CheckFailed(
        "\n".join([head, *(f"  {name:{width}}  {text}" for name, text in details)]),
        subject=getattr(fn, "__name__", type(fn).__name__),
        cause=details[0][1],
        case=details[-1][1],
    )


_CAUSES = {
    "globals": "simulated ranks share {shared}; with those of its own for each rank sim ends as {real} does",
    "other": "not module globals, as far as they can be told apart: with its own for each rank sim still differs",
    "before": "it ran before, or what it uses did: from the same beginning a second run on sim ends as {real} does",
}
_READ_EARLY = (
    "read when a module is imported, where simulated ranks have no rank yet, and each process has its own: "
    "read it in a function"
)
_HASHES = (
    "the order of a set, or another result of hashes: simulated ranks share them, and each process has its own; with "
    "one hash seed for all ranks {real} ends as sim does"
)


def _is_of_hashes(run: Callable[[World], list[Any] | Exception], on_sim: Any, on_real: Any, real: World) -> bool:
    """Return whether new processes end as simulated ranks do if, and only if, all of them have one hash seed."""
    for one_hash_seed, expected in ((False, on_real), (True, on_sim)):
        anew = real.anew(one_hash_seed=one_hash_seed) if hasattr(real, "anew") else None
        if anew is None:
            return False
        try:
            if not _alike(run(anew), expected):
                return False
        finally:
            anew.close()
    return True


def _alike(one: Any, other: Any) -> bool:
    """Return whether both runs raised, or both returned equal lists of results."""
    if isinstance(one, Exception) or isinstance(other, Exception):
        return isinstance(one, Exception) and isinstance(other, Exception)
    return _equal(one, other)


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal and of one type.

    A nan in a tensor or an array equals itself. Objects without ``__eq__`` are compared by their attributes.
    """
    import numpy as np
    import torch

    kind = type(one)
    if kind is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and bool(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if getattr(kind, "__eq__", None) is getattr(object, "__eq__", None) and hasattr(one, "__dict__"):
        return _equal(vars(one), vars(other))
    return bool(one == other or (one != one and other != other))


def _difference(on_sim: Any, on_real: Any, real: str) -> str:
    if isinstance(on_sim, Exception):
        return f"raises {_head(on_sim)} on sim, returns on {real}"
    if isinstance(on_real, Exception):
        return f"returns on sim, raises {_head(on_real)} on {real}"
    rank = next(number for number, pair in enumerate(zip(on_sim, on_real, strict=True)) if not _equal(*pair))
    return f"rank {rank} returns {_short(on_sim[rank])} on sim, {_short(on_real[rank])} on {real}"


def _head(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
