"""Ranks on CUDA devices: nccl with one rank a device, and gloo whose ranks share one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck import primitives
from pdlcheck.errors import CollectiveMismatch, RankDied, WorldTooSmall
from pdlcheck.worlds import get_world
from pdlcheck.worlds.processes import ProcessWorld

from .data_parallel_steps import OPTIONS, WRAPPERS, ddp_step, ddp_steps

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def nccl() -> Iterator[ProcessWorld]:
    world = ProcessWorld("nccl")
    yield world
    world.close()


@pytest.fixture(scope="module", params=[True, False], ids=["watched", "plain"])
def shared(request: pytest.FixtureRequest) -> Iterator[ProcessWorld]:
    """Yield gloo on CUDA devices that its ranks share."""
    world = ProcessWorld("gloo", device="cuda", watch=request.param)
    yield world
    world.close()


@pytest.fixture(scope="module")
def watched() -> Iterator[ProcessWorld]:
    world = ProcessWorld("gloo", device="cuda")
    yield world
    world.close()


def total() -> tuple[float, int]:
    x = torch.tensor([dist.get_rank() + 1.0], device="cuda")
    dist.all_reduce(x)
    return x.item(), x.device.index


# -- nccl ------------------------------------------------------------------------------------------


def test_nccl_adds_on_a_device_of_its_own(nccl):
    assert nccl.run(total, world_size=1) == [(1.0, 0)]


@WRAPPERS
def test_nccl_takes_a_step_of_ddp(nccl, wrapper):
    assert nccl.run(ddp_step, wrapper, "cuda", world_size=1) == [([[2.0, 2.0, 2.0]], True)]


@WRAPPERS
@OPTIONS
def test_steps_of_ddp_on_nccl_are_those_of_the_plain_model(nccl, wrapper, options):
    ((away, alike),) = nccl.run(ddp_steps, wrapper, "cuda", options, world_size=1)
    assert away < 1e-12
    assert alike


def test_ranks_of_nccl_are_kept_join_anew_or_are_fresh(nccl):
    pids = []
    for isolation in ("pool", "reinit", "fresh"):
        nccl.isolation = isolation
        assert nccl.run(total, world_size=1) == [(1.0, 0)]
        nccl.isolation = "pool"
        pids.append(nccl.pids(1))
    assert pids[0] == pids[1] == pids[2]


def test_more_ranks_than_devices_is_an_error_of_a_run(nccl):
    devices = torch.cuda.device_count()
    with pytest.raises(WorldTooSmall, match=f"this machine has {devices}; ranks of gloo can share a device"):
        nccl.run(total, world_size=devices + 1)


def test_pytest_on_nccl(pytester):
    more = torch.cuda.device_count() + 1
    pytester.makepyfile(
        f"""
        import pytest
        import torch
        import torch.distributed as dist

        @pytest.mark.world_size(1)
        def test_sum(rank, device):
            assert str(device) == "cuda:0"
            x = torch.ones(3, device=device)
            dist.all_reduce(x)
            dist.barrier()
            assert x.tolist() == [1.0] * 3

        @pytest.mark.world_size(1)
        def test_wrong(device):
            x = torch.full((2,), 3.0, device=device)
            dist.all_reduce(x)
            assert x.sum().item() == 7.0

        @pytest.mark.world_size(1)
        def test_the_next_one(device):
            dist.all_reduce(torch.ones(1, device=device))

        @pytest.mark.world_size({more})
        def test_too_many(rank):
            pass

        def test_too_many_for_a_run(world):
            world.run(dist.get_rank, world_size={more})
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rs", "--world", "nccl")
    result.assert_outcomes(passed=2, failed=1, skipped=2)
    result.stdout.fnmatch_lines(
        [
            "*test_wrong?nccl-1?*",
            ">       assert x.sum().item() == 7.0",
            "E       *assert 6.0 == 7.0",
            "pytest *test_wrong?nccl-1?* --world nccl --pdl-seed=0",
            f"SKIPPED*: needs {more} ranks, each with a CUDA device of its own on nccl, and this machine has*",
        ]
    )


# -- gloo on shared devices ------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_of_gloo_share_devices(shared, world_size):
    expected = world_size * (world_size + 1) / 2
    devices = torch.cuda.device_count()
    assert shared.run(total, world_size=world_size) == [(expected, rank % devices) for rank in range(world_size)]


@WRAPPERS
@pytest.mark.parametrize("world_size", [2, 4])
def test_ddp_on_shared_devices(shared, world_size, wrapper):
    mean = world_size + 1.0  # two samples of r + 1 on rank r, averaged over the ranks
    assert shared.run(ddp_step, wrapper, "cuda", world_size=world_size) == [([[mean] * 3], True)] * world_size


@WRAPPERS
@OPTIONS
@pytest.mark.parametrize("world_size", [2, 4])
def test_steps_of_ddp_on_shared_devices_are_those_of_the_plain_model(shared, world_size, wrapper, options):
    for away, alike in shared.run(ddp_steps, wrapper, "cuda", options, world_size=world_size):
        assert away < 1e-12
        assert alike


def hooked_steps(hook: str, steps: int = 5) -> list[tuple[float, float]]:
    """Return the smallest and largest gradient element after each step of torch's DDP; a rank's own are r + 1."""
    model = nn.Linear(1024, 1024, bias=False, device="cuda")
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    if hook == "fp16_compress":
        ddp.register_comm_hook(None, primitives.fp16_compress)
    elif hook == "top_k":
        ddp.register_comm_hook(primitives.TopKState(model, ratio=1.0), primitives.top_k)
    else:
        ddp.register_comm_hook(primitives.PowerSGDState(model, start_step=0), primitives.power_sgd)
    found = []
    for _ in range(steps):
        ddp.zero_grad()
        ddp(torch.full((1, 1024), dist.get_rank() + 1.0, device="cuda")).sum().backward()
        assert model.weight.grad is not None
        found.append((model.weight.grad.min().item(), model.weight.grad.max().item()))
    return found


@pytest.mark.parametrize("hook", ["fp16_compress", "top_k", "power_sgd"])
def test_hooks_wait_until_the_device_has_the_result(shared, hook):
    """The backend gloo reports completion earlier."""
    for found in shared.run(hooked_steps, hook, world_size=2):
        assert found == [pytest.approx((1.5, 1.5), rel=1e-5)] * 5


def test_tensors_of_a_call_come_to_the_device_of_the_rank(shared):
    def held(model: nn.Module, x: torch.Tensor) -> tuple[list[str], float]:
        with torch.no_grad():
            return [str(tensor.device) for tensor in (*model.parameters(), x)], model(x).item()

    model = nn.Linear(2, 1).cuda()
    x = torch.ones(1, 2, device="cuda")
    expected = model(x).item()
    for rank, (devices, value) in enumerate(shared.run(held, model, x, world_size=2)):
        assert devices == [f"cuda:{rank % torch.cuda.device_count()}"] * 3
        assert value == expected


def test_broadcast_and_all_gather_of_cuda_tensors(shared):
    def body() -> tuple[list[float], list[float]]:
        mine = torch.full((2,), float(dist.get_rank()), device="cuda")
        parts = [torch.empty(2, device="cuda") for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        dist.broadcast(mine, 1)
        return mine.tolist(), torch.cat(parts).tolist()

    assert shared.run(body, world_size=2) == [([1.0, 1.0], [0.0, 0.0, 1.0, 1.0])] * 2


def test_tensors_of_the_cpu_still_move(shared):
    def body() -> float:
        x = torch.ones(1)
        dist.all_reduce(x)
        dist.barrier()
        return x.item()

    assert shared.run(body, world_size=2) == [2.0, 2.0]


def test_a_collective_waits_for_the_stream_that_it_was_called_on(shared):
    def body() -> float:
        stream = torch.cuda.Stream()
        x = torch.zeros(2**20, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)  # about 50 ms, in which the value below is not there yet
            x.fill_(1.0)
            dist.all_reduce(x)
            x.mul_(2.0)
        stream.synchronize()
        return x.sum().item() / 2**20

    assert shared.run(body, world_size=2) == [4.0, 4.0]


def test_a_mismatch_of_cuda_tensors_is_told_before_data_moves(watched):
    def body() -> None:
        dist.all_reduce(torch.ones(dist.get_rank() + 1, device="cuda"))

    before = watched.pids(2)
    with pytest.raises(CollectiveMismatch):
        watched.run(body, world_size=2)
    assert watched.pids(2) == before


def test_a_message_of_a_cuda_tensor_is_refused(watched):
    def body() -> None:
        if dist.get_rank() == 0:
            dist.send(torch.ones(1, device="cuda"), 1)
        else:
            dist.recv(torch.ones(1, device="cuda"), 0)

    with pytest.raises(ValueError, match=r"gloo has no (send|recv) for CUDA tensors"):
        watched.run(body, world_size=2)


def test_ranks_whose_device_is_lost_are_replaced(watched):
    def body() -> None:
        if dist.get_rank() == 1:
            table = torch.zeros(4, device="cuda")
            table[torch.tensor([7], device="cuda")].sum().item()  # an assertion in the kernel
        dist.barrier()

    before = watched.pids(2)
    with pytest.raises(Exception, match="CUDA error"):
        watched.run(body, world_size=2)
    assert not {*before} & {*watched.pids(2)}
    assert watched.run(total, world_size=2) == [(3.0, 0), (3.0, 1 % torch.cuda.device_count())]


def test_a_rank_that_has_no_memory_left_on_its_device_goes_on(watched):
    def body() -> None:
        if dist.get_rank() == 1:
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        dist.all_reduce(torch.ones(1, device="cuda"))

    before = watched.pids(2)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        watched.run(body, world_size=2)
    assert watched.pids(2) == before
    assert watched.run(total, world_size=2) == [(3.0, 0), (3.0, 1 % torch.cuda.device_count())]


def test_a_rank_that_is_killed_in_the_midst_of_a_kernel_is_told_and_replaced(watched):
    def body() -> None:
        if dist.get_rank() == 1:
            torch.cuda._sleep(10_000_000_000)  # some seconds
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1, device="cuda"))

    with pytest.raises(RankDied, match="rank 1 was killed by SIGKILL"):
        watched.run(body, world_size=2)
    assert watched.run(total, world_size=2) == [(3.0, 0), (3.0, 1 % torch.cuda.device_count())]


def test_pytest_on_shared_devices(pytester):
    pytester.makepyfile(
        """
        import pytest
        import torch
        import torch.distributed as dist

        @pytest.mark.world_size(2, 4)
        def test_sum(rank, world_size, device):
            assert str(device) == f"cuda:{rank % torch.cuda.device_count()}"
            assert torch.cuda.current_device() == device.index
            x = torch.tensor([rank + 1.0], device=device)
            dist.all_reduce(x)
            assert x.item() == world_size * (world_size + 1) / 2
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--world", "gloo", "--rank-device", "cuda")
    result.assert_outcomes(passed=2)


# -- both ------------------------------------------------------------------------------------------


def test_ranks_on_the_cpu_do_not_touch_cuda():
    world = get_world("gloo")
    try:
        assert world.run(lambda: torch.cuda.is_initialized(), world_size=2) == [False, False]
    finally:
        world.close()


def test_the_fork_server_has_not_used_cuda(nccl):
    assert nccl.run(lambda: torch.cuda._is_in_bad_fork(), world_size=1) == [False]
