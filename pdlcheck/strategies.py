"""Strategies for Hypothesis that concern ranks rather than data."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from pdlcheck.worlds.simulated.schedules import DrawnSchedule

__all__ = ["schedules"]


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
