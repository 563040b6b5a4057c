"""Training goes on bit for bit from a checkpoint, on the same ranks or others, or says why it cannot."""

from __future__ import annotations

import io
import os
import pickle
import random
import resource
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, OneCycleLR

from pdlcheck.checks import check_resume, check_torn_files
from pdlcheck.errors import CheckpointError
from pdlcheck.primitives import (
    broadcast_parameters,
    latest_checkpoint,
    load_checkpoint,
    resumable_steps,
    save_checkpoint,
    shard_indices,
    sync_gradients,
)
from pdlcheck.primitives.checkpoint.container import body_of, sealed

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.AdamW, lr=0.1, amsgrad=True)
SCHEDULERS = {
    "milestones": partial(MultiStepLR, milestones=[2, 4]),
    "lambda": partial(LambdaLR, lr_lambda=lambda step: 0.7**step),
    "one cycle": partial(OneCycleLR, max_lr=0.2, total_steps=10),
}
one_folder = settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Shards:
    """A sampler: this rank's part of every batch, in the order of the epoch; its position is that of all ranks."""

    def __init__(self, num_samples=12, batch=8):
        self.num_samples, self.batch, self.epoch, self.position = num_samples, batch, 0, 0

    def next(self):
        order = shard_indices(self.num_samples, rank=0, world_size=1, epoch=self.epoch)
        indices = order[self.position : self.position + self.batch]
        self.position += self.batch
        if self.position >= self.num_samples:
            self.epoch, self.position = self.epoch + 1, 0
        return indices[dist.get_rank() :: dist.get_world_size()]

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position, "num_samples": self.num_samples}

    def load_state_dict(self, state):
        if state["num_samples"] != self.num_samples:
            raise ValueError(f"{state['num_samples']} samples were saved, these are {self.num_samples}")
        self.epoch, self.position = state["epoch"], state["position"]


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))


def parts(make=net, optimizer=SGD, scheduler="milestones"):
    model = make()
    if dist.is_initialized():
        broadcast_parameters(model)
    optimizer = optimizer(model.parameters())
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": SCHEDULERS[scheduler](optimizer),
        "scaler": torch.amp.GradScaler("cpu", growth_interval=2),
        "sampler": Shards(),
        "augment": torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0),
    }


def step(model, optimizer, scheduler, scaler, sampler, augment):
    """One training step that uses everything that has a state."""
    indices = sampler.next()
    x = torch.linspace(-1, 1, 36).view(12, 3)[indices] + 0.01 * torch.rand(len(indices), 3, generator=augment)
    x = x * (1 + 0.01 * random.random()) + 0.01 * float(np.random.rand())
    optimizer.zero_grad()
    if len(x) > 1:  # batch norm needs two
        scaler.scale(model(x).square().mean()).backward()
    sync_gradients(model, weight=len(x) if len(x) > 1 else 0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()


def training(save=save_checkpoint, load=load_checkpoint, **made):
    """A start for the checks."""

    def start():
        held = parts(**made)
        taken = [0]

        def train(i):
            step(**held)
            taken[0] = i + 1

        return (
            held["model"],
            train,
            lambda path: save(path, taken[0], **held),
            lambda path: load(newest(path), **held),
        )

    return start


def newest(path):
    """The last file, intact or not."""
    return sorted(path.glob("*.ckpt"))[-1]


def weights(held):
    return [tensor.tolist() for tensor in held["model"].state_dict().values()]


def written(folder, world, world_size=2, step_number=2, **made):
    """A checkpoint that ``world_size`` ranks wrote after two steps."""

    def write():
        torch.manual_seed(dist.get_rank())
        held = parts(**made)
        for _ in range(2):
            step(**held)
        return save_checkpoint(folder, step_number, **held)

    return world.run(write, world_size=world_size)[0]


def damage(path, byte=-10):
    content = bytearray(path.read_bytes())
    content[byte] ^= 4
    path.write_bytes(content)


# goes on


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
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))  # as in local SGD: never made alike
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
    optimizer.step()  # two equal momentum buffers
    path = save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer)
    load_checkpoint(path, model=model, optimizer=optimizer)
    first, last = (optimizer.state[model[i].weight]["momentum_buffer"] for i in (0, 2))
    first.add_(1)
    assert not torch.equal(first, last)
    assert model[1].weight is model[0].weight


class Holder:
    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


STATE = {
    "dtypes": [torch.ones(2, dtype=d) for d in (torch.bfloat16, torch.bool, torch.int16, torch.complex64, torch.uint8)],
    "shapes": (torch.tensor(2.5), torch.empty(0, 3), torch.arange(6).view(2, 3).t(), torch.ones(2, 1).expand(2, 4)),
    "float": [float("nan"), float("inf"), -0.0, 1e-320, 2**80, True, None, "text", b"bytes", 1 + 2j],
    "arrays": np.arange(3, dtype="uint32"),
    1: Counter({3: 2}),
}


def test_every_kind_of_state_comes_back_as_it_was(tmp_path):
    holder = Holder()
    load_checkpoint(save_checkpoint(tmp_path, 0, holder=Holder(STATE)), holder=holder)
    found = holder.state
    assert repr(found) == repr(STATE)
    assert type(found[1]) is Counter and found["arrays"].dtype == np.uint32
    assert [t.dtype for t in found["dtypes"]] == [t.dtype for t in STATE["dtypes"]]


def test_a_tensor_that_all_ranks_hold_is_stored_once(world, tmp_path):
    def write():
        model = nn.Linear(100, 100)
        broadcast_parameters(model)
        return save_checkpoint(tmp_path, 1, model=model)

    path = world.run(write, world_size=3)[0]
    assert 40_000 < path.stat().st_size < 120_000  # beside the weights there are three random streams


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


# refused, and nothing touched


@pytest.mark.verifies("load_checkpoint")
def test_cut_files_and_flipped_bits_are_refused(subject, world):
    told = check_torn_files(training(load=subject), world, count=8)
    assert all("CheckpointError" in line for line in told)


def heads(path):
    return path.read_bytes().split(b"\n", 3)


def cut(path):
    path.write_bytes(path.read_bytes()[:200])


def cut_in_the_first_lines(path):
    path.write_bytes(path.read_bytes()[:40])


def emptied(path):
    path.write_bytes(b"")


def longer(path):
    path.write_bytes(path.read_bytes() + b"??")


def other_format(path):
    path.write_bytes(path.read_bytes().replace(b"format 1\n", b"format 7\n", 1))


def other_program(path):
    torch.save({"model": {}}, path)


def number_of_bytes_with_a_blank(path):
    first, sha, _, body = heads(path)
    path.write_bytes(b"\n".join([first, sha, b"nbytes %20d" % len(body), body]))


def sealed_by_hand(path):
    body = body_of({"model": {}})
    path.write_bytes(sealed(body) + body)


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def hostile(path):
    buffer = io.BytesIO()
    torch.save({"model": Hostile()}, buffer)
    path.write_bytes(sealed(buffer.getvalue()) + buffer.getvalue())


def hostile_pickle(path):
    body = pickle.dumps(Hostile())
    path.write_bytes(sealed(body) + body)


REFUSED = [
    (cut, r"was cut at byte 200: it should be \d+ bytes long"),
    (cut_in_the_first_lines, "was cut at byte 40, inside its first lines"),
    (emptied, "is empty"),
    (damage, "was changed after it was written: its SHA-256 is"),
    (longer, "is 2 bytes longer than the"),
    (other_format, "was written in format 7, this version of pdlcheck reads format 1"),
    (other_program, "is not a checkpoint: it does not start with 'pdlcheck checkpoint"),
    (number_of_bytes_with_a_blank, "has damaged first lines"),
    (sealed_by_hand, "is intact, but not a checkpoint of save_checkpoint"),
    (hostile, "holds something that weights_only=True does not load"),
    (hostile_pickle, "holds something that weights_only=True does not load"),
    (Path.unlink, "does not exist"),
]


@pytest.mark.verifies("load_checkpoint")
@pytest.mark.parametrize(("spoil", "message"), REFUSED, ids=[spoil.__name__ for spoil, _ in REFUSED])
def test_a_file_is_refused_with_what_is_wrong_and_the_previous_is_offered(subject, world, tmp_path, spoil, message):
    def read():
        held = parts()
        before = weights(held)
        with pytest.raises(CheckpointError, match=message) as caught:
            subject(path, **held)
        assert weights(held) == before
        return str(caught.value), caught.value.previous

    previous = written(tmp_path, world)
    path = written(tmp_path, world, step_number=3)
    spoil(path)
    (text, offered), other = world.run(read, world_size=2)
    assert (text, offered) == other
    assert offered == str(previous) and f"{previous} is intact: load that" in text
    assert not Path("executed").exists()


@pytest.mark.verifies("load_checkpoint")
def test_a_file_that_one_rank_cannot_read_is_refused_by_all(subject, world, tmp_path):
    def read():
        folder = tmp_path / f"node-{dist.get_rank()}"
        with pytest.raises(
            CheckpointError, match=r"does not exist \(on rank 1 of 3\).*there is no earlier one"
        ) as caught:
            subject(folder / path.name, **parts())
        return caught.value.rank

    path = written(tmp_path / "node-0", world, world_size=3)
    for node in (1, 2):
        (tmp_path / f"node-{node}").mkdir()
    (tmp_path / "node-2" / path.name).write_bytes(path.read_bytes())
    assert world.run(read, world_size=3) == [1, 1, 1]


@pytest.mark.verifies("load_checkpoint")
def test_different_files_of_one_name_are_refused(subject, world, tmp_path):
    def read():
        subject(tmp_path / f"node-{dist.get_rank()}" / path.name, **parts())

    for node in range(2):
        path = written(tmp_path / f"node-{node}", world, optimizer=partial(SGD, lr=0.1 + node))
    with pytest.raises(CheckpointError, match="is not the same file on rank 0 and rank 1"):
        world.run(read, world_size=2)


def wide():
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 1))


def double():
    return net().double()


def deep():
    return nn.Sequential(*net(), nn.Linear(1, 1))


def wrapped():
    model = nn.Module()
    model.module = net()
    return model


def two_groups(parameters):
    first, *rest = parameters
    return torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1, momentum=0.9)


def fewer(parameters):
    return SGD(list(parameters)[:-1])


def reordered(parameters):
    return SGD(list(parameters)[::-1])


MISFITS = [
    ({"make": wide}, r"another model: '0.weight' has shape \(5, 3\).*the checkpoint holds shape \(4, 3\)"),
    ({"make": double}, "another model: '0.weight' has shape .* and torch.float64, .* and torch.float32"),
    ({"make": deep}, "another model: it lacks '4.weight', '4.bias'"),
    ({"make": wrapped}, "this model lacks .* from a bare model: load into wrapper.module"),
    ({"optimizer": ADAM}, "optimizer is a AdamW, the checkpoint holds the state of a SGD"),
    ({"optimizer": two_groups}, "optimizer has 2 parameter groups, the checkpoint holds 1"),
    ({"optimizer": fewer}, "group 0 of optimizer has 5 parameters, that of the checkpoint 6"),
    (
        {"optimizer": reordered},
        "group 0 of optimizer has '3.bias' of shape .* as parameter 0, the checkpoint '0.weight'",
    ),
    ({"scheduler": "lambda"}, "scheduler is a LambdaLR, the checkpoint holds the state of a MultiStepLR"),
]


@pytest.mark.verifies("load_checkpoint")
@pytest.mark.parametrize(("other", "message"), MISFITS, ids=[message[:30] for _, message in MISFITS])
def test_what_does_not_fit_is_named_and_nothing_is_touched(subject, world, tmp_path, other, message):
    def read():
        torch.manual_seed(dist.get_rank())
        held = parts(**other) if dist.get_rank() == 1 else parts()  # one rank sees it, all raise
        held_before, stream = weights(held), torch.get_rng_state()
        with pytest.raises(ValueError, match=message) as caught:
            subject(path, **held)
        assert weights(held) == held_before and torch.equal(stream, torch.get_rng_state())
        assert held["sampler"].position == 0 and not held["optimizer"].state
        return str(caught.value)

    def read_alike():
        held = {**parts(**other), "optimizer": None}
        held["optimizer"] = other.get("optimizer", SGD)(held["model"].parameters())
        subject(path, **held)

    path = written(tmp_path, world)
    if other.get("make") is None:
        assert len(set(world.run(read, world_size=2))) == 1
    with pytest.raises(ValueError, match=message):
        world.run(read_alike, world_size=2)


@pytest.mark.verifies("load_checkpoint")
def test_parameters_of_one_shape_in_another_order_are_another_optimizer(subject, tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    path = save_checkpoint(tmp_path, 1, model=model, optimizer=SGD(model.parameters()))
    swapped = SGD([*model[1].parameters(), *model[0].parameters()])
    with pytest.raises(ValueError, match=r"optimizer has '1.weight' .* as parameter 0, .* '0.weight' of shape"):
        subject(path, model=model, optimizer=swapped)


def test_a_state_that_an_object_does_not_take_is_taken_back_everywhere(world, tmp_path):
    def read():
        held = parts()
        if dist.get_rank() == 1:
            held["sampler"] = Shards(num_samples=11)
        before = weights(held)
        with pytest.raises(
            ValueError, match=r"sampler does not take its state: ValueError: 12 samples .* \(on rank 1 of 2"
        ):
            load_checkpoint(path, **held)
        assert weights(held) == before and not held["optimizer"].state and held["scheduler"].last_epoch == 0

    path = written(tmp_path, world)
    world.run(read, world_size=2)


def test_a_load_state_dict_that_forgets_is_found_out(tmp_path):
    class Forgetful(Holder):
        def load_state_dict(self, state):
            self.state = {**state, "position": 0}

    path = save_checkpoint(tmp_path, 1, model=nn.Linear(1, 1), sampler=Forgetful({"position": 3}))
    model = nn.Linear(1, 1)
    before, sampler = model.weight.item(), Forgetful({"position": 0})
    with pytest.raises(ValueError, match=r"sampler does not hold.*sampler\['position'\] is 0, it should be 3"):
        load_checkpoint(path, model=model, sampler=sampler)
    assert model.weight.item() == before


def test_names_must_be_those_that_were_saved_or_be_ignored(tmp_path):
    model = net()
    path = save_checkpoint(tmp_path, 1, model=model, optimizer=SGD(model.parameters()))
    with pytest.raises(ValueError, match=r"also holds 'optimizer': pass optimizer=\.\.\., or ignore=\['optimizer'\]"):
        load_checkpoint(path, model=model)
    with pytest.raises(ValueError, match="holds no 'scaler'; it holds 'model', 'optimizer'"):
        load_checkpoint(path, model=model, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match=r"ignore or reshard names 'optimiser', which .* does not hold"):
        load_checkpoint(path, model=model, ignore=["optimiser"])
    stream = torch.get_rng_state()
    torch.rand(1)
    assert load_checkpoint(path, model=model, ignore=["optimizer", "rng"]) == 1
    assert not torch.equal(stream, torch.get_rng_state())


# saving


@pytest.mark.verifies("save_checkpoint")
def test_the_last_k_are_kept_and_torn_ones_do_not_count(subject, tmp_path):
    model = nn.Linear(1, 1)
    for number in range(1, 5):
        subject(tmp_path, number, keep=2, model=model)
    assert [int(path.stem[5:]) for path in sorted(tmp_path.iterdir())] == [3, 4]
    cut(tmp_path / "step_000000000004.ckpt")
    assert latest_checkpoint(tmp_path).stem.endswith("3")
    subject(tmp_path, 5, keep=2, model=model)
    assert sorted(os.listdir(tmp_path))[0].endswith("3.ckpt"), "an intact one had to go for a torn one"
    subject(tmp_path, 2, keep=1, model=model)
    assert [int(path.stem[5:]) for path in sorted(tmp_path.iterdir())] == [2, 3, 4, 5], "later steps are left alone"


@pytest.mark.verifies("latest_checkpoint")
def test_the_newest_that_all_ranks_can_read(subject, world, tmp_path):
    def find():
        found = subject(tmp_path / f"node-{dist.get_rank()}")
        return found and found.name

    for number in (1, 2, 3):
        path = written(tmp_path / "node-0", world, step_number=number)
        (tmp_path / "node-1").mkdir(exist_ok=True)
        (tmp_path / "node-1" / path.name).write_bytes(path.read_bytes())
    assert world.run(find, world_size=2) == ["step_000000000003.ckpt"] * 2
    damage(tmp_path / "node-1" / "step_000000000003.ckpt")
    assert world.run(find, world_size=2) == ["step_000000000002.ckpt"] * 2
    damage(tmp_path / "node-0" / "step_000000000002.ckpt")
    assert world.run(find, world_size=2) == ["step_000000000001.ckpt"] * 2
    (tmp_path / "node-1" / "step_000000000001.ckpt").unlink()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .*rank 0: step_000000000003.ckpt; rank 1: step_0{11}2"
    ):
        world.run(find, world_size=2)
    assert world.run(lambda: subject(tmp_path / "empty"), world_size=2) == [None, None]


@pytest.mark.verifies("save_checkpoint")
def test_a_full_disk_leaves_the_previous_and_no_temporary_file(subject, world, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # of the process, which simulated ranks share

    def write():
        held = parts()
        if dist.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # the write stops in the middle
        try:
            with pytest.raises(
                CheckpointError, match=r"could not be written: File too large; .*2.ckpt is as it was"
            ) as caught:
                subject(tmp_path, 3, **held)
        finally:
            if dist.get_rank() == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return str(caught.value), latest_checkpoint(tmp_path)

    path = written(tmp_path, world)
    before = path.read_bytes()
    (first, latest), second = world.run(write, world_size=2)
    assert (first, latest) == second and latest == path
    assert os.listdir(tmp_path) == [path.name] and path.read_bytes() == before


@pytest.mark.verifies("save_checkpoint")
def test_a_folder_that_cannot_be_made_is_told_to_all(subject, world, tmp_path):
    (tmp_path / "file").write_text("")

    def write():
        with pytest.raises(CheckpointError, match="could not be written: Not a directory; there is no earlier one"):
            subject(tmp_path / "file" / "folder", 3, model=nn.Linear(1, 1))

    world.run(write, world_size=2)


@pytest.mark.verifies("save_checkpoint")
def test_what_a_killed_writer_left_is_removed_and_what_another_writes_is_not(subject, tmp_path):
    import fcntl

    stale = tmp_path / ".step_000000000001.ckpt.0123abcd.tmp"
    written_now = tmp_path / ".step_000000000001.ckpt.4567cdef.tmp"
    foreign = tmp_path / ".step_1.tmp"
    for path in (stale, written_now, foreign):
        path.write_bytes(b"half")
    with written_now.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        subject(tmp_path, 2, model=nn.Linear(1, 1))
    assert not stale.exists() and written_now.exists() and foreign.exists()


UNREADABLE = [
    ({"held": object()}, r"holder\['held'\] is of type object"),
    ({"f": [len]}, r"holder\['f'\]\[0\] is of type builtin_function_or_method"),
    ({(1, 2): 3}, "holder has a key of type tuple"),
    ({"t": torch.ones(2).to_sparse()}, "a tensor torch.sparse_coo.*takes dense tensors"),
    ({"t": torch.ones(2, device="meta")}, "on the meta device"),
    ({"a": np.array(["x"], dtype=object)}, "an array of object"),
    ({"i": np.int64(3)}, "is of type int64"),
]


@pytest.mark.verifies("save_checkpoint")
@pytest.mark.parametrize(("state", "message"), UNREADABLE, ids=[message[:24] for _, message in UNREADABLE])
def test_a_state_that_could_not_be_read_back_is_not_written(subject, world, tmp_path, state, message):
    def write():  # one rank's alone
        with pytest.raises(TypeError, match=message):
            subject(tmp_path, 1, holder=Holder(state if dist.get_rank() == 1 else {}))

    world.run(write, world_size=2)
    assert not os.listdir(tmp_path)


@pytest.mark.verifies("save_checkpoint")
def test_ranks_that_save_different_things_all_hear_of_it(subject, world, tmp_path):
    def steps():
        subject(tmp_path, dist.get_rank(), model=nn.Linear(1, 1))

    def names():
        subject(tmp_path, 1, **{f"model{dist.get_rank()}": nn.Linear(1, 1)})

    with pytest.raises(ValueError, match="save different things: step is 0 on rank 0 and 1 on rank 1"):
        world.run(steps, world_size=2)
    with pytest.raises(ValueError, match=r"objects is \['model0'\] on rank 0 and \['model1'\] on rank 1"):
        world.run(names, world_size=2)
    assert not os.listdir(tmp_path)


BAD = [
    ({"step": -1}, ValueError, "needs step of at least 0, got step=-1"),
    ({"step": 1.0}, TypeError, "takes step as an int, got float"),
    ({"keep": 0}, ValueError, "needs keep of at least 1, got keep=0"),
    ({"model": 3}, TypeError, "model is of type int, without state_dict and load_state_dict"),
    ({"rng": nn.Linear(1, 1)}, ValueError, "'rng' names the random streams"),
]


@pytest.mark.verifies("save_checkpoint")
@pytest.mark.parametrize(("arguments", "kind", "message"), BAD, ids=[message[:24] for *_, message in BAD])
def test_wrong_arguments_are_named(subject, tmp_path, arguments, kind, message):
    with pytest.raises(kind, match=message):
        subject(**{"folder": tmp_path, "step": 1, "model": nn.Linear(1, 1), **arguments})
    assert not os.listdir(tmp_path)


def test_nothing_to_save_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"nothing to save or load; pass model="):
        save_checkpoint(tmp_path, 1)


# the loop


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
