"""The random streams of a rank: torch on the CPU and on CUDA devices, Python's ``random``, numpy's global one."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

__all__ = ["can_restore", "capture_streams", "derive_streams", "restore_streams"]

_CUDA_NBYTES = (8, 16)  # a seed alone, or a seed and an offset


def capture_streams() -> dict[str, Any]:
    """Return the state of every stream, as tensors and numbers. CUDA streams are included once CUDA is initialized."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if used else [],
        "python": [version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss],
        "numpy": [
            str(kind),
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }


def restore_streams(state: dict[str, Any]) -> None:
    """Set every stream to the state that :func:`capture_streams` returned. Skip devices that this machine lacks."""
    random.setstate(_pythons(state))
    np.random.set_state(_numpys(state))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, stream in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(stream, device)


def can_restore(state: Any) -> bool:
    """Return whether :func:`restore_streams` accepts ``state``, tried on new generators.

    Raises:
        Exception: a generator refuses its part.
    """
    random.Random().setstate(_pythons(state))
    numpys = _numpys(state)
    np.random.RandomState().set_state(numpys)
    torch.Generator("cpu").set_state(state["torch"])
    of_cuda = all(stream.dtype == torch.uint8 and stream.numel() in _CUDA_NBYTES for stream in state["cuda"])
    return of_cuda and 0 <= numpys[2] <= len(numpys[1])  # numpy does not check its read position


def _pythons(state: dict[str, Any]) -> tuple[Any, ...]:
    version, words, gauss = state["python"]
    return version, tuple(words.tolist()), gauss


def _numpys(state: dict[str, Any]) -> tuple[Any, ...]:
    kind, keys, position, has_gauss, cached = state["numpy"]
    return kind, keys.numpy().astype(np.uint32), position, has_gauss, cached


def derive_streams(state: dict[str, Any], rank: int) -> None:
    """Set new streams for a rank that is not in the checkpoint, from those of its first rank and ``rank``."""
    mixed = hashlib.sha256(state["torch"].numpy().tobytes() + f" rank {rank}".encode()).digest()
    random.seed(mixed)
    np.random.seed(np.frombuffer(mixed, dtype=np.uint32))
    torch.manual_seed(int.from_bytes(mixed[:7], "little"))
