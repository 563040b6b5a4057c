"""The cases of the checks on a device: each has a correct subject and a wrong one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from pdlcheck import checks, primitives

from .layers_by_hand import Add

__all__ = ["CASES", "Case"]

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Case(NamedTuple):
    """A call of a check, ``ask(device, world, wrong)``, and ``says``, a part of its message about the wrong subject."""

    ask: Callable[[str, Any, bool], object]
    says: str


def batch(device: str, number: int, size: int = 3) -> tuple[Tensor, Tensor]:
    """Return inputs and targets that depend on ``number`` only, on the device."""
    generator = torch.Generator().manual_seed(number)
    x = torch.rand(size, 4, dtype=torch.float64, generator=generator)
    return x.to(device), x.sum(1, keepdim=True).to(device)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def own(number: int) -> int:
    return number * dist.get_world_size() + dist.get_rank()


def wrapped(model: nn.Module) -> nn.Module:
    """Return the model in our wrapper, on the device that the model is on."""
    device = next(model.parameters()).device
    return primitives.DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)


def gradients(device: str, world: Any, wrong: bool) -> None:
    def sync(model: nn.Module, num_samples: int) -> None:
        if not wrong:
            primitives.sync_gradients(model, weight=num_samples)

    shards = [batch(device, rank, size) for rank, size in enumerate((3, 1))]
    checks.check_gradients_equal_single_process(lambda: net().to(device), nn.MSELoss(), shards, sync, world)


def data_parallel(device: str, world: Any, wrong: bool) -> None:
    """Check a wrapper that gets a module which is on the device already, as in programs."""

    class Alone(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *inputs: Tensor) -> Any:
            return self.module(*(x.to(device) for x in inputs))

    def wrap(module: nn.Module) -> nn.Module:
        module.to(device)
        if wrong:
            return Alone(module)
        ids = [torch.cuda.current_device()] if device == "cuda" else None
        return primitives.DistributedDataParallel(module, device_ids=ids, find_unused_parameters=True)

    checks.check_data_parallel(wrap, world, no_sync=not wrong)


def replicas(device: str, world: Any, wrong: bool) -> None:
    def start() -> tuple[nn.Module, Callable[[int], object]]:
        torch.manual_seed(0)
        model = nn.Sequential(net(), nn.BatchNorm1d(1, dtype=torch.float64)).to(device)
        called = model if wrong else wrapped(model)
        optimizer = SGD(model.parameters())

        def step(i: int) -> None:
            x, y = batch(device, own(i))
            optimizer.zero_grad()
            (called(x) - y).square().mean().backward()
            optimizer.step()

        return model, step

    checks.check_replicas_in_sync(start, world, world_size=2, buffers=False)


def same_start(device: str, world: Any, wrong: bool) -> None:
    def make() -> nn.Module:
        if not wrong:
            torch.manual_seed(0)
        with torch.device(device):
            return nn.Linear(4, 1)

    checks.check_same_start(make, world, world_size=2)


def trajectory(device: str, world: Any, wrong: bool) -> None:
    """Compare a training on shards of each batch with one on whole batches.

    Both move the caller's model to the device.
    """

    def train(model: nn.Module, steps: int, divided: bool) -> None:
        model.to(device)
        called = wrapped(model) if divided and not wrong else model
        optimizer = SGD(model.parameters())
        for i in range(steps):
            x, y = batch(device, i, 4)
            own = slice(dist.get_rank(), None, dist.get_world_size()) if divided else slice(None)
            optimizer.zero_grad()
            (called(x[own]) - y[own]).square().mean().backward()
            optimizer.step()

    ways = (functools.partial(train, divided=divided) for divided in (True, False))
    checks.check_same_trajectory(*ways, net, world)


def world_sizes(device: str, world: Any, wrong: bool) -> None:
    def train(model: nn.Module, steps: int) -> None:
        model.to(device)
        called = model if wrong else wrapped(model)
        optimizer = SGD(model.parameters())
        for i in range(steps):
            x, y = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch(device, i, 4))
            optimizer.zero_grad()
            (called(x) - y).square().mean().backward()
            optimizer.step()

    checks.check_world_size_does_not_matter(train, lambda: net().to(device), world, world_sizes=(1, 2))


def scaler(device: str, world: Any, wrong: bool) -> None:
    kind = torch.amp.GradScaler if wrong else primitives.DistributedGradScaler

    def make() -> Any:
        return kind(device, init_scale=64.0, growth_interval=2)

    def optimizer(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr)

    checks.check_grad_scaler(make, world, overflows=[[], [1], [], [], [0]], optimizer=optimizer)


def clip(device: str, world: Any, wrong: bool) -> None:
    def ours(parameters: list[Tensor], max_norm: float) -> Tensor:
        if wrong:
            return nn.utils.clip_grad_norm_(parameters, max_norm)
        return primitives.clip_grad_norm(parameters, max_norm, sharded=True)

    grads = [[torch.full((3,), 1.0 + rank, device=device)] for rank in range(2)]
    checks.check_clip_grad_norm(ours, world, gradients=grads, max_norm=1.5)


def derivative(device: str, world: Any, wrong: bool) -> None:
    outputs = "own" if wrong else "replicated"
    checks.check_derivative(Add.apply, lambda rank: torch.ones(3, 3, device=device), world, outputs=outputs)


def resume(device: str, world: Any, wrong: bool) -> None:
    def start() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).to(device)
        torch.manual_seed(own(1))
        called, optimizer = wrapped(model), torch.optim.Adam(model.parameters(), lr=0.01)

        def step(i: int) -> None:
            optimizer.zero_grad()
            called(torch.rand(4, 4, device=device)).square().mean().backward()
            optimizer.step()

        held = {"model": model} if wrong else {"model": model, "optimizer": optimizer}
        save = functools.partial(primitives.save_checkpoint, step=2, **held)
        return model, step, save, lambda path: primitives.load_checkpoint(primitives.latest_checkpoint(path), **held)

    checks.check_resume(start, world, saved_after=2, steps=4)


def random_streams(device: str, world: Any, wrong: bool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0 if wrong else own(1))
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)).to(device)

    checks.check_random_streams(make, lambda model: model(torch.ones(2, 4, device=device)), world)


def metric(device: str, world: Any, wrong: bool) -> None:
    def mean(errors: Tensor) -> float:
        mine = errors[dist.get_rank() :: dist.get_world_size()].to(device)
        total = torch.stack([mine.mean() if wrong else mine.sum(), torch.tensor(float(len(mine)), device=device)])
        dist.all_reduce(total)
        return float(total[0] / (dist.get_world_size() if wrong else total[1]))

    checks.check_metric(mean, [torch.arange(7.0, device=device)], world)


class Rows(nn.Module):
    """A layer with some of the input features on each rank; the outputs are added."""

    def __init__(self, layer: nn.Module, adds: bool) -> None:
        super().__init__()
        self.adds = adds
        weight = layer.weight.detach().chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        return Add.apply(y) if self.adds else y


def sharded_layer(device: str, world: Any, wrong: bool) -> None:
    checks.check_sharded_layer(
        functools.partial(Rows, adds=not wrong),
        lambda: nn.Linear(4, 3, bias=False).to(device),
        [torch.ones(2, 4, device=device)],
        world,
        world_size=2,
        inputs_of=lambda x: x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()],
    )


def comm_hook(device: str, world: Any, wrong: bool, hook: Callable[..., Any] = allreduce_hook) -> None:
    """Check a hook that returns the mean; the wrong one leaves each rank its own gradients."""

    def alone(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(torch.zeros(1, device=device), async_op=True)
        return work.get_future().then(lambda _: bucket.buffer())

    def wrap(module: nn.Module, bucket_bytes: int, find_unused: bool) -> Any:
        return TorchDistributedDataParallel(module.to(device), bucket_cap_mb=bucket_bytes / 2**20)

    checks.check_comm_hook(
        lambda module: (None, alone if wrong else hook), world, world_size=2, relative=2**-9, steps=4, wrap=wrap
    )


def kept_back(device: str, world: Any, wrong: bool, make_state: Callable[..., Any], hook: Callable[..., Any]) -> None:
    """Check a hook of ours that sends its residuals later; the wrong one drops them."""

    def make_hook(module: nn.Module) -> tuple[Any, Any]:
        return make_state(module, error_feedback=not wrong), hook

    def wrap(module: nn.Module, bucket_bytes: int, find_unused: bool) -> Any:
        return primitives.DistributedDataParallel(
            module.to(device), bucket_cap_mb=bucket_bytes / 2**20, find_unused_parameters=find_unused
        )

    def residual(state: Any) -> Any:
        return state.residuals.state_dict()

    checks.check_comm_hook(make_hook, world, world_size=2, residual=residual, steps=4, wrap=wrap)


def diloco(device: str, world: Any, wrong: bool) -> None:
    def wrap(optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
        outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.5 if wrong else 0.9, nesterov=True)
        return primitives.DiLoCo(optimizer, model, sync_every=2, outer=outer)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)

    checks.check_local_sgd(wrap, world, sync_every=2, world_size=2, make=make, outer=(0.7, 0.9, True))


def local_sgd(device: str, world: Any, wrong: bool) -> None:
    def wrap(optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
        return primitives.LocalSGD(optimizer, model, sync_every=3 if wrong else 2)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)

    checks.check_local_sgd(wrap, world, sync_every=2, world_size=2, make=make)


def all_reduce(device: str, world: Any, wrong: bool) -> None:
    def reduced(x: Tensor) -> None:
        dist.all_reduce(x, op=dist.ReduceOp.MAX if wrong else dist.ReduceOp.SUM)

    checks.check_all_reduce(reduced, [torch.full((3,), rank + 1.0, device=device) for rank in range(2)], world)


def all_gather(device: str, world: Any, wrong: bool) -> None:
    def gathered(x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return parts[::-1] if wrong else parts

    checks.check_all_gather(gathered, [torch.full((3,), rank + 1.0, device=device) for rank in range(2)], world)


def broadcast(device: str, world: Any, wrong: bool) -> None:
    def given(x: Tensor, src: int) -> None:
        dist.broadcast(x, 0 if wrong else src)

    checks.check_broadcast(given, [torch.full((3,), rank + 1.0, device=device) for rank in range(2)], world, src=1)


def average_parameters(device: str, world: Any, wrong: bool) -> None:
    def average(model: nn.Module) -> None:
        if not wrong:
            primitives.average_parameters(model)

    checks.check_average_parameters(average, lambda: net().to(device), world, world_size=2)


def broadcast_parameters(device: str, world: Any, wrong: bool) -> None:
    def give(model: nn.Module, src: int) -> None:
        if not wrong:
            primitives.broadcast_parameters(model, src=src)

    checks.check_broadcast_parameters(give, lambda: net().to(device), world, world_size=2)


def low_precision_sum(device: str, world: Any, wrong: bool) -> None:
    def added(grads: list[Tensor]) -> None:
        for tensor in grads:
            grad = tensor.grad
            total = grad.clone() if wrong else grad.float()
            dist.all_reduce(total)
            grad.copy_(total / dist.get_world_size())

    near_the_end = [60000.0, 60000.0, 4.0]
    contributions = [torch.full((3,), value, device=device, dtype=torch.float16) for value in near_the_end]
    checks.check_low_precision_sum(added, contributions, world)


def digest(device: str, world: Any, wrong: bool) -> None:
    def text(x: Tensor) -> str:
        return str(float(x.sum())) if wrong else primitives.shard_digest(x)

    checks.check_digest(text, torch.arange(6.0, device=device).view(2, 3), world)


def gathered_digests(device: str, world: Any, wrong: bool) -> None:
    def gather(x: Tensor) -> list[str]:
        found = primitives.gather_shard_digests(x)
        return found[::-1] if wrong else list(found)

    shards = [torch.arange(4.0, device=device) + rank for rank in range(2)]
    checks.check_gathered_digests(gather, shards, world)


def pipeline(device: str, world: Any, wrong: bool) -> None:
    """Check a pipeline whose stages are in one process, because gloo sends no CUDA tensors between ranks."""
    loss = nn.MSELoss()

    def start(model: nn.Module) -> tuple[nn.Module, Callable[..., Any]]:
        places = [device, "cpu"]
        ours = primitives.Pipeline(
            model, nn.MSELoss(reduction="sum") if wrong else loss, schedule="1f1b", n_microbatches=2, devices=places
        )

        def step(inputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
            result = ours.step(inputs, targets)
            return result.loss, result.outputs

        return ours.module, step

    checks.check_pipeline(start, net, loss, [batch("cpu", 0, 4)], world, world_size=1, n_microbatches=2)


def replicated(device: str, world: Any, wrong: bool) -> None:
    class First(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)[:1]

    def wrap(module: nn.Module, workers: int) -> nn.Module:
        return First(module) if wrong else primitives.DataParallel(module, [device] * workers)

    checks.check_replicated_module(wrap, lambda: net().to(device), lambda size: (batch(device, 0, size)[0],))


CASES = {
    "gradients": Case(gradients, "never synchronised"),
    "data parallel": Case(data_parallel, "initial weights were not broadcast"),
    "replicas": Case(replicas, "replicas differ after step 1: rank 1 holds"),
    "same start": Case(same_start, "replicas differ before the first step: rank 1 holds"),
    "trajectory": Case(trajectory, "after 1 step"),
    "world sizes": Case(world_sizes, "replicas differ after 3 step(s): rank 1 holds"),
    "scaler": Case(scaler, "found_inf must be reduced over ranks"),
    "clip": Case(clip, "rank alone was used"),
    "derivative": Case(derivative, "it has only the part of this rank's own outputs"),
    "resume": Case(resume, "lost: optimizer"),
    "random streams": Case(random_streams, "torch.manual_seed(0) on both"),
    "metric": Case(metric, "the mean of the ranks' values"),
    "sharded layer": Case(sharded_layer, "all ranks' parts add up to what is right"),
    "comm hook": Case(comm_hook, "it is this rank's own gradient: never reduced"),
    "top_k": Case(
        functools.partial(
            kept_back, make_state=functools.partial(primitives.TopKState, ratio=0.25), hook=primitives.top_k
        ),
        "plus the mean of what the ranks hold back",
    ),
    "power_sgd": Case(
        functools.partial(
            kept_back,
            make_state=functools.partial(primitives.PowerSGDState, start_step=1),
            hook=primitives.power_sgd,
        ),
        "plus the mean of what the ranks hold back",
    ),
    "fp16_compress": Case(functools.partial(comm_hook, hook=primitives.fp16_compress), "own gradient: never reduced"),
    "DiLoCo": Case(diloco, "after step 2 rank 0 holds"),
    "local SGD": Case(local_sgd, "models are averaged after every 3 steps, not 2"),
    "all_reduce": Case(all_reduce, "rank 0 holds 2 at (0,), the sum over ranks is 3"),
    "all_gather": Case(all_gather, "the rows are shifted by 1"),
    "broadcast": Case(broadcast, "the wrong rank sent"),
    "average_parameters": Case(average_parameters, "it was not averaged"),
    "broadcast_parameters": Case(broadcast_parameters, "it was left out of the broadcast"),
    "low precision": Case(low_precision_sum, "left the range of torch.float16"),
    "digest": Case(digest, "another last element has the digest of the data"),
    "gathered digests": Case(gathered_digests, "it is that of rank 1's shard"),
    "pipeline": Case(pipeline, "where one process averages"),
    "replicated": Case(replicated, "5 of 6 samples were dropped when the batch was cut"),
}
