"""The experiments on synchronisation: every k-th step, tensor by tensor or in buckets, one process or several."""

from __future__ import annotations

from collections.abc import Iterable

from pdlcheck.bench.experiments.experiment import Experiment, Plot
from pdlcheck.bench.experiments.rows import Rows, as_ms, as_ranks
from pdlcheck.bench.formulas import fit_local_sgd

__all__ = ["data_parallel", "gradient_sync", "sync_every"]


def sync_every(rows: Rows) -> Iterable[Experiment]:
    """Yield the fit of ``T0 + Ts / k`` to an epoch in which every k-th step synchronises."""
    limit, test = 0.1, "test_sync_every"
    for (ranks, sync), ways in rows.of(test).items():
        seconds: dict[int | None, float] = {}
        points = []
        for way, value in ways.items():
            k = None if way == "never" else int(way.removeprefix("every ") or 1)
            seconds[k] = value
            points.append(rows.point(1 / k if k else 0.0, test, ranks, sync, way))
        if len(seconds) < 3:
            continue
        t0, ts = fit_local_sgd(seconds)
        error = max(abs(t0 + (ts / k if k else 0.0) - value) / value for k, value in seconds.items())
        times = ", ".join(f"{as_ms(value)} {f'with k = {k}' if k else 'without any'}" for k, value in seconds.items())
        yield Experiment(
            f"gradients synchronised every k-th step, {sync}, {as_ranks(ranks)}",
            f"An epoch takes {times}. The model T0 + Ts / k with T0 = {as_ms(t0)}, Ts = {as_ms(ts)} is at most "
            f"{error:.0%} off. "
            + (
                f"Synchronisation is {ts / (t0 + ts):.0%} of a synchronous epoch: every 4th step saves "
                f"{0.75 * ts / (t0 + ts):.0%}."
                if ts > 0
                else "Synchronisation costs nothing that can be measured."
            ),
            error,
            error <= limit,
            Plot(
                "synchronisations a step, 1 / k",
                "milliseconds of an epoch",
                {"measured": sorted(points)},
                {"T0 + Ts / k": [(0.0, 1e3 * t0), (1.0, 1e3 * (t0 + ts))]},
            ),
        )


def gradient_sync(rows: Rows) -> Iterable[Experiment]:
    """Yield the cost of a loop over tensors, compared with the step alone plus a message for each tensor."""
    test = "test_gradient_sync"
    names = {"none": "not synchronised", "loop": "tensor by tensor", "": "flat buckets", "ddp": "torch's DDP"}
    for (ranks, rest), ways in rows.of(test).items():
        if not {"none", "loop", "message"} <= set(ways) or ranks == 1:
            continue
        tensors = int(rest.removesuffix("tensors"))
        model = ways["none"] + tensors * ways["message"]
        error = abs(model - ways["loop"]) / ways["loop"]
        advice = "send few large messages" if ways[""] < ways["loop"] else "here messages cost less than copies"
        points = [rows.point(names.get(way, way), test, ranks, rest, way) for way in ways if way != "message"]
        yield Experiment(
            f"one all_reduce for each of {tensors} tensors, {as_ranks(ranks)}",
            f"A step takes {as_ms(ways['loop'])}; the step alone and {tensors} messages make {as_ms(model)}, "
            f"{error:.0%} off. In flat buckets it takes {as_ms(ways[''])}: {advice}.",
            error,
            plot=Plot(
                "gradients",
                "milliseconds of a step",
                {"measured": points},
                {"the step alone and a message for each tensor": [("tensor by tensor", 1e3 * model)]},
            ),
        )


def data_parallel(rows: Rows) -> Iterable[Experiment]:
    """Yield the time of several workers in one process and of the plain module, and the memory of the first worker."""
    test = "test_data_parallel"
    for (ranks, rest), ways in rows.of(test).items():
        skew = rows.facts(test, ranks, rest).get("first_worker_bytes_over_others") if "" in ways else None
        if skew is None or "plain" not in ways:
            continue
        model, workers = rest.split("-")[:2]
        others = "".join(f", torch's {as_ms(ways['torch'])}" if "torch" in ways else "")
        names = {"": "DataParallel", "plain": "one device", "torch": "torch.nn.DataParallel"}
        advice = (
            "Use a process for each device, with DistributedDataParallel."
            if skew > 1.05 or ways[""] > ways["plain"]
            else "No worker needs more memory than the others."
        )
        yield Experiment(
            f"DataParallel in one process, {model}, {workers.replace('workers', ' workers')}",
            f"A step takes {as_ms(ways[''])}{others}, on one device {as_ms(ways['plain'])}. The first worker needs "
            f"{skew:.2f} times the memory of the others. {advice}",
            plot=Plot(
                "module",
                "milliseconds of a step",
                {"measured": [rows.point(names.get(way, way), test, ranks, rest, way) for way in ways]},
            ),
        )
