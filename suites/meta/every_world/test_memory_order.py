"""Backends move memory as it lies: tensors whose elements lie in different orders would be mixed up silently."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import CollectiveMismatch

IMAGES = (2, 3, 2, 2)
pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor. is deprecated:FutureWarning")


def in_order(x, transposed):
    return x.t().contiguous().t() if transposed else x


def numbers(rank, *, transposed=False):
    return in_order(torch.arange(6.0).reshape(2, 3) + 10 * rank, transposed)


def all_reduce(x):
    dist.all_reduce(x)
    return x


def broadcast(x):
    dist.broadcast(x, 0)
    return x


def reduce(x):
    dist.reduce(x, 0)
    return x if dist.get_rank() == 0 else torch.zeros(0)


def reduce_scatter_flat(x):
    rows = torch.empty(1, 3)
    dist.reduce_scatter_tensor(rows, x)
    return rows


def scatter(x):
    own = [x, x + 1] if dist.get_rank() == 0 else None
    out = torch.empty_like(x)
    dist.scatter(out, own, 0)
    return out


COLLECTIVES = [all_reduce, broadcast, reduce, reduce_scatter_flat, scatter]


def call(collective, transposed):
    rank = dist.get_rank()
    return collective(numbers(rank, transposed=transposed[rank])).tolist()


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_ranks_whose_elements_lie_in_other_orders_are_told(world, collective):
    text = (
        r"ranks 0 and 1 met in collective 0 of the default group .* and differ in the order of elements in memory, by "
        r"which backends go: contiguous and dimensions \(1, 0\), of shape \(2, 3\); call .contiguous\(\) on every rank"
    )
    with pytest.raises(CollectiveMismatch, match=text):
        world.run(call, collective, (False, True), world_size=2)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_where_all_lie_alike_the_values_are_right(world, collective):
    contiguous = world.run(call, collective, (False, False), world_size=2)
    assert world.run(call, collective, (True, True), world_size=2) == contiguous


def sum_of_images(channels_last):
    memory_format = torch.channels_last if channels_last[dist.get_rank()] else torch.contiguous_format
    x = torch.arange(24.0).reshape(IMAGES).contiguous(memory_format=memory_format)
    dist.all_reduce(x)
    return x.flatten().tolist()


def test_channels_last_is_an_order(world):
    assert world.run(sum_of_images, (True, True), world_size=2) == [[2.0 * i for i in range(24)]] * 2
    with pytest.raises(CollectiveMismatch, match=r"dimensions \(0, 2, 3, 1\) and contiguous, of shape \(2, 3, 2, 2\)"):
        world.run(sum_of_images, (True, False), world_size=2)


def sum_of_one_channel():
    x = torch.arange(18.0).reshape(2, 1, 3, 3)
    x = x.to(memory_format=torch.channels_last) if dist.get_rank() else x
    dist.all_reduce(x)
    return x.flatten().tolist()


def sum_of_lines():
    x = torch.arange(24.0).reshape(2, 3, 1, 4)
    x = x[:, :, 0].mT.contiguous().mT if dist.get_rank() else x.contiguous(memory_format=torch.channels_last)
    dist.all_reduce(x)
    return x.flatten().tolist()


@pytest.mark.parametrize(("program", "count"), [(sum_of_one_channel, 18), (sum_of_lines, 24)])
def test_dimensions_of_one_element_lie_anywhere(world, program, count):
    assert world.run(program, world_size=2) == [[2.0 * i for i in range(count)]] * 2


def scatter_into(transposed):
    out = in_order(torch.zeros(2, 3), transposed)
    dist.scatter(out, [numbers(0), numbers(1)] if dist.get_rank() == 0 else None, 0)
    return out.tolist()


def reduce_scatter_of(transposed):
    out = torch.zeros(2, 3)
    dist.reduce_scatter(out, [numbers(0, transposed=transposed), numbers(1, transposed=transposed)])
    return out.tolist()


def all_to_all_into(transposed):
    out = in_order(torch.zeros(2, 3), transposed)
    dist.all_to_all_single(out, numbers(dist.get_rank()))
    return out.tolist()


@pytest.mark.parametrize("program", [scatter_into, reduce_scatter_of, all_to_all_into])
def test_a_rank_whose_own_tensors_lie_in_other_orders_is_told(world, program):
    name = program.__name__.rpartition("_")[0]
    with pytest.raises(RuntimeError, match=rf"{name} moves memory as it lies, .* strides \(1, 2\).*; call .contiguous"):
        world.run(program, True, world_size=2)
    assert all(isinstance(held, list) for held in world.run(program, False, world_size=2))


def gather_all(transposed):
    out = [in_order(torch.zeros(2, 3), transposed) for _ in range(2)]
    dist.all_gather(out, numbers(dist.get_rank(), transposed=not transposed))
    return [one.tolist() for one in out]


@pytest.mark.parametrize("transposed", [True, False])
def test_what_is_gathered_is_copied_element_by_element(world, transposed):
    assert world.run(gather_all, transposed, world_size=2) == [[numbers(0).tolist(), numbers(1).tolist()]] * 2


def first_column(values):
    """Return the first column of a table, with ``values``; other elements lie between them."""
    table = torch.full((len(values), 2), -1.0)
    table[:, 0] = torch.tensor(values)
    return table[:, 0]


def reduce_scatter_to(x):
    dist.reduce_scatter(x, [torch.ones(2), torch.ones(2)])


def scatter_from(x):
    dist.scatter(torch.empty(2), [x, x] if dist.get_rank() == 0 else None, 0)


def scatter_to(x):
    dist.scatter(x, [torch.ones(2), torch.ones(2)] if dist.get_rank() == 0 else None, 0)


@pytest.mark.parametrize("collective", [all_reduce, broadcast, reduce, reduce_scatter_to, scatter_from, scatter_to])
def test_other_elements_between_those_of_a_tensor_are_told(world, collective):
    """Gloo moves the block of memory in which the tensor begins: for a column, that of the first rows."""

    def program(in_one_block):
        x = first_column([1.0, 2.0])
        collective(x.contiguous() if in_one_block else x)

    world.run(program, True, world_size=2)
    name = collective.__name__.removesuffix("_to").removesuffix("_from")
    told = rf"{name} moves memory as it lies, .* as a column has: shape \(2,\), strides \(2,\); call .contiguous"
    with pytest.raises(RuntimeError, match=told):
        world.run(program, False, world_size=2)


def copies_columns():
    x, rank = first_column([1.0, 2.0]), dist.get_rank()
    gathered, own = [first_column([0.0, 0.0]) for _ in range(2)], torch.empty(2)
    dist.all_gather(gathered, x)
    dist.gather(x, gathered if rank == 0 else None, 0)
    dist.reduce_scatter(own, [x, x])
    return [one.tolist() for one in (*gathered, own)]


def test_columns_that_are_copied_are_right(world):
    assert world.run(copies_columns, world_size=2) == [[[1.0, 2.0], [1.0, 2.0], [2.0, 4.0]]] * 2
