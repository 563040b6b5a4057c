"""Prints the attributes of Python, torch and pytest that differ once a world is closed, or inside of it.

Usage: left_behind.py WORLD FOLDER [closed|open]
"""

from __future__ import annotations

import sys
import threading
import time
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.distributed.nn.functional
import torch.distributed.tensor
import torch.profiler
from torch.nn.parallel import DistributedDataParallel

LOGGER = "filters of torch's logger"
REGISTERED = "torch.distributed.distributed_c10d.Backend.SIM"  # torch cannot unregister a backend
NOT_OURS = ("__main__", "pdlcheck", "suites")
NOT_COMPARED = (bool, bytes, float, int, str, tuple, dict, list, set, frozenset, ModuleType, type(None))


def step(folder):
    """Use what is exchanged: groups, DDP, seeds, stores, threads, mocks, sleep, the profiler, torch.compile."""
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    with torch.profiler.profile() if dist.get_rank() == 0 else mock.patch.object(time, "ctime"):
        model(torch.ones(1, 3)).sum().backward()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(time, "asctime", lambda: "now")
        time.sleep(0.001)
    dist.FileStore(f"{folder}/store", dist.get_world_size())
    thread = threading.Thread(target=torch.ones(3).tolist)
    thread.start()
    thread.join()
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(2), group=group, async_op=True).get_future().wait()
    return torch.compile(torch.sin)(torch.ones(1)).numpy()


def attributes():
    """Return all that a patch could exchange: values in modules, and in the classes that modules hold."""
    found = {}
    for module in [one for one in list(sys.modules.values()) if isinstance(one, ModuleType)]:
        if module.__name__.startswith(NOT_OURS):
            continue
        for name, value in list(vars(module).items()):
            if not isinstance(value, NOT_COMPARED):
                found[f"{module.__name__}.{name}"] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                members = [(own, held) for own, held in list(vars(value).items()) if own not in ("__doc__", "__dict__")]
                found |= {f"{module.__name__}.{name}.{own}": held for own, held in members}
    world = "torch.distributed.distributed_c10d._world"
    found[f"class of {world}"] = type(found[world])
    found[LOGGER] = frozenset(torch.distributed.c10d_logger._c10d_logger.filters) or None
    return found


def main(name, folder, when="closed"):
    """Compare before and after."""
    assert c10d._world is not None
    torch.compile(torch.sin)(torch.ones(1))
    before = attributes()
    from pdlcheck.harness.running.worlds import look_after
    from pdlcheck.worlds import get_world

    world = get_world(name)
    look_after(world)
    with world.open(2) as ranks:
        ranks.run(step, folder)
        after = attributes()
    world.close()
    if when == "closed":
        after = attributes()
    for attribute, value in before.items():
        if attribute not in after:
            print(f"{attribute} is gone")
        elif after[attribute] is not value and (attribute == LOGGER or not isinstance(value, NOT_COMPARED)):
            print(f"{attribute}: {value!r} is {after[attribute]!r}")
    for attribute in after.keys() - before.keys():
        if isinstance(before.get(attribute.rpartition(".")[0]), type) and attribute != REGISTERED:
            print(f"{attribute} is new")


if __name__ == "__main__":
    main(*sys.argv[1:])
