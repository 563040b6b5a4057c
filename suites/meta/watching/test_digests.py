"""Digests of tensors change with every bit and every place, and with nothing else."""

from __future__ import annotations

import pytest
import torch

from pdlcheck.watching.digests import ROW, Digester
from pdlcheck.watching.replica_sets import factors

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
SIZES = [1, 3, 2 * ROW, 5 * ROW + 7]  # of float64: small, and rows with a rest


def word(tensor):
    return Digester(torch.device("cpu")).words([tensor]).item()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int8, torch.bool])
def test_one_changed_element_changes_the_digest(dtype, size):
    tensor = (torch.arange(size) % 2).to(dtype)
    places = {0, size // 2, size - 1}
    changes = [tensor.clone() for _ in places]
    for changed, place in zip(changes, places, strict=True):
        changed.view(torch.uint8)[place * dtype.itemsize] ^= 1
    assert len({word(one) for one in (tensor, *changes)}) == 1 + len(places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("places", [[0, 1], [1, 3], [0, 1, 2, 3], [5, ROW + 5]])
def test_signs_of_several_elements_do_not_cancel_out(dtype, places):
    tensor = torch.ones(4 * ROW, dtype=dtype)
    changed = tensor.clone()
    highest = {4: -(2**31), 8: -(2**63)}[dtype.itemsize]
    integers = changed.view(torch.int32 if dtype.itemsize == 4 else torch.int64)
    integers[places] ^= highest
    assert word(tensor) != word(changed)


def test_two_exchanged_elements_or_rows_change_the_digest():
    tensor = torch.randn(8, 2 * ROW, generator=torch.Generator().manual_seed(0))
    rows, elements = tensor.clone(), tensor.clone()
    rows[[2, 3]] = tensor[[3, 2]]
    elements[0, [4, 5]] = tensor[0, [5, 4]]
    assert len({word(tensor), word(rows), word(elements)}) == 3


def test_a_nan_equals_itself_and_zeros_of_other_signs_differ():
    nan = torch.tensor([1.0, float("nan")])
    assert word(nan) == word(nan.clone())
    assert word(torch.tensor([0.0, 0.0])) != word(torch.tensor([0.0, -0.0]))


def test_strides_and_offsets_in_memory_do_not_count():
    tensor = torch.randn(300, 70, generator=torch.Generator().manual_seed(0))
    odd = torch.empty(tensor.numel() + 1)[1:].view_as(tensor).copy_(tensor)
    assert word(tensor) == word(tensor.t().contiguous().t()) == word(odd)


def test_a_digest_does_not_depend_on_the_tensors_beside_it():
    tensors = [torch.randn(size) for size in (0, 3, 3 * ROW, 1, 5)] + [torch.arange(4), torch.tensor(2.5)]
    digester = Digester(torch.device("cpu"))
    together = digester.words(tensors).tolist()
    assert together == [word(tensor) for tensor in tensors]
    assert together[0] == 0
    assert digester.words([]).tolist() == []


@pytest.mark.parametrize("count", [2, 3, 8, 100])
def test_the_factors_of_a_replica_set_add_up_to_zero(count):
    assert sum(factors(count)) % 2**64 == 0
    assert len(set(factors(count))) == count
    assert all(abs(factor) > 2**20 for factor in factors(count))
