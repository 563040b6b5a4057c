"""The times of a run, and the figures computed from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pdlcheck.clock.chrome import chrome_trace
from pdlcheck.clock.intervals import Interval, common, merged, without
from pdlcheck.clock.record import Message, Span
from pdlcheck.clock.svg import svg

__all__ = ["Message", "Span", "Timeline"]


@dataclass(frozen=True)
class Timeline:
    """The activities of each rank, in virtual time.

    Args:
        world_size: number of ranks.
        spans: sorted by rank and start.
        messages: between two ranks, sorted by start.
        in_steps: there was no topology; each computation and each operation took one step, and ``start_s`` and
            ``end_s`` count steps. Such a picture shows an order and no durations.
        by_schedule: the reasons why another schedule might give other times (a receive from any rank, a poll); empty if
            no schedule can.
    """

    world_size: int
    spans: Sequence[Span]
    messages: Sequence[Message]
    in_steps: bool = False
    by_schedule: Sequence[str] = ()

    @cached_property
    def step_time_s(self) -> float:
        """Return the time when the last rank and the last message have ended; infinite if a rank waits for ever.

        Raises:
            ValueError: without a topology there are no seconds.
        """
        self._require_seconds("step_time_s")
        return self.end

    @cached_property
    def overlap(self) -> float | None:
        """Return the share of the communication, over all ranks, during which the same rank computes; None without any.

        Raises:
            ValueError: without a topology there are no seconds.
        """
        self._require_seconds("overlap")
        total = sum(self.communication_s(rank) for rank in range(self.world_size))
        hidden = sum(_length(common(*self._both(rank))) for rank in range(self.world_size))
        return hidden / total if total else None

    @cached_property
    def bubble(self) -> float:
        """Return the share of all ranks' time in which they neither compute nor communicate, but wait for others.

        The formula is ``sum(idle_s) / (world_size * step_time_s)``. With links that cost nothing it equals GPipe's
        ``(p - 1) / (m + p - 1)`` for p equal stages and m micro-batches.

        Raises:
            ValueError: without a topology there are no seconds.

        Source: Y. Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism",
        NeurIPS (2019).
        """
        self._require_seconds("bubble")
        total = self.world_size * self.step_time_s
        return sum(self.idle_s(rank) for rank in range(self.world_size)) / total if total else 0.0

    def compute_s(self, rank: int) -> float:
        """Return the time in which the rank computes."""
        return _length(self._times(rank, "compute"))

    def communication_s(self, rank: int) -> float:
        """Return the time in which a message or a collective of the rank moves data.

        The time until its partners post does not count.
        """
        return _length(self._times(rank, "communication"))

    def exposed_s(self, rank: int) -> float:
        """Return the time in which the rank communicates and does not compute."""
        communicates, computes = self._both(rank)
        return _length(without(communicates, computes))

    def idle_s(self, rank: int) -> float:
        """Return the time, up to the end of the run, in which the rank neither computes nor communicates."""
        busy = self._times(rank, "compute", "communication")
        return _length(without([(0.0, self.step_time_s)], busy))

    def spans_of(self, rank: int, kind: str | None = None) -> list[Span]:
        """Return the rank's spans, or those of one kind."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be one of 0 to {self.world_size - 1}, got {rank!r}")
        return [span for span in self._by_rank[rank] if kind is None or span.kind == kind]

    @cached_property
    def end(self) -> float:
        """Return the end of the run, in seconds or steps."""
        return max((span.end_s for span in self.spans), default=0.0)

    def save(self, path: str | Path) -> Path:
        """Write a picture: one lane for each rank, time from left to right, operations as boxes, messages as arrows.

        Args:
            path: ``.json`` for a Chrome trace, for https://ui.perfetto.dev; ``.svg`` for one self-contained picture.

        Returns:
            ``path``.

        Raises:
            ValueError: ``path`` has another suffix.

        Example:
            >>> from pdlcheck.worlds import get_world
            >>> world = get_world("sim", timeline=True)
            >>> world.run(lambda: dist.barrier(), world_size=2)
            [None, None]
            >>> world.timeline.save(getfixture("tmp_path") / "run.svg").name
            'run.svg'
        """
        path = Path(path)
        if path.suffix not in _PICTURES:
            raise ValueError(f"path must end in .json or .svg, got {path.name!r}; name it {path.stem}.svg")
        path.write_text(_PICTURES[path.suffix](self), encoding="utf-8")
        return path

    def __str__(self) -> str:
        """Return a table with a line for each rank and one for the run."""
        if self.in_steps:
            return f"{self.world_size} ranks, {self.end:g} steps; pass topology= for seconds"
        lines = [f"{'rank':>5}{'compute s':>12}{'exposed s':>12}{'idle s':>12}{'communication s':>17}"]
        for rank in range(self.world_size):
            figures = (self.compute_s(rank), self.exposed_s(rank), self.idle_s(rank))
            lines.append(
                f"{rank:>5}" + "".join(f"{value:>12.6g}" for value in figures) + f"{self.communication_s(rank):>17.6g}"
            )
        overlap = "none" if self.overlap is None else f"{self.overlap:.1%}"
        lines.append(f"step time {self.step_time_s:.6g} s, overlap {overlap}, bubble {self.bubble:.1%}")
        return "\n".join(lines)

    # ----------------------------------------------------------------------------------------------

    @cached_property
    def _by_rank(self) -> list[list[Span]]:
        lanes: list[list[Span]] = [[] for _ in range(self.world_size)]
        for span in self.spans:
            lanes[span.rank].append(span)
        return lanes

    def _times(self, rank: int, *kinds: str) -> list[Interval]:
        spans = self.spans_of(rank)
        return merged((span.start_s, span.end_s) for span in spans if span.kind in kinds)

    def _both(self, rank: int) -> tuple[list[Interval], list[Interval]]:
        return self._times(rank, "communication"), self._times(rank, "compute")

    def _require_seconds(self, name: str) -> None:
        if self.in_steps:
            raise ValueError(f'{name} needs a model of the links: get_world("sim", topology=Topology(intra=Link(...)))')


_PICTURES = {".json": chrome_trace, ".svg": svg}


def _length(intervals: Iterable[Interval]) -> float:
    return math.fsum(end - start for start, end in intervals)
