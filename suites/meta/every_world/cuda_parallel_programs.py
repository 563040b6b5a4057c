"""Programs of two ranks that use CUDA for joint work: wrappers, meshes, groups, pipelines."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "a_pipeline",
    "ddp_with_device_ids",
    "fsdp2_on_a_mesh_of_cuda",
    "fsdp_with_device_id",
    "fsdp_with_its_scaler",
    "groups_of_nccl",
    "groups_of_two_backends",
    "on",
    "tensor_parallel_on_a_mesh_of_cuda",
]


def on(device):
    return torch.device("cuda", device)


def ddp_with_device_ids():
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 1).to(rank), device_ids=[rank], output_device=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = model(torch.full((4, 2), rank + 1.0, device=rank))
    out.mean().backward()
    optimizer.step()
    assert out.is_cuda
    assert model.module.weight.grad.tolist() == [[1.5, 1.5]]
    gathered = [torch.empty(1, 2, device="cuda") for _ in range(2)]
    dist.all_gather(gathered, model.module.weight.detach())
    assert torch.equal(*gathered)


def fsdp_with_device_id():
    from torch.distributed.fsdp import FullyShardedDataParallel

    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.cuda.current_device())
    model(torch.ones(1, 4, device=rank)).sum().backward()
    whole = FullyShardedDataParallel(nn.Linear(4, 2).cuda(), device_id=on(rank))
    assert whole(torch.ones(1, 4).cuda()).shape == (1, 2)


def fsdp_with_its_scaler():
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model = FullyShardedDataParallel(nn.Linear(4, 4).cuda())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), ShardedGradScaler(init_scale=8.0)
    with torch.autocast("cuda"):
        loss = model(torch.ones(1, 4, device="cuda")).float().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.is_enabled()
    assert scaler.get_scale() == 8.0


def fsdp2_on_a_mesh_of_cuda():
    from torch.distributed.fsdp import fully_shard

    rank = dist.get_rank()
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("shard",))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(rank)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 4, device="cuda")).sum().backward()
    optimizer.step()
    assert model[0].weight.full_tensor().shape == (4, 4)


def tensor_parallel_on_a_mesh_of_cuda():
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cuda", (1, 2), mesh_dim_names=("data", "heads"))["heads"]  # a slice of another mesh
    assert mesh.device_type == "cuda"
    assert torch.ones(1, device=mesh.device_type).is_cuda
    assert init_device_mesh("cpu", (2,)).device_type == "cpu"
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).cuda()
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model(torch.ones(3, 4, device="cuda")).sum().backward()
    heads = [distribute_tensor(torch.randn(2, 4, 5, 8, device="cuda"), mesh, [Shard(1)]) for _ in range(3)]
    attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
    plain = [head.full_tensor() for head in heads]
    whole = nn.functional.scaled_dot_product_attention(*plain, is_causal=True)
    torch.testing.assert_close(attended.full_tensor(), whole)
    assert attended.shape == whole.shape
    assert attended.placements == (Shard(1),)
    assert attended.to_local().is_cuda


def groups_of_nccl():
    rank = dist.get_rank()
    dist.init_process_group("nccl", device_id=on(rank))
    pair = dist.new_group([0, 1], backend="nccl")
    x = torch.ones(2, device=on(rank))
    dist.all_reduce(x, group=pair)
    assert x.tolist() == [2.0, 2.0]
    assert dist.is_nccl_available()
    dist.destroy_process_group()
    dist.init_process_group("nccl")
    dist.all_reduce(x)
    assert x.tolist() == [4.0, 4.0]
    dist.barrier(device_ids=[rank])
    objects = [None, None]
    dist.all_gather_object(objects, x)
    assert objects[1 - rank].tolist() == [4.0, 4.0]


def groups_of_two_backends():
    dist.init_process_group("cpu:gloo,cuda:nccl")
    dist.destroy_process_group()
    dist.init_process_group("cpu:gloo,cuda:nccl")
    x = torch.ones(2, device="cuda")
    dist.all_reduce(x)
    assert x.tolist() == [2.0, 2.0]


def a_pipeline():
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    stage = PipelineStage(nn.Linear(2, 2).cuda(), rank, 2, device=on(rank))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, target: (output - target).square().sum())
    x = torch.ones(4, 2, device="cuda")
    if rank == 0:
        schedule.step(x)
    else:
        losses = []
        schedule.step(target=x, losses=losses)
        assert len(losses) == 2
    assert stage.submod.weight.grad is not None
