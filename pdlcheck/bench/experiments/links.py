"""The experiments on collectives and messages by size: latency and bandwidth, with a plain socket of the same run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from pdlcheck.bench.experiments.experiment import Experiment, Plot, Point
from pdlcheck.bench.experiments.rows import Rows, as_ms, as_ranks
from pdlcheck.bench.models import LinkFit, fit_link

__all__ = ["fits_of", "links"]

_TESTS = ("test_all_reduce", "test_reduce_scatter", "test_all_gather", "test_broadcast", "test_ping_pong")


def links(rows: Rows) -> Iterable[Experiment]:
    """Yield one experiment for each operation and number of ranks with three sizes or more."""
    for test in _TESTS:
        for ranks, fits in fits_of(rows, test).items():
            yield _link(rows, test, ranks, fits)


def fits_of(rows: Rows, test: str) -> dict[int, dict[str, LinkFit]]:
    """Return the lines through the sizes of an operation, by number of ranks and function."""
    seconds: dict[tuple[int, str], dict[int, float]] = defaultdict(dict)
    for (ranks, rest), ways in rows.of(test).items():
        for way, value in ways.items():
            if "nbytes" in (facts := rows.facts(test, ranks, rest, way)):  # a user's test may have this name
                seconds[ranks, way][facts["nbytes"]] = value
    found: dict[int, dict[str, LinkFit]] = defaultdict(dict)
    for (ranks, way), by_size in sorted(seconds.items()):
        if len(by_size) > 2 and ranks > 1:
            found[ranks][way] = fit_link(by_size)
    return dict(found)


def _link(rows: Rows, test: str, ranks: int, fits: dict[str, LinkFit]) -> Experiment:
    roof = _socket_GBps(rows, ranks)
    sentences: list[str] = []
    points: dict[str, list[Point]] = {}
    lines: dict[str, list[tuple[float | str, float]]] = {}
    sizes: list[int] = []
    for way, fit in fits.items():
        name = way or ("pdlcheck" if len(fits) > 1 else "measured")
        half_MB = fit.alpha_s * fit.beta_GBps * 1e3
        share = f", {fit.beta_GBps / roof:.0%} of a plain socket" if roof else ""
        sentences.append(
            f"{name}: alpha = {as_ms(fit.alpha_s)}, beta = {fit.beta_GBps:.3g} GB/s{share}; half of the "
            f"bandwidth is reached at {half_MB:.3g} MB; the line is at most {fit.worst_error:.0%} off."
        )
        places = sorted(
            (rows.facts(test, ranks, rest, way)["nbytes"], rest)
            for (size, rest), ways in rows.of(test).items()
            if size == ranks and way in ways and "nbytes" in rows.facts(test, ranks, rest, way)
        )
        sizes = [nbytes for nbytes, _ in places]
        points[name] = [rows.point(nbytes, test, ranks, rest, way) for nbytes, rest in places]
        model = "model" if name == "measured" else f"model of {name}"
        lines[model] = [(nbytes, 1e3 * fit.seconds(nbytes)) for nbytes in _between(sizes)]
    if roof:
        sentences.append(f"A plain socket reaches {roof:.3g} GB/s.")
        least = min(point.y for series in points.values() for point in series) / 10
        lines["a plain socket"] = [(n, n / roof / 1e6) for n in _between(sizes) if n / roof / 1e6 >= least]
    return Experiment(
        f"{test.removeprefix('test_')}, {as_ranks(ranks)}: latency and bandwidth",
        " ".join(sentences),
        max(fit.worst_error for fit in fits.values()),
        plot=Plot("bytes", "milliseconds", points, lines, log_x=True, log_y=True),
    )


def _socket_GBps(rows: Rows, ranks: int) -> float | None:
    for (size, rest), _ in rows.of("test_socket").items():
        if size == ranks:
            return float(rows.facts("test_socket", size, rest)["algbw_GBps"])
    return None


def _between(sizes: list[int], count: int = 40) -> list[int]:
    """Return sizes for a smooth line on a logarithmic axis."""
    first, last = sizes[0], sizes[-1]
    return [round(first * (last / first) ** (k / (count - 1))) for k in range(count)]
