"""The keys of a program's tensors are not converted to text: that may fail, take long, or read a tensor."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.errors import BufferHazard, CollectiveMismatch


class Silent:
    def __repr__(self):
        raise RuntimeError("asked for its text")


def gathers_parameters_that_are_keys(reads):
    """Gather parameters that are keys, as optimizers do that divide their states over ranks."""
    rank = dist.get_rank()
    parameters = [nn.Parameter(torch.zeros(4, 2)) for _ in range(2)]
    parts = {parameter: {"part": parameter.detach()[2 * rank : 2 * rank + 2]} for parameter in parameters}
    works = []
    for parameter, held in parts.items():
        held["part"].add_(1)
        works.append(dist.all_gather(list(parameter.detach().chunk(2)), held["part"], async_op=True))
    if reads:
        return repr(parameters[0])
    for work in works:
        work.wait()
    return [parameter.sum().item() for parameter in parameters]


def test_keys_may_be_parameters_under_way(world):
    assert world.run(gathers_parameters_that_are_keys, False, world_size=2) == [[8.0, 8.0]] * 2
    if world.name == "sim":
        with pytest.raises(BufferHazard, match="reads the output of a pending operation"):
            world.run(gathers_parameters_that_are_keys, True, world_size=2)


def sums_under(keys):
    grads = {key: torch.ones(2) for key in keys}
    for grad in grads.values():
        dist.all_reduce(grad)
    return [grad.tolist() for grad in grads.values()]


def test_keys_may_have_no_text(world):
    assert world.run(lambda: sums_under([Silent(), (Silent(), 1), "w"]), world_size=2) == [[[2, 2]] * 3] * 2


def test_keys_that_are_told_are_numbers_texts_and_pairs_of_them(world):
    """The calls are equal and in another order on each rank, so only the names of the keys distinguish them."""

    def swapped():
        keys = [("w", 0), 1, "b", 2.5]
        return sums_in_order({key: torch.full((2,), float(i)) for i, key in enumerate(keys)})

    with pytest.raises(CollectiveMismatch, match=r"grads\[\('w', 0\)\].*|grads\['b'\]"):
        world.run(swapped, world_size=2)


def sums_in_order(grads):
    order = list(grads)
    if dist.get_rank():
        order.reverse()
    for key in order:
        dist.all_reduce(grads[key])
