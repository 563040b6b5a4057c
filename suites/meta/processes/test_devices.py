"""The device of each rank: the arithmetic, the refused arguments, and a fork server that does not use CUDA."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from pdlcheck.errors import WorldTooSmall, WorldUnavailable
from pdlcheck.item_runners.launched.session import PRELOAD
from pdlcheck.launch.environment import Launch
from pdlcheck.worlds import get_world
from pdlcheck.worlds.devices import check_devices, choose_device, device_name, why_no_cuda
from pdlcheck.worlds.processes import ProcessWorld
from pdlcheck.worlds.processes.controller import forkserver
from pdlcheck.worlds.processes.rank import own_device

from .data_parallel_steps import OPTIONS, WRAPPERS, ddp_step, ddp_steps

needs_no_cuda = pytest.mark.skipif(not why_no_cuda(), reason="this machine has a CUDA device")


def test_ranks_have_the_cpu_unless_asked_and_nccl_always_has_cuda():
    assert {world: choose_device(world, None) for world in ("gloo", "mpi", "nccl", "sim")} == {
        "gloo": "cpu",
        "mpi": "cpu",
        "nccl": "cuda",
        "sim": "cpu",
    }
    assert choose_device("gloo", "cuda") == choose_device("nccl", "cuda") == "cuda"
    assert choose_device("gloo", "cpu") == "cpu"


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("mpi", "cuda", "the ranks of world mpi have cpu tensors, not cuda; --world sim, gloo or nccl"),
        ("nccl", "cpu", "the ranks of world nccl have cuda tensors, not cpu; leave the device away"),
    ],
)
def test_a_device_that_a_world_cannot_have_is_refused_with_the_cure(name, device, message):
    with pytest.raises(WorldUnavailable) as caught:
        get_world(name, device=device)
    assert str(caught.value) == message


def test_a_device_that_does_not_exist_is_a_wrong_argument():
    with pytest.raises(ValueError, match="device must be one of cpu, cuda; got 'gpu'"):
        get_world("gloo", device="gpu")


@pytest.mark.parametrize(
    ("devices", "expected"), [(1, [0, 0, 0, 0]), (2, [0, 1, 0, 1]), (3, [0, 1, 2, 0]), (8, [0, 1, 2, 3])]
)
def test_ranks_share_the_devices_in_turn(devices, expected):
    assert [device_name(local_rank, devices) for local_rank in range(4)] == [f"cuda:{index}" for index in expected]


def test_more_ranks_than_devices_are_refused_with_the_alternative():
    check_devices(2, 2)
    with pytest.raises(WorldTooSmall) as caught:
        check_devices(4, 1)
    assert str(caught.value) == (
        "needs 4 ranks, each with a CUDA device of its own on nccl, and this machine has 1; ranks of gloo can share a "
        'device: --world gloo --rank-device cuda, or get_world("gloo", device="cuda")'
    )
    assert (caught.value.world_size, caught.value.available) == (4, 1)


def test_under_a_launcher_the_ranks_of_this_node_are_counted(tmp_path, monkeypatch):
    from pdlcheck.launch.environment import INSIDE
    from pdlcheck.worlds.launched.placement import LaunchedPlacement

    monkeypatch.setenv(INSIDE, "1")  # the placement sets it, so monkeypatch must restore it
    placement = LaunchedPlacement(Launch("torchrun", 0, 1, 0, 2, f"file://{tmp_path}/meeting"))
    try:
        assert [placement.ranks_here(world_size) for world_size in (1, 2, 4)] == [1, 2, 2]
    finally:
        placement.close(0)


@needs_no_cuda
@pytest.mark.parametrize(("name", "device"), [("nccl", None), ("gloo", "cuda"), ("sim", "cuda")])
def test_without_cuda_a_world_says_what_is_missing(name, device):
    with pytest.raises(WorldUnavailable, match="install a CUDA build of torch on a machine with an NVIDIA GPU"):
        get_world(name, device=device).run(dist.get_rank, world_size=1)


@needs_no_cuda
def test_without_cuda_tests_are_skipped_with_the_reason(pytester):
    pytester.makepyfile(
        """
        import pytest
        import torch.distributed as dist

        @pytest.mark.world_size(2)
        def test_ranks(rank, device):
            assert device.type == "cuda"

        def test_controller(world):
            world.run(dist.get_rank, world_size=2)
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-rs", "--world", "nccl")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED*test_without_cuda*: *; install a CUDA build of torch on a machine with*"])
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-rs", "--world", "sim,gloo", "--rank-device=cuda")
    result.assert_outcomes(skipped=4)
    result.stdout.fnmatch_lines_random(
        [
            f"SKIPPED*: ranks of gloo on CUDA: {why_no_cuda()}; install a CUDA build*",
            f"SKIPPED*: ranks of sim on CUDA: {why_no_cuda()}; install a CUDA build*",
        ]
    )


def test_the_device_is_part_of_the_replay_command(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.world_size(2)
        def test_ranks(rank, device):
            assert device.type == "cuda"
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--world", "gloo", "--rank-device", "cpu")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["pytest *test_ranks*gloo-2* --world gloo --pdl-seed=0 --rank-device cpu"])


def test_watched_and_plain_groups_of_gloo_take_tensors_of_the_same_devices():
    def kinds() -> list[str]:
        return sorted(device.type for device in dist.group.WORLD._device_types)  # type: ignore[union-attr]

    found = []
    for watch in (True, False):
        world = ProcessWorld(watch=watch)
        try:
            found.append(world.run(kinds, world_size=1))
        finally:
            world.close()
    assert found == [[["cpu", "cuda"]]] * 2


def test_a_message_of_a_cuda_tensor_is_refused_where_gloo_would_end_the_process():
    def send() -> None:
        with FakeTensorMode():  # a CUDA tensor without memory
            tensor = torch.empty(3, device="cuda")
        dist.group.WORLD.send([tensor], 0, 0)  # type: ignore[union-attr]

    world = ProcessWorld()
    try:
        with pytest.raises(ValueError, match="gloo has no send for CUDA tensors, got one on cuda:0; move it to"):
            world.run(send, world_size=1)
    finally:
        world.close()


def test_a_cuda_tensor_of_a_call_is_moved_to_the_device_of_the_rank(monkeypatch):
    class Storage:  # a tensor that the controller had on its own device
        def cuda(self, index: int) -> str:
            return f"on cuda:{index}"

    monkeypatch.setattr(own_device, "_own", torch.device("cuda:1"))
    assert own_device._moved(Storage(), "cuda:0") == "on cuda:1"
    assert own_device._moved(Storage(), "cpu") is None
    model = torch.nn.Linear(2, 1)
    data = pickle.dumps(("call", [model, torch.ones(2)]))
    words, (found, ones) = own_device.loads_on_own_device(data)
    assert words == "call"
    assert torch.equal(found.weight, model.weight)
    assert ones.tolist() == [1.0, 1.0]


def test_ranks_whose_device_is_lost_are_replaced():
    def fail() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    world = ProcessWorld()
    try:
        before = world.pids(2)
        with pytest.raises(RuntimeError, match="device-side assert"):
            world.run(fail, world_size=2)
        assert not {*before} & {*world.pids(2)}
    finally:
        world.close()


def test_nothing_that_the_fork_server_imports_asks_for_a_device():
    code = f"""
import importlib, torch
asked = []
for name in ("is_available", "device_count", "current_device", "get_device_properties", "init", "_lazy_init"):
    setattr(torch.cuda, name, lambda *args, name=name: asked.append(name) or 0)
for module in {(*forkserver._PRELOAD, *PRELOAD)}:
    importlib.import_module(module)
print(asked)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.strip() == "[]"


@WRAPPERS
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_step_of_ddp_as_it_is_taken_on_gpus(world, world_size, wrapper):
    mean = world_size + 1.0  # two samples of r + 1 on rank r, averaged over the ranks
    assert world.run(ddp_step, wrapper, "cpu", world_size=world_size) == [([[mean] * 3], True)] * world_size


@WRAPPERS
@OPTIONS
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_steps_of_ddp_as_they_are_taken_on_gpus(world, world_size, wrapper, options):
    for away, alike in world.run(ddp_steps, wrapper, "cpu", options, world_size=world_size):
        assert away < 1e-12
        assert alike


def test_steps_that_are_not_synchronised_are_seen(world):
    """The twin of the two tests above is a wrapper that does not synchronise."""

    class Alone(torch.nn.Module):
        def __init__(self, module, device_ids):
            super().__init__()
            self.module, self.no_sync = module, contextlib.nullcontext

        def forward(self, *inputs):
            return self.module(*inputs)

    for away, alike in world.run(ddp_steps, Alone, "cpu", {}, world_size=2):
        assert away > 0.01
        assert not alike
    assert world.run(ddp_step, Alone, "cpu", world_size=2) == [([[2.0] * 3], False), ([[4.0] * 3], False)]
