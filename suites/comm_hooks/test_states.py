"""States of communication hooks are saved, restored and refused."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from pdlcheck.primitives import PowerSGDState, TopKState, bf16_compress, fp16_compress, power_sgd, top_k

from .models import MATRICES, applied, drawn, quarter, rank_one, rank_two_later, residual, wrappers

# checkpoints


@wrappers
@pytest.mark.parametrize("make", [quarter, rank_one, rank_two_later], ids=["top_k", "rank 1", "rank 2 later"])
def test_a_restored_state_goes_on_bit_for_bit(make, world, wrapper):
    grads = drawn(2, 6, MATRICES)

    def train():
        whole, _ = applied(make, grads, wrapper=wrapper)
        file = io.BytesIO()
        _, state = applied(make, [rank[:4] for rank in grads], wrapper=wrapper)
        torch.save(state.state_dict(), file)
        file.seek(0)

        def restored(module):
            new, hook = make(module)
            new.load_state_dict(torch.load(file, weights_only=True))
            return new, hook

        rest, _ = applied(restored, [rank[4:] for rank in grads], wrapper=wrapper)
        return whole[4:], rest

    for whole, rest in world.run(train, world_size=2):
        for a, b in zip(whole, rest, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("make", [TopKState, PowerSGDState], ids=["TopKState", "PowerSGDState"])
def test_a_state_of_another_rank_world_or_model_is_refused(make, rank):
    name = make.__name__
    model = nn.Linear(3, 2)
    state = make(model)
    saved = state.state_dict()
    for place in ({"rank": 1 - rank}, {"world_size": 3}):
        with pytest.raises(ValueError, match=rf"{name} got the state of rank \d of \d on rank {rank} of 2; a rank's"):
            state.load_state_dict(saved | place)
    with pytest.raises(ValueError, match=f"{name} got a saved residual of 'other', the model has no such parameter"):
        state.load_state_dict(saved | {"residuals": {"other": torch.zeros(1)}})
    with pytest.raises(ValueError, match=r"saved residual of shape \(3, 2\) for 'weight', whose shape is \(2, 3\)"):
        state.load_state_dict(saved | {"residuals": {"weight": torch.zeros(3, 2)}})
    if make is PowerSGDState:
        with pytest.raises(ValueError, match="PowerSGDState of rank=1 got a state of rank=2"):
            state.load_state_dict(make(model, rank=2).state_dict())
        with pytest.raises(ValueError, match="saved factors of 'other', the model has no such parameter"):
            state.load_state_dict(saved | {"factors": {"other": torch.zeros(1)}})


@pytest.mark.world_size(2)
@wrappers
@pytest.mark.parametrize("make", [TopKState, PowerSGDState], ids=["TopKState", "PowerSGDState"])
def test_residuals_follow_a_loss_scale(make, world_size, wrapper):
    grads = drawn(world_size, 1, MATRICES)
    hook = top_k if make is TopKState else power_sgd
    keywords = {"ratio": 0.1} if make is TopKState else {"start_step": 0, "min_compression": 1.0}
    _, state = applied(lambda m: (make(m, **keywords), hook), grads, wrapper=wrapper)
    before = residual(state)
    state.scale_residuals(0.5)
    assert all(torch.equal(held * 0.5, residual(state)[name]) for name, held in before.items())


# bad input


@pytest.mark.parametrize(
    ("make", "keywords", "error", "message"),
    [
        (TopKState, {"ratio": 0}, ValueError, "TopKState needs a ratio above 0 and at most 1, got ratio=0"),
        (TopKState, {"ratio": 1.5}, ValueError, r"at most 1, got ratio=1\.5"),
        (TopKState, {"ratio": True}, ValueError, "at most 1, got ratio=True"),
        (PowerSGDState, {"rank": 0}, ValueError, "PowerSGDState needs rank of at least 1, got rank=0"),
        (PowerSGDState, {"rank": 1.5}, TypeError, "PowerSGDState takes rank as an int, got float"),
        (PowerSGDState, {"start_step": -1}, ValueError, "needs start_step of at least 0, got start_step=-1"),
        (PowerSGDState, {"min_compression": 0}, ValueError, "needs a min_compression above 0, got 0"),
        (PowerSGDState, {"seed": -1}, ValueError, "needs seed of at least 0, got seed=-1"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_wrong_argument_is_refused(make, keywords, error, message):
    with pytest.raises(error, match=message):
        make(nn.Linear(1, 1), **keywords)


@pytest.mark.parametrize("make", [TopKState, PowerSGDState], ids=["TopKState", "PowerSGDState"])
def test_a_model_without_gradients_is_refused(make):
    with pytest.raises(ValueError, match=f"{make.__name__} got an empty model: no parameter requires a gradient"):
        make(nn.ReLU())
    with pytest.raises(TypeError, match=rf"{make.__name__} takes the torch\.nn\.Module that is wrapped, got list"):
        make([nn.Parameter(torch.ones(1))])


@pytest.mark.world_size(2)
@wrappers
@pytest.mark.parametrize(
    ("hook", "state", "message"),
    [
        (fp16_compress, 3, "fp16_compress takes a process group or None as its state, got int"),
        (bf16_compress, "gloo", "bf16_compress takes a process group or None as its state, got str"),
        (top_k, None, "top_k takes a TopKState as its state, got NoneType"),
        (power_sgd, None, "power_sgd takes a PowerSGDState as its state, got NoneType"),
    ],
    ids=["fp16", "bf16", "top_k", "power_sgd"],
)
def test_a_wrong_state_is_refused_on_every_rank(hook, state, message, wrapper):
    ddp = wrapper(nn.Linear(2, 1))
    ddp.register_comm_hook(state, hook)
    with pytest.raises(TypeError, match=message):
        ddp(torch.ones(1, 2)).sum().backward()


@pytest.mark.world_size(2)
@wrappers
@pytest.mark.parametrize(
    ("make", "hook"), [(TopKState, top_k), (PowerSGDState, power_sgd)], ids=["TopKState", "PowerSGDState"]
)
def test_the_state_of_another_model_is_refused_on_every_rank(make, hook, wrapper):
    ddp = wrapper(nn.Linear(2, 1))
    ddp.register_comm_hook(make(nn.Linear(2, 1)), hook)
    with pytest.raises(ValueError, match=rf"{make.__name__} does not know a parameter of shape .* that was wrapped"):
        ddp(torch.ones(1, 2)).sum().backward()
