"""The replacements of ``cuda_as_cpu`` in torch are visible to ranks only, and only while the world is open."""

from __future__ import annotations

import gc
import sys
import threading
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
import torch.serialization
from torch.cuda import set_device

from pdlcheck.worlds import get_world
from pdlcheck.worlds.cuda_as_cpu.replaced import replaced_names
from pdlcheck.worlds.simulated import world as simulated

MINE = sys.modules[__name__]
HERE = torch.cuda.device_count()


def _owner(name):
    module, _, kind = name.partition(":")
    owner = import_module(module)
    return getattr(owner, kind) if kind else owner


def everything():
    """Return all names of torch's modules, of this file, and of the table's classes, with their values."""
    gc.collect()  # a world that an earlier test has forgotten takes its replacements back when it is collected
    owners = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "torch"]
    owners += [MINE, *(_owner(entry.owner) for entry in replaced_names(processes=True) if ":" in entry.owner)]
    held = {(owner.__name__, name): value for owner in owners for name, value in list(vars(owner).items())}
    held["packages"] = tuple(torch.serialization._package_registry)
    held["modes"] = torch._C._len_torch_function_stack()
    return held


def differing(before, after):
    """Return the names whose values differ."""
    there = [name for name, value in before.items() if after.get(name, before) is not value]
    return sorted(str(name) for name in there if before[name] != after.get(name))


def use_cuda():
    set_device(dist.get_rank())
    torch.set_default_device("cuda")
    torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    return torch.cuda.current_device(), torch.ones(1).is_cuda


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Run once before the tests, because a first run imports modules and sets values permanently.

    No world of an earlier test holds the process any longer, because its replacements stay while one does.
    """
    simulated._holders.clear()
    get_world("sim").run(dist.barrier, world_size=2)
    get_world("sim", cuda_as_cpu=True).run(use_cuda, world_size=2)


def test_nothing_differs_after_the_world_has_closed():
    before, world = everything(), get_world("sim", cuda_as_cpu=True)
    with world.open(2) as ranks:
        inside = differing(before, everything())
        assert ranks.run(use_cuda) == [(0, True), (1, True)]
    world.close()
    assert differing(before, everything()) == []
    for expected in (("torch.cuda", "set_device"), (__name__, "set_device"), ("Module", "to"), ("Thread", "start")):
        assert str(expected) in inside


def test_nothing_differs_after_a_rank_has_failed():
    before, world = everything(), get_world("sim", cuda_as_cpu=True)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        world.run(lambda: set_device(2), world_size=2)
    world.close()
    assert differing(before, everything()) == []


def test_a_difference_is_seen(monkeypatch):
    before = everything()
    monkeypatch.setattr(torch.cuda, "set_device", print)
    assert differing(before, everything()) == [str(("torch.cuda", "set_device"))]


def test_what_is_exchanged_is_in_the_table():
    with get_world("sim").open(2):  # which exchanges other names
        table = [vars(_owner(entry.owner)).get(entry.name) for entry in replaced_names(processes=False)]
        before = everything()
    with get_world("sim", cuda_as_cpu=True).open(2):
        inside = differing(before, everything())
    by_name = {str(name): value for name, value in before.items()}
    assert {name for name in inside if not any(by_name[name] is real for real in table)} == {"packages"}


def test_the_controller_sees_the_truth_while_the_world_is_open():
    seen = {}

    def look(where):
        seen[where] = torch.cuda.device_count(), torch.accelerator.is_available(), torch.ones(1).is_cuda

    with get_world("sim", cuda_as_cpu=True).open(2) as ranks:
        look("controller")
        thread = threading.Thread(target=look, args=("thread",))
        thread.start()
        thread.join()
        assert ranks.run(lambda: torch.cuda.device_count()) == [2, 2]
    assert seen == dict.fromkeys(("controller", "thread"), (HERE, torch.accelerator.is_available(), False))


def test_each_call_begins_with_the_first_device():
    with get_world("sim", cuda_as_cpu=True).open(2) as ranks:
        assert ranks.run(set_device, 1) == [None, None]
        assert ranks.run(torch.cuda.current_device) == [0, 0]


def test_ranks_of_a_world_without_it_do_not_have_it():
    get_world("sim", cuda_as_cpu=True).run(use_cuda, world_size=2)
    assert get_world("sim").run(torch.cuda.device_count, world_size=2) == [HERE, HERE]


def test_results_are_tensors_of_the_cpu():
    (made, _) = get_world("sim", cuda_as_cpu=True).run(lambda: torch.ones(2, device="cuda"), world_size=2)
    assert made.device.type == "cpu"
    assert not made.is_cuda
    assert (made + 1).tolist() == [2.0, 2.0]
