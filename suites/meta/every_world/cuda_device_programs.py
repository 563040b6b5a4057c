"""Programs of two ranks that use a CUDA device: streams, memory, random numbers, device properties."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .cuda_parallel_programs import on

__all__ = [
    "memory_statistics",
    "questions",
    "random_streams",
    "streams_and_events",
    "the_accelerator",
]


def streams_and_events():
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    side, x = torch.cuda.Stream(priority=-1), torch.ones(2, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    block = torch.cuda.stream(side)
    for _ in range(2):  # a framework keeps one such block for all buckets
        with block:
            assert torch.cuda.current_stream() == side
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side != torch.cuda.default_stream()
        dist.barrier()
        assert torch.cuda.current_stream() == side
        x.mul_(2)
        x.record_stream(side)
        done = side.record_event()
    torch.cuda.current_stream().wait_event(done)
    done.synchronize()
    with torch.cuda.stream(None), side:
        assert torch.cuda.current_stream() == side
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert done.query()
    assert side.query()
    assert isinstance(side, torch.cuda.Stream)
    assert isinstance(done, torch.cuda.Event)
    assert side.device == on(rank)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.ones(100, 100) @ torch.ones(100, 100)
    end.record(side)
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0
    torch.cuda.set_stream(side)
    assert torch.cuda.current_stream() == side
    with torch.cuda.StreamContext(torch.cuda.default_stream()):
        assert torch.cuda.current_stream() != side
    with torch.cuda.device_of(torch.ones(1, device=on(1 - rank))):
        assert torch.cuda.current_device() == 1 - rank
    assert not torch.cuda.is_current_stream_capturing()
    torch.accelerator.set_stream(torch.cuda.default_stream())
    assert torch.Stream(device="cuda").device == on(rank)
    assert isinstance(torch.Event("cuda"), torch.Event)


def memory_statistics():
    torch.zeros(100, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.5)
    names = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    for kind in (torch.cuda, torch.accelerator):
        assert [getattr(kind, name)() for name in names] == [getattr(kind, name)(0) for name in names] == [0] * 4
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.reset_accumulated_memory_stats()
    assert torch.accelerator.memory_stats()["allocated_bytes.all.peak"] == 0
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
    assert torch.cuda.memory_summary()
    free, total = torch.cuda.mem_get_info()
    assert 0 < free < total == torch.cuda.get_device_properties(0).total_memory


def random_streams():
    torch.cuda.manual_seed_all(7)
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(4, device="cuda")
    dist.barrier()
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="cuda"), drawn)
    assert torch.cuda.initial_seed() == 7
    torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
    torch.cuda.manual_seed(8)
    assert not torch.equal(torch.rand(4, device="cuda"), drawn)
    assert torch.initial_seed() == 8
    torch.cuda.seed()
    torch.cuda.seed_all()
    assert torch.cuda.initial_seed() != 8
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert isinstance(generator, torch.Generator)
    torch.rand(4, device="cuda", generator=generator)


def the_accelerator():
    rank = dist.get_rank()
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 2
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    torch.accelerator.set_device_index(rank)
    assert torch.accelerator.current_device_index() == rank == torch.cuda.current_device()
    with torch.accelerator.device_index(1 - rank):
        assert torch.zeros(1, device="cuda").device == on(1 - rank)
    torch.accelerator.set_device_idx(rank)
    assert torch.accelerator.current_device_idx() == rank
    assert torch.accelerator.get_memory_info()[0] > 0
    torch.accelerator.synchronize()
    assert torch.accelerator.current_stream() == torch.cuda.current_stream()


def questions():
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == dist.get_world_size()
    assert torch.cuda.is_bf16_supported()
    assert "CPU" in torch.cuda.get_device_name(0)
    properties = torch.cuda.get_device_properties(0)
    assert torch.cuda.get_device_capability() == (properties.major, properties.minor) < (1, 0)
    assert torch.cuda.get_arch_list() == []
    assert not torch.cuda.is_tf32_supported()
    assert torch.cuda.can_device_access_peer(0, 1)
    assert torch.cuda.nccl.version() == (0, 0, 0)
    torch.cuda.init()
    torch.cuda.set_sync_debug_mode("warn")
    torch.cuda.ipc_collect()
    torch.cuda.nvtx.range_push("step")
    torch.cuda.nvtx.range_pop()
    torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("step"))
    torch.cuda.nvtx.mark("here")
    with torch.cuda.nvtx.range("step"):
        pass
