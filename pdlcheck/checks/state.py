"""The named state of a replica, and the comparison of two replicas bit for bit."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pdlcheck.checks.message import Place, failure, first_index, show
from pdlcheck.checks.rank_results import bits

__all__ = [
    "State",
    "device_of",
    "differing",
    "digest",
    "in_dtype",
    "made_by",
    "made_wide",
    "plain_name",
    "require_bits",
    "scramble",
    "state_of",
    "tied_names",
    "wants_another_dtype",
    "whole",
]

State = dict[str, Tensor | None]

_WRAPPERS = re.compile(r"\b(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


def state_of(module: nn.Module, *, buffers: bool = True, gradients: bool = False) -> State:
    """Return copies of the tensors of ``module``, named ``parameter 'a'``, ``gradient of 'a'`` and ``buffer 'b'``."""
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
    """Remove the names of wrapper modules, which torch inserts to compile, recompute or shard a module."""
    return _WRAPPERS.sub("", name)


def whole(tensor: Tensor) -> Tensor:
    """Return a dense copy on the CPU.

    The copy of a DTensor has all its shards, so every rank of its mesh must call this function. For a replicated
    DTensor, the result is this rank's copy.
    """
    gather: Any = getattr(tensor, "full_tensor", None)
    held: Tensor = tensor if gather is None else gather()
    held = held.detach()
    return (held if held.layout == torch.strided else held.to_dense()).cpu().clone()


def device_of(module: nn.Module) -> torch.device:
    """Return the device for inputs of ``module``: that of its parameters or buffers, or the CPU if it has none."""
    held = next((tensor for tensors in (module.parameters(), module.buffers()) for tensor in tensors), None)
    return torch.device("cpu") if held is None else held.device


def digest(state: Mapping[str, Tensor | None]) -> dict[str, str]:
    """Return a digest of every tensor. Digests are equal only if the dtype, the shape and every bit are equal."""
    return {name: _digest(tensor) for name, tensor in state.items()}


def differing(everyone: list[dict[str, str]]) -> list[str]:
    """Return the names whose digests differ between ranks, or which are absent on some rank."""
    names = dict.fromkeys(name for one in everyone for name in one)
    return [name for name in names if len({one.get(name) for one in everyone}) > 1]


def scramble(module: nn.Module, *, whole: int = 1) -> None:
    """Fill every parameter and buffer with new random values, so that no two ranks hold the same.

    Integers become multiples of ``whole``. A newly made model would hide faults, because its buffers have the same
    values on every rank.
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
    """Return the result of ``make()``.

    Raises:
        TypeError: ``make`` is the model itself. A model is callable too, so calling it would not report the mistake.
    """
    if isinstance(make, nn.Module):
        name = type(make).__name__
        raise TypeError(f"make must be a function that makes the model, as lambda: {name}(...) is; got a {name} itself")
    return make()


def made_wide(make: Callable[[], nn.Module]) -> nn.Module:
    """Return the result of ``make()`` in float64 and complex128. No process group exists during the call.

    If ``make`` fails because it needs a process group, a note on the error explains what ``make`` must return.
    """
    try:
        return _widened(made_by(make))
    except (RuntimeError, ValueError) as error:
        if re.search("process group|rendezvous", str(error)):
            error.add_note(
                "make is called outside of the ranks and returns the plain module; a wrapper is checked by "
                "check_data_parallel, whole steps by check_same_trajectory and check_replicas_in_sync"
            )
        raise


def in_dtype(function: Any, dtype: torch.dtype) -> Any:
    """Return a copy of ``function`` in ``dtype`` if it is a module of another dtype, such as a loss; else itself."""
    if not isinstance(function, nn.Module):
        return function
    held = [one.dtype for one in (*function.parameters(), *function.buffers()) if one.is_floating_point()]
    return function if all(one == dtype for one in held) else copy.deepcopy(function).to(dtype)


def wants_another_dtype(error: RuntimeError) -> bool:
    """Return whether the error is that of data of one dtype with weights of another."""
    return re.search(r"\b(same dtype|[Dd]ouble|float64)\b", str(error)) is not None


def tied_names(module: nn.Module) -> list[list[str]]:
    """Return groups of names that share one tensor, such as tied weights."""
    groups: dict[int, list[str]] = {}
    everything = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in everything:
        groups.setdefault(id(tensor), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def require_bits(
    who: str,
    name: str,
    pair: tuple[Tensor | None, Tensor | None],
    what: str,
    place: Place | None = None,
    /,
    **details: object,
) -> None:
    """Check that two tensors are equal bit for bit, or that both are None.

    Args:
        who: the beginning of the message, such as the function and the rank.
        name: the name of the tensor.
        pair: the tensor found, and the tensor expected.
        what: a phrase that introduces the expected value in the message.
        place: the rank and the step of the tensor found.
        **details: further lines of the message.

    Raises:
        AssertionError: one of the two is None, or the shape, the dtype or an element differs.
    """
    __tracebackhide__ = True
    found, expected = pair
    place = replace(place or Place(), tensor=name)
    if found is None or expected is None:
        if found is not expected:
            texts = ["None" if tensor is None else "values" for tensor in pair]
            raise failure(f"{who} holds {texts[0]} as {name}, {what} {texts[1]}", place, **details)
        return
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        raise failure(
            f"{who} holds {name} of shape {tuple(found.shape)} and {found.dtype}, "
            f"{what} shape {tuple(expected.shape)} and {expected.dtype}",
            place,
            **details,
        )
    differs = bits(found) != bits(expected)
    if found.is_complex():
        differs = differs.any(-1)
    if differs.any():
        at = first_index(differs)
        raise failure(
            f"{who} holds {show(found[at])} at {at} of {name}, {what} {show(expected[at])}",
            replace(place, index=at, found=found[at], expected=expected[at]),
            **details,
        )


def _widened(module: nn.Module) -> nn.Module:
    """Convert the tensors of ``module`` to float64 and complex128, in place, and return ``module``."""
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
