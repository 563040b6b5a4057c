"""Faulty programs as users write them, each with its correct twin, and programs that only look faulty.

A fault is one function: ``program(right=False)`` is faulty, ``program(right=True)`` is its twin. Comments such as
``# blocks`` mark the lines that a verdict must name: all of them and no other.
``suites/meta/catalogue/test_catalogue.py`` checks this.
"""

from __future__ import annotations

from . import absent, crossed, differing, groups, hazards, leaks, messages, orders, races
from .entry import FAULTS, Fault
from .false_alarm_traps import INNOCENT

__all__ = ["FAULTS", "INNOCENT", "KINDS", "Fault"]

KINDS = {
    absent: "ranks that do not come",
    crossed: "ranks that wait for one another",
    groups: "process groups",
    messages: "messages that do not fit",
    differing: "collectives that do not fit",
    orders: "equal calls in another order",
    hazards: "buffers of pending operations",
    leaks: "work that is left behind",
    races: "what depends on the schedule, polling, failures",
}
