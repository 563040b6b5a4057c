"""Pipeline parallelism: a model in stages, schedules as data, and the runner that executes them."""

from pdlcheck.primitives.pipeline.cells import Cell, Schedule, lay_out, parse_schedule
from pdlcheck.primitives.pipeline.picture import save_schedule
from pdlcheck.primitives.pipeline.pipeline import Pipeline, Result
from pdlcheck.primitives.pipeline.schedules import gpipe, interleaved_1f1b, one_f_one_b, pipedream
from pdlcheck.primitives.pipeline.splitting import split_model
from pdlcheck.primitives.pipeline.validator import require_valid_schedule

__all__ = [
    "Cell",
    "Pipeline",
    "Result",
    "Schedule",
    "gpipe",
    "interleaved_1f1b",
    "lay_out",
    "one_f_one_b",
    "parse_schedule",
    "pipedream",
    "require_valid_schedule",
    "save_schedule",
    "split_model",
]
