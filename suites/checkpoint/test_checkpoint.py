"""Training resumes bit for bit from a checkpoint, on the same number of ranks or another."""

from __future__ import annotations

import os
import random
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from pdlcheck.checks import check_resume
from pdlcheck.errors import CheckpointError
from pdlcheck.primitives import (
    ShardSampler,
    broadcast_parameters,
    latest_checkpoint,
    load_checkpoint,
    resumable_steps,
    save_checkpoint,
    shard_indices,
)

from .training import ADAM, SCHEDULERS, SGD, Holder, Shards, cut, net, newest, parts, step, training, weights, written

one_folder = settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])


# resuming


@pytest.mark.verifies("save_checkpoint")
@settings(max_examples=3)
@given(
    optimizer=st.sampled_from([SGD, ADAM]),
    scheduler=st.sampled_from(sorted(SCHEDULERS)),
    saved_after=st.integers(1, 4),
)
def test_training_goes_on_bit_for_bit(subject, world, optimizer, scheduler, saved_after):
    start = training(save=subject, optimizer=optimizer, scheduler=scheduler)
    check_resume(start, world, saved_after=saved_after, steps=6)


@pytest.mark.verifies("load_checkpoint")
def test_ranks_that_differ_get_their_own_back(subject, world):
    def start():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))  # ranks differ, as in local SGD
        optimizer = ADAM(model.parameters())

        def train(i):
            optimizer.zero_grad()
            model(torch.randn(3, 2)).square().mean().backward()
            model[0].weight.grad += torch.rand(2, 2)
            optimizer.step()

        def save(path):
            save_checkpoint(path, 2, model=model, optimizer=optimizer)

        return model, train, save, lambda path: subject(newest(path), model=model, optimizer=optimizer)

    check_resume(start, world, world_size=3, saved_after=2, steps=4)


@pytest.mark.gpu
@pytest.mark.verifies("save_checkpoint")
def test_training_on_a_gpu_goes_on_with_its_own_random_numbers(subject, world):
    def start():
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).cuda()
        optimizer = ADAM(model.parameters())

        def train(i):
            optimizer.zero_grad()
            model(torch.rand(4, 4, device="cuda")).square().mean().backward()
            optimizer.step()

        def save(path):
            subject(path, 2, model=model, optimizer=optimizer)

        return model, train, save, lambda path: load_checkpoint(newest(path), model=model, optimizer=optimizer)

    check_resume(start, world, world_size=1, saved_after=2, steps=4)


def test_the_default_device_does_not_matter(tmp_path):
    """Loading allocates its own memory on the CPU, for any default device of the program."""
    model, other = net(), net()
    with torch.device("meta"):
        assert load_checkpoint(save_checkpoint(tmp_path, 4, model=model), model=other) == 4
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_without_a_process_group_it_is_this_process(tmp_path):
    model = net()
    path = save_checkpoint(tmp_path, 4, model=model)
    other = net()
    assert load_checkpoint(path, model=other) == 4
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    assert latest_checkpoint(tmp_path) == path


def test_equal_tensors_stay_two_and_tied_ones_one(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    with torch.no_grad():
        model[2].weight.copy_(model[0].weight)
    optimizer = SGD(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones(2, 2)
    optimizer.step()  # makes two equal momentum buffers
    path = save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer)
    load_checkpoint(path, model=model, optimizer=optimizer)
    first, last = (optimizer.state[model[i].weight]["momentum_buffer"] for i in (0, 2))
    first.add_(1)
    assert not torch.equal(first, last)
    assert model[1].weight is model[0].weight


STATE = {
    "dtypes": [torch.ones(2, dtype=d) for d in (torch.bfloat16, torch.bool, torch.int16, torch.complex64, torch.uint8)],
    "shapes": (torch.tensor(2.5), torch.empty(0, 3), torch.arange(6).view(2, 3).t(), torch.ones(2, 1).expand(2, 4)),
    "empty array": torch.from_numpy(np.ones(0)),  # it has stride 0
    "float": [float("nan"), float("inf"), -0.0, 1e-320, 2**80, True, None, "text", b"bytes", 1 + 2j],
    "as torch does not load them": [2**2039, -(2**20000), b"", [b""]],
    "arrays": np.arange(3, dtype="uint32"),
    1: Counter({3: 2}),
}


def test_every_kind_of_state_comes_back_as_it_was(tmp_path):
    holder = Holder()
    load_checkpoint(save_checkpoint(tmp_path, 0, holder=Holder(STATE)), holder=holder)
    found = holder.state
    assert found.pop("as torch does not load them") == STATE["as torch does not load them"]
    assert repr(found) == repr({key: held for key, held in STATE.items() if key in found})
    assert type(found[1]) is Counter
    assert found["arrays"].dtype == np.uint32
    assert [t.dtype for t in found["dtypes"]] == [t.dtype for t in STATE["dtypes"]]
    assert found["shapes"][2].stride() == STATE["shapes"][2].stride(), "sums go in the order of the memory"


def test_a_tensor_that_all_ranks_hold_is_stored_once(world, tmp_path):
    def write():
        model = nn.Linear(100, 100)
        broadcast_parameters(model)
        return save_checkpoint(tmp_path, 1, model=model)

    path = world.run(write, world_size=3)[0]
    assert 40_000 < path.stat().st_size < 120_000  # the file also holds three random streams


# another number of ranks


@pytest.mark.verifies("load_checkpoint")
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
def test_on_other_ranks_what_was_equal_is_loaded_and_new_ranks_draw_their_own(subject, world, tmp_path, before, after):
    def write():
        torch.manual_seed(dist.get_rank())
        model = nn.Linear(2, 2)
        broadcast_parameters(model)
        return save_checkpoint(tmp_path, 1, model=model, sampler=Shards()), drawn(), model.weight.tolist()

    def drawn():
        return torch.rand(1).item(), random.random(), float(np.random.rand())

    def read():
        model = nn.Linear(2, 2)
        subject(newest(tmp_path), model=model, sampler=Shards())
        return drawn(), model.weight.tolist()

    ranks = world.run(write, world_size=before)
    found, again = (world.run(read, world_size=after) for _ in range(2))
    assert found == again
    assert all(weight == ranks[0][2] for _, weight in found)
    assert [streams for streams, _ in found][:before] == [streams for _, streams, _ in ranks][:after]
    for place in range(3):
        assert len({streams[place] for streams, _ in found}) == after, "two ranks draw the same"


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("load_checkpoint")
def test_what_differs_between_ranks_needs_a_rule_on_other_ranks(subject, world, tmp_path):
    def write():
        return save_checkpoint(tmp_path, 1, sampler=Holder({"seen": dist.get_rank() + 5}))

    def read(reshard):
        sampler = Holder()
        subject(path, sampler=sampler, reshard=reshard)
        return sampler.state["seen"]

    path = world.run(write, world_size=3)[0]
    with pytest.raises(
        ValueError, match=r"3 ranks that differ in sampler.*cannot be re-sharded to 2: resume on 3 ranks"
    ):
        world.run(read, None, world_size=2)
    rule = {"sampler": lambda states, rank, world_size: {"seen": sum(s["seen"] for s in states) + rank}}
    assert world.run(read, rule, world_size=2) == [18, 19]
    assert world.run(read, rule, world_size=3) == [5, 6, 7]


@pytest.mark.verifies("load_checkpoint")
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (4, 2)])
@pytest.mark.parametrize("tail", ["pad", "uneven", "drop"])
def test_an_epoch_that_is_over_is_over_on_other_ranks_whatever_its_tail(subject, world, tmp_path, before, after, tail):
    """With five samples some ranks have one more than others, or one sample is repeated or dropped."""

    def train(path=None):
        sampler, seen = ShardSampler(range(5), tail=tail), []
        if path is not None:
            subject(path, sampler=sampler)
        for epoch in range(sampler.epoch, 1 if path is None else 2):
            sampler.set_epoch(epoch)
            for (sample,) in DataLoader(range(5), 1, sampler=sampler):
                sampler.commit(1)
                seen.append((epoch, sample.item()))
        return seen if path is not None else save_checkpoint(tmp_path, 1, sampler=sampler)

    path = world.run(train, world_size=before)[0]
    second = [shard_indices(5, rank=rank, world_size=after, epoch=1, tail=tail).tolist() for rank in range(after)]
    assert world.run(train, path, world_size=after) == [[(1, sample) for sample in share] for share in second]


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("load_checkpoint")
def test_in_the_last_step_of_an_uneven_epoch_the_state_of_rank_0_holds(subject, world, tmp_path):
    """All samples were fetched ahead, and 4 of 5 and 4 of 4 are used: rank 1 cannot detect that rank 0 has one left."""

    def write():
        sampler = ShardSampler(range(9), tail="uneven", shuffle=False)
        list(sampler)
        sampler.commit(4)
        return save_checkpoint(tmp_path, 1, sampler=sampler)

    def read(rule):
        sampler = ShardSampler(range(9), tail="uneven", shuffle=False)
        subject(path, sampler=sampler, reshard=rule)
        return list(sampler)

    path = world.run(write, world_size=2)[0]
    assert world.run(read, None, world_size=2) == [[8], []]
    message = r"sampler\['position'\] is 9, it should be 8 .* or pass reshard={'sampler': rule}"
    with pytest.raises(ValueError, match=message):
        world.run(read, None, world_size=1)
    first = {"sampler": lambda states, rank, world_size: states[0]}
    assert world.run(read, first, world_size=3) == [[8], [], []]


# the training loop


@pytest.mark.verifies("resumable_steps")
@one_folder
@given(stops=st.lists(st.integers(0, 3), min_size=1, max_size=3), save_every=st.integers(1, 3))
def test_a_loop_that_is_stopped_and_started_again_ends_with_the_same_bits(
    subject, world, tmp_path_factory, stops, save_every
):
    def train(folder, stop):
        torch.manual_seed(dist.get_rank())
        random.seed(dist.get_rank())
        np.random.seed(dist.get_rank())
        held, taken = parts(), []
        for i in subject(folder, steps=7, save_every=save_every, **held):
            if stop is not None and len(taken) == stop:
                return taken, None
            step(**held)
            taken.append(i)
        return taken, weights(held)

    _, expected = world.run(train, tmp_path_factory.mktemp("straight"), None, world_size=2)[0]
    folder, reached = tmp_path_factory.mktemp("stopped"), 0
    for stop in [*stops, None]:
        taken, found = world.run(train, folder, stop, world_size=2)[0]
        if taken:
            assert taken[0] == reached - reached % save_every
            reached = taken[-1] + 1
    assert found == expected


def test_a_loader_with_a_generator_of_its_own_leaves_dropout_its_numbers(tmp_path):
    """A resumed loop in the middle of an epoch calls iter(loader) once more than an uninterrupted one."""

    def train(folder, until=None):
        torch.manual_seed(1)
        model, sampler = nn.Linear(4, 1), ShardSampler(range(12), 1, 0)
        optimizer = SGD(model.parameters())

        def batches():
            while True:
                loader = DataLoader(torch.arange(12.0), 4, sampler=sampler, generator=torch.Generator())
                yield from loader
                sampler.set_epoch(sampler.epoch + 1)

        samples = batches()
        for i in resumable_steps(folder, steps=7, save_every=1, model=model, optimizer=optimizer, sampler=sampler):
            if i == until:
                break
            optimizer.zero_grad()
            model(nn.functional.dropout(next(samples).sin())).square().backward()
            optimizer.step()
            sampler.commit(4)
        return model.weight.tolist()

    expected = train(tmp_path / "straight")
    for until in (1, 3, 5):
        train(tmp_path / str(until), until)
        assert train(tmp_path / str(until)) == expected


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("resumable_steps")
def test_a_loop_does_not_start_anew_over_damaged_checkpoints(subject, world, tmp_path):
    def train():
        for i in subject(tmp_path, steps=7, save_every=2, **parts()):
            raise AssertionError(f"it started at {i}")

    cut(written(tmp_path, world))
    with pytest.raises(CheckpointError, match=r"was cut at byte 200.*no other checkpoint is intact; move them away"):
        world.run(train, world_size=2)


def test_a_loop_says_what_is_wrong_before_its_first_step(tmp_path):
    with pytest.raises(ValueError, match="needs save_every of at least 1"):
        resumable_steps(tmp_path, steps=3, save_every=0, model=nn.Linear(1, 1))
    with pytest.raises(ValueError, match="needs steps of at least 0"):
        resumable_steps(tmp_path, steps=-1, save_every=1, model=nn.Linear(1, 1))


def test_a_loop_saves_where_it_began_wherever_the_process_goes(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    for i in resumable_steps("checkpoints", steps=3, save_every=1, model=nn.Linear(1, 1)):
        if i == 1:
            monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(os.listdir(tmp_path / "checkpoints")) == 3
    assert not os.listdir(tmp_path / "elsewhere")


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("resumable_steps")
def test_a_loop_whose_ranks_do_not_agree_is_refused_on_all(subject, world, tmp_path):
    def train():
        rank = dist.get_rank()
        with pytest.raises(ValueError, match=r"needs save_every of at least 1, got save_every=0 \(on rank 0 of 2\)"):
            list(subject(tmp_path, steps=3, save_every=rank, model=nn.Linear(1, 1)))
        with pytest.raises(ValueError, match="needs the same steps on every rank, got 3 on rank 0 and 4 on rank 1"):
            list(subject(tmp_path, steps=3 + rank, save_every=1, model=nn.Linear(1, 1)))
        with pytest.raises(ValueError, match="needs the same save_every on every rank, got 1 on rank 0 and 2 on"):
            list(subject(tmp_path, steps=3, save_every=1 + rank, model=nn.Linear(1, 1)))

    world.run(train, world_size=2)
