"""Our DistributedDataParallel on embeddings with sparse gradients: only rows that were looked up are sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from pdlcheck.checks import check_same_trajectory

from .models import TINY, alike, ddp, fitting, plain_hook

W2 = pytest.mark.world_size(2)


@pytest.fixture(autouse=True)
def of_sparse_tensors(request):
    """Skip worlds that cannot sum sparse tensors."""
    name = request.node.callspec.params["world"] if "world" in request.fixturenames else dist.get_backend()
    if name not in ("gloo", "sim"):
        pytest.skip(f"{name} makes no sparse sums")


class Words(nn.Module):
    """A table and a head; with ``tied`` the table is the weight of the head."""

    def __init__(self, *, tied=False):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 2, sparse=True), nn.Linear(2, 7)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, words, *, head=True):
        found = torch.ones(1, 2, dtype=torch.float64) if words is None else self.table(words)
        return self.head(found) if head else found


class Bags(nn.Module):
    """A model with a table only."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(7, 2, mode="sum", sparse=True)

    def forward(self, words):
        return self.table(words[None])


def words_of(rank, step=0):
    """Return words that all ranks have, words of one rank, and one word twice."""
    return torch.tensor([0, rank + 1, rank + 1, (rank + step) % 3 + 3])


def loss(model, rank, step=0):
    return model(words_of(rank, step)).square().mean()


def dense(model):
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {n: g.to_dense() if g is not None and g.layout == torch.sparse_coo else g for n, g in grads.items()}


def of_one_process(make, losses):
    """Return the mean of these losses' gradients, computed by one process."""
    model = alike(make)
    found = losses(model)
    (sum(found) / len(found)).backward()
    return dense(model)


def require_same(model, goal):
    torch.testing.assert_close(dense(model), goal, rtol=1e-12, atol=1e-12)


OPTIONS = [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}, TINY]


@ddp
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("make", [Words, Bags], ids=["beside others", "alone"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options), "plain"))
def test_the_gradient_is_that_of_one_process_and_stays_sparse(subject, rank, world_size, make, options):
    model = alike(make)
    wrapped = subject(model, **fitting(subject, options))
    for step in range(3):
        model.zero_grad()
        loss(wrapped, rank, step).backward()
        assert model.table.weight.grad.layout == torch.sparse_coo
        assert model.table.weight.grad._nnz() < 7
        require_same(model, of_one_process(make, lambda m, step=step: [loss(m, r, step) for r in range(world_size)]))


def trainer(wrap):
    def train(model, steps):
        wrapped, optimizer = wrap(model), torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            loss(wrapped, dist.get_rank(), step).backward()
            optimizer.step()

    return train


@ddp
def test_it_trains_as_torchs_does(subject, world):
    check_same_trajectory(trainer(subject), trainer(TorchDistributedDataParallel), Words, world, steps=3)


@pytest.mark.beyond_contract("sparse gradients beyond torch's")
@ddp
@pytest.mark.world_size(3)
def test_a_rank_that_looks_nothing_up_takes_part(subject, rank):
    model = alike(Words)
    wrapped = subject(model, find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        wrapped(words_of(1) if rank == 1 else None).sum().backward()
        require_same(model, of_one_process(Words, lambda m: [m(None).sum(), m(words_of(1)).sum(), m(None).sum()]))
    model.zero_grad()
    wrapped(None).sum().backward()
    assert model.table.weight.grad is None, "no rank has used it"


@pytest.mark.beyond_contract("error messages")
@ddp
@W2
def test_a_table_that_is_not_used_is_named_on_every_rank(subject, rank):
    model = alike(Words)
    wrapped = subject(model)
    with pytest.raises(RuntimeError, match=r"on rank 1, parameter 'table.weight' got no gradient in this backward"):
        wrapped(words_of(0) if rank == 0 else None).sum().backward()
    model.zero_grad()
    loss(wrapped, rank).backward()
    require_same(model, of_one_process(Words, lambda m: [loss(m, 0), loss(m, 1)]))


@ddp
@W2
def test_gradients_add_up_without_synchronisation(subject, rank):
    model = alike(Words)
    wrapped = subject(model)
    with wrapped.no_sync():
        loss(wrapped, rank, 0).backward()
    loss(wrapped, rank, 1).backward()
    require_same(model, of_one_process(Words, lambda m: [loss(m, r, 0) + loss(m, r, 1) for r in range(2)]))


@pytest.mark.beyond_contract("sparse gradients beyond torch's")
@ddp
@W2
@pytest.mark.parametrize("used", [[0, 1], [1]], ids=["on every rank", "on rank 1"])
@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_a_table_that_is_the_weight_of_a_layer_too(subject, rank, used, as_view):
    """The gradient is dense on ranks that use the layer."""

    def make():
        return Words(tied=True)

    def part(model, rank):
        return model(words_of(rank), head=rank in used).square().mean()

    model = alike(make)
    wrapped = subject(model, find_unused_parameters=True, gradient_as_bucket_view=as_view)
    for _ in range(2):
        model.zero_grad()
        part(wrapped, rank).backward()
        assert (model.table.weight.grad.layout == torch.strided) == (rank in used)
        require_same(model, of_one_process(make, lambda m: [part(m, 0), part(m, 1)]))


@pytest.mark.beyond_contract("sparse gradients beyond torch's")
@ddp
@W2
def test_a_communication_hook_sees_dense_gradients_alone(subject, rank):
    seen = []

    def hook(state, bucket):
        assert bucket.buffer().layout == torch.strided
        seen.append((len(bucket.parameters()), bucket.is_last()))
        return plain_hook(state, bucket)

    model = alike(Words)
    wrapped = subject(model)
    wrapped.register_comm_hook(None, hook)
    for _ in range(2):
        model.zero_grad()
        loss(wrapped, rank).backward()
        require_same(model, of_one_process(Words, lambda m: [loss(m, 0), loss(m, 1)]))
    assert seen == [(2, True)] * 2


@pytest.mark.beyond_contract("error messages")
@ddp
@W2
@pytest.mark.parametrize("make", [Words, Bags], ids=["beside others", "alone"])
def test_a_communication_hook_of_one_rank_is_an_error_on_every_rank(subject, rank, make):
    model = alike(make)
    wrapped = subject(model, **fitting(subject, TINY))
    if rank == 1:
        wrapped.register_comm_hook(None, plain_hook)
    with pytest.raises(ValueError, match="hook"):
        loss(wrapped, rank).backward()


@pytest.mark.beyond_contract("sparse gradients beyond torch's")
@ddp
@W2
def test_ranks_may_have_different_numbers_of_inputs(subject, rank):
    model = alike(Words)
    wrapped = subject(model)
    with wrapped.join():
        for step in range(1 + rank):
            model.zero_grad()
            loss(wrapped, rank, step).backward()
    if rank == 1:
        require_same(model, of_one_process(Words, lambda m: [m(words_of(0)).sum() * 0, loss(m, 1, 1)]))


@pytest.mark.if_subject_takes("reduce_dtype")
@ddp
@pytest.mark.world_size(3)
def test_rows_of_low_precision_are_summed_in_float32(subject, rank):
    table = nn.Embedding(2, 1, sparse=True, dtype=torch.bfloat16)
    grads = torch.tensor([1.0, 2.0**-8, 2.0**-8])  # their mean differs if bfloat16 rounds its parts
    subject(table, reduce_dtype=torch.float32)(torch.tensor([1])).backward(grads[rank].bfloat16().view(1, 1))
    assert table.weight.grad.dtype == torch.bfloat16
    assert table.weight.grad.to_dense()[1].item() == grads.mean().bfloat16().item()


@pytest.mark.beyond_contract("error messages")
@ddp
@W2
def test_a_table_that_is_sparse_on_one_rank_alone_is_refused(subject, rank):
    with pytest.raises(ValueError, match=r"sparse=\['weight'\] on rank 0 and sparse=\[\] on rank 1"):
        subject(nn.Embedding(3, 2, sparse=rank == 0))


@pytest.mark.beyond_contract("error messages")
@ddp
@W2
def test_complex_tables_are_refused(subject):
    with pytest.raises(ValueError, match=r"gradient of 'weight', torch.complex64, is sparse, of which .* makes no"):
        subject(nn.Embedding(3, 2, sparse=True, dtype=torch.complex64))
