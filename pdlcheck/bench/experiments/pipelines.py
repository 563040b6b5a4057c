"""The experiment on the bubble of a pipeline: ``(m + p - 1)(3 T + c)`` for p stages and m micro-batches."""

from __future__ import annotations

from collections.abc import Iterable

from pdlcheck.bench.experiments.experiment import Experiment, Plot
from pdlcheck.bench.experiments.rows import Rows, as_ms

__all__ = ["bubble"]


def bubble(rows: Rows) -> Iterable[Experiment]:
    """Yield an experiment for each schedule; the stages sleep, so only the schedule can cause an error."""
    limit, test = 0.05, "test_bubble_of_sleeping_stages"
    for (stages, rest), ways in rows.of(test).items():
        stage_s = rows.facts(test, stages, rest).get("stage_s") if "" in ways else None
        if "half of T" not in ways or stage_s is None:
            continue
        microbatches, schedule = int(rest.partition("microbatches")[0]), rest.rpartition("-")[2]
        pairs = microbatches + stages - 1
        overhead_s = ways["half of T"] / pairs - 1.5 * stage_s
        model = pairs * (3 * stage_s + overhead_s)
        error = abs(model - ways[""]) / ways[""]
        lines = {
            f"T = {as_ms(one)}, c as measured": [
                (m, 1e3 * (m + stages - 1) * (3 * one + overhead_s)) for m in range(1, 4 * stages + 1)
            ]
            for one in (stage_s, stage_s / 2)
        }
        points = [rows.point(microbatches, test, stages, rest, way) for way in ("", "half of T")]
        yield Experiment(
            f"bubble of {schedule}, {stages} stages, {microbatches} micro-batches",
            f"A step takes {as_ms(ways[''])}; (m + p - 1)(3 T + c) with c = {as_ms(overhead_s)} is {as_ms(model)}, "
            f"{error:.1%} off. The bubble is {(stages - 1) / pairs:.0%} of it; with {4 * (stages - 1)} micro-batches "
            "it is 20 %.",
            error,
            error <= limit,
            Plot("micro-batches", "milliseconds of a step", {"measured": points}, lines),
        )
