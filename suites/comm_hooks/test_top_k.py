"""Tests of the top-k hook with error feedback."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlcheck.primitives import TopKState

from .models import MATRICES, applied, drawn, mean, rank_one, residual, wrappers

few = settings(max_examples=6)


@pytest.mark.verifies("top_k")
@wrappers
@few
@given(
    world_size=st.sampled_from([1, 2, 4]),
    ratio=st.sampled_from([0.01, 0.3, 1.0]),
    steps=st.integers(1, 4),
    bucket_bytes=st.sampled_from([1, 100, 10**6]),
    seed=st.integers(0, 99),
)
def test_what_top_k_applied_and_what_it_keeps_are_the_gradients_exactly(
    subject, world, wrapper, world_size, ratio, steps, bucket_bytes, seed
):
    shapes = [(3, 4), (), (7,), (0,), (2, 2, 2)]
    grads = drawn(world_size, steps, shapes, seed=seed)

    def train():
        found, state = applied(
            lambda m: (TopKState(m, ratio=ratio), subject), grads, wrapper=wrapper, bucket_bytes=bucket_bytes
        )
        return found, residual(state)

    everyone = world.run(train, world_size=world_size)
    for place in range(len(shapes)):
        applied_sum = sum(step[place] for step in everyone[0][0]) * world_size
        kept = sum(held[f"weights.{place}"] for _, held in everyone)
        assert torch.equal(applied_sum + kept, sum(step[place] for rank in grads for step in rank))


@pytest.mark.verifies("top_k")
@wrappers
def test_top_k_sends_the_largest_entries_of_each_parameter(subject, world, wrapper):
    def step():
        grads = [[[torch.tensor([1.0, -8, 3, 2]), torch.tensor([0.5, 0.25])]], [[torch.tensor([4.0, 1, 1, 1])] * 2]]
        grads[1][0][1] = torch.tensor([0.25, 2.0])
        make = partial(TopKState, ratio=0.25)
        return applied(lambda m: (make(m), subject), grads, wrapper=wrapper, dtype=torch.float32)[0][0]

    for first, other in world.run(step, world_size=2):
        assert first.tolist() == [2, -4, 0, 0]
        assert other.tolist() == [0.25, 1]


@pytest.mark.verifies("top_k")
@wrappers
@pytest.mark.parametrize("ratio", [0.2, 1.0])
def test_the_buckets_do_not_matter_to_top_k(subject, world, ratio, wrapper):
    grads = drawn(3, 4, MATRICES)

    def train():
        def make(module):
            return TopKState(module, ratio=ratio), subject

        return [applied(make, grads, wrapper=wrapper, bucket_bytes=nbytes)[0] for nbytes in (1, 200, 10**6)]

    one, two, three = world.run(train, world_size=3)[0]
    for step in range(4):
        for place in range(3):
            assert torch.equal(one[step][place], two[step][place])
            assert torch.equal(two[step][place], three[step][place])
            if ratio == 1:
                assert torch.equal(one[step][place], mean(grads, step, place))


@wrappers
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.verifies(n), id=n) for n in ("power_sgd", "top_k")])
def test_a_parameter_that_nobody_uses_keeps_its_residual(name, subject, world, wrapper):
    make = {"top_k": lambda m: (TopKState(m, ratio=0.1), subject), "power_sgd": lambda m: (rank_one(m)[0], subject)}

    def train():
        grads = drawn(2, 3, MATRICES)
        for rank in grads:
            rank[1][0] = None
        seen = []

        def look(number, state):
            seen.append(residual(state)["weights.0"])

        applied(make[name], grads, wrapper=wrapper, unused=True, between=look)
        return seen

    for first, second, third in world.run(train, world_size=2):
        assert first.any()
        assert torch.equal(first, second)
        assert not torch.equal(second, third)


@pytest.mark.verifies("top_k")
@wrappers
@pytest.mark.world_size(2)
def test_without_error_feedback_nothing_is_kept(subject, world_size, wrapper):
    grads = drawn(world_size, 2, MATRICES)
    make = partial(TopKState, ratio=0.1, error_feedback=False)
    _, state = applied(lambda m: (make(m), subject), grads, wrapper=wrapper)
    assert residual(state) == {}
