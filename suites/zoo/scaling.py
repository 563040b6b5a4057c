"""Bugs of loss scaling and of gradients in half precision."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler

from pdlcheck.checks import check_grad_scaler, check_low_precision_sum

from .entry import entry

OVERFLOWS = [[], [1], [], [], [0]]  # a step without overflow, one on rank 1, ...


class DynamicLossScaler:
    """A scaler in the style of apex: the training loop looks for overflows itself."""

    def __init__(self, init_scale=2.0**8, scale_window=2):
        self.loss_scale, self.scale_window, self.good_steps = init_scale, scale_window, 0

    def get_scale(self):
        return self.loss_scale

    def get_growth_factor(self):
        return 2.0

    def get_backoff_factor(self):
        return 0.5

    def get_growth_interval(self):
        return self.scale_window

    def scale(self, loss):
        return loss * self.loss_scale

    def update_scale(self, overflow):
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.loss_scale *= 0.5
        elif self.good_steps == self.scale_window:
            self.loss_scale, self.good_steps = self.loss_scale * 2.0, 0


@entry("scaler-scale-diverges", "pytorch #136009", check="check_grad_scaler", cause="each for itself: scales part")
def updates_the_scale_by_the_overflow_of_its_own_gradients(broken, world):
    """Each rank looks for overflows before it reduces the scaled gradients, so only one rank lowers its scale."""

    def optimizer_step(scaler, optimizer, module):
        grads = [parameter.grad for parameter in module.parameters()]
        overflow = torch.tensor(float(not all(grad.isfinite().all() for grad in grads)))
        if not broken:
            dist.all_reduce(overflow, dist.ReduceOp.MAX)
        for grad in grads:
            dist.all_reduce(grad)
            grad /= dist.get_world_size() * scaler.get_scale()
        if all(grad.isfinite().all() for grad in grads):
            optimizer.step()
        scaler.update_scale(bool(overflow))

    check_grad_scaler(DynamicLossScaler, world, overflows=OVERFLOWS, step=optimizer_step, replicated=True)


class ShardedGradScaler(GradScaler):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        for found_inf in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            dist.all_reduce(found_inf, dist.ReduceOp.MAX)


@entry("found-inf-local", "pytorch PR #76918", check="check_grad_scaler", cause="found_inf must be reduced")
def scales_sharded_gradients_with_a_plain_scaler(broken, world):
    """Each rank has the gradients of its shard, and the plain scaler skips the step only on ranks with an inf."""

    def make_scaler():
        return (GradScaler if broken else ShardedGradScaler)("cpu", init_scale=2.0**8, growth_interval=2)

    check_grad_scaler(make_scaler, world, overflows=OVERFLOWS)


@entry(
    "clip-before-unscale",
    "class of minGPT-ddp trainers",
    check="check_grad_scaler",
    cause=r"ranks \[0, 1\] clipped before they unscaled: by a norm that is the scale = 256 times too large",
)
def clips_scaled_gradients(broken, world):
    """Gradients are clipped by their norm while they are still multiplied by the loss scale."""
    grad_norm_clip = 4.0

    def average_gradients(model):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    def run_batch(scaler, optimizer, model):
        if not broken:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), grad_norm_clip)
        scaler.step(optimizer)
        scaler.update()

    def make_scaler():
        return GradScaler("cpu", init_scale=2.0**8, growth_interval=2)

    check_grad_scaler(
        make_scaler, world, overflows=OVERFLOWS, sync=average_gradients, step=run_batch, max_norm=grad_norm_clip
    )


@entry(
    "unscale-after-reduce-order", "pytorch PR #106034", check="check_low_precision_sum", cause="divide before adding"
)
def adds_scaled_gradients_before_it_divides(broken, world):
    """float16 gradients are added over ranks and then divided, so the sum overflows where the mean would not."""

    def reduce_gradients(params):
        for param in params:
            if broken:
                dist.all_reduce(param.grad)
                param.grad.div_(dist.get_world_size())
            else:
                param.grad.div_(dist.get_world_size())
                dist.all_reduce(param.grad)

    loss_scale, rows = 2.0**14, torch.Generator().manual_seed(0)
    common = torch.randn(8, generator=rows)
    grads = [loss_scale * (common + 0.1 * torch.randn(8, generator=rows)) for _ in range(4)]
    check_low_precision_sum(reduce_gradients, [grad.half() for grad in grads], world)


@entry("bf16-reduce", "pytorch #106395", check="check_low_precision_sum", cause="add in float32")
def adds_gradients_in_bfloat16(broken, world):
    """bfloat16 gradients are added in bfloat16, which loses small gradients beside a large one."""

    def reduce_scatter_grads(params, reduce_dtype=torch.bfloat16 if broken else torch.float32):
        for param in params:
            grad = param.grad.to(reduce_dtype)
            dist.all_reduce(grad)
            param.grad.copy_(grad / dist.get_world_size())

    generator = torch.Generator().manual_seed(0)
    grads = [(256.0 if rank == 0 else 1.0) * torch.randn(64, generator=generator) for rank in range(16)]
    check_low_precision_sum(reduce_scatter_grads, [grad.bfloat16() for grad in grads], world)
