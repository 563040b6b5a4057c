"""Hypothesis strategies for properties of ranks, not of data: faults, schedules and network semantics."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import reject
from hypothesis import strategies as st

from pdlcheck.faults import Absent, Corrupt, DrawnFaults, Fault, Kill, Stall
from pdlcheck.worlds.semantics import Semantics
from pdlcheck.worlds.simulated.schedules import DrawnSchedule

__all__ = ["faults", "schedules", "semantics"]

_KINDS = (Kill, Stall, Corrupt, Absent)


def faults(
    *, world_size: int, operations: int, kinds: Sequence[type[Fault]] = _KINDS, at_most: int = 1
) -> st.SearchStrategy[DrawnFaults]:
    """Draw the faults of simulated ranks.

    An example shrinks towards no fault, an absent rank, or an early operation. Each rank suffers at most one fault, and
    at least one rank suffers none. An example with an absent rank has no fault of another kind. An example is rejected
    if one of its faults does not happen because the rank posts fewer operations (a run without Hypothesis would be
    ``Inconclusive``). In a test with the marker ``world_size``, the ranks suffer the drawn faults, whatever the name of
    the argument; elsewhere, pass it to the world. The faults have no effect on rank processes.

    Args:
        world_size: world size of the run, at least 2.
        operations: upper bound (exclusive) of the drawn operation numbers: how many operations a rank posts.
        kinds: the classes to draw from: ``Kill``, ``Stall``, ``Corrupt`` and ``Absent``.
        at_most: the greatest number of faults.

    Raises:
        ValueError: an argument is not one of those named here.

    Example:
        >>> from hypothesis import given
        >>> from pdlcheck.worlds import get_world
        >>> @given(faults=faults(world_size=3, operations=4, kinds=[Kill, Stall]))
        ... def test_two_ranks_go_on_without_the_third(faults):
        ...     get_world("sim", faults=faults).run(my_program, world_size=3)
    """
    for name, value, least in (("world_size", world_size, 2), ("operations", operations, 1), ("at_most", at_most, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"faults: {name} must be an int of at least {least}; got {value!r}")
    if not kinds or not set(kinds) <= set(_KINDS):
        raise ValueError(f"faults: kinds must be some of Kill, Stall, Corrupt and Absent; got {kinds!r}")
    at_most = min(at_most, world_size - 1)
    ranks, numbers = st.integers(0, world_size - 1), st.integers(0, operations - 1)
    how, where = st.sampled_from(["nan", "bit_flip", "stale"]), st.sampled_from(["output", "input"])
    happen: dict[type[Fault], st.SearchStrategy[Fault]] = {
        Kill: st.builds(Kill, ranks, numbers),
        Stall: st.builds(Stall, ranks, numbers),
        Corrupt: st.builds(Corrupt, ranks, numbers, how, where),
        Absent: st.builds(Absent, ranks),
    }
    together = [happen[kind] for kind in _KINDS if kind in kinds and kind is not Absent]
    alone = [happen[Absent]] if Absent in kinds else []
    some = [st.lists(st.one_of(one), max_size=at_most, unique_by=_rank) for one in (together, alone) if one]
    return _drawn_faults(st.one_of(some))


def _rank(fault: Fault) -> int:
    return fault.rank


@st.composite
def _drawn_faults(draw: st.DrawFn, some: st.SearchStrategy[list[Fault]]) -> DrawnFaults:
    return DrawnFaults(sorted(draw(some), key=_rank), reject)


def schedules() -> st.SearchStrategy[DrawnSchedule]:
    """Draw a schedule of the simulated world, choice by choice while the program runs.

    It shrinks together with the inputs and the world size, towards the schedule ``first``, which switches rarely. In a
    test with the marker ``world_size``, the ranks run under the drawn schedule, whatever the name of the argument;
    elsewhere, pass it to the world. The schedule has no effect on rank processes.

    Example:
        >>> from hypothesis import given
        >>> from pdlcheck.worlds import get_world
        >>> @given(schedule=schedules())
        ... def test_rank_1_is_received_first(schedule):
        ...     get_world("sim", schedule=schedule).run(my_program, world_size=3)
    """
    return st.randoms(use_true_random=False).map(_drawn)


def _drawn(source: random.Random) -> DrawnSchedule:
    return DrawnSchedule(source.randrange)


@st.composite
def semantics(draw: st.DrawFn, *, buffered: bool = True) -> Semantics:
    """Draw any legal semantics of the simulated network, with all checks on; it shrinks to the default.

    With ``buffered=True``, sends may also complete before they are received. With ``buffered=False``, the drawn
    semantics are those that a program must support on every backend.

    Example:
        >>> from hypothesis import given
        >>> from pdlcheck.worlds import get_world
        >>> @given(semantics())
        ... def test_is_right_on_every_network(semantics):
        ...     get_world("sim", semantics=semantics).run(my_program, world_size=2)
    """
    send = draw(st.sampled_from(["rendezvous", "eager", "buffered"] if buffered else ["rendezvous"]))
    return Semantics(
        send=send,
        eager_bytes=draw(st.sampled_from([1, 64, 4096])) if send == "eager" else 0,
        data=draw(st.sampled_from(["at_once", "at_wait", "random"])),
        completion=draw(st.sampled_from(["in_order", "random"])),
        reduce=draw(st.sampled_from(["rank_order", "reversed", "random"])),
        polls=draw(st.sampled_from(["answered", "after_wait"])),
    )
