"""The check of clipping rejects broken functions, names the cause, and accepts the correct twin."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_clip_grad_norm, check_same_trajectory
from pdlcheck.errors import Inconclusive


def rows(*cases, names=("broken", "message")):
    """Parametrize a test over broken subjects; the id of each case is the name of its subject."""
    return pytest.mark.parametrize(names, [pytest.param(*case, id=case[0].__name__) for case in cases])


GRADIENTS = [[torch.tensor([3.0, 0.0])], [torch.tensor([4.0]), torch.tensor([12.0])], []]
REPLICATED = [[torch.tensor([3.0, 4.0])]] * 3
HALVES = [[torch.tensor([300.0], dtype=torch.float16)], [torch.tensor([400.0], dtype=torch.float16)]]


def grads_of(parameters):
    return [p.grad for p in parameters if p.grad is not None]


def scaled(parameters, norm, max_norm):
    for grad in grads_of(parameters):
        grad *= min(1.0, max_norm / (norm + 1e-6))
    return norm


def own_squares(parameters):
    return sum((grad.double() ** 2).sum() for grad in grads_of(parameters)) + torch.zeros((), dtype=torch.float64)


def squares_over_ranks(parameters, op=dist.ReduceOp.SUM):
    squares = own_squares(parameters)
    dist.all_reduce(squares, op)
    return float(squares)


def sharded(parameters, max_norm):
    return scaled(parameters, math.sqrt(squares_over_ranks(parameters)), max_norm)


def own_norm(parameters, max_norm):
    scaled(parameters, math.sqrt(own_squares(parameters)), max_norm)


def torchs_own(parameters, max_norm):
    nn.utils.clip_grad_norm_(parameters, max_norm)


def sums_norms(parameters, max_norm):
    norm = own_squares(parameters).sqrt()
    dist.all_reduce(norm)
    return scaled(parameters, float(norm), max_norm)


def averages_squares(parameters, max_norm):
    return scaled(parameters, math.sqrt(squares_over_ranks(parameters) / dist.get_world_size()), max_norm)


def largest_of_ranks(parameters, max_norm):
    norm = own_squares(parameters).sqrt()
    dist.all_reduce(norm, dist.ReduceOp.MAX)
    return scaled(parameters, float(norm), max_norm)


def without_a_root(parameters, max_norm):
    return scaled(parameters, float(squares_over_ranks(parameters)), max_norm)


def only_on_rank_0(parameters, max_norm):
    norm = math.sqrt(squares_over_ranks(parameters))
    return scaled(parameters, norm, max_norm if dist.get_rank() == 0 else math.inf)


def wrong_norm_returned(parameters, max_norm):
    return sharded(parameters, max_norm) / 2


def another_last_digit(parameters, max_norm):
    return sharded(parameters, max_norm) * (1 + 1e-14 * dist.get_rank())


def squares_in_half(parameters, max_norm):
    squares = sum((grad**2).sum() for grad in grads_of(parameters)).double()
    dist.all_reduce(squares)
    return scaled(parameters, math.sqrt(squares), max_norm)


def zeros_on_rank_1(parameters, max_norm):
    return scaled(parameters, math.sqrt(squares_over_ranks(parameters)), max_norm if dist.get_rank() == 0 else 0.0)


def norm_on_rank_0_only(parameters, max_norm):
    """Clip by the norm on rank 0 only; the others divide by the zero of a new buffer."""
    norm = torch.tensor(squares_over_ranks(parameters)).sqrt()
    for grad in grads_of(parameters):
        grad *= max_norm / (norm if dist.get_rank() == 0 else torch.zeros(()))


def not_the_first(parameters, max_norm):
    kept = [grad.clone() for grad in grads_of(parameters)]
    sharded(parameters, max_norm)
    if dist.get_rank() == 1:
        parameters[0].grad.copy_(kept[0])


def loses_the_first(parameters, max_norm):
    sharded(parameters, max_norm)
    if dist.get_rank() == 1:
        parameters[0].grad.zero_()


def nan_returned(parameters, max_norm):
    sharded(parameters, max_norm)
    return torch.nan


def loses_a_gradient(parameters, max_norm):
    sharded(parameters, max_norm)
    if dist.get_rank() == 1:
        parameters[1].grad = None


def test_check_clip_grad_norm_accepts(world):
    check_clip_grad_norm(sharded, world, gradients=GRADIENTS, max_norm=1.0)
    check_clip_grad_norm(sharded, world, gradients=GRADIENTS, max_norm=100.0)
    check_clip_grad_norm(sharded, world, gradients=HALVES, max_norm=1.0)
    check_clip_grad_norm(torchs_own, world, gradients=REPLICATED, max_norm=1.0, counted=[[True], [False], [False]])


@rows(
    (own_norm, r"rank 0 holds 0.999\d* at \(0,\) of gradient 0, 0.2307\d* is expected[\s\S]*norm of this rank alone"),
    (torchs_own, r"rank 0 holds [\s\S]*norms +13 over all ranks, rank 0: 3, rank 1: 12.6[\s\S]*of this rank alone"),
    (sums_norms, r"rank 0 holds [\s\S]*norms of ranks were added: add their powers"),
    (averages_squares, r"rank 0 holds [\s\S]*the powers of the norms were averaged, not added"),
    (largest_of_ranks, r"rank 0 holds [\s\S]*the largest norm of a rank was taken: add powers instead"),
    (without_a_root, r"rank 0 holds [\s\S]*the powers of the norms were added, and no root was taken of the sum"),
    (only_on_rank_0, r"rank 1 holds 4 at [\s\S]*the gradients were not clipped on this rank"),
    (zeros_on_rank_1, r"rank 1 holds 0 at [\s\S]*the gradients were multiplied by 0 on this rank\n"),
    (norm_on_rank_0_only, r"rank 1 holds inf at [\s\S]*multiplied by inf on this rank, as where a norm of 0 divides"),
    (not_the_first, r"rank 1 holds 4 at [\s\S]*gradient 0 was not clipped on this rank\n"),
    (loses_the_first, r"rank 1 holds 0 at [\s\S]*gradient 0 was multiplied by 0 on this rank\n"),
    (wrong_norm_returned, r"rank 0 returns 6.5, the norm of all gradients is 13"),
    (nan_returned, r"rank 0 returns nan, the norm of all gradients is 13"),
    (another_last_digit, r"rank 1 returns 13.0\d+, rank 0 returns 13.0\n.*different orders"),
    (loses_a_gradient, r"rank 1 has another gradient 1: None"),
)
def test_check_clip_grad_norm_rejects(world, broken, message):
    with pytest.raises(AssertionError, match=f"^{broken.__name__}: {message}"):
        check_clip_grad_norm(broken, world, gradients=GRADIENTS, max_norm=1.0)


def always_scaled(parameters, max_norm):
    norm = math.sqrt(squares_over_ranks(parameters))
    for grad in grads_of(parameters):
        grad *= max_norm / (norm + 1e-6)


def made_one(parameters, max_norm):
    always_scaled(parameters, 1.0)


@rows(
    (own_norm, 100.0, r"rank 0 holds 1.49\d* at [^$]*of this rank alone[^$]* max_norm=1.5 .half of a rank's norm. "),
    (always_scaled, 1.0, r"rank 0 holds 5.99\d* at [^$]*scaled up: a norm below [^$]* max_norm=26 .twice the norm. "),
    (made_one, 1.0, r"rank 0 holds 0.23\d* at [^$]*divided by their norm, whatever max_norm is\n[^$]*max_norm=26 "),
    names=("broken", "max_norm", "message"),
)
def test_check_clip_grad_norm_looks_on_both_sides_of_the_norm(world, broken, max_norm, message):
    with pytest.raises(AssertionError, match=f"^{broken.__name__}: {message}"):
        check_clip_grad_norm(broken, world, gradients=GRADIENTS, max_norm=max_norm)


def test_check_clip_grad_norm_rejects_copies_that_count(world):
    with pytest.raises(AssertionError, match=r"^sharded: rank 0 holds [\s\S]*were counted on each of them"):
        check_clip_grad_norm(sharded, world, gradients=REPLICATED, max_norm=1.0, counted=[[True], [False], [False]])


def test_check_clip_grad_norm_says_what_to_pass_for_copies_alone(world):
    cure = "; if these are copies of one gradient .data parallel., pass counted= with True on one rank alone[;\n]"
    with pytest.raises(AssertionError, match=rf"it must be that of all ranks{cure}"):
        check_clip_grad_norm(torchs_own, world, gradients=REPLICATED, max_norm=1.0)
    with pytest.raises(AssertionError, match="it must be that of all ranks\n"):
        check_clip_grad_norm(torchs_own, world, gradients=[*REPLICATED, []], max_norm=1.0)
    both, counted = [[torch.tensor([3.0]), torch.tensor([4.0])]] * 2, [[True, True], [False, True]]
    with pytest.raises(AssertionError, match=r"it must be that of all ranks; \(2\) norms"):  # it is passed already
        check_clip_grad_norm(torchs_own, world, gradients=both, max_norm=1.0, counted=counted)


def test_check_clip_grad_norm_rejects_squares_that_overflow(world):
    with pytest.raises(
        AssertionError, match=r"^squares_in_half: rank 0 holds 0 at [\s\S]*float16 overflowed, beyond 65504"
    ):
        check_clip_grad_norm(squares_in_half, world, gradients=HALVES, max_norm=1.0)


def test_check_clip_grad_norm_names_no_overflow_where_powers_have_a_place_in_the_dtype(world):
    small = [[grad / 100 for grad in own] for own in HALVES]
    with pytest.raises(AssertionError, match=r"^zeros_on_rank_1: rank 1 holds 0 at [\s\S]*were multiplied by 0 on"):
        check_clip_grad_norm(zeros_on_rank_1, world, gradients=small, max_norm=1.0)


def test_check_clip_grad_norm_needs_a_gradient(world):
    with pytest.raises(Inconclusive, match="all gradients are zero"):
        check_clip_grad_norm(sharded, world, gradients=[[torch.zeros(2)], [None]], max_norm=1.0)
    for number in (torch.inf, torch.nan):
        with pytest.raises(Inconclusive, match=r"the norm of the gradients is (inf|nan), no factor brings it to 1"):
            check_clip_grad_norm(sharded, world, gradients=[[torch.tensor([number, 1.0])], [None]], max_norm=1.0)


COMPLEX = [[torch.tensor([3 + 4j]), torch.tensor([12.0])], [torch.tensor([[2j, 1 - 2j]]), None]]


def of_absolute_values(parameters, max_norm, power=2, parts=torch.abs):
    total = sum(parts(grad).double().abs().pow(power).sum() for grad in grads_of(parameters))
    dist.all_reduce(total)
    return scaled(parameters, float(total) ** (1 / power), max_norm)


def of_real_parts(parameters, max_norm):
    of_absolute_values(parameters, max_norm, parts=lambda grad: grad.real)


def of_pairs(parameters, max_norm):
    of_absolute_values(
        parameters, max_norm, power=1, parts=lambda grad: torch.view_as_real(grad) if grad.is_complex() else grad
    )


def own_absolute_values(parameters, max_norm):
    torchs_own([p for p in parameters if p.grad is not None], max_norm)


def drops_imaginary_parts(parameters, max_norm):
    of_absolute_values(parameters, max_norm)
    for grad in grads_of(parameters):
        grad.copy_(grad.real.clone())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_check_clip_grad_norm_accepts_complex_gradients(world, dtype):
    gradients = [[grad if grad is None else grad.to(dtype) for grad in own] for own in COMPLEX]
    for given in (gradients, COMPLEX):
        for max_norm in (1.0, 100.0):
            check_clip_grad_norm(of_absolute_values, world, gradients=given, max_norm=max_norm)
            one = partial(of_absolute_values, power=1)
            check_clip_grad_norm(one, world, gradients=given, max_norm=max_norm, norm_type=1.0)
    copies = [gradients[0]] * 2
    check_clip_grad_norm(torchs_own, world, gradients=copies, max_norm=1.0, counted=[[True] * 2, [False] * 2])


@pytest.mark.parametrize(
    ("broken", "norm_type", "message"),
    [
        (
            of_real_parts,
            2.0,
            r"rank 0 holds .*j\) at \(0,\) of gradient 0, \(0.2\d*\+0.29\d*j\) is expected[\s\S]*imaginary",
        ),
        (
            of_pairs,
            1.0,
            r"rank 0 holds [\s\S]*real and imaginary parts were counted each for itself: the norm is that of",
        ),
        (own_absolute_values, 2.0, r"rank 0 holds [\s\S]*the norm of this rank alone was used"),
        (
            drops_imaginary_parts,
            2.0,
            r"rank 0 holds \(0.2\d*\+0j\) at \(0,\) of gradient 0, .*[\s\S]*imaginary parts of gradient 0 are dropped",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_check_clip_grad_norm_rejects_complex_gradients(world, broken, norm_type, message):
    with pytest.raises(AssertionError, match=f"^{broken.__name__}: {message}"):
        check_clip_grad_norm(broken, world, gradients=COMPLEX, max_norm=1.0, norm_type=norm_type)


def trained(before_step):
    """Return a training on this rank's half of the samples, which calls ``before_step(model)``."""
    inputs = torch.linspace(-1, 2, 24, dtype=torch.float64).view(3, 4, 2)

    def train(model, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for i in range(steps):
            optimizer.zero_grad()
            model(inputs[i].chunk(2)[dist.get_rank()]).square().mean().backward()
            before_step(model)
            optimizer.step()

    train.__name__ = before_step.__name__
    return train


def average(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def synchronised_then_clipped(model):
    average(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clipped_then_synchronised(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    average(model)


def clipped_by_hand(model):
    average(model)
    norm = math.sqrt(sum((p.grad**2).sum().item() for p in model.parameters()))
    for p in model.parameters():
        p.grad *= min(1.0, 0.1 / (norm + 1e-6))


def test_replicas_that_clip_before_they_synchronise_stay_in_sync_and_train_otherwise(world):
    """Replicas that clip before they synchronise stay in sync; only the steps of a reference show the error."""

    def make():
        return nn.Sequential(nn.Linear(2, 3), nn.Tanh())

    reference = trained(synchronised_then_clipped)
    check_same_trajectory(trained(clipped_by_hand), reference, make, world, steps=3)
    with pytest.raises(AssertionError, match=r"^clipped_then_synchronised: after 1 step\(s\) rank 0 holds"):
        check_same_trajectory(trained(clipped_then_synchronised), reference, make, world, steps=3)
