"""check_training picks the checks that the parts of a training allow, and reports on each property."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler

from pdlcheck.checks import check_training
from pdlcheck.checks.training import check, properties
from pdlcheck.errors import CheckFailed, Inconclusive, WorldTooSmall
from pdlcheck.seen_conditions import listening

GENERATOR = torch.Generator().manual_seed(0)
BATCHES = [(torch.randn(12, 3, generator=GENERATOR), torch.randn(12, 1, generator=GENERATOR)) for _ in range(3)]
SAMPLES = torch.randn(7, 3, generator=GENERATOR), torch.randn(7, 1, generator=GENERATOR)


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
    torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    return model


def loss(model, batch, reduction="mean"):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets, reduction=reduction)


def save(path, model, optimizer):
    path.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
    torch.save(state, path / f"{dist.get_rank()}.pt")


def load(path, model, optimizer):
    state = torch.load(path / f"{dist.get_rank()}.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])


def load_without_momentum(path, model, optimizer):
    random = torch.load(path / f"{dist.get_rank()}.pt")
    model.load_state_dict(random["model"])
    torch.set_rng_state(random["random"])


def loader(dataset, epochs, tells=True):
    sampler = DistributedSampler(dataset)
    batches, seen = DataLoader(dataset, batch_size=4, sampler=sampler), []
    for epoch in range(epochs):
        if tells:
            sampler.set_epoch(epoch)
        seen.append(list(batches))
    return seen


def loader_without_set_epoch(dataset, epochs):
    return loader(dataset, epochs, tells=False)


@torch.no_grad()
def evaluate(model, inputs, targets):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    errors = (model(inputs[rank::world_size]) - targets[rank::world_size]).square()
    total = torch.stack([errors.sum(), torch.tensor(float(len(errors)))])
    dist.all_reduce(total)
    return float(total[0] / total[1])


@torch.no_grad()
def evaluate_means(model, inputs, targets):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    error = (model(inputs[rank::world_size]) - targets[rank::world_size]).square().mean()
    dist.all_reduce(error)
    return float(error / world_size)


def seeds_alike():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))


def seeds_each_rank():
    torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))


class Averaged(nn.Module):
    """A wrapper that averages gradients in its step, and broadcasts nothing."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, inputs):
        return self.module(inputs)


def averages(model, optimizer, batch):
    optimizer.zero_grad()
    loss(model, batch).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()


def of_a_sum(model, batch):
    return loss(model, batch, "sum")


@dataclass(frozen=True)
class Script:
    """The parts of a training script, and the properties that it has."""

    make: Any = make
    parts: Any = None

    def check(self, world, **more):
        given = {
            "batches": BATCHES,
            "loss": loss,
            "wrap": DistributedDataParallel,
            "save": save,
            "load": load,
            "loader": loader,
            "evaluate": evaluate,
            "samples": SAMPLES,
        }
        return check_training(self.make, world, **{**given, **(self.parts or {}), **more})

    def but(self, **parts):
        return replace(self, parts=parts)


RIGHT = Script()
STARTS = "all ranks start with the same weights"
EQUALS = "training equals that of one process"
STAYS = "replicas stay equal"
DRAWS = "ranks draw random numbers of their own"
RESUMES = "a resumed training goes on as without a stop"
SHARES = "ranks share the samples of each epoch"
REPORTS = "metrics are those of one process"
WRONG = {
    "no broadcast": (
        Script(seeds_each_rank).but(wrap=Averaged, step=averages),
        [STARTS],
        "initial weights were not broadcast",
    ),
    "no wrapper": (RIGHT.but(wrap=None), [EQUALS, STAYS], "no rank reduced or gathered values in step 1"),
    "one seed": (Script(seeds_alike), [DRAWS], "torch.manual_seed(0) on both: add the rank to the seed"),
    "no momentum": (RIGHT.but(load=load_without_momentum), [RESUMES], "lost: optimizer; put back"),
    "no set_epoch": (RIGHT.but(loader=loader_without_set_epoch), [SHARES], "set_epoch"),
    "a mean of means": (RIGHT.but(evaluate=evaluate_means), [REPORTS], "the mean of the ranks' values"),
}


def row(report, name):
    return next(one for one in str(report).splitlines() if one.startswith(name))


def test_a_right_training_has_all_properties(world):
    report = RIGHT.check(world)
    assert report.count("right") == len(report.rows) == 7
    assert row(report, EQUALS).split()[-5:-1] == ["process", "check_same_trajectory", "right", "3"]
    assert "    not seen: a rank without samples" in str(report).splitlines()


@pytest.mark.parametrize(("script", "names", "cause"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_has_its_row_and_its_cause(world, script, names, cause):
    with pytest.raises(CheckFailed, match="check_training: ") as raised:
        script.check(world)
    table, _, messages = str(raised.value).partition("\n\n")[2].partition("\n\n")
    wrong = [line for line in table.splitlines() if re.search(r"  wrong  ", line)]
    assert set(names) <= {re.split(r"  +", line)[0] for line in wrong}
    assert f"likely cause: {raised.value.cause}" in table
    assert cause in table
    assert cause in messages


def test_a_step_of_its_own_is_compared_with_one_rank(world):
    def clips(model, optimizer, batch):
        optimizer.zero_grad()
        loss(model, batch).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    report = RIGHT.but(step=clips).check(world)
    assert "training equals that of one rank" in str(report)
    with pytest.raises(CheckFailed, match=r"training equals that of one rank +check_world_size_does_not_matter +wrong"):
        RIGHT.but(step=clips, loss=None, wrap=None).check(world)


def test_fsdp_is_compared_whole(world):
    def wrap(model):
        return fully_shard(model)

    def step(model, optimizer, batch):
        assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()

    report = check_training(make, world, batches=BATCHES, step=step, wrap=wrap, loss=loss)
    assert report.count("right") == len(report.rows) == 4


def test_a_loop_of_the_programs_own_is_compared_with_plain_code(world):
    def train(model, steps, factor=1.0):
        model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in BATCHES[:steps]:
            share = [part.double().tensor_split(dist.get_world_size())[dist.get_rank()] for part in batch]
            optimizer.zero_grad()
            (loss(model, share) * factor).backward()
            optimizer.step()

    def doubled(model, steps):
        train(model, steps, 2.0)

    def plainly(model, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in BATCHES[:steps]:
            optimizer.zero_grad()
            loss(model, [part.double() for part in batch]).backward()
            optimizer.step()

    def plain_model():
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    assert check_training(plain_model, world, train=train, reference=plainly).count("right") == 1
    with pytest.raises(CheckFailed, match="the gradients of each rank are 2 times too large"):
        check_training(plain_model, world, train=doubled, reference=plainly)


def test_ranks_with_the_same_samples_draw_alike(world):
    parts = {"batches": BATCHES, "loss": loss, "same_samples": [[0, 1]]}
    assert check_training(seeds_alike, world, **parts).count("right") == 4
    with pytest.raises(CheckFailed, match=r"replicas stay equal +check_replicas_in_sync +wrong"):
        check_training(make, world, **parts)  # the masks differ
    with pytest.raises(CheckFailed, match=r"own +check_random_streams +wrong[\s\S]*ranks [01] and [23] draw the same"):
        check_training(seeds_alike, world, **{**parts, "same_samples": [[2, 3], [0, 1]]}, world_size=4)


def test_each_set_of_ranks_with_the_same_samples_has_one_share(world):
    def seeds_each_pair():
        model = seeds_alike()
        torch.manual_seed(1 + (dist.get_rank() // 2 if dist.is_initialized() else 0))
        return model

    def step(model, optimizer, batch):
        start = 6 * (dist.get_rank() // 2)
        if dist.get_world_size() == 4:
            assert torch.equal(batch[0].float(), BATCHES[0][0][start : start + 6])
        averages(model, optimizer, batch)

    parts = {"batches": BATCHES[:1], "step": step, "same_samples": [[0, 1], [2, 3]]}
    assert check_training(seeds_each_pair, world, **parts, world_size=4).count("right") == 4


def test_wrap_may_return_the_optimizer_too(world):
    def prepares(model):
        model = DistributedDataParallel(model)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def forgets_ddp(model):
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    assert RIGHT.but(wrap=prepares).check(world).count("right") == 7
    with pytest.raises(CheckFailed, match="no rank reduced or gathered values in step 1"):
        RIGHT.but(wrap=forgets_ddp).check(world)


def test_options_of_the_loader_reach_its_check(world):
    def deals_batches(dataset, epochs):
        rank, seen = dist.get_rank(), []
        for epoch in range(epochs):
            order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(epoch))
            rounds = 4 * dist.get_world_size()
            order = torch.cat([order, order[: -len(order) % rounds]])
            seen.append(list(order.split(4))[rank :: dist.get_world_size()])
        return seen

    with pytest.raises(CheckFailed, match=r"check_epoch_loop +wrong"):
        check_training(make, world, loader=deals_batches)
    assert check_training(make, world, loader=deals_batches, loader_options={"dealt_in": 4}).count("right") == 1


def test_other_ranks_resume_what_does_not_depend_on_their_number(world, monkeypatch):
    def load_of_more_ranks(path, model, optimizer):
        load(path, model, optimizer)
        if dist.get_world_size() == 1:
            optimizer.state.clear()

    def only_of_other_ranks(*args, **kwargs):
        return [one for one in properties.properties_of(*args, **kwargs) if one.name == other]

    other = "other ranks resume a training"
    monkeypatch.setattr(check, "properties_of", only_of_other_ranks)  # the rest takes time
    parts = {"batches": BATCHES, "loss": loss, "wrap": DistributedDataParallel, "save": save}
    report = check_training(make, world, load=load, resume_world_size=1, **parts)
    assert row(report, other).split()[-4:-1] == ["check_resume", "right", "1"]
    with pytest.raises(
        CheckFailed, match=rf"{other} +check_resume +wrong[\s\S]*on 1 rank, load leaves wrong: optimizer"
    ):
        check_training(make, world, load=load_of_more_ranks, resume_world_size=1, **parts)
    with pytest.raises(ValueError, match="another number of ranks than world_size=2"):
        check_training(make, world, load=load, resume_world_size=2, **parts)
    odd = [tuple(part[:11] for part in batch) for batch in BATCHES]
    with pytest.raises(Inconclusive, match=r"must divide evenly over 2 and 1 ranks, got \[11, 11, 11\]"):
        check_training(make, world, load=load, resume_world_size=1, **{**parts, "batches": odd})


def test_batches_that_do_not_divide_are_named(world):
    odd = [(torch.randn(7, 3), torch.randn(7, 1))]
    report = check_training(make, world, batches=odd, loss=loss, wrap=DistributedDataParallel)
    (one,) = [each for each in report.rows if each.name == EQUALS]
    assert one.verdict == "not run"
    assert one.note == "the samples of each batch must divide evenly over 2 or 3 or 4 ranks, got [7]"


def test_a_failure_without_a_cause_has_no_cause_in_the_table(world):
    def train(model, steps, seed=0):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))

    def other(model, steps):
        train(model, steps, seed=1)

    with pytest.raises(CheckFailed, match="\n    found: train: after 1 step") as raised:
        check_training(lambda: nn.Linear(3, 1), world, train=train, reference=other)
    assert raised.value.cause is None


def test_a_loss_that_draws_is_not_compared(world):
    def noisy(model, batch):
        return loss(model, batch) * (1 + 0.1 * torch.rand(()))

    report = check_training(make, world, batches=BATCHES, loss=noisy, wrap=DistributedDataParallel)
    (one,) = [each for each in report.rows if each.name == EQUALS]
    assert one.verdict == "not compared"
    assert "the loss draws random numbers" in one.note
    assert report.count("right") == 3


def test_no_case_begins_after_the_time(world):
    with pytest.raises(Inconclusive, match=r"no property could be compared[\s\S]*not run +0 [\s\S]*the 0 s were spent"):
        RIGHT.check(world, seconds=0)


def test_conditions_reach_the_session(world):
    heard = []
    with listening(lambda check, conditions: heard.append((check, conditions))):
        check_training(make, world, loader=loader)
    assert heard[0][0] == "check_epoch_loop"
    assert heard[0][1]["more than two ranks"] is False
    assert heard[-1][1]["more than two ranks"] is True


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "has nothing to check: give batches="),
        ({"batches": BATCHES, "save": save}, "needs both save= and load=, got save alone"),
        ({"samples": SAMPLES}, "evaluate is missing"),
        ({"loader": loader, "same_samples": [[0, 1, 2]]}, "as same_samples sets of the 2 ranks"),
        ({"loader": loader, "same_samples": [[0, 1], [1]]}, "each rank in one set at most"),
    ],
)
def test_parts_that_do_not_fit_are_refused(world, parts, message):
    with pytest.raises(ValueError, match=message):
        check_training(make, world, **parts)


def test_a_model_is_not_a_function_that_makes_one(world):
    with pytest.raises(TypeError, match="takes as make a function that returns the model, got a Linear"):
        check_training(nn.Linear(1, 1), world, loader=loader)
    with pytest.raises(TypeError, match="takes as world the fixture of that name"):
        check_training(make, "sim", loader=loader)


class OfTwoRanks:
    """A world that has no more ranks, as a launched one."""

    name = "two"

    def __init__(self, world):
        self.world = world

    def run(self, function, *args, world_size, **kwargs):
        if world_size > 2:
            raise WorldTooSmall(f"this world has 2 ranks, {world_size} are asked for")
        return self.world.run(function, *args, world_size=world_size, **kwargs)


def test_a_world_of_two_ranks_is_not_widened(world):
    parts = {"batches": BATCHES, "loss": loss, "evaluate": evaluate, "samples": SAMPLES}
    try:
        report = check_training(make, OfTwoRanks(world), wrap=DistributedDataParallel, **parts)
    except WorldTooSmall as error:  # which pytest would take for a reason to skip
        pytest.fail(str(error))
    assert [(row.verdict, len(row.cases)) for row in report.rows] == [("right", 1)] * 5
    with pytest.raises(WorldTooSmall):
        check_training(make, OfTwoRanks(world), batches=BATCHES, loss=loss, world_size=3)


def test_an_error_of_the_program_says_what_was_checked(world):
    def fails(dataset, epochs):
        raise OSError("no data")

    with pytest.raises(OSError, match="no data") as raised:
        check_training(make, world, loader=fails)
    assert "while check_training checked: ranks share the samples of each epoch, 48 samples, world_size=2" in (
        raised.value.__notes__
    )
