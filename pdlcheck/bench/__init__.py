"""What stands beside a measurement: bandwidths, models, and the machine it was made on."""

from pdlcheck.bench.formulas import (
    algbw_GBps,
    all_reduce_busbw_GBps,
    all_reduce_row,
    epoch_s,
    fit_local_sgd,
    local_sgd_step_s,
    slowest_s,
    speed_up_pays,
)

__all__ = [
    "algbw_GBps",
    "all_reduce_busbw_GBps",
    "all_reduce_row",
    "epoch_s",
    "fit_local_sgd",
    "local_sgd_step_s",
    "slowest_s",
    "speed_up_pays",
]
