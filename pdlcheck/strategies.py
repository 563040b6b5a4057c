"""Strategies for Hypothesis that concern ranks rather than data: which of them goes on, what the network does."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from pdlcheck.worlds.semantics import Semantics
from pdlcheck.worlds.simulated.schedules import DrawnSchedule

__all__ = ["schedules", "semantics"]


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
