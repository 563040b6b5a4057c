"""Schedules are valid grids; an invalid one is refused with an error that names the wrong cell."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pdlcheck.checks import check_schedule
from pdlcheck.clock import Link, Topology, compute
from pdlcheck.primitives.pipeline import (
    Pipeline,
    Schedule,
    gpipe,
    interleaved_1f1b,
    lay_out,
    one_f_one_b,
    parse_schedule,
    pipedream,
    require_valid_schedule,
    save_schedule,
)
from pdlcheck.primitives.pipeline.cells import Cell
from pdlcheck.primitives.pipeline.splitting import split_costs
from pdlcheck.worlds import get_world

some = settings(max_examples=20)
stages, microbatches = st.integers(1, 6), st.integers(1, 8)


@st.composite
def schedules(draw):
    kind = draw(st.sampled_from([gpipe, one_f_one_b, pipedream, interleaved_1f1b]))
    if kind is interleaved_1f1b:
        n_ranks = draw(st.integers(1, 4))
        return kind(n_ranks, n_ranks * draw(st.integers(1, 3)), stages_per_rank=draw(st.integers(1, 3)))
    return kind(draw(stages), draw(microbatches))


@some
@given(schedule=schedules())
def test_every_schedule_is_valid_and_prints_what_can_be_read_again(schedule):
    require_valid_schedule(schedule)
    check_schedule(schedule.rows)
    texts = [[None if cell is None else str(cell) for cell in row] for row in schedule.rows]
    assert parse_schedule(schedule.name, texts, asynchronous=schedule.asynchronous) == schedule


@pytest.mark.verifies("one_f_one_b")
@some
@given(p=stages, m=microbatches)
def test_1f1b_holds_as_many_activations_as_stages_are_left(subject, p, m):
    schedule = subject(p, m)
    check_schedule(schedule.rows, max_live=[min(p - stage, m) for stage in range(p)])
    assert [schedule.peak_live(rank) for rank in range(p)] == [min(p - rank, m) for rank in range(p)]
    assert schedule.n_steps == 2 * (m + p - 1)


@pytest.mark.verifies("gpipe")
@some
@given(p=stages, m=microbatches)
def test_gpipe_holds_all_activations_and_takes_as_long(subject, p, m):
    schedule = subject(p, m)
    assert [schedule.peak_live(rank) for rank in range(p)] == [m] * p
    assert schedule.n_steps == 2 * (m + p - 1)


@pytest.mark.verifies("interleaved_1f1b")
@some
@given(p=st.integers(2, 4), rounds=st.integers(1, 3), v=st.integers(1, 3))
def test_interleaving_shortens_the_pipeline_by_the_stages_on_a_rank(subject, p, rounds, v):
    """It takes 2 (m v + p - 1) steps that are v times shorter, so the bubble is v times smaller."""
    schedule = subject(p, p * rounds, stages_per_rank=v)
    assert schedule.n_stages == p * v
    assert schedule.stage_ranks == tuple(stage % p for stage in range(p * v))
    assert schedule.n_steps == 2 * (p * rounds * v + p - 1)
    if v > 1:  # Megatron's warm-up, and the forward pass that comes before the first backward pass
        most = [min(2 * (p - rank - 1) + (v - 1) * p + 1, p * rounds * v) for rank in range(p)]
        assert [schedule.peak_live(rank) for rank in range(p)] == most


def damaged(draw, schedule):
    """Return a schedule with one wrong cell, and the texts that name the cell."""
    rows = [list(row) for row in schedule.rows]
    cells = [(rank, step) for rank, row in enumerate(rows) for step, cell in enumerate(row) if cell]
    rank, step = draw(st.sampled_from(cells))
    kind = draw(st.sampled_from(["lost", "twice", "early", "moved", "renumbered"]))
    cell = other = rows[rank][step]
    if kind == "lost":
        rows[rank][step] = None
    elif kind == "twice":
        rows[rank].append(cell)
    elif kind == "moved":
        rows[rank][step] = None
        rows.append([cell])
    elif kind == "renumbered":
        other = replace(cell, microbatch=draw(st.integers(0, 20).filter(lambda one: one != cell.microbatch)))
        rows[rank][step] = other
    else:  # before its inputs exist: a backward pass moves to the front
        backward = [(r, s) for r, s in cells if rows[r][s].kind == "B"]
        rank, step = draw(st.sampled_from(backward))
        cell = other = rows[rank].pop(step)
        rows[rank].insert(0, cell)
    return Schedule("damaged", tuple(map(tuple, rows))), {str(cell), str(other)}


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("require_valid_schedule")
@some
@given(data=st.data(), schedule=schedules())
def test_a_damaged_schedule_is_refused_by_the_validator_and_by_the_check(subject, data, schedule):
    """Both messages name the cell."""
    wrong, cells = damaged(data.draw, schedule)
    with pytest.raises(ValueError, match="damaged: ") as refused:
        subject(wrong)
    with pytest.raises(AssertionError, match="damaged: ") as rejected:
        check_schedule(wrong.rows, name="damaged")
    for error in (refused, rejected):
        assert cells & set(re.findall(r"\d+[FB]\d+", str(error.value).splitlines()[0]))


@pytest.mark.verifies("require_valid_schedule")
@some
@given(data=st.data(), p=st.integers(1, 3), m=st.integers(1, 3))
def test_the_validator_and_the_check_agree_on_any_order(subject, data, p, m):
    """Cells of one stage a rank come in any order, at any step; both refuse the schedule, or both accept it."""
    rows = []
    for stage in range(p):
        cells = [Cell(stage, kind, i) for kind in "FB" for i in range(m)]
        order = data.draw(st.permutations([*cells, None, None]))
        rows.append([None] * data.draw(st.integers(0, p)) + list(order))
    schedule = Schedule("drawn", tuple(map(tuple, rows)))
    verdicts = []
    for verdict in (lambda: subject(schedule), lambda: check_schedule(schedule.rows)):
        try:
            verdict()
            verdicts.append(True)
        except (ValueError, AssertionError):
            verdicts.append(False)
    assert verdicts[0] == verdicts[1]


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("require_valid_schedule")
@pytest.mark.parametrize(
    ("rows", "message", "marked"),
    [
        ([["0F0", None, None], [None, "1F0", "1B0"]], "0B0 is missing, 0F0 is there on rank 0 in step 0", ">F0<"),
        (
            [["0F0", "0F0", None, "0B0"], [None, "1F0", "1B0"]],
            "0F0 is there twice, on rank 0 in step 0 and on rank 0 in step 1",
            ">F0<  >F0<",
        ),
        (
            [["0F0", None, None, "0B0"], ["1F0", None, "1B0"]],
            "1F0 on rank 1 in step 0 needs 0F0, which is made in",
            ">F0<",
        ),
        ([["0F0", None, "0B0"], [None, "1F0", "1B0"]], "0B0 on rank 0 in step 2 needs 1B0, which is made in", ">B0<"),
        ([["0B0", "0F0"]], "0B0 on rank 0 in step 0 needs 0F0, which is made in step 1 on rank 0", ">B0<"),
        ([["0F0", None], [None, "0B0"]], "0B0 is on rank 1 in step 1, 0F0 on rank 0 in step 0: one stage", ">0B0<"),
    ],
    ids=["missing", "twice", "too early", "backward too early", "backward first", "moved"],
)
def test_the_wrong_cell_is_marked_in_the_grid(subject, rows, message, marked):
    with pytest.raises(ValueError, match=r"^mine: ") as error:
        subject(parse_schedule("mine", rows))
    assert str(error.value).startswith(f"mine: {message}")
    assert marked in str(error.value)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("require_valid_schedule")
def test_the_memory_that_a_schedule_takes_can_be_limited(subject):
    subject(one_f_one_b(3, 8), max_live=[3, 2, 1])
    with pytest.raises(
        ValueError, match=r"gpipe: 0F2 in step 2 is activation number 3 that rank 0 holds, the limit is 2"
    ):
        subject(gpipe(2, 4), max_live=2)


def test_orders_that_wait_for_one_another_cannot_be_laid_out():
    first = [Cell(0, "F", 0), Cell(0, "B", 0), Cell(0, "F", 1), Cell(0, "B", 1)]
    second = [Cell(1, "F", 0), Cell(1, "F", 1), Cell(1, "B", 0), Cell(1, "B", 1)]
    with pytest.raises(ValueError, match="mine cannot be laid out") as error:
        lay_out("mine", [first, second])
    assert str(error.value) == (
        "mine cannot be laid out: its ranks wait for ever\n"
        "  rank 0: 0B0 waits for 1B0 (rank 1)\n  rank 1: 1F1 waits for 0F1 (rank 0)"
    )


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("parse_schedule")
def test_what_is_no_cell_is_refused(subject):
    with pytest.raises(ValueError, match=r"reads cells such as 1F3 \(stage, F or B, micro-batch\), got 'F0'"):
        subject("mine", [["F0"]])


@some
@given(schedule=schedules())
def test_the_picture_has_a_box_for_every_pass(schedule, tmp_path_factory):
    path = save_schedule(schedule, tmp_path_factory.mktemp("picture") / "schedule.svg")
    root = ElementTree.parse(path).getroot()
    boxes = [node for node in root.iter() if node.get("class") in ("F", "B")]
    assert len(boxes) == 2 * schedule.n_stages * schedule.n_microbatches
    assert {node.get("class") for node in boxes} == {"F", "B"}


# splitting


@pytest.mark.verifies("split_model")
@some
@given(costs=st.lists(st.integers(0, 9), min_size=1, max_size=8), data=st.data())
def test_no_other_cut_has_a_cheaper_costliest_stage(subject, costs, data):
    import itertools

    parts = data.draw(st.integers(1, len(costs)))

    def worst(starts):
        return max(sum(costs[a:b]) for a, b in zip(starts, [*starts[1:], len(costs)], strict=True))

    best = min(worst([0, *cut]) for cut in itertools.combinations(range(1, len(costs)), parts - 1))
    starts = split_costs(costs, parts)
    assert len(starts) == parts
    assert starts[0] == 0
    assert sorted(set(starts)) == starts
    assert worst(starts) == best


class Slow(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.ones(1))

    def forward(self, x):
        time.sleep(self.seconds)
        return x * self.weight


@pytest.mark.if_subject_takes("sample")
@pytest.mark.verifies("split_model")
def test_a_slow_layer_has_a_stage_of_its_own_when_times_are_measured(subject):
    model = nn.Sequential(*(Slow(0.02 if i == 2 else 0.0) for i in range(5)))
    assert subject(model, 2, by="time", sample=torch.ones(2)) in (
        [["0", "1"], ["2", "3", "4"]],
        [["0", "1", "2"], ["3", "4"]],
    )
    assert subject(model, 3, by="time", sample=torch.ones(2))[1] == ["2"]
    assert all(p.grad is None for p in model.parameters())
    assert subject(model, 5, by="parameters") == [["0"], ["1"], ["2"], ["3"], ["4"]]


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("split_model")
def test_layers_without_parameters_stay_with_the_one_before(subject):
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    assert subject(model, 2) == [["0", "1", "2"], ["3", "4"]]
    with pytest.raises(ValueError, match=r"stage 0 has no parameters, its layers are 0 \(Flatten\)"):
        subject(model, 2, by=[1])


# virtual time


class Computing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        compute(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        compute(2 * ctx.seconds)
        return grad, None


class Stage(nn.Module):
    """A stage that takes a known virtual time, twice as long backwards."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.ones(1))

    def forward(self, x):
        return Computing.apply(x * self.weight, self.seconds)


@pytest.mark.parametrize(("schedule", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (8, 8)])
def test_the_bubble_of_a_run_is_that_of_the_formula(schedule, v, p, m):
    """The time is (m + p - 1) 3 T for GPipe and 1F1B, and (m v + p - 1) 3 T / v with v stages on a rank."""

    def train(steps):
        model = nn.Sequential(*(Stage(1.0 / v) for _ in range(p * v)))
        more = {"stages_per_rank": v} if schedule == "interleaved" else {}
        pipeline = Pipeline(model, nn.MSELoss(), schedule=schedule, n_microbatches=m, **more)
        for _ in range(steps):
            pipeline.step(torch.ones(m, 1), torch.ones(m, 1))

    seconds = []
    for steps in (1, 2):  # the first step also runs every stage on zeros, to determine shapes
        world = get_world("sim", topology=Topology(intra=Link(0.0, 1e9)))
        world.run(train, steps, world_size=p)
        seconds.append(world.timeline.step_time_s)
    assert seconds[1] - seconds[0] == pytest.approx((m * v + p - 1) * 3.0 / v, rel=1e-6)
