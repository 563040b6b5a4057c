"""Strategies for Hypothesis that concern ranks, not data: which of them goes on or is lost, what the network does."""

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
    """What ranks of the simulated world suffer; shrinks to nothing, to a rank that is absent, to an early operation.

    Each rank suffers once, and one is never lost; where a rank is absent nothing else happens. An example is rejected
    if one of its faults does not come about (it would be ``Inconclusive``): the rank posts fewer operations. In a test
    that is marked ``world_size`` the ranks suffer what is drawn, whatever the argument is called; elsewhere hand it to
    the world. On rank processes it means nothing.

    Args:
        world_size: of the run, at least 2.
        operations: numbers are drawn below it; how many a rank posts.
        kinds: what is drawn, of ``Kill``, ``Stall``, ``Corrupt`` and ``Absent``.
        at_most: so many faults.

    Raises:
        ValueError: an argument is none of those named here.

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
    """A schedule of the simulated world, drawn choice by choice while the program runs.

    It shrinks together with inputs and world size, towards the schedule ``first``: few switches. In a test that is
    marked ``world_size`` the ranks run under the schedule that is drawn, whatever the argument is called; elsewhere
    hand it to the world. On rank processes it means nothing.

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
    """Every legal way in which the simulated network carries operations out, all checks on; shrinks to the default.

    Args:
        buffered: let sends end before they are received, too; False draws what a program must stand everywhere.

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
