"""Collectives that return their result, also through autograd, and tensors that are spread over a mesh."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as through
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


def _mine(n=4):
    return torch.arange(float(n)) + dist.get_rank()


def functional_all_reduce():
    return [funcol.all_reduce(_mine(), op, dist.group.WORLD).tolist() for op in ("sum", "max", "avg")]


def functional_all_gather():
    return [funcol.all_gather_tensor(_mine().view(2, 2), dim, dist.group.WORLD).tolist() for dim in (0, 1)]


def functional_reduce_scatter():
    x = torch.arange(16.0).view(4, 4) + dist.get_rank()
    return [funcol.reduce_scatter_tensor(x, "sum", dim, dist.group.WORLD).tolist() for dim in (0, 1)]


def functional_all_to_all():
    rank = dist.get_rank()
    even = funcol.all_to_all_single(_mine(), None, None, dist.group.WORLD)
    uneven = funcol.all_to_all_single(_mine(10), [rank + 1] * 4, [1, 2, 3, 4], dist.group.WORLD)
    return even.tolist(), uneven.tolist()


def functional_broadcast():
    return funcol.broadcast(_mine(), 2, dist.group.WORLD).tolist()


def functional_calls_on_several():
    reduced = funcol.all_reduce_coalesced([_mine(1), _mine(2)], "sum", dist.group.WORLD)
    gathered = funcol.all_gather_into_tensor_coalesced([_mine(1), _mine(2)], dist.group.WORLD)
    return [x.tolist() for x in (*reduced, *gathered)]


def functional_calls_with_gradients():
    x = _mine(4).requires_grad_()
    y = funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    (y * torch.arange(16.0)).sum().backward()
    z = _mine(4).requires_grad_()
    (funcol.reduce_scatter_tensor_autograd(z, "sum", 0, dist.group.WORLD) * (dist.get_rank() + 1)).sum().backward()
    return y.tolist(), x.grad.tolist(), z.grad.tolist()


def gradient_of_all_reduce():
    x = _mine().requires_grad_()
    (through.all_reduce(x) * (dist.get_rank() + 1)).sum().backward()
    return x.grad.tolist()


def gradient_of_all_gather():
    x = _mine(2).requires_grad_()
    out = through.all_gather(x)
    sum((r + 1) * (dist.get_rank() + 1) * part.sum() for r, part in enumerate(out)).backward()
    return [part.tolist() for part in out], x.grad.tolist()


def gradient_of_broadcast():
    x = _mine(2).requires_grad_()
    y = through.broadcast(x, 1)
    (y * (dist.get_rank() + 1)).sum().backward()
    return y.tolist(), x.grad.tolist()


def gradient_of_all_to_all_on_one_tensor():
    x = _mine(4).requires_grad_()
    y = through.all_to_all_single(torch.zeros(4), x)
    (y * (dist.get_rank() + 1)).sum().backward()
    return y.tolist(), x.grad.tolist()


def gradient_of_gather_and_scatter():
    x, parts = _mine(2).requires_grad_(), [_mine(2).requires_grad_() for _ in range(4)]
    gathered = through.gather(x, 1)
    out = through.scatter(parts, 2)
    weights = torch.tensor(
        [1.0, 2.0]
    )  # the gradient of a bare sum is not contiguous, and gloo would send what lies behind it
    loss = sum((r + 1) * (weights * part).sum() for r, part in enumerate(gathered))
    (loss + (dist.get_rank() + 1) * (weights * out).sum()).backward()
    mine = [part.tolist() for part in gathered] if dist.get_rank() == 1 else None
    grads = [part.grad.tolist() for part in parts] if dist.get_rank() == 2 else None
    return mine, x.grad.tolist(), out.tolist(), grads


def gradient_of_reduce():
    x = _mine(2).requires_grad_()
    y = through.reduce(x, 3)
    (y * (dist.get_rank() + 1)).sum().backward()
    return y.tolist() if dist.get_rank() == 3 else None, x.grad.tolist()


# -- DTensor ---------------------------------------------------------------------------------------


def _mesh():
    return init_device_mesh("cpu", (4,))


def dtensor_from_one_to_another_placement():
    whole = torch.arange(32.0).view(8, 4)
    rows = distribute_tensor(whole, _mesh(), [Shard(0)])
    columns = rows.redistribute(placements=[Shard(1)])
    copies = columns.redistribute(placements=[Replicate()])
    return rows.to_local().tolist(), columns.to_local().tolist(), copies.to_local().tolist()


def dtensor_of_uneven_shards():
    rows = distribute_tensor(torch.arange(12.0).view(6, 2), _mesh(), [Shard(0)])
    return rows.to_local().tolist(), rows.full_tensor().tolist(), str(rows.placements)


def dtensor_of_partial_sums():
    partial = DTensor.from_local(torch.arange(4.0) + dist.get_rank(), _mesh(), [Partial()])
    return (
        partial.redistribute(placements=[Shard(0)]).to_local().tolist(),
        partial.full_tensor().tolist(),
    )


def dtensor_product_of_matrices():
    mesh = _mesh()
    a = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(1)])
    b = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0)])
    product = a @ b
    return str(product.placements), product.full_tensor().tolist()


def dtensor_on_two_dimensions():
    mesh = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0), Shard(1)])
    return x.to_local().tolist(), x.sum(0).full_tensor().tolist()


def dtensor_with_a_gradient():
    x = distribute_tensor(torch.arange(8.0), _mesh(), [Shard(0)]).requires_grad_()
    (x.full_tensor() * torch.arange(8.0)).sum().backward()
    return str(x.grad.placements), x.grad.full_tensor().tolist()


def dtensors_of_sizes_that_do_not_divide():
    """Redistribute tensors; torch's plan for a mesh and placements depends on the sizes of the rank's shards."""
    mesh, draws, told = init_device_mesh("cpu", (2, 2)), random.Random(3), []
    for _ in range(20):
        shape = [draws.choice([1, 2, 3, 5, 7]) for _ in range(draws.choice([1, 2]))]
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        placements = [
            [draws.choice([Shard(0), Shard(len(shape) - 1), Replicate()]) for _ in range(2)] for _ in range(2)
        ]
        spread = distribute_tensor(whole, mesh, placements[0])
        moved = spread.redistribute(mesh, placements[1])
        told.append([spread.to_local().tolist(), moved.to_local().tolist(), (moved * 2).full_tensor().tolist()])
        told.append(moved.sum(0).full_tensor().tolist())
    return told
