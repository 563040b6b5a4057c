"""check_comm_hook distinguishes residuals that stay small from those that grow, also on one rank, and late means."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdlcheck.checks import check_comm_hook
from pdlcheck.worlds import get_world

SIM = get_world("sim")  # growing errors need hundreds of steps


def ready(tensor):
    future = torch.futures.Future()
    future.set_result(tensor)
    return future


def largest(grad):
    """Return the largest quarter of the entries, with zeros in place of the others."""
    flat = grad.flatten()
    at = flat.abs().topk(max(1, flat.numel() // 4)).indices
    return torch.zeros_like(flat).index_copy_(0, at, flat[at]).view_as(grad)


def above_3(grad):
    """Return the entries of magnitude 3 or more, so that small gradients are never sent."""
    return torch.where(grad.abs() >= 3, grad, 0)


def in_halves(grad):
    return grad.half().float()


class Hook:
    """A correct hook with error feedback by parameter; each class below breaks one part."""

    def __init__(self, module):
        self.names = {id(p): name for name, p in module.named_parameters()}
        self.left = {}

    def __call__(self, state, bucket):
        grads = bucket.gradients()
        for parameter, grad in zip(bucket.parameters(), grads, strict=True):
            name = self.names[id(parameter)]
            whole = grad + self.left.get(name, 0.0)
            sent = self.compress(whole)
            self.left[name] = self.keep(whole - sent)
            grad.copy_(sent)
        mean = bucket.buffer()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        return ready(self.given(bucket, mean))

    def compress(self, whole):
        return largest(whole)

    def keep(self, left):
        return left

    def given(self, bucket, mean):
        return mean


class Above3(Hook):
    def compress(self, whole):
        return above_3(whole)


class Halves(Hook):
    def compress(self, whole):
        return in_halves(whole)


class Rank0Loses(Hook):
    def keep(self, left):
        return left if dist.get_rank() else torch.zeros_like(left)


class Forgets(Hook):
    def keep(self, left):
        return 0.9 * left


class DropsAFifth(Hook):
    """A hook that drops a fifth of the elements, others in each step."""

    def __init__(self, module):
        super().__init__(module)
        self.draws = torch.Generator().manual_seed(dist.get_rank())

    def compress(self, whole):
        return whole * (torch.rand(whole.shape, generator=self.draws) >= 0.2)

    def keep(self, left):
        return torch.zeros_like(left)


class Late(Halves):
    """A hook that returns the mean of the step before."""

    def __init__(self, module):
        super().__init__(module)
        self.before = {}

    def given(self, bucket, mean):
        key = tuple(map(id, bucket.parameters()))
        before, self.before[key] = self.before.get(key, mean).clone(), mean.clone()
        return before


class OnlyUsed(Hook):
    """A hook that sends the residual of a parameter only in steps in which some rank uses the parameter.

    In other steps DDP drops what the hook sends.
    """

    def __call__(self, state, bucket):
        self.used = {}
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            used = grad.any().float()
            dist.all_reduce(used)
            self.used[parameter.shape] = bool(used)
        return super().__call__(state, bucket)

    def compress(self, whole):
        return largest(whole) if self.used[whole.shape] else torch.zeros_like(whole)


def made(hook):
    def make(module):
        made = hook(module)

        def called(state, bucket):
            return made(state, bucket)

        called.__name__ = hook.__name__
        return None, called

    return make


def test_check_comm_hook_accepts_what_sends_later(world):
    check_comm_hook(made(Hook), world, error_feedback=True)
    check_comm_hook(made(Halves), world, error_feedback=True, relative=2**-9)


@pytest.mark.slow
def test_check_comm_hook_accepts_what_is_never_sent_if_it_does_not_grow():
    check_comm_hook(made(Above3), SIM, error_feedback=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_check_comm_hook_follows_what_is_held_back_of_unused_parameters():
    check_comm_hook(made(OnlyUsed), SIM, error_feedback=True, unused=True)
    message = (
        r"gradient of 'weights\.2' is .* off[\s\S]* is sent in a step in which no rank uses the parameter, is lost"
    )
    with pytest.raises(AssertionError, match=message):
        check_comm_hook(made(Hook), SIM, error_feedback=True, unused=True)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [16, 160])
def test_check_comm_hook_names_the_rank_that_loses_what_it_does_not_send(steps):
    message = (
        r"^Rank0Loses: after \d+ steps the sum of what was applied to gradient of 'weights\.0' is .* off the sum of "
        r"the means, after \d+ steps .*\n.*\n.*cause  what rank 0 does not send is lost: add it to the next gradient"
    )
    with pytest.raises(AssertionError, match=message):
        check_comm_hook(made(Rank0Loses), SIM, error_feedback=True, steps=steps)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [Forgets, DropsAFifth])
def test_check_comm_hook_rejects_small_losses(broken):
    message = rf"^{broken.__name__}: after 512 steps the sum of .*, after 256 steps .*\n.*\n.* is not sent is lost: "
    with pytest.raises(AssertionError, match=message):
        check_comm_hook(made(broken), SIM, error_feedback=True)


@pytest.mark.parametrize("error_feedback", [False, True])
def test_check_comm_hook_rejects_the_mean_of_the_step_before(world, error_feedback):
    message = (
        r"^Late: after step 1\d every rank holds .*, the mean over ranks is .*[\s\S]*it is the mean of the step be"
    )
    with pytest.raises(AssertionError, match=message):
        check_comm_hook(made(Late), world, relative=2**-9, error_feedback=error_feedback)
