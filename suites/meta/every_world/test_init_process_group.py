"""Programs that make their own default group: the first call gets the group that the rank already has."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck import primitives
from pdlcheck.worlds import get_world


def main(backend="gloo"):
    """Make a group, use it and destroy it, as every script does."""
    dist.init_process_group(backend, timeout=timedelta(seconds=20))
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


@pytest.mark.parametrize("time", range(2))
def test_a_script_runs_as_it_is(world, time):
    assert world.run(main, world_size=2) == [2, 2]


BY_NAME = """
from torch.distributed import destroy_process_group, get_rank, init_process_group, monitored_barrier

def main():
    init_process_group("gloo")
    monitored_barrier()
    rank = get_rank()
    destroy_process_group()
    return rank
"""


def test_functions_that_a_script_has_imported_by_name_are_the_worlds_too(tmp_path):
    (tmp_path / "script.py").write_text(BY_NAME)
    run = "import script; from pdlcheck.worlds import get_world; print(get_world('sim').run(script.main, world_size=2))"
    command = [sys.executable, "-c", run]  # the script imports torch.distributed as torch made it
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "[0, 1]\n", done.stderr


def backends():
    return dist.get_backend(), dist.get_backend(dist.new_group([0, 1]))


def test_the_backend_has_the_name_that_programs_look_for(world):
    name = "pdlcheck_mpi" if world.name == "mpi" else "gloo"
    assert world.run(backends, world_size=2) == [(name, name)] * 2


@pytest.mark.parametrize("profile", ["gloo", "buffered", "rendezvous"])
def test_under_semantics_of_nccl_the_backend_is_not_taken_for_gloo(profile):
    assert get_world("sim", semantics=profile).run(backends, world_size=2)[0] == ("gloo", "gloo")
    assert get_world("sim", semantics="nccl").run(backends, world_size=2)[0] == ("sim", "sim")


def address():
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) > 0


def test_a_script_finds_the_address_that_launchers_give(world):
    before = dict(os.environ)
    assert world.run(address, world_size=2) == [("127.0.0.1", True)] * 2
    assert dict(os.environ) == before


@pytest.mark.world_size(2)
@pytest.mark.parametrize("time", range(2))
def test_the_world_chooses_the_backend(time):
    assert main("nccl") == 2


@pytest.mark.world_size(2)
def test_the_second_time_is_refused():
    dist.init_process_group("gloo")
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group("gloo")


@pytest.mark.world_size(2)
def test_a_group_that_was_destroyed_may_be_made_again():
    assert main() == 2
    dist.init_process_group("gloo", init_method="env://")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2


@pytest.mark.world_size(2)
def test_another_size_is_refused():
    with pytest.raises(ValueError, match=r"init_process_group\(world_size=4\) on a rank whose world_size is 2"):
        dist.init_process_group("gloo", rank=dist.get_rank(), world_size=4)


# -- what torch refuses, as a script under torchrun sees it -----------------------------------------

HERE = "tcp://127.0.0.1:29500"
REFUSED = {
    "device without an index": ({"device_id": torch.device("cpu")}, ValueError, "device_id"),
    "absent device": ({"device_id": torch.device("meta", 0)}, ValueError, "device_id"),
    "name of the argument": ({"devise": 0}, TypeError, "devise"),
    "timeout in seconds": ({"timeout": 20.0}, TypeError, "timedelta"),
    "timeout below 0": ({"timeout": timedelta(seconds=-1)}, dist.DistNetworkError, "timeout of -1 s"),
    "timeout of nothing": ({"timeout": timedelta(0)}, dist.DistNetworkError, "timeout of 0 s"),
    "store and address": ({"store": dist.HashStore, "init_method": HERE}, AssertionError, "both init_method and store"),
    "store without rank": ({"store": dist.HashStore, "world_size": 2}, AssertionError, "rank must be non-negative"),
    "store without size": ({"store": dist.HashStore, "rank": "own"}, AssertionError, "world_size must be positive"),
    "scheme": ({"init_method": "nowhere://x"}, RuntimeError, "No rendezvous handler for nowhere://"),
    "address that is none": ({"init_method": 29500}, RuntimeError, "`url` must be a string"),
    "address without port": (
        {"init_method": "tcp://127.0.0.1", "rank": "own", "world_size": 2},
        ValueError,
        "port number",
    ),
    "address without rank": ({"init_method": HERE, "world_size": 2}, ValueError, "rank parameter missing"),
    "address with both": (
        {"init_method": f"{HERE}?rank=0&world_size=2", "rank": "own", "world_size": 2},
        AssertionError,
        "node-specific arguments",
    ),
    "file without size": (
        {"init_method": "file:///nowhere/to/meet", "rank": "own"},
        ValueError,
        "world size parameter",
    ),
    "rank that is text": ({"rank": "0", "world_size": 2}, RuntimeError, "`rank` must be an integer"),
    "one device twice": ({"backend": "cpu:gloo,cpu:gloo"}, ValueError, "Duplicate device type cpu"),
    "backend that is none": ({"backend": 3}, Exception, "[Bb]ackend"),
    "another rank by address": ({"init_method": f"{HERE}?rank=7&world_size=2"}, ValueError, "rank=7"),
}
ACCEPTED = {
    "nothing": {},
    "timeout": {"timeout": timedelta(seconds=20)},
    "store": {"store": dist.HashStore, "rank": "own", "world_size": 2},
    "address": {"init_method": HERE, "rank": "own", "world_size": 2},
    "file": {"init_method": "file:///nowhere/to/meet", "rank": "own", "world_size": 2},
    "environment": {"init_method": "env://"},
    "both devices": {"backend": "cpu:gloo,cuda:nccl"},
}


def arguments(given):
    """Return this rank's arguments; each rank makes its own store."""
    own = {"rank": dist.get_rank} if given.get("rank") == "own" else {}
    return {name: value() if callable(value) else value for name, value in (given | own).items()}


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.parametrize("what", REFUSED)
def test_what_torch_refuses_is_refused_on_a_world_that_is_open(what):
    given, error, words = REFUSED[what]
    with pytest.raises(error, match=words):
        dist.init_process_group(**({"backend": "gloo"} | arguments(given)))
    assert main() == 2  # the existing group can still be taken


@pytest.mark.world_size(2)
@pytest.mark.parametrize("what", ACCEPTED)
def test_what_torch_accepts_takes_the_group_of_the_world(what):
    before = dist.group.WORLD
    dist.init_process_group(**({"backend": "gloo"} | arguments(ACCEPTED[what])))
    assert dist.group.WORLD is before
    group = dist.new_group([0, 1])
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total == 2
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group("gloo")


@pytest.mark.world_size(2)
def test_a_variable_of_the_launcher_that_is_not_there_is_missed(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ValueError, match="environment variable MASTER_ADDR expected"):
        dist.init_process_group("gloo")
    monkeypatch.undo()
    dist.init_process_group("gloo")


def announced():
    """Return the rendezvous of a program's own method."""
    raise AssertionError("nobody meets: the world is open")
    yield


@pytest.mark.world_size(2)
def test_a_way_to_meet_of_the_programs_own_is_known_and_not_gone(rank, monkeypatch):
    from torch.distributed import rendezvous

    handlers = sys.modules[rendezvous.__module__]._rendezvous_handlers
    monkeypatch.setitem(handlers, "mine", lambda url, **kwargs: announced())
    dist.init_process_group("gloo", init_method="mine://somewhere")


# tutorials do this: each rank gets its number, sets up its group, and cleans it up


def set_up_by_environment(rank, world_size, port):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=20))


def set_up_by_file(rank, world_size, path):
    meeting = f"file://{path}"
    dist.init_process_group("gloo", meeting, rank=rank, world_size=world_size, timeout=timedelta(seconds=20))


def set_up_by_tcp(rank, world_size, port):
    meeting = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", meeting, rank=rank, world_size=world_size, timeout=timedelta(seconds=20))


def trained(rank, world_size, set_up, where):
    """Take a step of torch's DDP and of ours; return the gradients."""
    set_up(rank, world_size, where)
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
        gradients = []
        for wrapper in (DistributedDataParallel, primitives.DistributedDataParallel):
            model = wrapper(nn.Linear(2, 1))
            model(torch.full((1, 2), rank + 1.0)).sum().backward()
            gradients.append(model.module.weight.grad[0].tolist())
        return gradients
    finally:
        dist.destroy_process_group()


def spawned(rank, world_size, meetings, folder):
    torch.save([trained(rank, world_size, *meeting) for meeting in meetings], folder / f"{rank}.pt")


def failing(rank, world_size, set_up, where):
    set_up(rank, world_size, where)
    try:
        if rank == 1:
            raise ValueError("rank 1 is wrong")
    finally:
        dist.destroy_process_group()


def on_a_rank(fn, *args):
    return fn(int(os.environ["RANK"]), dist.get_world_size(), *args)


WAYS = {"env": set_up_by_environment, "file": set_up_by_file, "tcp": set_up_by_tcp}


def meeting_by(way, folder):
    """Return the set-up function of a way, and an unused port or file."""
    if way == "file":
        return WAYS[way], folder / "meeting"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return WAYS[way], free.getsockname()[1]


@pytest.fixture(params=WAYS)
def meeting(request, tmp_path):
    return meeting_by(request.param, tmp_path)


@pytest.mark.slow
def test_functions_that_set_up_and_clean_up_run_under_spawn_and_worlds_go_on(world, tmp_path):
    assert world.run(dist.get_rank, world_size=2) == [0, 1]
    mp.spawn(spawned, (2, [meeting_by(way, tmp_path) for way in WAYS], tmp_path), nprocs=2)
    assert [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)] == [[[[1.5, 1.5]] * 2] * len(WAYS)] * 2
    assert not dist.is_initialized()
    assert world.run(main, world_size=2) == [2, 2]


@pytest.mark.parametrize("world_size", [1, 3])
def test_they_run_on_the_ranks_of_a_world_as_they_are(world, meeting, world_size):
    for _ in range(2):  # on the same ranks, which have done it before
        gradients = world.run(on_a_rank, trained, *meeting, world_size=world_size)
        assert gradients == [[[(world_size + 1) / 2] * 2] * 2] * world_size
    assert world.run(dist.get_rank, world_size=world_size) == [*range(world_size)]


def test_one_that_fails_cleans_up_and_the_next_one_runs(world, meeting):
    with pytest.raises(ValueError, match="rank 1 is wrong"):
        world.run(on_a_rank, failing, *meeting, world_size=2)
    assert world.run(on_a_rank, trained, *meeting, world_size=2) == [[[1.5, 1.5]] * 2] * 2
