"""The table of replacements in torch while ranks run CUDA code on the CPU.

Each entry names an attribute of torch and its replacement. A thread that belongs to no rank gets torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from pdlcheck.compat.private import PrivateName
from pdlcheck.compat.torch.autograd import RUN_BACKWARD
from pdlcheck.compat.torch.devices import CAST, FACTORY_UNDER_DEFAULT_DEVICE
from pdlcheck.worlds.cuda_as_cpu import calls, functions, streams
from pdlcheck.worlds.cuda_as_cpu.functions import refuse
from pdlcheck.worlds.cuda_as_cpu.mode import asked_by_torch
from pdlcheck.worlds.rank_devices import devices_of_caller

__all__ = ["NAMES_REFUSED", "Replaced", "replaced_names"]

_GRAPHS = "call the function without a graph"
_CAPABILITY = "ask for what the code needs, such as torch.cuda.is_bf16_supported(), or test this on a GPU"
_READING = "the CPU has no such reading: guard it, or test this on a GPU"
_MEMORY = "the memory is the host's, which has no such allocator: guard it, or test this on a GPU"
_KERNELS = "guard the custom kernel, or test this on a GPU"


class Replaced(NamedTuple):
    """One attribute and its replacement on ranks.

    Args:
        owner: module, or module:class, by name.
        name: the attribute.
        make: returns the replacement, given torch's own.
    """

    owner: str
    name: str
    make: Callable[[Any], Any]


def _on_ranks(stand_in: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a maker of replacements for a function, or for a class that code only calls."""

    def make(real: Any) -> Any:
        @wraps(real, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            return (real if devices_of_caller() is None else stand_in)(*args, **kwargs)

        return call

    return make


def _for_users(stand_in: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a maker of replacements for a query.

    torch's own code gets the true answer, so that it takes its paths for the CPU.
    """

    def make(real: Any) -> Any:
        @wraps(real, updated=())
        def answer(*args: Any, **kwargs: Any) -> Any:
            truth = devices_of_caller() is None or asked_by_torch()
            return (real if truth else stand_in)(*args, **kwargs)

        return answer

    return make


def _around(wrapper: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a maker of replacements that call ``wrapper(real, *args, **kwargs)``, which may change the arguments."""

    def make(real: Any) -> Any:
        @wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            if devices_of_caller() is None:
                return real(*args, **kwargs)
            return wrapper(real, *args, **kwargs)

        return call

    return make


def _class(make_instance: Callable[..., Any], *others: type) -> Callable[[Any], Any]:
    """Return a maker of replacements for a class that code calls and uses in ``isinstance``.

    ``make_instance(real, ...)`` makes the object, of torch's own class or of one of the ``others``.
    """

    def make(real: Any) -> Any:
        kinds = (real, *others)

        class Kind(type):
            def __call__(cls, *args: Any, **kwargs: Any) -> Any:
                return real(*args, **kwargs) if devices_of_caller() is None else make_instance(real, *args, **kwargs)

            def __instancecheck__(cls, instance: Any) -> bool:
                return isinstance(instance, kinds)

            def __subclasscheck__(cls, kind: type) -> bool:
                return kind is cls or issubclass(kind, kinds)

            def __getattr__(cls, name: str) -> Any:
                return getattr(real, name)

        return Kind(real.__name__, (), {"__doc__": real.__doc__, "__module__": real.__module__})

    return make


def _private(name: PrivateName, make: Callable[[Any], Any]) -> Replaced:
    owner = name.owner
    place = f"{owner.__module__}:{owner.__name__}" if isinstance(owner, type) else owner.__name__
    return Replaced(place, name.attribute, make)


def replaced_names(*, processes: bool) -> list[Replaced]:
    """Return the table.

    Args:
        processes: whether the ranks are processes, which use the groups of their backend and may compile.
    """
    cuda, accelerator, c10d = "torch.cuda", "torch.accelerator", "torch.distributed.distributed_c10d"
    table = [
        *[Replaced(cuda, name, _for_users(stand_in)) for name, stand_in in _QUESTIONS.items()],
        *[Replaced(cuda, name, _on_ranks(stand_in)) for name, stand_in in _FUNCTIONS.items()],
        Replaced(cuda, "Event", _class(calls.event, streams.Event)),
        Replaced(cuda, "Stream", _class(calls.stream, streams.Stream)),
        *[Replaced(cuda, name, _on_ranks(refuse(f"{cuda}.{name}", cure))) for name, cure in NAMES_REFUSED.items()],
        *[Replaced(f"{cuda}.nvtx", name, _on_ranks(calls.no_range)) for name in _RANGES],
        Replaced(f"{cuda}.nccl", "version", _on_ranks(lambda: (0, 0, 0))),
        *[Replaced(accelerator, name, _for_users(stand_in)) for name, stand_in in _ACCELERATOR_QUESTIONS.items()],
        *[Replaced(accelerator, name, _on_ranks(stand_in)) for name, stand_in in _ACCELERATOR.items()],
        Replaced(c10d, "is_nccl_available", _for_users(functions.true)),
        *[Replaced("torch", name, _around(calls.of_autocast)) for name in calls.AUTOCAST],
        Replaced("torch", "get_default_device", _around(calls.get_default_device)),
        Replaced("torch", "Generator", _class(calls.generator)),
        Replaced("torch", "Event", _class(calls.event_of_kind, streams.Event)),
        Replaced("torch", "Stream", _class(calls.stream_of_kind, streams.Stream)),
        Replaced("torch.amp.autocast_mode:autocast", "__init__", _around(calls.autocast)),
        _private(CAST, _around(calls.cast)),
        Replaced("torch.amp.grad_scaler:GradScaler", "__init__", _around(calls.grad_scaler)),
        _private(RUN_BACKWARD, _around(calls.in_mode_of_rank)),
        Replaced("torch.distributed.device_mesh:DeviceMesh", "__init__", _around(calls.device_mesh)),
        Replaced("torch.distributed.device_mesh:DeviceMesh", "device_type", calls.device_type),
        Replaced(c10d, "barrier", _around(calls.barrier)),
        Replaced("torch.distributed.fsdp:FullyShardedDataParallel", "__init__", _around(calls.fully_sharded)),
        Replaced("torch.nn:Module", "to", _around(calls.module_to)),
        Replaced("torch.nn.parallel:DistributedDataParallel", "__init__", _around(calls.data_parallel)),
        Replaced("torch.nn:SyncBatchNorm", "forward", _around(calls.sync_batch_norm)),
        _private(FACTORY_UNDER_DEFAULT_DEVICE, _around(calls.default_device)),
        Replaced("torch:Tensor", "record_stream", _on_ranks(functions.do_nothing)),
        Replaced("torch:UntypedStorage", "to", _around(calls.storage_to)),
        Replaced("threading:Thread", "start", _around(calls.start_thread)),
    ]
    if processes:
        table += [
            Replaced(c10d, "init_process_group", _around(calls.init_process_group)),
            Replaced(c10d, "new_group", _around(calls.new_group)),
            Replaced("torch", "compile", _around(calls.compile_nothing)),
        ]
    else:
        table += [Replaced(c10d, name, _around(calls.bind_no_device)) for name in ("init_process_group", "new_group")]
    return table


_QUESTIONS: dict[str, Callable[..., Any]] = {"is_available": functions.true, "device_count": functions.device_count}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "current_device": functions.current_device,
    "current_stream": streams.current_stream,
    "default_stream": streams.default_stream,
    "device": functions.device_block,
    "device_of": functions.device_of_block,
    "empty_cache": functions.do_nothing,
    "get_arch_list": list,
    "get_device_capability": functions.get_device_capability,
    "get_device_name": functions.get_device_name,
    "get_device_properties": functions.get_device_properties,
    "get_rng_state": functions.get_rng_state,
    "get_rng_state_all": functions.get_rng_state_all,
    "init": functions.do_nothing,
    "initial_seed": functions.initial_seed,
    "ipc_collect": functions.do_nothing,
    "is_bf16_supported": functions.true,
    "is_current_stream_capturing": lambda: False,
    "is_tf32_supported": lambda: False,
    "can_device_access_peer": functions.true,
    "manual_seed": functions.manual_seed,
    "manual_seed_all": functions.manual_seed,
    "max_memory_allocated": functions.no_bytes,
    "max_memory_reserved": functions.no_bytes,
    "mem_get_info": functions.mem_get_info,
    "memory_allocated": functions.no_bytes,
    "memory_reserved": functions.no_bytes,
    "memory_stats": functions.memory_stats,
    "memory_summary": lambda *args, **kwargs: f"{functions.NAME}: nothing is allocated on a CUDA device",
    "reset_accumulated_memory_stats": functions.do_nothing,
    "reset_peak_memory_stats": functions.do_nothing,
    "seed": functions.seed,
    "seed_all": functions.seed,
    "set_device": functions.set_device,
    "set_per_process_memory_fraction": functions.do_nothing,
    "set_rng_state": functions.set_rng_state,
    "set_rng_state_all": functions.set_rng_state_all,
    "set_stream": streams.set_stream,
    "set_sync_debug_mode": functions.do_nothing,
    "stream": streams.stream,
    "synchronize": functions.synchronize,
    "StreamContext": streams.stream,
}
NAMES_REFUSED = {  # names of torch.cuda, with advice
    "CUDAGraph": _GRAPHS,
    "graph": _GRAPHS,
    "graph_pool_handle": _GRAPHS,
    "make_graphed_callables": _GRAPHS,
    "caching_allocator_alloc": _MEMORY,
    "change_current_allocator": _MEMORY,
    "CUDAPluggableAllocator": _MEMORY,
    "MemPool": _MEMORY,
    "memory_snapshot": _MEMORY,
    "clock_rate": _READING,
    "memory_usage": _READING,
    "power_draw": _READING,
    "temperature": _READING,
    "utilization": _READING,
    "cudart": _KERNELS,
    "current_blas_handle": _KERNELS,
    "get_stream_from_external": _KERNELS,
}
_RANGES = ("mark", "range", "range_end", "range_pop", "range_push", "range_start")
_ACCELERATOR_QUESTIONS: dict[str, Callable[..., Any]] = {
    "current_accelerator": functions.the_accelerator,
    "device_count": functions.device_count,
    "is_available": functions.true,
}
_ACCELERATOR: dict[str, Callable[..., Any]] = {
    "current_device_idx": functions.current_device,
    "current_device_index": functions.current_device,
    "current_stream": streams.current_stream,
    "device_index": functions.device_block,
    "empty_cache": functions.do_nothing,
    "get_device_capability": refuse("torch.accelerator.get_device_capability", _CAPABILITY),
    "get_memory_info": functions.mem_get_info,
    "max_memory_allocated": functions.no_bytes,
    "max_memory_reserved": functions.no_bytes,
    "memory_allocated": functions.no_bytes,
    "memory_reserved": functions.no_bytes,
    "memory_stats": functions.memory_stats,
    "reset_accumulated_memory_stats": functions.do_nothing,
    "reset_peak_memory_stats": functions.do_nothing,
    "set_device_idx": functions.set_device,
    "set_device_index": functions.set_device,
    "set_stream": streams.set_stream,
    "synchronize": functions.synchronize,
}
