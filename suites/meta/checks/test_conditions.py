"""A check that passes reports the conditions that its run has not met; for each condition, a run that lacks it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from pdlcheck import checks
from pdlcheck.checks import (
    check_all_reduce,
    check_gradients_equal_single_process,
    check_metric,
    check_random_streams,
    check_replicas_in_sync,
    check_resume,
    check_same_trajectory,
    check_sharded_layer,
)
from pdlcheck.checks.conditions import CONDITIONS
from pdlcheck.primitives import ring_all_reduce, sync_gradients
from pdlcheck.seen_conditions import listening

# These checks choose their own cases, or their argument is the only case.
WITHOUT = {
    "check_all_reduce_agrees",
    "check_average_parameters",
    "check_broadcast_parameters",
    "check_digest",
    "check_epochs_differ",
    "check_gathered_digests",
    "check_halo_bytes",
    "check_low_precision_sum",
    "check_pagerank_over_ranks",
    "check_pagerank_rounds",
    "check_pipedream",
    "check_random_streams",
    "check_resume",  # its run shows them
    "check_resumed_run",  # likewise
    "check_ring_pass",
    "check_same_gradients",
    "check_same_start",
    "check_torn_files",
    "check_training",  # the checks that it calls report them
}


def shards(*sizes):
    return [(torch.ones(size, 2), torch.ones(size, 1)) for size in sizes]


def tensors(count, numel):
    return [torch.ones(numel) for _ in range(count)]


COLLECTIVE = [{"inputs": tensors(2, 4), "ranks": None}, {"inputs": tensors(3, 4), "ranks": (2, 0, 1)}]
SAMPLER = [{"num_samples": 8, "world_size": 2, "epochs": 1}, {"num_samples": 2, "world_size": 3, "epochs": 2}]
# For each check the arguments of two calls: the first lacks every condition, the second meets every condition.
ARGUMENTS = {
    "check_all_gather": COLLECTIVE,
    "check_all_reduce": COLLECTIVE,
    "check_broadcast": [COLLECTIVE[0] | {"src": 0}, COLLECTIVE[1] | {"src": 1}],
    "check_clip_grad_norm": [
        {"gradients": [[torch.ones(4)]], "max_norm": 2.0, "norm_type": 2.0},
        {"gradients": [[torch.ones(4), None]], "max_norm": 1.0, "norm_type": 2.0},
    ],
    "check_comm_hook": [
        {"world_size": 2, "dtypes": (torch.float32,)},
        {"world_size": 3, "dtypes": (torch.float32, torch.bfloat16)},
    ],
    "check_data_parallel": [{"world_size": 2}, {"world_size": 3}],
    "check_derivative": [{"world_size": 2}, {"world_size": 3}],
    "check_epoch_loop": SAMPLER,
    "check_grad_scaler": [
        {"world_size": 2, "overflows": [[0, 1]]},
        {"world_size": 3, "overflows": [[0], []]},
    ],
    "check_gradients_equal_single_process": [{"shards": shards(2, 2)}, {"shards": shards(3, 1, 0)}],
    "check_local_sgd": [
        {"world_size": 2, "sync_every": 4, "steps": 4},
        {"world_size": 3, "sync_every": 4, "steps": [4, 9]},
    ],
    "check_metric": [
        {"samples": [torch.ones(8)], "world_sizes": (2,)},
        {"samples": [torch.ones(2)], "world_sizes": (2, 3)},
    ],
    "check_pipeline": [
        {"world_size": 2, "n_microbatches": 2, "batches": [1]},
        {"world_size": 3, "n_microbatches": 4, "batches": [1, 2]},
    ],
    "check_reduce_scatter": COLLECTIVE,
    "check_replicas_in_sync": [{"world_size": 2, "steps": 1}, {"world_size": 3, "steps": 2}],
    "check_same_trajectory": [{"world_size": 2, "steps": 1}, {"world_size": 3, "steps": 2}],
    "check_sampler": SAMPLER,
    "check_sampler_resumes": [
        {"num_samples": 8, "world_sizes": (2, 2), "epoch": 0},
        {"num_samples": 7, "world_sizes": (2, 3), "epoch": 1},
    ],
    "check_shards": SAMPLER,
    "check_sharded_layer": [
        {"world_size": 2, "batches": [torch.ones(2, 2)]},
        {"world_size": 3, "batches": [torch.ones(2, 2).T.contiguous(), (torch.ones(2, 3).T, torch.ones(1))]},
    ],
    "check_world_size_does_not_matter": [{"world_sizes": (1, 2, 4)}, {"world_sizes": (1, 3)}],
}
ELSEWHERE = {("check_clip_grad_norm", "a norm below max_norm"): {"max_norm": 9.0}}  # one call cannot meet both
ELSEWHERE |= {
    (check, "a number of elements that the ranks cannot divide evenly"): {"inputs": tensors(3, 4)}
    for check in ("check_all_gather", "check_all_reduce")
}
ELSEWHERE |= {
    (check, "a tensor without elements"): {"inputs": tensors(2, 0)}
    for check in ("check_all_gather", "check_all_reduce")
}


@pytest.mark.parametrize(("check", "words"), [(check, words) for check, own in CONDITIONS.items() for words in own])
def test_a_condition_holds_only_for_arguments_that_meet_it(check, words):
    lacks, meets = ARGUMENTS[check]
    assert not CONDITIONS[check][words](lacks)
    assert CONDITIONS[check][words](meets | ELSEWHERE.get((check, words), {}))


def test_every_check_over_ranks_has_conditions_or_a_reason():
    over_ranks = {name for name in checks.__all__ if "world" in inspect.signature(getattr(checks, name)).parameters}
    assert over_ranks == CONDITIONS.keys() | WITHOUT
    assert not CONDITIONS.keys() & WITHOUT


@pytest.mark.parametrize("check", CONDITIONS)
def test_the_arguments_of_a_condition_are_those_of_the_check(check):
    parameters = inspect.signature(getattr(checks, check)).parameters
    assert set(ARGUMENTS[check][0]) - {"epochs"} <= set(parameters)


def reported(call):
    """Return what the checks of a call report, by check."""
    found = {}
    with listening(lambda check, conditions: found.update({check: dict(conditions)})):
        call()
    return found


def mean_error(errors):
    own = errors[dist.get_rank() :: dist.get_world_size()]
    total = torch.stack([own.sum(), torch.tensor(float(len(own)))])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def largest_error(errors):
    """Return a number that a rank without samples does not have."""
    largest = errors[dist.get_rank() :: dist.get_world_size()].max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def test_a_passed_check_reports_what_its_run_has_met(world):
    found = reported(lambda: check_metric(largest_error, [torch.arange(12.0)], world, world_sizes=[2]))
    assert found == {
        "check_metric": {
            "more than two ranks": False,
            "one sample on each rank": True,
            "a rank without samples": False,
        }
    }
    found = reported(lambda: check_metric(mean_error, [torch.arange(12.0)], world))
    assert len(found["check_metric"]) == 3
    assert all(found["check_metric"].values())


def test_a_failed_check_reports_nothing(world):
    def fails():
        with pytest.raises(AssertionError):
            check_all_reduce(lambda x: x, tensors(2, 3), world)

    assert reported(fails) == {}


def test_a_check_inside_of_a_check_reports_nothing_of_its_own(world):
    def check():
        check_gradients_equal_single_process(
            lambda: nn.Linear(2, 1), nn.MSELoss(), shards(2, 1), lambda m, n: sync_gradients(m, weight=n), world
        )

    assert reported(check).keys() == {"check_gradients_equal_single_process"}
    assert reported(lambda: check_all_reduce(ring_all_reduce, tensors(2, 3), world)).keys() == {"check_all_reduce"}


def training(batches, *, schedules):
    """Return a training over a loader with so many batches an epoch; with ``schedules``, the rate falls at step 3."""

    def start():
        model = nn.Linear(2, 1, bias=False)
        nn.init.constant_(model.weight, 0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3]) if schedules else None
        loader = DataLoader(torch.arange(2.0 * batches).view(batches, 2))
        at = SimpleNamespace(rest=None)

        def step(i):
            if not at.rest:
                at.rest = [*loader]
            optimizer.zero_grad()
            model(at.rest.pop(0)).square().sum().backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()

        def save(path):
            if dist.get_rank() == 0:
                state = model.state_dict(), optimizer.state_dict(), scheduler and scheduler.state_dict()
                torch.save((*state, at.rest), path)
            dist.barrier()

        def load(path):
            weights, momenta, schedule, at.rest = torch.load(path)
            model.load_state_dict(weights)
            optimizer.load_state_dict(momenta)
            if scheduler is not None:
                scheduler.load_state_dict(schedule)

        return model, step, save, load

    return start


EPOCH = "an epoch end {} the save"
RATE = "a change of the learning rate {} the save"


@pytest.mark.parametrize(
    ("batches", "before", "after"),
    [(9, False, False), (5, False, True), (2, True, True)],
    ids=["none", "after", "both"],
)
def test_check_resume_reports_whether_an_epoch_has_ended(world, batches, before, after):
    found = reported(lambda: check_resume(training(batches, schedules=False), world))["check_resume"]
    assert found == {EPOCH.format("before"): before, EPOCH.format("after"): after}


@pytest.mark.parametrize(("saved_after", "before", "after"), [(2, False, True), (4, True, False)])
def test_check_resume_reports_whether_the_learning_rate_has_changed(world, saved_after, before, after):
    found = reported(lambda: check_resume(training(9, schedules=True), world, saved_after=saved_after))["check_resume"]
    assert (found[RATE.format("before")], found[RATE.format("after")]) == (before, after)


def ddp_training(layers, *, schedules=False, dropout=0.0):
    """Return a training of a model with so many linear layers, each in a bucket of its own."""

    def train(model, steps):
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1e-6) if dist.get_world_size() > 1 else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3) if schedules else None
        for step in range(steps):
            optimizer.zero_grad()
            wrapped(torch.full((2, 2), step + 1.0, dtype=torch.float64)).sum().backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()

    def make():
        return nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(layers)), nn.Dropout(dropout))

    return train, make


BUCKETS = "three or more collectives in a step"


@pytest.mark.parametrize("layers", [2, 3])
def test_a_trajectory_reports_whether_there_were_three_buckets(world, layers):
    train, make = ddp_training(layers)
    found = reported(lambda: check_same_trajectory(train, train, make, world))["check_same_trajectory"]
    assert found[BUCKETS] == (layers == 3)
    assert "a change of the learning rate" not in found


@pytest.mark.parametrize("steps", [3, 4])
def test_a_trajectory_reports_whether_the_learning_rate_has_changed(world, steps):
    train, make = ddp_training(1, schedules=True)
    found = reported(lambda: check_same_trajectory(train, train, make, world, steps=steps))["check_same_trajectory"]
    assert found["a change of the learning rate"] == (steps == 4)


def drawing(steps, p):
    """Train as alike on every rank, with a dropout of probability ``p``."""

    def train(model, count):
        torch.manual_seed(0)
        model[-1].p = p
        ddp_training(1)[0](model, count)

    return train


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_trajectory_reports_whether_dropout_drew(world, p):
    train, make = drawing(2, p), ddp_training(1)[1]
    found = reported(lambda: check_same_trajectory(train, train, make, world, steps=2))["check_same_trajectory"]
    assert found["dropout that draws"] == (p > 0)


@pytest.mark.parametrize("steps", [2, 4])
def test_replicas_report_whether_there_were_two_rounds(world, steps):
    def start():
        torch.manual_seed(0)
        model = nn.Linear(2, 1, bias=False)

        def step(i):
            with torch.no_grad():
                model.weight += dist.get_rank()
            if i % 2 == 1:
                dist.all_reduce(model.weight.data)

        return model, step

    def check():
        check_replicas_in_sync(start, world, steps=steps, sync_every=2)

    found = reported(check)["check_replicas_in_sync"]
    assert found[BUCKETS] is False
    assert "two rounds of synchronisation" not in found  # each look sees one round

    def every_second():
        model, step = start()

        def take(i):
            if i % 2 == 1:
                step(i)

        return model, take

    found = reported(lambda: check_replicas_in_sync(every_second, world, steps=steps))["check_replicas_in_sync"]
    assert found["two rounds of synchronisation"] == (steps == 4)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_random_streams_report_whether_a_loader_had_workers(world, num_workers):
    def make():
        torch.manual_seed(dist.get_rank())
        return DataLoader(torch.arange(2.0), num_workers=num_workers)

    def step(loader):
        torch.rand(1)
        return list(loader)

    found = reported(lambda: check_random_streams(make, step, world, steps=1))["check_random_streams"]
    assert found == {"workers of a DataLoader": num_workers == 1}


@pytest.mark.parametrize("features", [4, 3])
def test_a_sharded_layer_reports_whether_a_parameter_is_uneven(world, features):
    class Columns(nn.Module):
        def __init__(self, whole):
            super().__init__()
            part = whole.weight.tensor_split(dist.get_world_size())[dist.get_rank()]
            self.weight = nn.Parameter(part.detach().clone())

        def forward(self, inputs):
            return inputs @ self.weight.T

    def part(tensor):
        return tensor.tensor_split(dist.get_world_size(), -1)[dist.get_rank()]

    class First(nn.Module):
        """A layer whose input has no gradient."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(features, 2))

        def forward(self, inputs):
            return inputs.detach() @ self.weight.T

    class OwnColumns(Columns):
        def forward(self, inputs):
            return super().forward(inputs.detach())

    def check():
        check_sharded_layer(OwnColumns, First, [torch.randn(2, 2)], world, world_size=2, output_of=part)

    found = reported(check)["check_sharded_layer"]
    assert found["a parameter that the ranks cannot divide evenly"] == (features == 3)


def test_a_loader_keeps_its_class_after_the_check(world):
    kinds = world.run(_kind_after_counting, world_size=1)
    assert kinds == [("DataLoader", "DataLoader", True)]


def test_a_loader_that_reports_another_class_is_left_alone(world):
    """Accelerate's adapters report the class of the loader that they hold, and refuse another."""
    assert world.run(_events_of_an_adapter, world_size=1) == [(1, "Adapter")]


class Adapter:
    def __init__(self, held):
        self.held = held

    @property
    def __class__(self):
        return type(self.held)

    def __iter__(self):
        return iter(self.held)


def _events_of_an_adapter():
    from pdlcheck.checks.checkpoint.events import watching_events

    adapter = Adapter(DataLoader([1.0, 2.0]))

    def step(i):
        return [*adapter]

    with watching_events((step,)) as events:
        step(0)
    return events._passes[0], type(adapter).__name__


def _kind_after_counting():
    from pdlcheck.checks.checkpoint.events import watching_events

    loader = DataLoader([1.0, 2.0])

    def step(i):
        return [*loader]

    with watching_events((step,)) as events:
        during = type(loader).__name__
        step(0)
        events.end_step()
    return during, type(loader).__name__, type(loader) is DataLoader


def test_an_argument_of_another_form_shows_nothing(world):
    def check():
        make, each = (lambda: nn.Linear(2, 1)), (pair for pair in shards(2, 1))
        check_gradients_equal_single_process(make, nn.MSELoss(), each, lambda m, n: sync_gradients(m, weight=n), world)

    assert reported(check) == {}
