"""The experiments on strong and weak scaling, on processes and threads, and on the break-even of more ranks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from pdlcheck.bench.experiments.experiment import Experiment, Plot, Point
from pdlcheck.bench.experiments.links import fits_of
from pdlcheck.bench.experiments.rows import Rows, as_ms, as_ranks
from pdlcheck.bench.formulas import speed_up_pays
from pdlcheck.bench.models import LinkFit, amdahl_s, karp_flatt, ring_link, serial_fraction
from pdlcheck.clock.links import Link, Topology

__all__ = ["break_even", "processes_and_threads", "strong_scaling", "weak_scaling"]

_MANY = (64, 256, 1024)  # the predicted numbers of ranks


def strong_scaling(rows: Rows) -> Iterable[Experiment]:
    """Yield the speed-up and the serial fraction at a constant global batch.

    The seconds on the largest number of ranks are predicted from the others.
    """
    test = "test_strong_scaling"
    seconds = rows.by_ranks(test)
    if 1 not in seconds or len(seconds) < 2:
        return
    last = max(seconds)
    parts = [
        f"{size} ranks: {seconds[1] / value:.2f} x as fast, efficiency {seconds[1] / value / size:.0%}, "
        f"serial fraction {karp_flatt(seconds[1], value, size):.2f}"
        for size, value in seconds.items()
        if size > 1
    ]
    sizes = range(1, 2 * last + 1)
    fraction, error, words = serial_fraction(seconds), None, ""
    if len(seconds) > 2:
        fraction = serial_fraction({size: value for size, value in seconds.items() if size != last})
        predicted = amdahl_s(seconds[1], last, fraction)
        error = abs(predicted - seconds[last]) / seconds[last]
        words = (
            f" From fewer ranks, Amdahl's law predicts {as_ms(predicted)} on {last}, measured {as_ms(seconds[last])}: "
            f"{error:.0%} off."
        )
    model = [(size, seconds[1] / amdahl_s(seconds[1], size, fraction)) for size in sizes]
    lines = {"ideal": [(size, float(size)) for size in sizes], "Amdahl's law (prediction)": model}
    plot = Plot("ranks", "times as fast as one rank", {"measured": _over_one(rows, test, seconds, strong=True)}, lines)
    yield Experiment("strong scaling of a training step", f"{'. '.join(parts)}.{words}", error, None, plot)


def weak_scaling(rows: Rows) -> Iterable[Experiment]:
    """Yield the efficiency at a constant batch for each rank, and a prediction for many ranks by the virtual clock."""
    test = "test_weak_scaling"
    seconds = rows.by_ranks(test)
    if 1 not in seconds or len(seconds) < 2:
        return
    parts = [f"{size} ranks {seconds[1] / value:.0%}" for size, value in seconds.items() if size > 1]
    sentence = f"With as many samples on each rank, the efficiency is: {', '.join(parts)}. Ideal is 100 %."
    lines: dict[str, list[tuple[float | str, float]]] = {}
    predicted = _predicted_steps(rows, seconds[1])
    if predicted:
        lines["prediction by the virtual clock"] = [(size, 100 * seconds[1] / s) for size, s in predicted.items()]
        many = ", ".join(f"{size} ranks {100 * seconds[1] / predicted[size]:.0f}%" for size in _MANY)
        sentence += (
            f" Prediction, not measured: with the link of all_reduce here and nothing hidden behind computing, {many}."
        )
    points = {"measured": _over_one(rows, test, seconds, strong=False)}
    plot = Plot("ranks", "efficiency, %", points, lines, {"ideal": 100.0}, log_x=bool(predicted))
    yield Experiment("weak scaling of a training step", sentence, plot=plot)


def processes_and_threads(rows: Rows) -> Iterable[Experiment]:
    """Yield the times of the same work with more processes, with more threads of each, or with both."""
    test = "test_processes_and_threads"
    found = {(ranks, int(rest.removesuffix("threads"))): ways[""] for (ranks, rest), ways in rows.of(test).items()}
    if (1, 1) not in found or len(found) < 3:
        return
    best = min(found, key=lambda one: found[one])
    worst = max(found, key=lambda one: found[one])
    times = ", ".join(f"{ranks} x {threads} {as_ms(value)}" for (ranks, threads), value in sorted(found.items()))
    points = [rows.point(f"{ranks} x {n}", test, ranks, f"{n}threads") for ranks, n in sorted(found)]
    yield Experiment(
        "processes x threads, as much work",
        f"{times}. The best is {best[0]} x {best[1]}; {worst[0]} x {worst[1]} takes {found[worst] / found[best]:.1f} "
        "times as long: give each core one thread of all processes.",
        plot=Plot("processes x threads", "milliseconds", {"measured": points}),
    )


def break_even(rows: Rows) -> Iterable[Experiment]:
    """Yield whether more ranks pay: synchronisation must take less than R - 1 times the time of the computation."""
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
            f"Synchronisation takes {as_ms(sync_s)}, computing {as_ms(compute_s)}: T_sync / T_comp = "
            f"{sync_s / compute_s:.2f}, and R - 1 = {ranks - 1}, so {as_ranks(ranks)} are predicted to be "
            f"{'faster' if pays else 'slower'} than one. Measured: {scaling[1] / value:.2f} x as fast as one rank.",
            held=pays == faster,
        )


def _over_one(rows: Rows, test: str, seconds: dict[int, float], *, strong: bool) -> list[Point]:
    """Return the speed-up, or the efficiency in percent, over one rank; the interval covers only their own time."""
    found = []
    for size in seconds:
        point = rows.point(size, test, size, scale=1.0)
        scale = seconds[1] if strong else 100 * seconds[1]
        found.append(Point(size, scale / point.y, scale / point.high, scale / point.low))
    return found


def _predicted_steps(rows: Rows, step_s: float) -> dict[int, float]:
    """Return the seconds of the row on many ranks.

    The prediction adds an all_reduce on the fitted link, for each step, to the time of one rank.
    """
    facts = rows.facts("test_weak_scaling", 1)
    fits: dict[int, dict[str, LinkFit]] = fits_of(rows, "test_all_reduce")
    if "gradient_bytes" not in facts or not fits:
        return {}
    ranks = max(fits)
    link = ring_link(fits[ranks].get("torch") or next(iter(fits[ranks].values())), ranks)
    sizes = sorted({2**k for k in range(1, 11)} | {*_MANY})
    steps, nbytes = facts["steps"], facts["gradient_bytes"]
    return {1: step_s} | {size: step_s + steps * _ring_s(size, nbytes, link) for size in sizes}


@cache
def _ring_s(ranks: int, nbytes: int, link: Link) -> float:
    """Return the seconds of an all_reduce of float32 in virtual time; a thousand ranks take a second to simulate."""
    from pdlcheck.clock.rounds import seconds  # imports torch, which a report needs for nothing else

    return seconds("all_reduce", range(ranks), 0, (nbytes, 4), Topology(intra=link))
