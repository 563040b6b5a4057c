"""Thirty tests whose verdicts must not depend on the world; each name begins with its verdict.

``python ci/same_verdicts.py`` runs them in every world and under every launcher. World sizes are at most 4.
"""

from __future__ import annotations

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel


def total(value: float) -> float:
    x = torch.tensor([value])
    dist.all_reduce(x)
    return x.item()


@pytest.fixture
def tensor(rank):
    return torch.full((3,), float(rank))


@pytest.fixture
def cleaned(rank, tmp_path):
    path = tmp_path / "left"
    path.write_text(str(rank))
    yield path
    path.unlink()


# -- that pass -------------------------------------------------------------------------------------


@pytest.mark.world_size(2, 3, 4)
def test_passed_all_reduce(rank, world_size):
    assert total(rank + 1.0) == world_size * (world_size + 1) / 2


@pytest.mark.world_size(4)
def test_passed_all_gather(tensor, world_size):
    out = [torch.empty(3) for _ in range(world_size)]
    dist.all_gather(out, tensor)
    assert [int(t[0]) for t in out] == [0, 1, 2, 3]


@pytest.mark.world_size(3)
@pytest.mark.parametrize("root", [0, 2])
def test_passed_broadcast(tensor, root):
    dist.broadcast(tensor, root)
    assert tensor.tolist() == [root] * 3


@pytest.mark.world_size(4)
def test_passed_ring(rank, world_size, tensor):
    received = torch.empty(3)
    sending = dist.isend(tensor, (rank + 1) % world_size)
    dist.recv(received, (rank - 1) % world_size)
    sending.wait()
    assert received[0] == (rank - 1) % world_size


@pytest.mark.world_size(4)
def test_passed_sub_group(rank):
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=group)
        assert x.item() == 4


@pytest.mark.world_size(2)
def test_passed_objects(rank):
    gathered: list[object] = [None, None]
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": 0}, {"rank": 1}]


@pytest.mark.world_size(2)
def test_passed_ddp(rank):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    model(torch.full((1, 2), float(rank))).sum().backward()
    assert next(model.parameters()).grad.tolist() == [[0.5, 0.5]]


@pytest.mark.world_size(2)
def test_passed_uneven_all_to_all(rank):
    out = torch.empty(3)
    dist.all_to_all_single(out, torch.arange(2.0 * (rank + 1)), [1, 2], [rank + 1] * 2)
    assert out.tolist() == ([0, 0, 1] if rank == 0 else [1, 2, 3])


@pytest.mark.world_size(2)
def test_passed_raises_on_one_rank(rank):
    if rank == 1:
        with pytest.raises(ZeroDivisionError):
            _ = 1 / 0
    dist.barrier()


@pytest.mark.world_size(2)
def test_passed_fixture_with_an_end(cleaned, rank):
    assert cleaned.read_text() == str(rank)


@pytest.mark.world_size(2)
def test_passed_monkeypatch(monkeypatch, rank):
    monkeypatch.setenv("ONLY_HERE", str(rank))
    assert os.environ["ONLY_HERE"] == str(rank)


class TestClass:
    @pytest.mark.world_size(2)
    def test_passed_method(self, rank):
        self.mine = rank
        dist.barrier()
        assert self.mine == rank


@pytest.mark.world_size(2)
@settings(max_examples=5, deadline=None)
@given(values=st.lists(st.integers(0, 99), min_size=2, max_size=2))
def test_passed_property(rank, values):
    assert total(float(values[rank])) == sum(values)


def test_passed_controller(world):
    assert world.run(total, 2.0, world_size=3) == [6.0] * 3


def test_passed_plain():
    assert 1 + 1 == 2


# -- that fail -------------------------------------------------------------------------------------


@pytest.mark.world_size(4)
def test_failed_one_rank(rank):
    dist.barrier()
    assert rank != 3, "rank 3 is wrong"
    dist.barrier()


@pytest.mark.world_size(2)
def test_failed_every_rank(rank):
    assert total(1.0) == 3


@pytest.mark.world_size(2)
def test_failed_before_the_collective(rank):
    if rank == 0:
        raise ValueError("no data on this rank")
    dist.barrier()


@pytest.mark.world_size(2)
def test_failed_deadlock(rank):
    dist.recv(torch.empty(1), 1 - rank)


@pytest.mark.world_size(2)
def test_failed_shapes(rank):
    dist.all_reduce(torch.ones(2 + rank))


@pytest.mark.world_size(3)
def test_failed_order(rank):
    a, b = torch.ones(2), torch.zeros(2)
    for x in (b, a) if rank == 1 else (a, b):
        dist.all_reduce(x)


@pytest.mark.world_size(2)
def test_failed_early_leaver(rank):
    for _ in range(2 + rank):
        dist.barrier()


@pytest.mark.world_size(2)
@settings(max_examples=20, deadline=None)
@given(value=st.integers(0, 99))
def test_failed_property(rank, value):
    assert not (rank == 1 and value > 9)


@pytest.fixture
def broken(rank):
    assert rank != 1, "no fixture on rank 1"


@pytest.mark.world_size(2)
def test_error_in_a_fixture(broken):
    pass


def test_failed_controller(world):
    assert world.run(total, 2.0, world_size=2) == [5.0] * 2


# -- neither ---------------------------------------------------------------------------------------


@pytest.mark.world_size(2)
def test_skipped_by_the_ranks():
    pytest.skip("not today")


@pytest.mark.skipif(True, reason="never")
@pytest.mark.world_size(2)
def test_skipped_by_a_mark():
    raise AssertionError


@pytest.mark.world_size(2)
def test_skipped_without_a_module():
    pytest.importorskip("no_such_module")


@pytest.mark.world_size(2)
@pytest.mark.xfail(reason="known", strict=True)
def test_xfailed_on_one_rank(rank):
    dist.barrier()
    assert rank == 0


@pytest.mark.world_size(2)
def test_passed_after_everything(rank):
    assert total(1.0) == 2
