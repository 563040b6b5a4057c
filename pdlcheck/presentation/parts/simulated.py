"""The section with pictures of simulated runs: the pipelines of a run in virtual time, with its stages and its link."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from pdlcheck.bench.experiments import Row
from pdlcheck.bench.models import fit_link
from pdlcheck.clock import Link, Topology
from pdlcheck.presentation.document import Picture, Section, Words

__all__ = ["pictures_section"]

_BUBBLE = re.compile(r"test_bubble_of_sleeping_stages\[(\d+)ranks-(\d+)microbatches-(\w+)\]")


def pictures_section(rows: Sequence[Row]) -> Section | None:
    """Return a picture for each schedule of the run, with its stages, its micro-batches and its seconds of a stage."""
    link = _link(rows)
    pictures = []
    for name, facts in rows:
        found = _BUBBLE.fullmatch(name)
        if found is not None and "stage_s" in facts:
            stages, microbatches, schedule = int(found[1]), int(found[2]), found[3]
            pictures.append(_picture(schedule, stages, microbatches, facts["stage_s"], link))
    if not pictures:
        return None
    words = (
        f"Simulated, not measured: a message takes {1e6 * link.latency_s:.3g} microseconds and its bytes at "
        f"{link.bandwidth_GBps:.3g} GB/s. A pointer that rests on a box reads the operation and its times."
    )
    return Section("simulated pipelines", [Words(words), *pictures])


def _link(rows: Sequence[Row]) -> Link:
    """Return the link of a one-way message, from half the bytes and half the time of a message there and back."""
    seconds = {
        facts["nbytes"] // 2: facts["median_s"] / 2
        for name, facts in rows
        if name.startswith("test_ping_pong[2ranks-") and "nbytes" in facts
    }
    if len(seconds) < 2:
        return Link()
    fit = fit_link(seconds)
    return Link(latency_s=fit.alpha_s, bandwidth_GBps=fit.beta_GBps)


def _picture(schedule: str, stages: int, microbatches: int, stage_s: float, link: Link) -> Picture:
    from pdlcheck.clock.svg import svg
    from pdlcheck.presentation.parts.virtual_stages import step
    from pdlcheck.worlds import get_world

    world = get_world("sim", topology=Topology(intra=link), timeline=True)
    try:
        world.run(partial(step, schedule, stages, microbatches, stage_s), world_size=stages)
    finally:
        world.close()
    timeline = world.timeline
    title = f"{schedule}, {stages} stages, {microbatches} micro-batches"
    words = f"{title}: a step takes {1e3 * timeline.step_time_s:.3g} ms, the bubble is {timeline.bubble:.0%} of it."
    return Picture(title, svg(timeline), words)
