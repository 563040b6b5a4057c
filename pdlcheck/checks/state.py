"""What a replica consists of, by name, and how two replicas are compared bit for bit."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pdlcheck.checks.held import bits
from pdlcheck.checks.message import failure, first_index, show

__all__ = [
    "State",
    "device_of",
    "differing",
    "digest",
    "made_by",
    "made_wide",
    "plain_name",
    "require_bits",
    "scramble",
    "state_of",
    "tied_names",
    "whole",
]

State = dict[str, Tensor | None]

_WRAPPERS = re.compile(r"\b(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


def state_of(module: nn.Module, *, buffers: bool = True, gradients: bool = False) -> State:
    """Copies of what ``module`` holds, named ``parameter 'a'``, ``gradient of 'a'`` and ``buffer 'b'``."""
    found: State = {}
    for name, parameter in module.named_parameters():
        name = plain_name(name)
        found[f"parameter {name!r}"] = whole(parameter)
        if gradients:
            grad = parameter.grad
            found[f"gradient of {name!r}"] = None if grad is None else whole(grad)
    if buffers:
        for name, buffer in module.named_buffers():
            found[f"buffer {plain_name(name)!r}"] = whole(buffer)
    return found


def plain_name(name: str) -> str:
    """Without the names of the modules that torch puts around others in their place, to compile or recompute them."""
    return _WRAPPERS.sub("", name)


def whole(tensor: Tensor) -> Tensor:
    """A dense copy on the CPU. Of a DTensor all its shards, for which every rank of its mesh must call this; a
    replicated one gives the copy of this rank.
    """
    gather: Any = getattr(tensor, "full_tensor", None)
    held: Tensor = tensor if gather is None else gather()
    held = held.detach()
    return (held if held.layout == torch.strided else held.to_dense()).cpu().clone()


def device_of(module: nn.Module) -> torch.device:
    """Where inputs of ``module`` are to be: the device of its parameters, or buffers; the CPU where it has none."""
    held = next((tensor for tensors in (module.parameters(), module.buffers()) for tensor in tensors), None)
    return torch.device("cpu") if held is None else held.device


def digest(state: Mapping[str, Tensor | None]) -> dict[str, str]:
    """A digest of every tensor: equal only if dtype, shape and every bit are."""
    return {name: _digest(tensor) for name, tensor in state.items()}


def differing(everyone: list[dict[str, str]]) -> list[str]:
    """Names whose digests are not the same on every rank, or that some rank does not have."""
    names = dict.fromkeys(name for one in everyone for name in one)
    return [name for name in names if len({one.get(name) for one in everyone}) > 1]


def scramble(module: nn.Module, *, whole: int = 1) -> None:
    """Draw every parameter and buffer anew, so that no two ranks hold the same. Integers are multiples of
    ``whole``.

    A model that was just made hides faults: its buffers start alike on every rank.
    """
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.copy_(torch.randn(tensor.shape, dtype=tensor.dtype))
            elif tensor.dtype == torch.bool:
                tensor.copy_(torch.rand(tensor.shape) < 0.5)
            else:
                tensor.copy_(torch.randint(1, 20, tensor.shape) * whole)


def made_by(make: Callable[[], nn.Module]) -> nn.Module:
    """What ``make`` returns.

    Raises:
        TypeError: it is the model itself, which is a function of inputs.
    """
    if isinstance(make, nn.Module):
        name = type(make).__name__
        raise TypeError(f"make must be a function that makes the model, as lambda: {name}(...) is; got a {name} itself")
    return make()


def made_wide(make: Callable[[], nn.Module]) -> nn.Module:
    """What ``make`` returns where no process group is, widened; an error for want of one says what is expected."""
    try:
        return _widened(made_by(make))
    except (RuntimeError, ValueError) as error:
        if re.search("process group|rendezvous", str(error)):
            error.add_note(
                "make is called outside of the ranks and returns the plain module; a wrapper is checked by "
                "check_data_parallel, whole steps by check_same_trajectory and check_replicas_in_sync"
            )
        raise


def tied_names(module: nn.Module) -> list[list[str]]:
    """Groups of names that are one tensor, such as tied weights."""
    groups: dict[int, list[str]] = {}
    everything = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in everything:
        groups.setdefault(id(tensor), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def require_bits(who: str, name: str, pair: tuple[Tensor | None, Tensor | None], what: str, **details: object) -> None:
    __tracebackhide__ = True
    found, expected = pair
    if found is None or expected is None:
        if found is not expected:
            texts = ["None" if tensor is None else "values" for tensor in pair]
            raise failure(f"{who} holds {texts[0]} as {name}, {what} {texts[1]}", **details)
        return
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        raise failure(
            f"{who} holds {name} of shape {tuple(found.shape)} and {found.dtype}, "
            f"{what} shape {tuple(expected.shape)} and {expected.dtype}",
            **details,
        )
    differs = bits(found) != bits(expected)
    if found.is_complex():
        differs = differs.any(-1)
    if differs.any():
        at = first_index(differs)
        raise failure(f"{who} holds {show(found[at])} at {at} of {name}, {what} {show(expected[at])}", **details)


def _widened(module: nn.Module) -> nn.Module:
    """``module`` itself, its numbers in float64 and complex128."""
    module.double()
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.is_complex():
            tensor.data = tensor.data.to(torch.complex128)
    return module


def _digest(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    head = f"{tensor.dtype} {tuple(tensor.shape)} "
    return head + hashlib.blake2b(bits(tensor.reshape(-1)).numpy().tobytes(), digest_size=16).hexdigest()
