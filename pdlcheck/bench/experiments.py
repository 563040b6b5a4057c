"""The experiments: what the rows of one run say about a model, in a sentence with a verdict.

Each takes the rows of a run, as ``pdlcheck bench`` stores them, and returns nothing where its rows are missing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdlcheck.bench.formulas import fit_local_sgd, speed_up_pays
from pdlcheck.bench.models import amdahl_s, fit_link, karp_flatt, serial_fraction

__all__ = ["Experiment", "Row", "experiments"]

Row = tuple[str, Mapping[str, Any]]  # name and facts

_NAME = re.compile(r"(?P<test>\w+)(?:\[(?P<ranks>\d+)ranks(?:-(?P<rest>[^\]]*))?\])?(?: \[(?P<way>[^\]]+)\])?")


@dataclass(frozen=True)
class Experiment:
    """What was measured beside what a model says.

    Args:
        title: the question.
        sentence: measured values, the model, and what follows.
        error: the largest relative difference between them; None where the model predicts a side or nothing.
        held: whether the difference is within what the model claims; None where it claims nothing.
    """

    title: str
    sentence: str
    error: float | None = None
    held: bool | None = None


def experiments(rows: Iterable[Row]) -> list[Experiment]:
    """Return the experiments whose rows are there, in order."""
    found = _Rows(rows)
    return [one for make in _EXPERIMENTS for one in make(found)]


class _Rows:
    """Rows by test, number of ranks, other parameters and function; seconds are medians."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._seconds: dict[str, dict[tuple[int, str], dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
        self._facts: dict[tuple[str, int, str, str], Mapping[str, Any]] = {}
        for name, facts in rows:
            parts = _NAME.fullmatch(name)
            if parts is None or parts["ranks"] is None or "median_s" not in facts:
                continue
            ranks, rest, way = int(parts["ranks"]), parts["rest"] or "", parts["way"] or ""
            self._seconds[parts["test"]][ranks, rest][way] = facts["median_s"]
            self._facts[parts["test"], ranks, rest, way] = facts

    def of(self, test: str) -> dict[tuple[int, str], dict[str, float]]:
        """Seconds of the functions, by number of ranks and parameters; the first function is ``""``."""
        return dict(self._seconds.get(test, {}))

    def by_ranks(self, test: str, rest: str = "") -> dict[int, float]:
        """Seconds of the first function by number of ranks."""
        return {ranks: ways[""] for (ranks, other), ways in self.of(test).items() if other == rest and "" in ways}

    def facts(self, test: str, ranks: int, rest: str, way: str = "") -> Mapping[str, Any]:
        return self._facts[test, ranks, rest, way]


def _sync_every(rows: _Rows) -> Iterable[Experiment]:
    limit = 0.1
    for (ranks, sync), ways in rows.of("test_sync_every").items():
        seconds: dict[int | None, float] = {}
        for way, value in ways.items():
            seconds[None if way == "never" else int(way.removeprefix("every ") or 1)] = value
        if len(seconds) < 3:
            continue
        t0, ts = fit_local_sgd(seconds)
        error = max(abs(t0 + (ts / k if k else 0.0) - value) / value for k, value in seconds.items())
        times = ", ".join(f"{'never' if k is None else f'every {k}'} {_ms(value)}" for k, value in seconds.items())
        yield Experiment(
            f"gradients synchronised every k-th step, {sync}, {_count(ranks)}",
            f"An epoch takes {times}. The model T0 + Ts / k with T0 = {_ms(t0)}, Ts = {_ms(ts)} is at most "
            f"{error:.0%} off. "
            + (
                f"Synchronisation is {ts / (t0 + ts):.0%} of a synchronous epoch: every 4th step saves "
                f"{0.75 * ts / (t0 + ts):.0%}."
                if ts > 0
                else "Synchronisation costs nothing that can be measured."
            ),
            error,
            error <= limit,
        )


def _strong_scaling(rows: _Rows) -> Iterable[Experiment]:
    seconds = dict(sorted(rows.by_ranks("test_strong_scaling").items()))
    if 1 not in seconds or len(seconds) < 2:
        return
    last = max(seconds)
    speed_up = {size: seconds[1] / value for size, value in seconds.items() if size > 1}
    parts = [
        f"{size} ranks: {faster:.2f} x as fast, efficiency {faster / size:.0%}, "
        f"serial fraction {karp_flatt(seconds[1], seconds[size], size):.2f}"
        for size, faster in speed_up.items()
    ]
    error, words = None, ""
    if len(seconds) > 2:
        fraction = serial_fraction({size: value for size, value in seconds.items() if size != last})
        predicted = amdahl_s(seconds[1], last, fraction)
        error = abs(predicted - seconds[last]) / seconds[last]
        words = (
            f" From fewer ranks, Amdahl's law predicts {_ms(predicted)} on {last}, measured {_ms(seconds[last])}: "
            f"{error:.0%} off."
        )
    yield Experiment("strong scaling of a training step", f"{'. '.join(parts)}.{words}", error, None)


def _weak_scaling(rows: _Rows) -> Iterable[Experiment]:
    seconds = dict(sorted(rows.by_ranks("test_weak_scaling").items()))
    if 1 not in seconds or len(seconds) < 2:
        return
    parts = [f"{size} ranks {seconds[1] / value:.0%}" for size, value in seconds.items() if size > 1]
    yield Experiment(
        "weak scaling of a training step",
        f"With as many samples on each rank, the efficiency is: {', '.join(parts)}. Ideal is 100 %.",
    )


def _processes_and_threads(rows: _Rows) -> Iterable[Experiment]:
    ways_of = rows.of("test_processes_and_threads")
    found = {(ranks, int(rest.removesuffix("threads"))): ways[""] for (ranks, rest), ways in ways_of.items()}
    if (1, 1) not in found or len(found) < 3:
        return
    best = min(found, key=lambda one: found[one])
    worst = max(found, key=lambda one: found[one])
    times = ", ".join(f"{ranks} x {threads} {_ms(value)}" for (ranks, threads), value in sorted(found.items()))
    yield Experiment(
        "processes x threads, as much work",
        f"{times}. The best is {best[0]} x {best[1]}; {worst[0]} x {worst[1]} takes {found[worst] / found[best]:.1f} "
        "times as long: give each core one thread of all processes.",
    )


def _break_even(rows: _Rows) -> Iterable[Experiment]:
    scaling = rows.by_ranks("test_strong_scaling")
    alone = rows.by_ranks("test_processes_and_threads", "1threads")
    for ranks, value in scaling.items():
        if ranks == 1 or 1 not in scaling or ranks not in alone:
            continue
        compute_s, sync_s = alone[ranks], max(value - alone[ranks], 0.0)
        pays = speed_up_pays(ranks, compute_s=compute_s, sync_s=sync_s)
        faster = value < scaling[1]
        yield Experiment(
            f"does it pay to use {ranks} ranks",
            f"Synchronisation takes {_ms(sync_s)}, computing {_ms(compute_s)}: T_sync / T_comp = "
            f"{sync_s / compute_s:.2f}, and R - 1 = {ranks - 1}, so {ranks} ranks are predicted to be "
            f"{'faster' if pays else 'slower'} than one. Measured: {scaling[1] / value:.2f} x as fast as one rank.",
            held=pays == faster,
        )


def _links(rows: _Rows) -> Iterable[Experiment]:
    for test in ("test_all_reduce", "test_reduce_scatter", "test_all_gather", "test_broadcast", "test_ping_pong"):
        by_way: dict[tuple[int, str], dict[int, float]] = defaultdict(dict)
        for (ranks, rest), ways in rows.of(test).items():
            for way, value in ways.items():
                by_way[ranks, way][rows.facts(test, ranks, rest, way)["nbytes"]] = value
        for (ranks, way), seconds in by_way.items():
            if len(seconds) < 3 or ranks == 1:
                continue
            fit = fit_link(seconds)
            half_MB = fit.alpha_s * fit.beta_GBps * 1e3
            yield Experiment(
                f"{test.removeprefix('test_')}{way and f' of {way}'}, {ranks} ranks: latency and bandwidth",
                f"alpha = {_ms(fit.alpha_s)}, beta = {fit.beta_GBps:.3g} GB/s, at most {fit.worst_error:.0%} off. "
                f"Half of the bandwidth is reached at {half_MB:.3g} MB{_share(rows, ranks, fit)}.",
                fit.worst_error,
            )


def _share(rows: _Rows, ranks: int, fit: Any) -> str:
    """The bandwidth of the fit beside that of a plain socket of the same run."""
    for (size, rest), _ in rows.of("test_socket").items():
        if size == ranks:
            roof = rows.facts("test_socket", size, rest)["algbw_GBps"]
            return f"; a plain socket reaches {roof:.3g} GB/s, so this is {fit.beta_GBps / roof:.0%} of it"
    return ""


def _gradient_sync(rows: _Rows) -> Iterable[Experiment]:
    for (ranks, rest), ways in rows.of("test_gradient_sync").items():
        if not {"none", "loop", "message"} <= set(ways) or ranks == 1:
            continue
        tensors = int(rest.removesuffix("tensors"))
        model = ways["none"] + tensors * ways["message"]
        error = abs(model - ways["loop"]) / ways["loop"]
        advice = "send few large messages" if ways[""] < ways["loop"] else "here messages cost less than copies"
        yield Experiment(
            f"one all_reduce for each of {tensors} tensors, {ranks} ranks",
            f"A step takes {_ms(ways['loop'])}; the step alone and {tensors} messages make {_ms(model)}, {error:.0%} "
            f"off. In flat buckets it takes {_ms(ways[''])}: {advice}.",
            error,
        )


def _bubble(rows: _Rows) -> Iterable[Experiment]:
    limit = 0.05
    for (stages, rest), ways in rows.of("test_bubble_of_sleeping_stages").items():
        stage_s = rows.facts("test_bubble_of_sleeping_stages", stages, rest).get("stage_s") if "" in ways else None
        if "half of T" not in ways or stage_s is None:
            continue
        microbatches, schedule = int(rest.partition("microbatches")[0]), rest.rpartition("-")[2]
        pairs = microbatches + stages - 1
        overhead_s = ways["half of T"] / pairs - 1.5 * stage_s
        model = pairs * (3 * stage_s + overhead_s)
        error = abs(model - ways[""]) / ways[""]
        yield Experiment(
            f"bubble of {schedule}, {stages} stages, {microbatches} micro-batches",
            f"A step takes {_ms(ways[''])}; (m + p - 1)(3 T + c) with c = {_ms(overhead_s)} is {_ms(model)}, "
            f"{error:.1%} off. The bubble is {(stages - 1) / pairs:.0%} of it; with {4 * (stages - 1)} micro-batches "
            "it is 20 %.",
            error,
            error <= limit,
        )


def _count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


_EXPERIMENTS: Sequence[Callable[[_Rows], Iterable[Experiment]]] = (
    _sync_every,
    _strong_scaling,
    _weak_scaling,
    _processes_and_threads,
    _break_even,
    _links,
    _gradient_sync,
    _bubble,
)
