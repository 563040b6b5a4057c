"""Modules of public libraries that keep a process's rank: by default each simulated rank has its own globals."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch.distributed as dist

from pdlcheck.worlds.simulated.module_globals.modules import known_own_globals

KNOWN = [
    "accelerate.state",
    "deepspeed.comm.comm",
    "deepspeed.runtime.zero.partition_parameters",
    "deepspeed.utils.groups",
    "hydra.core.singleton",
    "ignite.distributed.utils",
    "picotron.process_group_manager",
]


@pytest.fixture(params=[*KNOWN, "mine.state"])
def state(request, monkeypatch):
    """Return a module with a singleton, under the name of a known library such as accelerate, or an unknown name."""
    if request.param in sys.modules:
        pytest.skip(f"{request.param} is imported")
    module = ModuleType(request.param)
    module.shared = {}
    parts = request.param.split(".")
    for package in [".".join(parts[:depth]) for depth in range(1, len(parts))]:
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def first_come(state):
    state.shared.setdefault("rank", dist.get_rank())
    dist.barrier()
    return state.shared["rank"]


def test_singletons_of_known_libraries_are_each_ranks_own(state):
    from pdlcheck.worlds import get_world

    known = state.__name__ != "mine.state"
    assert any(f"{state.__name__}.".startswith(f"{name}.") for name in known_own_globals()) is known
    found = get_world("sim").run(lambda: first_come(sys.modules[state.__name__]), world_size=3)
    assert found == ([0, 1, 2] if known else [found[0]] * 3)
    assert (state.shared == {}) is known


def imports_and_keeps(name, module):
    sys.modules.setdefault(name, module)
    dist.barrier()
    return first_come(module)


def test_what_ranks_import_themselves_is_told(monkeypatch):
    from pdlcheck.worlds import get_world

    name = "accelerate.state"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, name.partition(".")[0], ModuleType(name.partition(".")[0]))
    module = ModuleType(name)
    module.shared = {}
    try:
        told = "simulated ranks shared accelerate.state in this run, .* import it at the top of the file of the test"
        with pytest.warns(UserWarning, match=told):
            found = get_world("sim").run(lambda: imports_and_keeps(name, module), world_size=2)
        assert found[0] == found[1]
        module.shared.clear()
        assert get_world("sim").run(lambda: first_come(sys.modules[name]), world_size=2) == [0, 1]
    finally:
        sys.modules.pop(name, None)


def polls():
    import torch

    future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
    while not future.done():
        pass
    return future.value()[0].tolist()


def test_polling_a_future_lets_its_operation_go_on(world):
    assert world.run(polls, world_size=2) == [[2.0, 2.0]] * 2
