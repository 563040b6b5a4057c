"""The measurement on ranks: rounds in step, passes, intervals, models, and the description of the machine."""

from pdlcheck.bench.formulas import (
    BUSBW_FACTORS,
    algbw_GBps,
    busbw_GBps,
    epoch_s,
    fit_local_sgd,
    local_sgd_step_s,
    slowest_s,
    speed_up_pays,
)
from pdlcheck.bench.models import LinkFit, amdahl_s, fit_link, karp_flatt, serial_fraction

__all__ = [
    "BUSBW_FACTORS",
    "LinkFit",
    "algbw_GBps",
    "amdahl_s",
    "busbw_GBps",
    "epoch_s",
    "fit_link",
    "fit_local_sgd",
    "karp_flatt",
    "local_sgd_step_s",
    "serial_fraction",
    "slowest_s",
    "speed_up_pays",
]
