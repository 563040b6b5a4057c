"""check_resume finds state that a training holds in callbacks, helpers of helpers, tensors, and dicts of dicts."""

from __future__ import annotations

import collections
import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pdlcheck.checks import check_resume


def program(make, keep=True):
    """Return a training with the state that ``make(model)`` adds.

    ``make`` returns a function that runs after each step, one that returns the state, and one that restores it. With
    ``keep=False`` the state is not saved.
    """

    def start():
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        after, get, put = make(model)
        get, put = (get, put) if keep else (dict, len)

        def step(i):
            optimizer.zero_grad()
            model(torch.full((2, 3), i % 3 + 1.0)).square().mean().backward()
            optimizer.step()
            after(i)

        def save(path):
            if dist.get_rank() == 0:
                torch.save([model.state_dict(), optimizer.state_dict(), get()], path)
            dist.barrier()

        def load(path):
            weights, state, held = torch.load(path, weights_only=True)
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            put(held)

        return model, step, save, load

    return start


class Average:
    """A callback of a trainer that averages the weights; the average begins after the step ``since``."""

    def __init__(self, model, since=-1):
        self.model, self.since, self.shadow = model, since, {}
        if since < 0:
            self.begin()

    def begin(self):
        self.shadow.update({name: p.detach().clone() for name, p in self.model.named_parameters()})

    def after_step(self, i):
        if i == self.since:
            self.begin()
        for name, value in self.shadow.items():
            value.lerp_(self.model.get_parameter(name).detach(), 0.1)


class Callbacks:
    def __init__(self, *callbacks):
        self.callbacks = list(callbacks)

    def after_step(self, i):
        for callback in self.callbacks:
            callback.after_step(i)


def in_a_callback(model, since=-1):
    trainer = Callbacks(Average(model, since))
    average = trainer.callbacks[0]
    return trainer.after_step, lambda: average.shadow, average.shadow.update


def in_a_callback_of_a_callback(model):
    average = Average(model)
    trainer = Callbacks(Callbacks(average))
    average.trainer, trainer.data = trainer, list(range(100_000))  # a cycle, and more than is searched
    return lambda i: trainer.after_step(i), lambda: average.shadow, average.shadow.update


def two_helpers_away(model):
    average = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update():
        for name, p in model.named_parameters():
            average[name].lerp_(p.detach(), 0.1)

    @torch.no_grad()
    def helper():
        update()

    return lambda i: helper(), lambda: average, average.update


def in_an_inner_function(model):
    average = {
        "settings": {"decay": 0.1},
        "nested": [{name: p.detach().clone() for name, p in model.named_parameters()}],
    }

    def after(i):
        held = average["nested"][0]
        return [held[name].lerp_(p.detach(), average["settings"]["decay"]) for name, p in model.named_parameters()]

    return partial(after), lambda: average["nested"][0], average["nested"][0].update


AVERAGES = {}  # one entry for each rank, because ranks may be threads of one process


class Keeper:
    def __init__(self, model):
        self.model = model
        AVERAGES[dist.get_rank()] = {name: p.detach().clone() for name, p in model.named_parameters()}

    def after_step(self, i):
        self.update()

    def update(self):
        for name, p in self.model.named_parameters():
            AVERAGES[dist.get_rank()][name].lerp_(p.detach(), 0.1)


def in_a_global_that_another_method_names(model):
    keeper, average = Keeper(model), AVERAGES[dist.get_rank()]
    return keeper.after_step, lambda: average, average.update


def in_one_tensor(model):
    average = parameters_to_vector(model.parameters()).detach().clone()
    flat = lambda: parameters_to_vector(model.parameters()).detach()  # noqa: E731
    return lambda i: average.lerp_(flat(), 0.1), lambda: average, average.copy_


def from_zero(model):
    """Return the functions of a slow average that begins at 0."""
    average = torch.zeros(4)
    flat = lambda: parameters_to_vector(model.parameters()).detach()  # noqa: E731
    return lambda i: average.lerp_(flat(), 0.001), lambda: average, average.copy_


def in_a_tensor_that_is_replaced(model):
    average = None

    def after(i):
        nonlocal average
        now = parameters_to_vector(model.parameters()).detach()
        average = now.clone() if average is None else average.lerp(now, 0.1)

    def put(held):
        nonlocal average
        average = held

    return after, lambda: average, put


class Both(nn.Module):
    """A module that holds the averaged model, and the average as a module or in buffers."""

    def __init__(self, model, in_buffers):
        super().__init__()
        self.online = model
        if in_buffers:
            for name, p in model.named_parameters():
                self.register_buffer(f"average_{name}", p.detach().clone())
        else:
            self.average = copy.deepcopy(model).requires_grad_(False)
        self.parts = [getattr(self, f"average_{n}") for n, _ in model.named_parameters()] if in_buffers else None

    def after_step(self, i):
        parts = list(self.average.parameters()) if self.parts is None else self.parts
        for part, p in zip(parts, self.online.parameters(), strict=True):
            part.lerp_(p.detach(), 0.1)


def beside_the_model(model, in_buffers=False):
    both = Both(model, in_buffers)
    return both.after_step, both.state_dict, both.load_state_dict


HELD = {
    "a module that holds the model too": (beside_the_model, r"Both\['average\.weight'\] holds other values"),
    "its buffers": (partial(beside_the_model, in_buffers=True), r"Both\['average_weight'\] holds other values"),
    "a callback": (in_a_callback, r"callbacks\[0\]\.shadow\['weight'\] holds other values"),
    "a callback of a callback": (
        in_a_callback_of_a_callback,
        r"trainer\.callbacks\[0\]\.callbacks\[0\]\.shadow\['weig",
    ),
    "a callback that begins late": (partial(in_a_callback, since=2), r"callbacks\[0\]\.shadow is missing"),
    "two helpers away": (two_helpers_away, r"average\['weight'\] holds other values"),
    "an inner function": (in_an_inner_function, r"nested\[0\]\['weight'\] holds other values"),
    "a global": (in_a_global_that_another_method_names, r"AVERAGES\[\d\]\['weight'\] holds other values"),
    "one tensor": (in_one_tensor, "average holds other values"),
    "a tensor that begins at 0": (from_zero, "average holds other values"),
    "a tensor that is replaced": (in_a_tensor_that_is_replaced, "average holds other values"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "message"), HELD.values(), ids=HELD)
def test_an_average_of_weights_is_found_wherever_it_is(world, make, message):
    check_resume(program(make), world)
    words = rf"resumed, rank 0 ends with the weights .*, but {message}.*\n  likely cause  not saved, or not loaded: "
    with pytest.raises(AssertionError, match=words):
        check_resume(program(make, keep=False), world)


def history_in_a_tensor(model):
    losses = torch.zeros(10)

    def after(i):
        losses[i] = model.weight.sum().detach()

    return after, None, None


def the_last_losses(model):
    """Record the last three losses: the log is as long at the stop as at the end, and shorter in a resumed run."""
    losses = [torch.zeros(1)]

    def after(i):
        losses[:] = [*losses, model.weight.sum().detach()][-3:] if i else losses

    return after, None, None


def the_last_batch(model):
    batch, weights = torch.zeros(2, 3), {}

    def after(i):
        nonlocal batch
        batch = torch.full((2, 3), i + 1.0)
        weights[i] = model.weight.detach().clone()

    return after, None, None


def a_loss(model):
    """Add up the losses since the beginning of this run."""
    total = torch.zeros(())
    return lambda i: total.add_(model.weight.sum().detach()), None, None


def sums(model):
    """Add up losses and steps since the beginning of this run, as programs do to print them."""
    total, by_name = torch.zeros(2), {"loss": torch.zeros(()), "steps": 0}

    def after(i):
        loss = model.weight.detach().sum()
        total.add_(torch.stack([loss, torch.ones(())]))
        by_name.update(loss=by_name["loss"] + loss, steps=by_name["steps"] + 1)

    return after, None, None


def histories(model):
    """Record losses in lists of a dict, a list of dicts, and a deque, as programs do to draw curves."""
    by_name, entries, last = collections.defaultdict(list), [], collections.deque(maxlen=2)

    def after(i):
        loss = model.weight.detach().sum()
        by_name["loss"].append(loss)
        by_name["both"].append(torch.stack([loss, loss * 2]))
        entries.append({"step": i, "weight": model.weight.detach().clone()})
        last.append(torch.stack([loss, loss]))

    return after, None, None


def smoothed(model):
    """Smooth the loss since the beginning of this run, and remember the best one."""
    shown = {"smoothed": None, "best": torch.tensor(torch.inf)}

    def after(i):
        loss = model.weight.detach().sum()
        before = shown["smoothed"]
        shown.update(smoothed=loss if before is None else before.lerp(loss, 0.1), best=shown["best"].minimum(loss))

    return after, None, None


LOGS = [history_in_a_tensor, the_last_losses, the_last_batch, a_loss, sums, histories, smoothed]


@pytest.mark.parametrize("make", LOGS)
@pytest.mark.parametrize("steps", [4, 6])
def test_what_a_run_notes_down_is_no_state(world, make, steps):
    check_resume(program(make, keep=False), world, steps=steps)


def two_models(schedulers_are_kept):
    """Return a training of two models, with optimizers and schedulers in two dicts with the same keys."""

    def start():
        torch.manual_seed(0)
        model = nn.ModuleDict({"g": nn.Linear(3, 1), "d": nn.Linear(3, 1)})
        optimizers = {key: torch.optim.SGD(one.parameters(), lr=0.01) for key, one in model.items()}
        schedulers = {key: StepLR(optimizer, 10) for key, optimizer in optimizers.items()}

        def step(i):
            for key, optimizer in optimizers.items():
                optimizer.zero_grad()
                model[key](torch.full((2, 3), 1.0)).square().mean().backward()
                optimizer.step()
                schedulers[key].step()

        def parts():
            kept = schedulers if schedulers_are_kept else {}
            return [model, *optimizers.values(), *kept.values()]

        def save(path):
            if dist.get_rank() == 0:
                torch.save([part.state_dict() for part in parts()], path)
            dist.barrier()

        def load(path):
            for part, state in zip(parts(), torch.load(path, weights_only=True), strict=True):
                part.load_state_dict(state)

        return model, step, save, load

    return start


def test_things_of_one_name_are_told_apart(world):
    check_resume(two_models(True), world)
    with pytest.raises(AssertionError, match=r"but schedulers\['g'\]\['last_epoch'\] is 3 instead of 6\n"):
        check_resume(two_models(False), world)
    lost = r"lost: schedulers\['g'\] and schedulers\['d'\]; put back from the run without a stop, the training goes on"
    with pytest.raises(AssertionError, match=lost):
        check_resume(two_models(False), world, steps=14)


class Decay:
    """A user's scheduler without a ``state_dict``."""

    def __init__(self, optimizer, since):
        self.optimizer, self.since, self.steps = optimizer, since, 0

    def after_step(self, i):
        self.steps += 1
        if self.steps == self.since:
            self.optimizer.param_groups[0]["lr"] = 0.01


def test_numbers_of_two_objects_of_one_class_are_told_apart(world):
    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        decays = Callbacks(Decay(optimizer, 100), Decay(optimizer, 5))

        def after(i):
            optimizer.step()
            decays.after_step(i)

        return after, lambda: [one.steps for one in decays.callbacks], None

    def kept(model):
        after, get, _ = make(model)
        decays = after.__closure__[0].cell_contents

        def put(steps):
            for one, number in zip(decays.callbacks, steps, strict=True):
                one.steps = number

        return after, get, put

    check_resume(program(kept), world)
    with pytest.raises(AssertionError, match=r"lost: the numbers of Decay \(2\); put back [\s\S]*is 0 instead of 3"):
        check_resume(program(make, keep=False), world)


def made_anew(missing=0):
    """Return a training whose scheduler is not saved, but made anew from the number of steps, as torch documents it."""

    def start():
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler, done = LambdaLR(optimizer, lambda step: 0.5 ** (step // 20)), 0

        def step(i):
            nonlocal done
            optimizer.zero_grad()
            model(torch.full((2, 3), 1.0)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            done = i + 1

        def save(path):
            if dist.get_rank() == 0:
                torch.save([model.state_dict(), optimizer.state_dict(), done], path)
            dist.barrier()

        def load(path):
            nonlocal scheduler, done
            weights, state, done = torch.load(path, weights_only=True)
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            scheduler = LambdaLR(optimizer, lambda step: 0.5 ** (step // 20), last_epoch=done - 1 - missing)

        return model, step, save, load

    return start


def test_what_a_scheduler_counts_in_order_to_warn_is_no_state(world):
    check_resume(made_anew(), world)
    with pytest.raises(AssertionError, match=r"but scheduler\['last_epoch'\] is 5 instead of 6\n"):
        check_resume(made_anew(missing=1), world)


def averages_of_statistics(keep):
    """Return a training with averaged batch-norm statistics that differ between ranks; rank 0 saves its own.

    The statistics differ because ranks see different batches.
    """

    def start():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(i):
            optimizer.zero_grad()
            model(torch.linspace(-1, 2, 12).view(4, 3) * (i + 1 + dist.get_rank())).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            average.update_parameters(model)

        def save(path):
            if dist.get_rank() == 0:
                torch.save({"model": model.state_dict(), "average": average.state_dict()}, path)
            dist.barrier()

        def load(path):
            state = torch.load(path, weights_only=True)
            model.load_state_dict(state["model"])
            if keep:
                average.load_state_dict(state["average"])

        return model, step, save, load

    return start


def test_averages_of_statistics_count_where_statistics_do(world):
    check_resume(averages_of_statistics(True), world, buffers=False)
    with pytest.raises(AssertionError, match=r"but average\['module.0.weight'\] holds other values"):
        check_resume(averages_of_statistics(False), world, buffers=False)
    with pytest.raises(AssertionError, match=r"of buffer '1.running_mean'"):
        check_resume(averages_of_statistics(True), world)
