"""The devices that the ranks of a world have.

This module does not import torch at the top, because the controller may not need it.
"""

from __future__ import annotations

from pdlcheck.errors import WorldTooSmall, WorldUnavailable
from pdlcheck.worlds.backends import BACKENDS, CUDA_CURE
from pdlcheck.worlds.choices import DEVICES

__all__ = ["CUDA_CURE", "check_cuda_as_cpu", "check_devices", "choose_device", "device_name", "why_no_cuda"]

_OFFERED = {"sim": DEVICES} | {name: backend.devices for name, backend in BACKENDS.items()}


def choose_device(world: str, device: str | None) -> str:
    """Return the kind of device of a world's ranks: ``device``, or the world's default.

    sim and gloo offer both kinds and use the CPU by default. A test must not change only because the machine that runs
    it has a GPU.

    Raises:
        ValueError: there is no such kind.
        WorldUnavailable: the world's groups do not move tensors of that kind.

    Example:
        >>> [choose_device(world, None) for world in ("sim", "gloo", "mpi", "nccl")]
        ['cpu', 'cpu', 'cpu', 'cuda']
        >>> choose_device("gloo", "cuda")
        'cuda'
    """
    offered = _OFFERED.get(world, ("cpu",))
    if device is None:
        return offered[0]
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}; got {device!r}")
    if device not in offered:
        *able, last = (name for name, kinds in _OFFERED.items() if device in kinds)
        cure = f"--world {', '.join(able)} or {last}" if device == "cuda" else "leave the device away"
        raise WorldUnavailable(
            f"the ranks of world {world} have {offered[0]} tensors, not {device}; {cure}", world=world, cure=cure
        )
    return device


def check_cuda_as_cpu(world: str, cuda_as_cpu: bool) -> bool:
    """Return ``cuda_as_cpu``.

    Raises:
        WorldUnavailable: the ranks of ``world`` need CUDA devices.
    """
    if cuda_as_cpu and "cpu" not in _OFFERED.get(world, ("cpu",)):
        cure = "--world gloo --cuda-as-cpu"
        raise WorldUnavailable(
            f"the ranks of world {world} have CUDA devices of their own, which the CPU cannot replace; {cure}, or "
            'get_world("gloo", cuda_as_cpu=True)',
            world=world,
            cure=cure,
        )
    return cuda_as_cpu


def device_name(local_rank: int, devices: int) -> str:
    """Return the name of a rank's CUDA device on a machine with ``devices`` of them.

    Ranks take the devices in turn, and share them if there are more ranks than devices.

    Example:
        >>> [device_name(local_rank, devices=2) for local_rank in range(4)]
        ['cuda:0', 'cuda:1', 'cuda:0', 'cuda:1']
    """
    return f"cuda:{local_rank % devices}"


def check_devices(ranks: int, devices: int) -> None:
    """Raise unless each rank of a machine can have a CUDA device of its own, which nccl requires."""
    if ranks > devices:
        cure = "--world gloo --rank-device cuda"
        raise WorldTooSmall(
            f"needs {ranks} ranks, each with a CUDA device of its own on nccl, and this machine has {devices}; "
            f'ranks of gloo can share a device: {cure}, or get_world("gloo", device="cuda")',
            world="nccl",
            cure=cure,
            world_size=ranks,
            available=devices,
        )


def why_no_cuda() -> str:
    """Return the reason why torch has no CUDA device here; empty if it has one.

    torch asks the driver's management library where it can, so this process may still fork afterwards.
    """
    import torch

    if torch.cuda.device_count():
        return ""
    return "this torch is a CPU build" if torch.version.cuda is None else "torch finds no CUDA device"
