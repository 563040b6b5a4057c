"""Checkpoints of ranks that hold different parts of one model, such as the stages of a pipeline."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.primitives import Pipeline, save_checkpoint

from ..pipeline.models import MSE, samples

ADAM = partial(torch.optim.Adam, lr=0.1)


def stages(split="layers", seed=0):
    """Return a pipeline of five layers, divided unevenly over the ranks, and its optimizer."""
    torch.manual_seed(seed)
    layers = (nn.Linear(3, 3, bias=number != 4) for number in range(5))
    pipeline = Pipeline(nn.Sequential(*layers), MSE, n_microbatches=2, split=split)
    return pipeline, ADAM(pipeline.module.parameters())


def train(pipeline, optimizer, steps):
    for number in steps:
        optimizer.zero_grad()
        pipeline.step(*samples(4, seed=number))
        optimizer.step()
    return {name: p.detach().clone() for name, p in pipeline.module.named_parameters()}


@pytest.mark.verifies("load_checkpoint")
@pytest.mark.parametrize("world_size", [2, 3])
def test_stages_go_on_where_they_stopped(subject, world, tmp_path, world_size):
    """Regression test: rank 1 could not load its own optimizer, because it differs from rank 0's."""

    def go_on():
        straight = train(*stages(), range(4))
        pipeline, optimizer = stages()
        train(pipeline, optimizer, range(2))
        path = save_checkpoint(tmp_path, 2, model=pipeline.module, optimizer=optimizer)
        again, fresh = stages(seed=1)
        assert subject(path, model=again.module, optimizer=fresh) == 2
        resumed = train(again, fresh, range(2, 4))
        return straight.keys() == resumed.keys() and all(torch.equal(straight[n], resumed[n]) for n in straight)

    assert all(world.run(go_on, world_size=world_size))


def saved(world, folder):
    def save():
        pipeline, optimizer = stages()
        train(pipeline, optimizer, range(1))
        path = save_checkpoint(folder, 1, model=pipeline.module, optimizer=optimizer)
        return path, {name: value.clone() for name, value in pipeline.module.state_dict().items()}

    ranks = world.run(save, world_size=2)
    return ranks[0][0], {name: value for _, own in ranks for name, value in own.items()}


@pytest.mark.if_subject_takes("ignore", "reshard")
@pytest.mark.verifies("load_checkpoint")
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_rule_gives_stages_to_another_number_of_ranks(subject, world, tmp_path, world_size):
    path, whole = saved(world, tmp_path)

    def read():
        pipeline, _ = stages(seed=1)
        own = pipeline.module.state_dict()

        def rule(states, rank, world_size):
            return {name: value for state in states for name, value in state.items() if name in own}

        subject(path, model=pipeline.module, ignore=["optimizer"], reshard={"model": rule})
        return all(torch.equal(value, whole[name]) for name, value in pipeline.module.state_dict().items())

    assert all(world.run(read, world_size=world_size))


@pytest.mark.if_subject_takes("reshard")
@pytest.mark.verifies("load_checkpoint")
def test_a_rule_may_make_the_state_of_an_optimizer_too(subject, world, tmp_path):
    """The parameters of the new optimizer never belonged to one rank together."""
    path, _ = saved(world, tmp_path)

    def joined(states, rank, world_size):
        first, second = states
        count = len(first["state"])
        state = {**first["state"], **{count + place: held for place, held in second["state"].items()}}
        group = {**first["param_groups"][0], "params": list(range(len(state)))}
        return {"state": state, "param_groups": [group]}

    def read():
        pipeline, optimizer = stages(seed=1)
        rules = {"model": lambda states, rank, world_size: {**states[0], **states[1]}, "optimizer": joined}
        subject(path, model=pipeline.module, optimizer=optimizer, reshard=rules)
        return train(pipeline, optimizer, range(1, 3))

    def straight():
        pipeline, optimizer = stages()
        return train(pipeline, optimizer, range(3))

    (resumed,) = world.run(read, world_size=1)
    expected = {name: value for own in world.run(straight, world_size=2) for name, value in own.items()}
    for name, value in expected.items():
        torch.testing.assert_close(resumed[name], value, msg=name)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("load_checkpoint")
def test_stages_that_are_cut_elsewhere_are_refused_on_every_rank(subject, world, tmp_path):
    path, _ = saved(world, tmp_path)

    def read():
        pipeline, optimizer = stages(split=[1])
        before = {name: value.clone() for name, value in pipeline.module.state_dict().items()}
        with pytest.raises(ValueError, match="load_checkpoint: the checkpoint is of another model: ") as caught:
            subject(path, model=pipeline.module, optimizer=optimizer)
        assert all(torch.equal(value, before[name]) for name, value in pipeline.module.state_dict().items())
        return str(caught.value)

    assert len({*world.run(read, world_size=2)}) == 1


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("load_checkpoint")
@pytest.mark.parametrize("rank", [0, 1])
def test_the_optimizer_of_another_stage_is_refused_on_every_rank(subject, world, tmp_path, rank):
    path, _ = saved(world, tmp_path)

    def read():
        pipeline, optimizer = stages()
        if dist.get_rank() == rank:
            optimizer = ADAM(list(pipeline.module.parameters())[::-1])
        with pytest.raises(ValueError, match=rf"group 0 of optimizer has .* \(on rank {rank} of 2\)$") as caught:
            subject(path, model=pipeline.module, optimizer=optimizer)
        return str(caught.value)

    assert len({*world.run(read, world_size=2)}) == 1


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("load_checkpoint")
def test_a_file_of_another_number_of_ranks_on_one_rank_alone_is_refused_on_every_rank(subject, world, tmp_path):
    def save(world_size):
        torch.manual_seed(0)
        return save_checkpoint(tmp_path / f"of-{world_size}", 1, model=nn.Linear(1, 1))

    for world_size in (2, 3):
        world.run(save, world_size, world_size=world_size)

    def read():
        model = nn.Linear(1, 1)
        before = model.weight.item()
        path = tmp_path / f"of-{2 + dist.get_rank()}" / "step_000000000001.ckpt"
        with pytest.raises(Exception, match="is not the same file on rank 0 and rank 1; nothing was loaded") as caught:
            subject(path, model=model)
        assert model.weight.item() == before
        return str(caught.value)

    assert len({*world.run(read, world_size=2)}) == 1
