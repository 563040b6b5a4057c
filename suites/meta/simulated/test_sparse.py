"""Sparse tensors in ``all_reduce`` on simulated ranks; ``parity`` compares the results with gloo."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.errors import BufferHazard, CollectiveMismatch
from pdlcheck.primitives.data_parallel import DistributedDataParallel
from pdlcheck.worlds import get_world

from ..needs_mpi import needs_mpi


def sum_of_sparse_tensors(early):
    """Sum sparse tensors; ``early`` is called with the tensor while the sum is pending."""
    place = dist.get_rank()
    x = torch.sparse_coo_tensor([[place, 2]], [1.0, 2.0], (3,))
    work = dist.all_reduce(x, async_op=True)
    early(x)
    work.wait()
    return x.to_dense().tolist()


@pytest.mark.parametrize(
    ("early", "access"),
    [(torch.Tensor.to_dense, "read"), (lambda x: x.mul_(2), "write"), (lambda x: x._values().mul_(2), "write")],
    ids=["read", "written", "written by its values"],
)
def test_a_sparse_tensor_is_held_by_its_operation(early, access):
    with pytest.raises(BufferHazard, match=r"all_reduce\(SUM\) of sparse float32 \(3,\)") as caught:
        get_world("sim").run(sum_of_sparse_tensors, early, world_size=2)
    assert caught.value.access == access
    assert get_world("sim").run(sum_of_sparse_tensors, len, world_size=2) == [[1.0, 1.0, 4.0]] * 2


def sparse_on_one_rank(right):
    x = torch.eye(2)
    dist.all_reduce(x if dist.get_rank() and not right else x.to_sparse())


def test_a_sparse_and_a_dense_tensor_do_not_fit_together():
    get_world("sim").run(sparse_on_one_rank, True, world_size=2)
    with pytest.raises(CollectiveMismatch, match=r"sparse float32"):
        get_world("sim").run(sparse_on_one_rank, False, world_size=2)


def test_indices_count_as_bytes_too():
    """A rank sends its two indices of 8 bytes and two values of 4; other ranks may send other numbers of them."""
    world = get_world("sim")
    world.run(sum_of_sparse_tensors, len, world_size=2)
    assert [world.traffic.sent_bytes(rank) for rank in range(2)] == [2 * (8 + 4)] * 2


def look_two_rows_up(rows):
    table = nn.Embedding(rows, 4, sparse=True)
    wrapped = DistributedDataParallel(table, init_sync=False)
    table.weight.grad = None
    wrapped(torch.tensor([dist.get_rank(), 5])).sum().backward()


def test_a_table_costs_the_rows_that_were_looked_up():
    """The cost of ten rows and of a million is equal: two indices, their rows and a buffer of flags."""
    sent = []
    for rows in (10, 1_000_000):
        world = get_world("sim")
        world.run(look_two_rows_up, rows, world_size=2)
        sent.append(world.traffic.sent_bytes(0))
    assert sent[0] == sent[1] < 1000


def keep_a_table_as_it_is(how):
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    if how == "frozen":
        model[0].requires_grad_(False)
    else:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    DistributedDataParallel(model)(torch.tensor([dist.get_rank()])).sum().backward()
    return model[1].bias.grad.item()


@needs_mpi
@pytest.mark.parametrize("how", ["frozen", "ignored"])
def test_a_table_without_a_gradient_to_sum_is_nothing_to_refuse(how):
    with closing(get_world("mpi")) as world:
        assert world.run(keep_a_table_as_it_is, how, world_size=2) == [1.0, 1.0]


@needs_mpi
def test_a_backend_that_sums_dense_tensors_alone_is_named():
    message = r"the gradient of 'weight', torch.float32, is sparse, of which .*mpi makes no sums; build"
    with closing(get_world("mpi")) as world, pytest.raises(ValueError, match=message):
        world.run(look_two_rows_up, 10, world_size=2)
