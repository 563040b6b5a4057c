"""Bugs of averages over ranks and over time: models, momentum, teachers and counts."""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_local_sgd, check_metric, check_same_trajectory

from .entry import entry


def average_over_ranks(tensor, count=None):
    dist.all_reduce(tensor)
    tensor /= count or dist.get_world_size()


class PostLocalSGDOptimizer:
    """An optimizer that averages the models of all ranks after every ``period`` steps."""

    def __init__(self, optimizer, model, period):
        self.optimizer, self.model, self.period = optimizer, model, period
        self.steps = 0

    def step(self):
        self.optimizer.step()
        self.steps += 1
        if self.steps % self.period == 0:
            self.average()
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)

    def average(self):
        for parameter in self.model.parameters():
            average_over_ranks(parameter.detach())


@entry(
    "localsgd-wrong-divisor",
    "class of bugs",
    check="check_local_sgd",
    cause="3 models were added and divided by 2",
)
def divides_by_the_period(broken, world):
    """Local SGD divides the sum of the models of all ranks by the number of local steps."""

    class Averager(PostLocalSGDOptimizer):
        def average(self):
            for parameter in self.model.parameters():
                average_over_ranks(parameter.detach(), self.period if broken else dist.get_world_size())

    check_local_sgd(partial(Averager, period=2), world, sync_every=2, buffers="broadcast")


@entry(
    "localsgd-momentum-local",
    "pytorch #61204",
    check="check_local_sgd",
    cause="each rank keeps its own momentum",
)
def keeps_the_momentum_of_each_rank(broken, world):
    """Models are averaged, and each rank goes on with its own momentum, which is meant to be averaged too."""

    class Averager(PostLocalSGDOptimizer):
        def average(self):
            super().average()
            if not broken:
                for state in self.optimizer.state.values():
                    average_over_ranks(state["momentum_buffer"])

    check_local_sgd(partial(Averager, period=2), world, sync_every=2, momentum="average", buffers="broadcast")


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(2, 4)
        self.heads = nn.ModuleList(nn.Linear(4, size) for size in (1, 3))

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


@entry(
    "localsgd-skip-none-grad",
    "pytorch #74157",
    check="sim",
    cause=r"met in collective 2 .* differ in the shape: \(1, 4\) and \(3, 4\)",
)
def skips_parameters_without_a_gradient(broken, world):
    """Model averaging skips the parameters that have no gradient on this rank."""

    class Averager(PostLocalSGDOptimizer):
        def average(self):
            for parameter in self.model.parameters():
                if broken and parameter.grad is None:
                    continue
                dist.all_reduce(parameter.detach())
                parameter.detach().div_(dist.get_world_size())

    def train():
        torch.manual_seed(0)
        model = TwoTasks()
        averager = Averager(torch.optim.SGD(model.parameters(), lr=0.1), model, period=2)
        for step in range(4):
            model.zero_grad()
            x = torch.randn(4, 2, generator=torch.Generator().manual_seed(step))
            model(x, task=dist.get_rank()).square().mean().backward()
            averager.step()

    world.run(train, world_size=2)


@entry(
    "ema-buffers-missing",
    "YOLOX #1176",
    check="check_same_trajectory",
    cause="an average or a copy leaves buffers out",
)
def forgets_the_statistics_of_the_teacher(broken, world):
    """Teachers follow the parameters of the student, and keep the batch statistics that they began with."""
    decay = 0.9

    def make():
        student = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        return nn.ModuleDict({"student": student, "teacher": copy.deepcopy(student).requires_grad_(False)})

    def update_by_parameters(teacher, student):
        for mean, value in zip(teacher.parameters(), student.parameters(), strict=True):
            mean.mul_(decay).add_(value.detach(), alpha=1 - decay)

    def update_by_state(teacher, student):
        state = student.state_dict()
        for name, mean in teacher.state_dict().items():
            if mean.is_floating_point():
                mean.mul_(decay).add_(state[name], alpha=1 - decay)

    def train_with(update, wrap):
        def train(model, steps):
            student, teacher = wrap(model["student"]), model["teacher"]
            optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
            for step in range(steps):
                x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
                optimizer.zero_grad()
                student(x).square().mean().backward()
                optimizer.step()
                update(teacher, model["student"])

        return train

    train = train_with(update_by_parameters if broken else update_by_state, nn.parallel.DistributedDataParallel)
    check_same_trajectory(train, train_with(update_by_state, lambda student: student), make, world)


@entry(
    "int-average-truncates",
    "Lightning #21838",
    check="check_metric",
    cause=r"divided by 17 in place of 17.5, which is the sum of samples\[1\], 35, over 2 ranks: the mean of an integer",
)
def averages_a_count_of_integers(broken, world):
    """Token counts are averaged over ranks as integers, so the mean loses its fraction."""
    lengths = torch.tensor([5, 2, 7, 3, 6, 4, 8])
    losses = torch.tensor([9.1, 3.3, 12.4, 6.7, 11.9, 8.2, 15.5], dtype=torch.float64)

    def sync_dist(value):
        value = value.clone()
        dist.all_reduce(value)
        return value.copy_(value / dist.get_world_size())

    def validate(losses, lengths):
        own = slice(dist.get_rank(), None, dist.get_world_size())
        loss, tokens = losses[own].sum(), lengths[own].sum()
        loss = sync_dist(loss)
        tokens = sync_dist(tokens if broken else tokens.double())
        return {"loss_per_token": float(loss / tokens)}

    check_metric(validate, [losses, lengths], world)


@entry(
    "localsgd-counter-per-parameter",
    "pytorch PostLocalSGDOptimizer",
    check="check_local_sgd",
    cause="parameters are averaged after different steps: .*: a count of steps goes on at each parameter, not at",
)
def counts_a_step_for_every_parameter(broken, world):
    """Call the averager once for each parameter, which counts calls as steps."""

    class PeriodicAverager:
        def __init__(self, period):
            self.period, self.calls = period, 0

        def average(self, parameters):
            if self.calls % self.period == 0:
                for parameter in parameters:
                    average_over_ranks(parameter.detach())
            self.calls += 1

    class AveragedOptimizer:
        def __init__(self, optimizer, model, period=4):
            self.optimizer, self.averager = optimizer, PeriodicAverager(period)
            self.parameters = list(model.parameters())

        def step(self):
            self.optimizer.step()
            for parameters in [[one] for one in self.parameters] if broken else [self.parameters]:
                self.averager.average(parameters)

    check_local_sgd(AveragedOptimizer, world, sync_every=4, first_round=1, buffers="keep")


@entry(
    "fedavg-buffers-of-one-client",
    "PFLlib",
    check="check_local_sgd",
    cause="every rank takes the buffers of rank 0",
)
def averages_the_parameters_of_clients_alone(broken, world):
    """Copy the model of one client on the server, and replace its parameters by their mean, not its buffers."""

    def aggregate(models):
        server = copy.deepcopy(models[0])
        for name, mean in server.named_parameters():
            mean.data = sum(model.get_parameter(name).data for model in models) / len(models)
        for name, buffer in server.named_buffers():
            if not broken and buffer.is_floating_point():
                buffer.copy_(sum(model.get_buffer(name) for model in models) / len(models))
        return server

    class Client(PostLocalSGDOptimizer):
        def step(self):
            self.optimizer.step()
            self.steps += 1
            if self.steps % self.period == 0:
                models = [None] * dist.get_world_size()
                dist.all_gather_object(models, self.model)
                self.model.load_state_dict(aggregate(models).state_dict())

    check_local_sgd(partial(Client, period=2), world, sync_every=2, buffers="average")
