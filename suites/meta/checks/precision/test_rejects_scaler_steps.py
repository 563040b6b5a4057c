"""check_grad_scaler detects every sort of overflow, and steps that are taken without a change of the weights."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

from pdlcheck.checks import check_grad_scaler

STEPS = [[], [1], [], [], [0]]


class Scaler:
    """A correct scaler by hand; the classes below replace parts of it."""

    def __init__(self):
        self.factor, self.calm = 8.0, 0

    def get_scale(self):
        return self.factor

    def get_growth_factor(self):
        return 2.0

    def get_backoff_factor(self):
        return 0.5

    def get_growth_interval(self):
        return 2

    def scale(self, loss):
        return loss * self.factor

    def step(self, optimizer):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        for grad in grads:
            grad /= self.factor
        flag = torch.tensor(float(any(map(self.overflows, grads))))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        self.found = bool(flag)
        if self.found:
            self.skip(optimizer)
        else:
            optimizer.step()

    def overflows(self, grad):
        return not grad.isfinite().all()

    def skip(self, optimizer):
        pass

    def update(self):
        self.calm = 0 if self.found else self.calm + 1
        self.factor *= 0.5 if self.found else 2.0 if self.calm == 2 else 1.0
        self.calm %= 2


class DropsGradients(Scaler):
    """A scaler that drops the gradients before a step, because optimizers of torch do nothing without them."""

    def skip(self, optimizer):
        optimizer.zero_grad()
        optimizer.step()


class StepsWithZeros(Scaler):
    def skip(self, optimizer):
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()


class PutsWeightsBack(Scaler):
    def skip(self, optimizer):
        parameters = optimizer.param_groups[0]["params"]
        kept = [p.detach().clone() for p in parameters]
        optimizer.step()
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.detach().copy_(value)


class LooksForTheLargest(Scaler):
    def overflows(self, grad):
        return bool(grad.isnan().any()) or grad.max() == math.inf


class LooksForInf(Scaler):
    def overflows(self, grad):
        return bool(grad.isinf().any())


class ReplacesWhatIsBelow(Scaler):
    def overflows(self, grad):
        return super().overflows(grad.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=0.0))


class SkipsItself(torch.optim.SGD):
    """An optimizer that skips a step if any gradient is not finite."""

    def step(self, closure=None):
        grads = torch.cat([p.grad for group in self.param_groups for p in group["params"]])
        flag = torch.tensor(float(not grads.isfinite().all()))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        if not flag:
            super().step()


class LeavesItToTheOptimizer(Scaler):
    def skip(self, optimizer):
        optimizer.step()


class Agreeing(torch.amp.GradScaler):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        self.agree(optimizer)

    def _check_inf_per_device(self, optimizer):  # torch calls it if the optimizer skips by itself
        super()._check_inf_per_device(optimizer)
        self.agree(optimizer)

    def agree(self, optimizer):
        for flag in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            dist.all_reduce(flag, dist.ReduceOp.MAX)


@pytest.mark.parametrize("right", [Scaler, DropsGradients])
def test_check_grad_scaler_accepts_a_step_that_is_left_out(world, right):
    check_grad_scaler(right, world, overflows=STEPS)


@pytest.mark.parametrize("fused", [False, True])
def test_check_grad_scaler_accepts_a_step_that_the_optimizer_skips(world, fused):
    make = partial(Agreeing, "cpu", init_scale=8.0, growth_interval=2)
    check_grad_scaler(make, world, overflows=STEPS, optimizer=partial(torch.optim.SGD, fused=fused))
    check_grad_scaler(LeavesItToTheOptimizer, world, overflows=STEPS, optimizer=SkipsItself)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            StepsWithZeros,
            r"in step 1 rank 0 calls the optimizer's step with gradients of 0, one process skips it\n"
            r".*the gradients of ranks \[1\] overflow, so no rank may step\n"
            r".*cause  gradients are set to 0 and stepped with: momentum, Adam's averages and weight decay still go on",
        ),
        (
            PutsWeightsBack,
            r"in step 1 rank 0 calls the optimizer's step with gradients, one process skips it\n"
            r".*\n.*cause  a step is taken, and weights are put back after it: momentum, ",
        ),
        (
            LooksForTheLargest,
            r"after step 1 rank 0 holds weight .*\n.*ranks \[1\] overflow to -inf, so no rank may step\n"
            r".*a scaler that sees inf and NaN does not see -inf, look for all that is not finite",
        ),
        (
            LooksForInf,
            r"after step 1 rank 0 holds weight .*\n.*ranks \[1\] overflow to NaN, so no rank may step\n"
            r".*a scaler that sees inf does not see NaN, look for all that is not finite",
        ),
        (
            ReplacesWhatIsBelow,
            r"after step 1 rank 0 holds weight .*\n.* to -inf, so no rank may step\n"
            r".*cause  what overflows on ranks \[1\] was replaced with 0 before the scaler looked for it",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_check_grad_scaler_rejects(world, broken, message):
    with pytest.raises(AssertionError, match=f"^{broken.__name__}: {message}"):
        check_grad_scaler(broken, world, overflows=STEPS)


def test_check_grad_scaler_needs_one_overflow_to_see_every_sort(world):
    with pytest.raises(AssertionError, match=r"step 0 rank 0 holds [\s\S]*overflow to -inf, so no rank may step"):
        check_grad_scaler(LooksForTheLargest, world, overflows=[[1], []])
