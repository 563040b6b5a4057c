"""DiLoCo equals the algorithm of its paper, and local SGD or synchronous SGD in its limit cases."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pdlcheck.checks import check_local_sgd

from .training import ADAM, MOMENTUM, OUTERS, PLAIN, POLICIES, backward, few, made, sgd, synchronous


@pytest.mark.verifies("DiLoCo")
@few
@given(
    sync_every=st.integers(1, 4),
    outer=st.sampled_from(OUTERS),
    optimizer=st.sampled_from([MOMENTUM, ADAM]),
    policies=POLICIES,
    steps=st.one_of(st.just(7), st.lists(st.integers(0, 6), min_size=2, max_size=4).filter(any)),
)
def test_diloco_is_what_its_paper_says(subject, world, sync_every, outer, optimizer, policies, steps):
    diloco = partial(subject, sync_every=sync_every, outer=sgd(outer), **policies)
    rule = {"sync_every": sync_every, "outer": outer, **policies}
    check_local_sgd(diloco, world, optimizer=optimizer, steps=steps, **rule)


@pytest.mark.verifies("DiLoCo")
def test_diloco_takes_nodes_as_replicas(subject, world):
    diloco = partial(subject, sync_every=2, outer=sgd(OUTERS[1]))
    check_local_sgd(diloco, world, sync_every=2, outer=OUTERS[1], nodes=[[0, 1], [2]], steps=5, buffers="broadcast")


@pytest.mark.verifies("DiLoCo")
@pytest.mark.parametrize("steps", [6, [5, 2, 3]], ids=str)
def test_diloco_with_an_outer_rate_of_1_and_no_momentum_is_local_sgd(subject, world, steps):
    diloco = partial(subject, sync_every=2, outer=sgd((1.0, 0.0, False)))
    check_local_sgd(diloco, world, sync_every=2, steps=steps, buffers="broadcast")


@pytest.mark.verifies("DiLoCo")
@pytest.mark.parametrize("nesterov", [True, False])
def test_diloco_in_every_step_over_plain_sgd_is_synchronous_sgd_with_momentum(subject, world, nesterov):
    """The learning rate of that SGD is the product of the two rates."""

    def weights(wrap, optimizer):
        def train():
            model = made()
            trainer = wrap(optimizer(model.parameters()), model)
            for step in range(6):
                backward(model, step)
                trainer.step()
            return nn.utils.parameters_to_vector(model.parameters()).detach()

        return world.run(train, world_size=3)

    diloco = weights(partial(subject, sync_every=1, outer=sgd((0.7, 0.9, nesterov))), PLAIN)
    product = partial(torch.optim.SGD, lr=0.07, momentum=0.9, nesterov=nesterov)
    for found, expected in zip(diloco, weights(synchronous, product), strict=True):
        assert (found - expected).abs().max() < 1e-13
