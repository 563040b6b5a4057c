"""The check of communication hooks rejects those that lose, repeat or mix gradients; torch's own correct hooks pass."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs_power_sgd
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_comm_hook
from pdlcheck.errors import CollectiveMismatch, Deadlock, Inconclusive
from pdlcheck.worlds import get_world

from ...torchs_limits import NO_POWER_SGD

EXACT = 1e-6  # float32 sums of three terms
MATRICES = [(8, 8), (8, 8), (8, 8)]


def ready(tensor):
    future = torch.futures.Future()
    future.set_result(tensor)
    return future


def reduced(tensor):
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def a_mean(state, bucket):
    return ready(reduced(bucket.buffer()))


def a_sum(state, bucket):
    dist.all_reduce(bucket.buffer())
    return ready(bucket.buffer())


def divided_twice(state, bucket):
    return ready(reduced(bucket.buffer()) / dist.get_world_size())


def nothing_reduced(state, bucket):
    return ready(bucket.buffer())


def of_rank_0(state, bucket):
    dist.broadcast(bucket.buffer(), 0)
    return ready(bucket.buffer())


def zeros(state, bucket):
    return ready(torch.zeros_like(bucket.buffer()))


def the_last_bucket_alone(state, bucket):
    return ready(reduced(bucket.buffer()) if bucket.is_last() else bucket.buffer())


MEANS = {}


def of_the_step_before(state, bucket):
    """Return the mean of the step before, as if communication overlapped with the next step."""
    key = dist.get_rank(), bucket.index(), bucket.buffer().numel()
    mean = reduced(bucket.buffer())
    before, MEANS[key] = MEANS.get(key, mean), mean
    return ready(before)


def four_bits(state, bucket):
    """Round to a sixteenth of the largest entry, which is coarser than promised."""
    mean = reduced(bucket.buffer())
    unit = mean.abs().max() / 16
    return ready((mean / unit).round() * unit)


def narrow_sum(state, bucket):
    """Round the sum before it is divided, so that large values overflow."""
    return ready(reduced((bucket.buffer() * 1000).half()).float() / 1000)


def stochastic(state, bucket):
    """Round the mean up or down by random numbers of this rank."""
    mean = reduced(bucket.buffer())
    return ready(mean * (1 + 2e-7 * torch.randint(0, 2, mean.shape)))


class Kept(dict):
    """A dict whose values are dicts of residuals by parameter name."""

    def __init__(self, module) -> None:
        super().__init__()
        self.names = {id(p): name for name, p in module.named_parameters()}

    def by_name(self):
        return {name: part for parts in self.values() for name, part in parts.items()}


def largest(whole):
    """Return the largest quarter of the entries, with zeros in place of the others."""
    return torch.where(whole.abs() >= whole.abs().flatten().quantile(0.75), whole, 0)


def sparse(keep):
    """Return a hook that sends the largest entries, and keeps ``keep(whole, sent)`` for the next step."""

    def hook(state, bucket):
        # residuals are keyed by parameter, because DDP makes other buckets after the first step
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = state.names[id(parameter)]
            whole = grad + state.setdefault(name, {}).get(name, torch.zeros_like(grad))
            sent = largest(whole.clone())
            state[name] = {name: keep(whole, sent)}
            grad.copy_(sent)
        return ready(reduced(bucket.buffer()))

    return hook


with_feedback = sparse(lambda whole, sent: whole - sent)
without_feedback = sparse(lambda whole, sent: torch.zeros_like(whole))
forgetting = sparse(lambda whole, sent: 0.9 * (whole - sent))
repeating = sparse(lambda whole, sent: whole)
keeping_the_negative = sparse(lambda whole, sent: sent - whole)


def made(hook):
    return lambda module: (Kept(module), hook)


def torchs_state(module):
    warnings.simplefilter("ignore")
    return torchs_power_sgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)


def torchs(state, bucket):
    return torchs_power_sgd.powerSGD_hook(state, bucket)


def torchs_waited_for(state, bucket):
    future = torchs(state, bucket)
    future.wait()
    return future


@pytest.mark.parametrize("unused", [False, True], ids=["used", "unused"])
@pytest.mark.parametrize(
    ("hook", "relative"),
    [
        (a_mean, EXACT),
        (default_hooks.allreduce_hook, EXACT),
        (default_hooks.fp16_compress_hook, 2**-9),
        (default_hooks.bf16_compress_hook, 2**-6),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_check_comm_hook_accepts(hook, relative, unused, world):
    check_comm_hook(lambda module: (None, hook), world, relative=relative, unused=unused, steps=4)


def test_check_comm_hook_accepts_error_feedback(world):
    check_comm_hook(made(with_feedback), world, error_feedback=True, residual=Kept.by_name)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (a_sum, r"(?s)the mean over ranks is .*it is world_size = 3 times too large: summed, not averaged"),
        (divided_twice, "(?s)the mean over ranks is .*it is world_size = 3 times too small: divided twice"),
        (nothing_reduced, "(?s)differ after step 1: rank 1 .*it is this rank's own gradient: never reduced"),
        (of_rank_0, "(?s)the mean over ranks is .*it is the gradient of rank 0: never reduced"),
        (zeros, "(?s)holds 0 at .*it is zero: the gradient was lost"),
        (the_last_bucket_alone, "(?s)differ after step 2: rank 1 .*it is this rank's own gradient: never reduced"),
        (of_the_step_before, "(?s)the mean over ranks is .*it is the mean of the step before"),
        (four_bits, "(?s)the mean over ranks is .*allowed error"),
        (narrow_sum, "(?s)every rank holds -?inf at .*numbers overflow in the narrow dtype"),
        (stochastic, "replicas differ after step 1: rank 1 holds"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_check_comm_hook_rejects(hook, message, world):
    with pytest.raises(AssertionError, match=message) as caught:
        check_comm_hook(lambda module: (None, hook), world, relative=EXACT, steps=4)
    assert str(caught.value).startswith(f"{hook.__name__}: ")
    assert "world_size=3 steps=4" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (without_feedback, "(?s)the sum of what was applied .* off the sum of the means.*lost: add it to the next"),
        (repeating, "(?s)the sum of what was applied.*what has been sent must not be kept and sent again"),
    ],
    ids=["without_feedback", "repeating"],
)
def test_check_comm_hook_rejects_errors_that_grow(hook, message):
    with pytest.raises(AssertionError, match=message):
        check_comm_hook(made(hook), get_world("sim"), error_feedback=True)


@pytest.mark.parametrize(
    "hook",
    [without_feedback, forgetting, repeating, keeping_the_negative],
    ids=["without_feedback", "forgetting", "repeating", "keeping_the_negative"],
)
def test_check_comm_hook_rejects_a_residual_that_is_not_what_was_left_out(hook, world):
    with pytest.raises(AssertionError, match=r"(?s)plus the mean of what the ranks hold back, is .* of the means is"):
        check_comm_hook(made(hook), world, residual=Kept.by_name, steps=5)


@NO_POWER_SGD
@pytest.mark.parametrize("schedule", ["first", "random:0", "random:1", "random:2"])
def test_check_comm_hook_meets_the_crossed_operations_of_torchs_power_sgd(schedule):
    world = get_world("sim", schedule=schedule)
    with pytest.raises((CollectiveMismatch, Deadlock), match=r"all_reduce\(SUM\)|no rank can go on"):
        check_comm_hook(lambda m: (torchs_state(m), torchs), world, error_feedback=True, shapes=MATRICES)
    check_comm_hook(lambda m: (torchs_state(m), torchs_waited_for), world, error_feedback=True, shapes=MATRICES)


def test_check_comm_hook_sees_a_hook_that_is_never_called(world):
    class Deaf(DistributedDataParallel):
        def register_comm_hook(self, state, hook):
            pass

    def wrap(module, bucket_bytes, find_unused):
        return Deaf(module)

    with pytest.raises(AssertionError, match="a_mean: the hook was never called"):
        check_comm_hook(lambda module: (None, a_mean), world, relative=EXACT, wrap=wrap)


def test_check_comm_hook_says_which_shapes_a_hook_could_not_take(world):
    def rows(state, bucket):
        for gradient in bucket.gradients():
            gradient.view(gradient.shape[0], -1)
        return a_mean(state, bucket)

    with pytest.raises(IndexError) as error:
        check_comm_hook(lambda module: (None, rows), world, relative=EXACT)
    told = "while check_comm_hook trained parameters of shapes (8, 12), (5,), (6, 9), (2, 3, 8), (); pass other shapes="
    assert any(note.startswith(told) for note in error.value.__notes__), error.value.__notes__
    check_comm_hook(lambda module: (None, rows), world, relative=EXACT, shapes=MATRICES)


def test_check_comm_hook_is_inconclusive_where_it_sees_nothing(world):
    with pytest.raises(Inconclusive, match="was told of no promise; pass relative, error_feedback or residual"):
        check_comm_hook(lambda module: (None, a_mean), world)
    with pytest.raises(Inconclusive, match="all gradients came in one bucket"):
        check_comm_hook(lambda module: (None, a_mean), world, relative=EXACT, bucket_bytes=10**6)
    with pytest.raises(ValueError, match="needs world_size 2 or more, got 1"):
        check_comm_hook(lambda module: (None, a_mean), world, relative=EXACT, world_size=1)
    with pytest.raises(ValueError, match="needs 8 steps or more to see an error grow, got 3"):
        check_comm_hook(lambda module: (None, a_mean), world, error_feedback=True, steps=3)
