"""The share of the roof that each row reaches; the same run measures the roof."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

__all__ = ["Share", "shares_of_roof"]

_COPY, _SOCKET, _MESSAGE = "test_copy_in_memory", "test_socket", "test_ping_pong"


class Share(NamedTuple):
    """The share ``value`` of the bandwidth of ``roof``."""

    value: float
    roof: str


def shares_of_roof(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Share]:
    """Return the share of each row that has a roof, by name.

    The roof of a collective's bus bandwidth is a plain socket between as many ranks, or on GPUs the fastest message.
    The roof of other bytes is a copy in memory by as many ranks. The roof of a row with ``floor_s`` is that value, the
    least time that the memory allows.

    Example:
        >>> rows = [("test_socket[2ranks]", {"world_size": 2, "nbytes": 8, "busbw_GBps": 4.0, "algbw_GBps": 4.0})]
        >>> rows += [("mine", {"world_size": 2, "nbytes": 8, "busbw_GBps": 3.0})]
        >>> shares_of_roof(rows)["mine"]
        Share(value=0.75, roof='socket')
    """
    rows = list(rows)
    copies, wires = _bandwidths(rows, _COPY), _bandwidths(rows, _SOCKET)
    for key, value in _bandwidths(rows, _MESSAGE).items():
        if key[0] != "cpu":
            wires[key] = value
    found = {}
    for name, facts in rows:
        key, roof = (facts.get("device", "cpu"), facts.get("world_size", 1)), None
        if name.startswith((_COPY, _SOCKET)):
            continue
        if facts.get("busbw_GBps") is not None and key in wires:
            roof = Share(facts["busbw_GBps"] / wires[key], "socket" if key[0] == "cpu" else "message")
        elif facts.get("floor_s"):
            roof = Share(facts["floor_s"] / facts["median_s"], "memory")
        elif facts.get("algbw_GBps") and facts.get("busbw_GBps") is None and key in copies:
            roof = Share(facts["algbw_GBps"] / copies[key], "memory")
        if roof is not None:
            found[name] = roof
    return found


def _bandwidths(rows: Iterable[tuple[str, Mapping[str, Any]]], test: str) -> dict[tuple[str, int], float]:
    """Return the largest bandwidth of a test, by device and number of ranks."""
    found: dict[tuple[str, int], float] = {}
    for name, facts in rows:
        if name.partition("[")[0] == test and facts.get("algbw_GBps"):
            key = (facts.get("device", "cpu"), facts.get("world_size", 1))
            found[key] = max(found.get(key, 0.0), facts["algbw_GBps"])
    return found
