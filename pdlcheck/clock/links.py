"""The cost of a message: links with a latency and a bandwidth, between hosts and within them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Link", "Topology"]


@dataclass(frozen=True)
class Link:
    """``seconds = latency_s + nbytes / bandwidth``: the alpha-beta model. ``Link()`` costs nothing.

    Args:
        latency_s: alpha, at least 0.
        bandwidth_GBps: 1 / beta, in 1e9 bytes a second, of each direction.

    Raises:
        ValueError: a negative or infinite latency, a bandwidth that is not positive.

    Example:
        >>> Link(latency_s=10e-6, bandwidth_GBps=25).seconds(1_000_000)
        5e-05

    Source: R. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20
    (1994).
    """

    latency_s: float = 0.0
    bandwidth_GBps: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"latency_s must be at least 0 and finite, got {self.latency_s!r}; pass seconds, as 2e-6")
        if not self.bandwidth_GBps > 0:
            raise ValueError(f"bandwidth_GBps must be positive, got {self.bandwidth_GBps!r}; pass 1e9 bytes a second")

    def seconds(self, nbytes: int) -> float:
        """Return the time of one message."""
        return self.latency_s + nbytes / (self.bandwidth_GBps * 1e9)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Hosts with some devices each; rank r is on host ``r // devices``, because launchers number ranks so.

    Args:
        intra: the link between two ranks of one host.
        inter: the link between two hosts; default: ``intra``.
        devices: number of devices of a host, with a rank on each; default: all ranks are on one host.
        hosts: number of hosts; default: as many as the ranks need.
        links: other links for some pairs ``(src, dst)``, each direction by itself: a slow cable, a slow NIC.

    Raises:
        ValueError: fewer than one host or device, or ``hosts`` without ``devices``.

    Example:
        >>> topology = Topology(hosts=2, devices=8, intra=Link(2e-6, 200), inter=Link(10e-6, 25))
        >>> topology.link(7, 8).bandwidth_GBps, topology.link(8, 9).bandwidth_GBps
        (25, 200)
    """

    intra: Link
    inter: Link | None = None
    devices: int | None = None
    hosts: int | None = None
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("devices", "hosts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value!r}; leave it out for as many as needed")
        if self.hosts is not None and self.devices is None:
            raise ValueError(f"hosts={self.hosts} needs devices, the number of ranks on each, such as devices=8")

    def check(self, world_size: int) -> None:
        """Raise ``ValueError`` if the topology has no place for so many ranks, or ``links`` names an unknown rank."""
        if self.hosts is not None and self.devices is not None and world_size > self.hosts * self.devices:
            raise ValueError(
                f"a topology of {self.hosts} hosts x {self.devices} devices has no place for world_size={world_size}; "
                "leave out hosts, or give more of them"
            )
        for pair in self.links:
            if len(pair) != 2 or any(not 0 <= rank < world_size for rank in pair):
                raise ValueError(f"links has {pair!r}, with world_size={world_size} ranks are 0 to {world_size - 1}")

    def link(self, src: int, dst: int) -> Link:
        """Return the link from one rank to another."""
        if self.links and (own := self.links.get((src, dst))) is not None:
            return own
        if self.inter is None or self.devices is None or src // self.devices == dst // self.devices:
            return self.intra
        return self.inter
