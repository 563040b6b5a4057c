"""The workers of DataParallel: settings, errors, random numbers, memory."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

verifies = pytest.mark.verifies("DataParallel")


class Context(nn.Module):
    """A module that records the settings of a worker's thread."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.seen: list[tuple[object, ...]] = []

    def forward(self, x):
        made = torch.ones(1)
        self.seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), made.dtype, made.device.type))
        return x @ self.weight


@pytest.mark.if_subject_takes("workers")
@verifies
def test_every_worker_has_the_settings_of_the_caller(subject):
    model = Context()
    replicated, x = subject(model, workers=3), torch.ones(3, 2)
    with torch.no_grad():
        assert not replicated(x).requires_grad
    with torch.inference_mode():
        assert replicated(x).is_inference()
    with torch.device("meta"):
        replicated(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert replicated(x).dtype == torch.bfloat16
    assert replicated(x).dtype == torch.float32
    expected = [(False, False, "cpu"), (False, True, "cpu"), (True, False, "meta"), (True, False, "cpu")]
    assert [(grad, inf, kind) for grad, inf, _, kind in model.seen[:12:3]] == expected
    assert all(model.seen[i] == model.seen[3 * (i // 3)] for i in range(15))


@pytest.mark.if_subject_takes("workers")
@verifies
def test_the_default_dtype_reaches_the_workers(subject):
    class Making(nn.Module):
        def forward(self, x):
            return x + torch.zeros(1)

    torch.set_default_dtype(torch.float64)
    try:
        assert subject(Making(), workers=2)(torch.ones(2, dtype=torch.int64)).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


class Failing(nn.Module):
    def __init__(self, *bad) -> None:
        super().__init__()
        self.bad, self.ended = bad, []

    def forward(self, x):
        if int(x[0]) in self.bad:
            raise KeyError(f"sample {int(x[0])}")
        time.sleep(0.05)  # longer than a failure takes
        self.ended.append(int(x[0]))
        return x


@pytest.mark.beyond_contract("error messages")
@verifies
@pytest.mark.parametrize("bad", [(0,), (1,), (2, 1), (0, 2)])
def test_one_error_is_raised_after_all_workers_have_ended_and_names_them(subject, bad):
    model = Failing(*bad)
    before = threading.active_count()
    with pytest.raises(KeyError, match=f"sample {min(bad)}") as caught:
        subject(model, workers=3)(torch.arange(3))
    assert caught.value.__notes__[0] == f"in worker {min(bad)} of 3 (cpu)"
    others = [f"worker {max(bad)} of 3 (cpu) failed too: KeyError: 'sample {max(bad)}'"] if len(bad) > 1 else []
    assert caught.value.__notes__[1:] == others
    assert sorted(model.ended) == sorted({0, 1, 2} - set(bad))
    assert threading.active_count() == before


@pytest.mark.if_subject_takes("rng", "workers")
@verifies
@pytest.mark.parametrize("rng", ["same", "distinct"])
def test_random_numbers_repeat_and_are_equal_on_all_workers_or_on_none(subject, rng):
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        replicated = subject(nn.Dropout(0.5), workers=3, rng=rng)
        drawn.append(torch.cat([replicated(torch.ones(3, 64)) for _ in range(2)]))
    assert torch.equal(*drawn)
    masks = [row.tolist() for row in drawn[0]]
    assert len({tuple(mask) for mask in masks}) == (2 if rng == "same" else 6)
    assert (masks[0] == masks[1] == masks[2]) == (rng == "same")


@pytest.mark.if_subject_takes("rng", "workers")
@verifies
def test_with_the_same_numbers_the_first_worker_draws_what_the_plain_module_draws(subject):
    torch.manual_seed(3)
    plain = nn.Dropout(0.5)(torch.ones(2, 8)), torch.rand(1)
    torch.manual_seed(3)
    found = subject(nn.Dropout(0.5), workers=2, rng="same")(torch.ones(4, 8)), torch.rand(1)
    assert torch.equal(found[0][:2], plain[0])
    assert torch.equal(found[1], plain[1])


@pytest.mark.if_subject_takes("rng", "workers")
@verifies
@pytest.mark.parametrize("rng", ["same", "distinct"])
def test_what_is_computed_again_in_backward_draws_the_same_numbers_again(subject, rng):
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2000))

        def forward(self, x):
            return checkpoint(lambda x: nn.functional.dropout(x * self.weight), x, use_reentrant=False)

    model = Recomputed()
    found = subject(model, workers=4, rng=rng)(torch.ones(4, 2000))
    found.sum().backward()
    assert torch.equal(model.weight.grad, found.detach().sum(0))


@pytest.mark.if_subject_takes("workers")
@verifies
@pytest.mark.world_size(2)
def test_a_rank_may_have_workers(subject, rank):
    model = nn.Linear(2, 1, bias=False)
    subject(model, workers=2)(torch.full((3, 2), rank + 1.0)).sum().backward()
    assert model.weight.grad.tolist() == [[3 * (rank + 1.0)] * 2]


# memory


@pytest.mark.verifies("memory_by_worker")
def test_memory_counts_what_each_worker_holds(subject):
    from pdlcheck.primitives import DataParallel

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            return self.last(torch.tanh(self.first(x)))

    replicated = DataParallel(Net(), workers=4)
    found = subject(replicated, lambda y: y.square().mean(), torch.ones(12, 8))
    parameters = 4 * (8 * 16 + 16 + 16 * 8 + 8)
    # A worker keeps its 3 samples of 8 numbers, and their 16 tanh. The first also keeps the output of all 12 for
    # square.
    assert [m.activations for m in found] == [4 * 3 * 24 + 4 * 12 * 8, *[4 * 3 * 24] * 3]
    assert {m.parameters for m in found} == {m.gradients for m in found} == {parameters}
    assert [m.total for m in found] == [m.parameters + m.gradients + m.activations for m in found]
    assert all(p.grad is None for p in replicated.parameters())
    assert len(subject(replicated, lambda y: y.sum(), torch.ones(2, 8))) == 2


@pytest.mark.verifies("memory_by_worker")
@pytest.mark.parametrize("workers", [1, 2])
def test_memory_counts_the_batch_and_not_the_data_that_it_was_cut_from(subject, workers):
    from pdlcheck.primitives import DataParallel

    replicated = DataParallel(nn.Linear(8, 1), workers=workers)
    found = subject(replicated, torch.sum, torch.ones(1000, 8)[:6])
    assert [m.activations for m in found] == [4 * 8 * 6 // workers] * workers


@pytest.mark.verifies("memory_by_worker")
def test_memory_of_sparse_gradients_and_buffers_and_of_modules_without_any(subject):
    from pdlcheck.primitives import DataParallel

    table = nn.Embedding(10, 3, sparse=True)
    table.register_buffer("chosen", torch.eye(10).to_sparse())
    first, other = subject(DataParallel(table, workers=2), torch.sum, torch.tensor([1, 2, 2, 5, 5, 5]))
    assert first.gradients == 6 * (8 + 3 * 4), "the samples of all workers are added up in the module"
    assert other.gradients == 3 * (8 + 3 * 4)
    assert first.parameters == other.parameters == 10 * 3 * 4 + 10 * (2 * 8 + 4)
    assert len(subject(DataParallel(nn.Identity(), workers=2), torch.sum, torch.ones(2, 1, requires_grad=True))) == 2


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("memory_by_worker")
def test_memory_is_of_data_parallel_only(subject):
    with pytest.raises(TypeError, match="memory_by_worker takes a DataParallel of pdlcheck, got Linear"):
        subject(nn.Linear(1, 1), torch.sum, torch.ones(1, 1))


@pytest.mark.if_subject_takes("workers")
@pytest.mark.gpu
@verifies
def test_two_workers_on_one_gpu(subject):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double().cuda()
    twin, x = copy.deepcopy(model), torch.randn(5, 4, dtype=torch.float64)
    replicated = subject(model, ["cuda:0", "cuda:0"])
    found, expected = replicated(x), twin(x.cuda())
    assert torch.allclose(found, expected, rtol=1e-12)
    found.square().mean().backward(), expected.square().mean().backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.allclose(a.grad, b.grad, rtol=1e-10) for a, b in pairs)
