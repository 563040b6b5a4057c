"""A pipeline runs users' own schedules, which are cells in a grid."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdlcheck.checks import check_pipeline, check_schedule
from pdlcheck.primitives.pipeline import gpipe, lay_out, one_f_one_b, parse_schedule
from pdlcheck.primitives.pipeline.cells import Cell

from .models import MSE, errors, few, samples, starter, tanh_net

pytestmark = pytest.mark.verifies("Pipeline")


@few
@given(data=st.data())
def test_any_order_that_can_be_laid_out_gives_the_gradients_of_one_process(subject, world, data):
    """Ranks do their passes in a drawn order in which each pass comes after the passes that it needs."""
    n_stages, n_microbatches = data.draw(st.integers(2, 3)), data.draw(st.integers(1, 3))
    left = [list(order) for order in (gpipe(n_stages, n_microbatches).rows)]
    done: set[Cell] = set()
    orders = [[] for _ in left]
    cells = [[cell for cell in row if cell] for row in left]
    while any(cells):
        ready = [(rank, cell) for rank, own in enumerate(cells) for cell in own if set(cell.needs(n_stages)) <= done]
        rank, cell = data.draw(st.sampled_from(ready))
        cells[rank].remove(cell)
        orders[rank].append(cell)
        done.add(cell)
    schedule = lay_out("drawn", orders)
    check_schedule(schedule.rows, name="drawn")
    start = starter(subject, MSE, schedule=schedule)
    check_pipeline(
        start, tanh_net, MSE, [samples(n_microbatches + 1)], world, world_size=n_stages, n_microbatches=n_microbatches
    )


@pytest.mark.beyond_contract("error messages")
def test_an_invalid_schedule_is_refused_with_its_grid(subject, world):
    rows = [list(row) for row in one_f_one_b(2, 2).rows]
    rows[1][2], rows[1][1] = rows[1][1], rows[1][2]
    schedule = parse_schedule("mine", rows)
    found = errors(world, lambda rank: subject(tanh_net(), MSE, schedule=schedule))
    assert len(set(found)) == 1
    assert "ValueError: mine: 1B0 on rank 1 in step 1 needs 1F0, which is made in step 2 on rank 1\n" in found[0]
    assert ">B0<" in found[0]


def test_stages_of_a_schedule_may_be_on_ranks_in_any_order(subject, world):
    """The first and the last stage are on rank 0, as in a V; it sends itself no message."""
    orders = [
        [Cell(stage, kind, i) for kind, stages in (("F", (0, 2)), ("B", (2, 0))) for stage in stages for i in range(3)],
        [Cell(1, kind, i) for kind in "FB" for i in range(3)],
    ]

    def start(model):
        pipeline = subject(model, MSE, schedule=lay_out("v", orders))

        def step(inputs, targets):
            result = pipeline.step(inputs, targets)
            return result.loss, result.outputs

        return pipeline.module, step

    check_pipeline(start, partial(tanh_net, 3), MSE, [samples(5)] * 2, world, world_size=2, n_microbatches=3)


@pytest.mark.if_subject_takes("sample")
def test_the_split_by_time_is_the_same_on_every_rank(subject, world):
    def stages():
        pipeline = subject(tanh_net(5), MSE, n_microbatches=2, split="time", sample=torch.ones(4, 3))
        pipeline.step(*samples(4))
        return pipeline.stages

    ranks = world.run(stages, world_size=3)
    assert ranks[0] == ranks[1] == ranks[2]
    assert [name for names in ranks[0] for name in names] == [str(i) for i in range(10)]
