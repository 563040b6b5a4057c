"""The check of wrappers rejects those that lose, double or mix up gradients, and accepts torch's and a plain twin."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from pdlcheck.checks import check_data_parallel
from pdlcheck.errors import CollectiveMismatch


class Plain(nn.Module):
    """The correct twin: it runs one blocking all_reduce for each parameter after the backward pass."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.syncs = True
        self.is_armed = False
        self.start()

    def start(self):
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            dist.broadcast(tensor.detach(), 0)

    def share_buffers(self):
        for buffer in self.module.buffers():
            dist.broadcast(buffer.detach(), 0)

    def forward(self, *inputs):
        self.share_buffers()
        output = self.module(*inputs)
        if self.syncs:
            for tensor in tensors(output):
                tensor.register_hook(self.arm)
        return output

    def arm(self, grad):
        if not self.is_armed:
            self.is_armed = True
            Variable._execution_engine.queue_callback(self.end)

    def end(self):
        self.is_armed = False
        for parameter in self.chosen():
            self.reduce(parameter)

    def chosen(self):
        return [p for p in self.module.parameters() if p.requires_grad]

    def reduce(self, parameter):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    @contextmanager
    def no_sync(self):
        self.syncs = False
        yield
        self.syncs = True


def tensors(output):
    if isinstance(output, torch.Tensor):
        return [output]
    inner = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else []
    return [tensor for one in inner for tensor in tensors(one)]


class KeepsItsOwnStart(Plain):
    def start(self):
        pass


class SendsParametersOnly(Plain):
    def start(self):
        for parameter in self.module.parameters():
            dist.broadcast(parameter.detach(), 0)


class KeepsItsOwnBuffers(Plain):
    def share_buffers(self):
        pass


class SavedBuffersOnly(Plain):
    """A wrapper that does not broadcast the buffers that checkpoints leave out."""

    def share_buffers(self):
        for name, tensor in self.module.state_dict().items():
            if name in dict(self.module.named_buffers()):
                dist.broadcast(tensor, 0)

    def start(self):
        for tensor in self.module.state_dict().values():
            dist.broadcast(tensor, 0)


class Sums(Plain):
    def reduce(self, parameter):
        super().reduce(parameter)
        parameter.grad *= dist.get_world_size()


class LosesTheLastBucket(Plain):
    """A wrapper that does not reduce the first parameter, whose gradient becomes ready last."""

    def chosen(self):
        return super().chosen()[1:]


class ForgetsToDivideTheLastBucket(Plain):
    def end(self):
        super().end()
        self.chosen()[0].grad.mul_(dist.get_world_size())


class CountsTiedWeightsTwice(Plain):
    def chosen(self):
        return [p for _, p in self.module.named_parameters(remove_duplicate=False) if p.requires_grad]

    def reduce(self, parameter):
        super().reduce(parameter)
        parameter.grad *= dist.get_world_size() ** 0.5  # a tied weight gets this factor twice, and loses it once

    def end(self):
        super().end()
        for parameter in super().chosen():
            parameter.grad /= dist.get_world_size() ** 0.5


class TakesTheOrderOfReadiness(Plain):
    """A wrapper that reduces in the order in which this rank's own gradients became ready."""

    def __init__(self, module):
        super().__init__(module)
        self.order = []
        for parameter in super().chosen():
            parameter.register_post_accumulate_grad_hook(self.order.append)

    def chosen(self):
        order, self.order[:] = [*dict.fromkeys(self.order)], []
        return order


class AveragesThisPassOnly(Plain):
    """A wrapper that reduces the gradients of the last pass, and leaves those accumulated before local."""

    def __init__(self, module):
        super().__init__(module)
        self.fresh = {}
        for parameter in self.chosen():
            parameter.register_hook(lambda grad, parameter=parameter: self.keep(parameter, grad))

    def keep(self, parameter, grad):
        self.fresh[parameter] = grad.clone()

    def reduce(self, parameter):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        mine = self.fresh.pop(parameter, torch.zeros_like(parameter))
        mean = mine.clone()
        dist.all_reduce(mean)
        parameter.grad += mean / dist.get_world_size() - mine


class SkipsWhatItDoesNotUse(Plain):
    """A wrapper that drops the average over all ranks if this rank has no gradient of its own."""

    def reduce(self, parameter):
        mine = parameter.grad
        super().reduce(parameter)
        if mine is None:
            parameter.grad = None


class SynchronisesInsideNoSync(Plain):
    @contextmanager
    def no_sync(self):
        yield


class LosesWhatWasAccumulated(Plain):
    def arm(self, grad):
        if not self.is_armed:
            self.module.zero_grad()
        super().arm(grad)


class WaitsForFrozenGradients(Plain):
    """A wrapper that reduces one bucket for each dtype, and stops at a bucket without a gradient."""

    def chosen(self):
        dtypes = list(dict.fromkeys(parameter.dtype for parameter in self.module.parameters()))
        buckets = [[p for p in super(WaitsForFrozenGradients, self).chosen() if p.dtype == dtype] for dtype in dtypes]
        return [parameter for bucket in buckets if all(buckets) for parameter in bucket]


class ReducesWhatTheLastPassUsed(Plain):
    """A wrapper that reduces the parameters that some rank has used in the pass that it synchronises."""

    def __init__(self, module):
        super().__init__(module)
        self.used = set()
        for parameter in super().chosen():
            parameter.register_hook(lambda _, parameter=parameter: self.used.add(parameter))

    def forward(self, *inputs):
        self.used.clear()
        return super().forward(*inputs)

    def chosen(self):
        own = super().chosen()
        used = torch.tensor([float(parameter in self.used) for parameter in own])
        dist.all_reduce(used)
        return [parameter for parameter, count in zip(own, used, strict=True) if count]


class LeavesSingleNumbersOut(Plain):
    def reduce(self, parameter):
        if parameter.dim():
            super().reduce(parameter)


class OnlyTheFirstPass(Plain):
    passes = 0

    def end(self):
        self.passes += 1
        super().end()
        if self.passes == 2:
            self.chosen()[0].grad.mul_(2)

    def reduce(self, parameter):
        if self.passes != 3:
            super().reduce(parameter)


class TensorOutputsOnly(Plain):
    def forward(self, *inputs):
        self.share_buffers()
        output = self.module(*inputs)
        if self.syncs and isinstance(output, torch.Tensor):
            output.register_hook(self.arm)
        return output


def torchs(module):
    return TorchDistributedDataParallel(module, find_unused_parameters=True, bucket_cap_mb=1e-5)


def torchs_as_view(module):
    return TorchDistributedDataParallel(module, find_unused_parameters=True, gradient_as_bucket_view=True)


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated")
def torchs_without_buffers(module):
    return TorchDistributedDataParallel(module, find_unused_parameters=True, broadcast_buffers=False)


@pytest.mark.parametrize(("wrap", "world_size"), [(Plain, 2), (Plain, 3), (torchs, 2), (torchs_as_view, 3)])
def test_check_data_parallel_accepts(world, wrap, world_size):
    check_data_parallel(wrap, world, world_size=world_size)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (KeepsItsOwnStart, r", batch norm: replicas differ before the first step: .* of parameter '0.weight'"),
        (SendsParametersOnly, r", batch norm: replicas differ before the first step: .* of buffer '1.running_mean'"),
        (
            KeepsItsOwnBuffers,
            r", buffers: in forward pass 1 rank 1 sees \S+ in buffer 'mean', rank 0 sees \S+\n"
            r"  likely cause  buffers are not made alike before every forward pass\n  case  .*world_size=2",
        ),
        (SavedBuffersOnly, r", buffers: in forward pass 0 rank 1 sees \S+ in buffer 'kept'[\s\S]* at construction"),
        (Sums, r", layers: rank 0 holds [\s\S]*2 times too large: summed, not averaged"),
        (LosesTheLastBucket, r", layers: rank 0 holds .* of the gradient of '0.weight'[\s\S]*never synchronised"),
        (ForgetsToDivideTheLastBucket, r", layers: .* of '0.weight'[\s\S]*2 times too large: summed, not averaged"),
        (CountsTiedWeightsTwice, r", tied weights: .* of the gradient of 'encode.weight'"),
        (AveragesThisPassOnly, r", accumulation without sync: rank 0 holds"),
        (SkipsWhatItDoesNotUse, r", parameters unused on other ranks each: rank 0 holds None .* of 'negative.weight'"),
        (
            SynchronisesInsideNoSync,
            r", inside of no_sync\(\): rank 0 holds \S+ at \(0, 0\) of the gradient of '0.weight', its own samples "
            r"give \S+\n  likely cause  gradients are synchronised, or scaled, inside of no_sync\(\)",
        ),
        (LosesWhatWasAccumulated, r", accumulation without sync: rank 0 holds"),
        (
            WaitsForFrozenGradients,
            r", a frozen layer of another dtype: .* of 'first.weight'[\s\S]*never synchronised",
        ),
        (ReducesWhatTheLastPassUsed, r", parameters used without sync only: .* of the gradient of '"),
        (LeavesSingleNumbersOut, r", a parameter without dimensions: .* of 'scale'[\s\S]*never synchronised"),
        (OnlyTheFirstPass, r", layers, after 3 passes or more: rank 0 holds [\s\S]*never synchronised"),
        (TensorOutputsOnly, r", outputs in nested containers: rank 0 holds [\s\S]*never synchronised"),
        (torchs_without_buffers, r", batch norm: replicas differ before the first step: .* of buffer"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
def test_check_data_parallel_rejects(world, broken, message):
    with pytest.raises(AssertionError, match=rf"^{broken.__name__}{message}"):
        check_data_parallel(broken, world)


def test_check_data_parallel_sees_an_order_that_each_rank_has_for_itself(world):
    """Ranks reduce different gradients of one shape; the world reports this before the check compares values."""
    with pytest.raises(CollectiveMismatch, match=r"differ in the order of equal calls: [\s\S]*branches.2.bias"):
        check_data_parallel(TakesTheOrderOfReadiness, world, unused=False)


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
def test_what_a_wrapper_does_not_promise_is_not_asked_for(world):
    check_data_parallel(KeepsItsOwnBuffers, world, buffers=False)
    check_data_parallel(torchs_without_buffers, world, buffers=False)
    check_data_parallel(SkipsWhatItDoesNotUse, world, unused=False)
    check_data_parallel(SynchronisesInsideNoSync, world, no_sync=False)
    check_data_parallel(ReducesWhatTheLastPassUsed, world, no_sync=False)
    check_data_parallel(RefusesOtherDtypes, world)


class RefusesOtherDtypes(Plain):
    """A wrapper that keeps all parameters in one flat tensor, as FSDP1 does, and refuses other dtypes."""

    def __init__(self, module):
        if len({parameter.dtype for parameter in module.parameters()}) > 1:
            raise ValueError("all parameters need one dtype")
        super().__init__(module)


def test_check_data_parallel_needs_two_ranks_and_the_context_that_is_promised(world):
    with pytest.raises(ValueError, match="it needs world_size 2 or more, got 1"):
        check_data_parallel(Plain, world, world_size=1)
    with pytest.raises(ValueError, match=r"Silent has no no_sync\(\); pass no_sync=False"):
        check_data_parallel(Silent, world)


class Silent(Plain):
    no_sync = None


class TakesTheFirstDimension(Plain):
    def __init__(self, module):
        super().__init__(module)
        self.rows = sum(parameter.shape[0] for parameter in module.parameters())


def test_the_model_that_a_wrapper_dies_of_is_named(world):
    with pytest.raises(IndexError) as raised:
        check_data_parallel(TakesTheFirstDimension, world, no_sync=False)
    notes = "\n".join(raised.value.__notes__)
    assert "while check_data_parallel wrapped a model with a parameter without dimensions" in notes


def test_a_wrapper_that_does_not_begin_inside_of_no_sync_is_told_the_switch(world):
    def static(module):
        return TorchDistributedDataParallel(module, static_graph=True)

    check_data_parallel(static, world, unused=False, no_sync=False)
    with pytest.raises(RuntimeError, match="expect_autograd_hooks_") as raised:
        check_data_parallel(static, world, unused=False)
    notes = "\n".join(raised.value.__notes__)
    assert "tried a first backward pass inside of no_sync(); pass no_sync=False for a wrapper that does not" in notes


def test_a_wrapper_that_does_not_take_unused_parameters_is_told_the_switch(world):
    check_data_parallel(TorchDistributedDataParallel, world, unused=False)
    with pytest.raises(RuntimeError, match="find_unused_parameters=True") as raised:
        check_data_parallel(TorchDistributedDataParallel, world)
    assert any("unused on other ranks each; pass unused=False for a wrapper" in note for note in raised.value.__notes__)
