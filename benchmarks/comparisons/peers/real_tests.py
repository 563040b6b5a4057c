"""Ten typical bodies of tests for distributed code; each takes a case number, so that no two runs are equal.

The ``test_*`` functions of a pool and a bare loop over gloo import this module and run the same bodies.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

__all__ = ["BODIES", "CASES"]

CASES = 20
Body = Callable[[int, int, int], None]


def ddp_gradient_is_that_of_the_whole_batch(rank: int, world_size: int, case: int) -> None:
    model, inputs, targets = _net(case), *_batch(case, 16 * world_size)
    alone = _net(case)
    nn.functional.mse_loss(alone(inputs), targets).backward()
    parallel = DistributedDataParallel(model)
    mine = slice(16 * rank, 16 * (rank + 1))
    nn.functional.mse_loss(parallel(inputs[mine]), targets[mine]).backward()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def ddp_replicas_stay_equal_while_training(rank: int, world_size: int, case: int) -> None:
    model = DistributedDataParallel(_net(case))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(5):
        inputs, targets = _batch(100 * case + 10 * step + rank, 32)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    _assert_equal_on_all_ranks(_flat(model), world_size)


def accumulation_without_sync_is_one_large_batch(rank: int, world_size: int, case: int) -> None:
    model, whole = DistributedDataParallel(_net(case)), DistributedDataParallel(_net(case))
    inputs, targets = _batch(case + rank, 32)
    with model.no_sync():
        (nn.functional.mse_loss(model(inputs[:16]), targets[:16]) / 2).backward()
    (nn.functional.mse_loss(model(inputs[16:]), targets[16:]) / 2).backward()
    nn.functional.mse_loss(whole(inputs), targets).backward()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def weights_of_rank_0_reach_everybody(rank: int, world_size: int, case: int) -> None:
    model = _net(1000 * rank + case)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    _assert_equal_on_all_ranks(_flat(model), world_size)


def a_checkpoint_resumes_on_every_rank(rank: int, world_size: int, case: int) -> None:
    model = _net(case)
    saved: list[bytes | None] = [None]
    if rank == 0:
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        saved = [buffer.getvalue()]
    dist.broadcast_object_list(saved, 0)
    resumed = _net(case + 1)
    assert saved[0] is not None
    resumed.load_state_dict(torch.load(io.BytesIO(saved[0]), weights_only=True))
    assert torch.equal(_flat(model), _flat(resumed))


def metrics_of_uneven_shards_are_gathered(rank: int, world_size: int, case: int) -> None:
    mine = torch.arange(float(case + rank + 1))
    lengths: list[Tensor] = [torch.zeros(1, dtype=torch.long) for _ in range(world_size)]
    dist.all_gather(lengths, torch.tensor([len(mine)]))
    padded = torch.zeros(int(max(lengths)))
    padded[: len(mine)] = mine
    everyone = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(everyone, padded)
    total = sum(float(shard[: int(length)].sum()) for shard, length in zip(everyone, lengths, strict=True))
    assert total == sum((case + r) * (case + r + 1) / 2 for r in range(world_size))


def samplers_cover_the_data_once(rank: int, world_size: int, case: int) -> None:
    data = range(world_size * (50 + case))
    sampler = DistributedSampler(data, world_size, rank, seed=case)  # type: ignore[arg-type]  # it has a length
    sampler.set_epoch(case)
    everyone: list[list[int] | None] = [None] * world_size
    dist.all_gather_object(everyone, list(sampler))
    assert sorted(i for part in everyone if part for i in part) == list(data)


def a_sharded_optimizer_steps_like_a_whole_one(rank: int, world_size: int, case: int) -> None:
    sharded, whole = _net(case), _net(case)
    optimizers = (
        ZeroRedundancyOptimizer(sharded.parameters(), torch.optim.Adam, lr=0.01),
        torch.optim.Adam(whole.parameters(), lr=0.01),
    )
    inputs, targets = _batch(case, 32)
    for _ in range(3):
        for model, optimizer in zip((sharded, whole), optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    torch.testing.assert_close(_flat(sharded), _flat(whole))


def reduce_scatter_and_all_gather_are_an_all_reduce(rank: int, world_size: int, case: int) -> None:
    whole = torch.arange(1024.0 * world_size) + rank + case
    shard = torch.empty(1024)
    dist.reduce_scatter(shard, list(whole.clone().chunk(world_size)))
    parts = [torch.empty(1024) for _ in range(world_size)]
    dist.all_gather(parts, shard)
    dist.all_reduce(whole)
    assert torch.equal(torch.cat(parts), whole)


def two_stages_pass_micro_batches_on(rank: int, world_size: int, case: int) -> None:
    if rank > 1:
        return
    stage = nn.Sequential(nn.Linear(128, 128), nn.Tanh())
    for micro_batch in range(4):
        if rank == 0:
            inputs = _batch(case + micro_batch, 16)[0]
            passed = stage(inputs)
            dist.send(passed.detach(), 1)
            gradient = torch.empty_like(passed)
            dist.recv(gradient, 1)
            passed.backward(gradient)
        else:
            received = torch.empty(16, 128)
            dist.recv(received, 0)
            received.requires_grad_()
            stage(received).square().mean().backward()
            assert received.grad is not None
            dist.send(received.grad, 0)
    assert all(p.grad is not None for p in stage.parameters())


BODIES: tuple[Body, ...] = (
    ddp_gradient_is_that_of_the_whole_batch,
    ddp_replicas_stay_equal_while_training,
    accumulation_without_sync_is_one_large_batch,
    weights_of_rank_0_reach_everybody,
    a_checkpoint_resumes_on_every_rank,
    metrics_of_uneven_shards_are_gathered,
    samplers_cover_the_data_once,
    a_sharded_optimizer_steps_like_a_whole_one,
    reduce_scatter_and_all_gather_are_an_all_reduce,
    two_stages_pass_micro_batches_on,
)


def _net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def _batch(seed: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 128, generator=generator), torch.randn(size, 10, generator=generator)


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _assert_equal_on_all_ranks(tensor: Tensor, world_size: int) -> None:
    everyone = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(everyone, tensor)
    assert all(torch.equal(other, tensor) for other in everyone)
