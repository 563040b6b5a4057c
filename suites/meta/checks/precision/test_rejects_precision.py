"""The checks of scalers and sums in half precision reject broken ones, and accept the correct twin."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from pdlcheck.checks import check_grad_scaler, check_low_precision_sum
from pdlcheck.errors import Inconclusive

STEPS = [[], [1], [], [], [0]]


def rows(*cases, names=("broken", "message")):
    """Parametrize a test over broken subjects; the id of each case is the name of its subject."""
    return pytest.mark.parametrize(names, [pytest.param(*case, id=case[0].__name__) for case in cases])


def torchs():
    return torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)


class Agreeing(torch.amp.GradScaler):
    """A scaler that reduces found_inf over ranks, as FSDP's scaler does; every rank must have gradients."""

    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        self.agree(self._per_optimizer_states[id(optimizer)]["found_inf_per_device"])

    def agree(self, found):
        for flag in found.values():
            dist.all_reduce(flag, dist.ReduceOp.MAX)


class Averaging(Agreeing):
    """A scaler that divides gradients by the scale twice."""

    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad /= self.get_scale()


class OfRankZero(Agreeing):
    def agree(self, found):
        for flag in found.values():
            dist.broadcast(flag, 0)


class Least(Agreeing):
    def agree(self, found):
        for flag in found.values():
            dist.all_reduce(flag, dist.ReduceOp.MIN)


class ScalesNothing(Agreeing):
    def scale(self, outputs):
        super().scale(outputs)
        return outputs


class NeverUnscales(Agreeing):
    """A scaler that looks for overflows in gradients that keep the factor of the loss."""

    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad *= self.get_scale()


class StepsTogether(torch.amp.GradScaler):
    """A scaler that skips on all ranks together, but changes the scale by what each rank found itself."""

    def step(self, optimizer):
        self.unscale_(optimizer)
        (own,) = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        anywhere = own.clone()
        dist.all_reduce(anywhere, dist.ReduceOp.MAX)
        if not anywhere:
            optimizer.step()


def scaler(kind):
    def make():
        return kind("cpu", init_scale=64.0, growth_interval=2)

    make.__name__ = kind.__name__
    return make


def never_grows():
    return Fixed("cpu", init_scale=64.0, growth_interval=2)


class Fixed(Agreeing):
    def update(self, new_scale=None):
        super().update(64.0)


class SeesTheFirst(Agreeing):
    """A scaler whose found_inf is that of the first parameter."""

    def agree(self, found):
        for flag in found.values():
            flag.fill_(not self.seen[0].isfinite().all())
        super().agree(found)

    def unscale_(self, optimizer):
        self.seen = [parameter.grad.clone() for parameter in optimizer.param_groups[0]["params"]]
        super().unscale_(optimizer)


class SeesTheLast(SeesTheFirst):
    def unscale_(self, optimizer):
        self.seen = [parameter.grad.clone() for parameter in optimizer.param_groups[0]["params"]][::-1]
        Agreeing.unscale_(self, optimizer)


def mean(module):
    for parameter in module.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def unscale_then_sync(scaler, optimizer, module):
    scaler.unscale_(optimizer)
    mean(module)
    scaler.step(optimizer)
    scaler.update()


def added(module):
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad)


def divided_twice(module):
    mean(module)
    for parameter in module.parameters():
        parameter.grad /= dist.get_world_size()


def only_looks(module):
    dist.barrier()


def stops_after_an_overflow(scaler, optimizer, module):
    if scaler.get_scale() >= 64:
        scaler.step(optimizer)
        scaler.update()


def removes_what_is_not_finite(module):
    for parameter in module.parameters():
        parameter.grad.nan_to_num_(posinf=0.0)
    mean(module)


def test_check_grad_scaler_accepts(world):
    check_grad_scaler(scaler(Agreeing), world, overflows=STEPS)
    check_grad_scaler(scaler(Agreeing), world, overflows=STEPS, step=unscale_then_sync, replicated=True)
    check_grad_scaler(torchs, world, overflows=STEPS, sync=mean)


def test_the_scaler_of_torch_fails_where_ranks_have_gradients_of_their_own(world):
    with pytest.raises(
        AssertionError, match=r"^torchs: after step 1 rank 0 holds weight .*, one process holds"
    ) as error:
        check_grad_scaler(torchs, world, overflows=STEPS)
    assert "the gradients of ranks [1] overflow, so no rank may step" in str(error.value)
    assert "sees the gradients of that rank alone: found_inf must be reduced over ranks" in str(error.value)


def test_the_scaler_of_torch_fails_where_gradients_are_synchronised_after_unscaling(world):
    with pytest.raises(AssertionError, match=r"^torchs: after step 1 rank 0 holds weight -5 at"):
        check_grad_scaler(torchs, world, overflows=STEPS, step=unscale_then_sync, replicated=True)


@rows(
    (OfRankZero, r"after step 1 rank 0 holds weight .*\n.*no rank may step\n.*every rank .* ranks \[1\] was lost"),
    (Least, r"after step 1 rank 0 holds weight .*\n.*no rank may step\n.*every rank .* ranks \[1\] was lost"),
    (StepsTogether, r"after step 1 rank 0 has scale 128, one process has 32[\s\S]*each for itself"),
    (Fixed, r"after step 1 rank 0 has scale 64, one process has 32[\s\S]*ranks \[0, 1\] did not change .* be 0.5"),
    (SeesTheFirst, r"after step 1 rank 0 holds weight .*\n.*no rank may step\n.*every rank .* ranks \[1\] was lost"),
    (SeesTheLast, r"after step 4 rank 0 holds weight .*\n.*no rank may step\n.*every rank .* ranks \[0\] was lost"),
    (Averaging, r"after step 0 rank 0 holds weight [\s\S]*the gradient by the scale: it was unscaled twice, or"),
    (ScalesNothing, r"after step 0 rank 0 holds weight [\s\S]*by the scale: .* or the loss was not scaled"),
    (NeverUnscales, r"after step 0 rank 0 holds weight [\s\S]*the gradient times the scale: it was not unscaled"),
)
def test_check_grad_scaler_rejects(world, broken, message):
    with pytest.raises(AssertionError, match=f"^{broken.__name__}: {message}"):
        check_grad_scaler(scaler(broken), world, overflows=STEPS)


@rows(
    (added, r"after step 0 rank 0 holds [\s\S]*cause  gradients were added over ranks, not averaged"),
    (divided_twice, r"after step 0 rank 0 holds [\s\S]*cause  the mean of the gradients was divided by world"),
    (only_looks, r"after step 0 rank 0 holds [\s\S]*cause  each rank stepped with the gradient of its own"),
    (removes_what_is_not_finite, r"after step 1 rank 0 .*\n.*no rank may step\n.*ranks \[1\] was replaced with 0"),
)
def test_check_grad_scaler_rejects_gradients_that_are_not_the_mean(world, broken, message):
    with pytest.raises(AssertionError, match=f"^torchs: {message}"):
        check_grad_scaler(torchs, world, overflows=STEPS, sync=broken)


def test_check_grad_scaler_rejects_steps_that_are_left_out(world):
    with pytest.raises(AssertionError, match=r"^torchs: after step 2 rank 0 [\s\S]*ranks \[0, 1\] did not step\n"):
        check_grad_scaler(torchs, world, overflows=STEPS, sync=mean, step=stops_after_an_overflow)


def test_check_grad_scaler_names_every_cause_that_explains_the_weights(world):
    """With a scale of world_size, gradients that were added look like gradients that were not unscaled."""

    def twice():
        return Agreeing("cpu", init_scale=2.0, growth_interval=2)

    with pytest.raises(AssertionError, match=r"it was not unscaled, or .*; \(2\) gradients were added over ranks"):
        check_grad_scaler(twice, world, overflows=STEPS, sync=added)


def test_check_grad_scaler_names_no_cause_that_does_not_explain_the_weights(world):
    def thirds(module):
        mean(module)
        module.weight.grad *= 3

    with pytest.raises(AssertionError, match="after step 0 rank 0 holds") as error:
        check_grad_scaler(torchs, world, overflows=STEPS, sync=thirds)
    assert error.value.cause is None


def clips(scaler, optimizer, module, *, unscaled=True, norm_of=None):
    """Clip and step; ``norm_of`` turns the norm of this rank into the norm to clip by."""
    if unscaled:
        scaler.unscale_(optimizer)
    parameters = [p for p in module.parameters() if p.grad is not None]
    norm = torch.cat([p.grad.flatten() for p in parameters]).norm()
    torch.nn.utils.clip_grads_with_norm_(parameters, 10.0, norm_of(norm) if norm_of else norm)
    scaler.step(optimizer)
    scaler.update()


def of_all(norm):
    square = norm.square()
    dist.all_reduce(square)
    return square.sqrt()


def clips_before_unscaling(scaler, optimizer, module):
    clips(scaler, optimizer, module, unscaled=False)


def clips_nothing(scaler, optimizer, module):
    scaler.step(optimizer)
    scaler.update()


def counts_copies(scaler, optimizer, module):
    clips(scaler, optimizer, module, norm_of=of_all)


def clips_before_averaging(scaler, optimizer, module):
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(module.parameters(), 7.0)
    mean(module)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("world_size", [2, 3])
def test_check_grad_scaler_takes_steps_that_clip(world, world_size):
    steps = {"overflows": STEPS, "world_size": world_size}
    check_grad_scaler(torchs, world, **steps, sync=mean, step=clips, max_norm=10.0)
    own = partial(clips, norm_of=of_all)
    check_grad_scaler(scaler(Agreeing), world, **steps, step=own, max_norm=10.0)


@rows(
    (clips_before_unscaling, r"after step 0 rank 0 .*\n.*every rank must step\n.*clipped before they unscaled: "),
    (clips_nothing, r"after step 2 rank 0 [\s\S]*cause  ranks \[0, 1\] did not clip\n"),
    (counts_copies, r"after step 2 rank 0 [\s\S]*cause  the gradients that every rank holds were counted on each"),
)
def test_check_grad_scaler_rejects_steps_that_clip_wrongly(world, broken, message):
    with pytest.raises(AssertionError, match=f"^torchs: {message}"):
        check_grad_scaler(torchs, world, overflows=STEPS, sync=mean, step=broken, max_norm=10.0)


def test_check_grad_scaler_names_the_norm_of_one_rank_and_clipping_before_the_mean(world):
    with pytest.raises(AssertionError, match=r"step 2 rank 0 [\s\S]*ranks \[0, 1\] clipped by the norm of their own"):
        check_grad_scaler(scaler(Agreeing), world, overflows=STEPS, step=clips, max_norm=10.0)
    with pytest.raises(AssertionError, match=r"step 0 rank 0 [\s\S]*each rank clipped the gradient of its own, be"):
        check_grad_scaler(torchs, world, overflows=STEPS, step=clips_before_averaging, replicated=True, max_norm=7.0)


def test_check_grad_scaler_needs_a_step_that_clips_and_something_to_clip(world):
    with pytest.raises(ValueError, match=r"takes max_norm, above 0, beside a step that clips; got 1\.0 and step=None"):
        check_grad_scaler(torchs, world, overflows=STEPS, sync=mean, max_norm=1.0)
    with pytest.raises(Inconclusive, match=r"no step has gradients of a norm above max_norm=1000\.0; lower it"):
        check_grad_scaler(torchs, world, overflows=STEPS, sync=mean, step=clips_nothing, max_norm=1000.0)


def test_check_grad_scaler_knows_its_ranks(world):
    for wrong in ({"overflows": [[], [2]]}, {"overflows": [[], [1]], "idle": [2]}):
        with pytest.raises(ValueError, match="has ranks 0 to 1, overflows or idle names rank 2"):
            check_grad_scaler(scaler(Agreeing), world, **wrong)


def test_check_grad_scaler_needs_a_scaler_that_is_switched_on(world):
    with pytest.raises(ValueError, match="check_grad_scaler got a scaler that is switched off; enable it, on 'cpu'"):
        check_grad_scaler(partial(torch.amp.GradScaler, "cpu", enabled=False), world, overflows=[[], [1]])


def test_check_grad_scaler_needs_both_sorts_of_steps(world):
    for steps in ([[], []], [[0], [1]]):
        with pytest.raises(Inconclusive, match="needs steps with an overflow and steps without one"):
            check_grad_scaler(torchs, world, overflows=steps)


def contributions(dtype, *values):
    return [torch.tensor([value], dtype=dtype) for value in values]


def in_float32(parameters, divide=True):
    for p in parameters:
        wide = p.grad.float()
        dist.all_reduce(wide)
        p.grad.copy_(wide / dist.get_world_size() if divide else wide)


def in_its_own_dtype(parameters):
    for p in parameters:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def one_after_the_other(parameters):
    for p in parameters:
        everyone = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, p.grad)
        p.grad.copy_(sum(everyone) / len(everyone))


SMALL_BESIDE_LARGE = contributions(torch.bfloat16, 256.0, *[1.0] * 4)
NEAR_THE_END = contributions(torch.float16, 60000.0, 60000.0, 4.0)


def test_check_low_precision_sum_accepts(world):
    check_low_precision_sum(in_float32, SMALL_BESIDE_LARGE, world)
    check_low_precision_sum(in_float32, NEAR_THE_END, world)
    check_low_precision_sum(partial(in_float32, divide=False), SMALL_BESIDE_LARGE, world, mean=False)


def test_check_low_precision_sum_rejects_what_is_lost(world):
    with pytest.raises(
        AssertionError, match=r"^one_after_the_other: rank 0 holds 51.25 at \(0,\), the mean is 52\n"
    ) as e:
        check_low_precision_sum(one_after_the_other, SMALL_BESIDE_LARGE, world)
    assert "it was added in torch.bfloat16, which loses what is small beside what is large" in str(e.value)


def test_check_low_precision_sum_rejects_what_overflows(world):
    message = r"^in_its_own_dtype: rank 0 holds inf at \(0,\), the mean is 4\d+\n[\s\S]*left the range of torch.float16"
    with pytest.raises(AssertionError, match=message):
        check_low_precision_sum(in_its_own_dtype, NEAR_THE_END, world)


def never(parameters):
    pass


def in_float32_but_not_before_it_is_divided(parameters):
    for p in parameters:
        wide = p.grad.float()
        dist.all_reduce(wide)
        p.grad.copy_(wide)
        p.grad /= dist.get_world_size()


def test_check_low_precision_sum_advises_nothing_that_is_done_already(world):
    with pytest.raises(AssertionError, match="it is the sum: it was not divided by world_size") as raised:
        check_low_precision_sum(partial(in_float32, divide=False), SMALL_BESIDE_LARGE, world)
    assert "add in float32" not in str(raised.value)
    with pytest.raises(AssertionError, match="it is this rank's own: it was never synchronised"):
        check_low_precision_sum(never, SMALL_BESIDE_LARGE, world)
    with pytest.raises(AssertionError, match="it is the mean: it was divided by world_size"):
        check_low_precision_sum(in_float32, SMALL_BESIDE_LARGE, world, mean=False)
    with pytest.raises(AssertionError, match=r"left the range of \S+: divide before .*, or add and divide in float32"):
        check_low_precision_sum(in_float32_but_not_before_it_is_divided, NEAR_THE_END, world)


def test_check_low_precision_sum_says_where_nothing_can_be_seen(world):
    with pytest.raises(Inconclusive, match=r"the result is beyond torch.float16, whose largest number is 65504"):
        check_low_precision_sum(in_float32, NEAR_THE_END, world, mean=False)
