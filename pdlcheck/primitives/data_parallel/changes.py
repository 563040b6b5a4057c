"""Changes of a module after it was wrapped. Hooks and buckets fit only the parameters at the time of wrapping."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from pdlcheck.compat.torch.modules import own_buffers, own_parameters, submodules
from pdlcheck.uncompiled import uncompiled

__all__ = ["Wrapped"]

Kind = tuple[torch.dtype, torch.Size, torch.device]


@uncompiled
class Wrapped:
    """The contents of ``module`` at construction; its methods report later changes. Each step calls it, so it is cheap.

    Args:
        module: the wrapped module.
        ignored: names of parameters and buffers that the wrapper does not handle.
        since: the event after which a change counts, for messages.
    """

    def __init__(self, module: nn.Module, ignored: set[str], since: str = "wrapping") -> None:
        self._module, self._ignored, self._since = module, ignored, since
        self.parameters = {n: p for n, p in module.named_parameters() if n not in ignored}
        self._held = list(self.parameters.values())
        self._looks = _looks(self._held)
        self._pointers = self._pointers_now()
        self._frozen = [p for p in self._held if not p.requires_grad]
        modules = list(module.modules())
        self._tables: list[dict[str, Any]] = [own_parameters(m) for m in modules]
        self._tables += [submodules(m) for m in modules]
        self._ids = self._ids_now()
        self._has_buffers = any(own_buffers(m) for m in modules)
        self._kinds = _kinds(self.buffers())

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers that the module holds now."""
        if not self._has_buffers:
            return {}
        return {n: b for n, b in self._module.named_buffers() if n not in self._ignored}

    def change(self) -> str | None:
        """Return a description of the first change to the parameters, or None.

        A parameter that was frozen or replaced gets no gradient. The reducer then calls :meth:`first_change`.
        """
        if not self.moved() and not any(p.requires_grad for p in self._frozen):
            return None
        change = self.first_change()
        if change is None:
            self.accept()
        return change

    def moved(self) -> bool:
        """Return whether parameters or submodules were exchanged, or parameters have another address."""
        return self._ids_now() != self._ids or self._pointers_now() != self._pointers

    def accept(self) -> None:
        """Record the current objects and addresses as unchanged."""
        self._ids, self._pointers = self._ids_now(), self._pointers_now()

    def first_change(self) -> str | None:
        """Return a description of the first change, or None, after comparing every parameter."""
        change = next(chain(self.others(), (text for _, _, text in self.looks())), None)
        return None if change is None else f"{change}; wrap the module anew"

    def _ids_now(self) -> list[int]:
        """Return the ids of all parameters and submodules. The lists are built in C, because each step calls this."""
        return [*map(id, chain.from_iterable(map(dict.values, self._tables)))]

    def _pointers_now(self) -> list[int]:
        """Return the addresses of the parameters; they change after a cast, a move, or most resizing."""
        return [*map(Tensor.data_ptr, self._held)]

    def buffers_to_take(self) -> tuple[list[Tensor], str | None]:
        """Return the buffers in their order at wrapping, and a description of the first change to one of them, or None.

        Zeros replace a changed buffer, so that the message has the size that the other ranks expect.
        """
        now = self.buffers()
        kinds = _kinds(now)
        if kinds == self._kinds:
            return [now[name] for name in self._kinds], None
        taken = [
            now[name] if kinds.get(name) == kind else torch.zeros(kind[1], dtype=kind[0], device=kind[2])
            for name, kind in self._kinds.items()
        ]
        name = next(n for n in [*self._kinds, *kinds] if self._kinds.get(n) != kinds.get(n))
        before, after = (_words(found.get(name)) for found in (self._kinds, kinds))
        return taken, f"buffer {name!r} was {before}, it is {after} now; wrap the module anew"

    def others(self) -> Iterator[str]:
        """Yield a description of each parameter that was tied, moved, removed, replaced or added."""
        now: dict[str, Parameter] = {n: p for n, p in self._module.named_parameters() if n not in self._ignored}
        everywhere = {n: p for n, p in self._module.named_parameters(remove_duplicate=False) if n not in self._ignored}
        known = {id(param): name for name, param in self.parameters.items()}
        places = {id(param): name for name, param in everywhere.items()}
        for name, param in self.parameters.items():
            found = everywhere.get(name)
            if found is not None and found is not param and id(found) in known:
                yield f"parameter {name!r} was tied to {known[id(found)]!r} after {self._since}"
            elif name not in now and id(param) in places:
                yield f"parameter {name!r} was moved to {places[id(param)]!r} after {self._since}"
            elif name not in now:
                yield f"parameter {name!r} was removed after {self._since}"
            elif now[name] is not param:
                yield f"parameter {name!r} was replaced by another one after {self._since}"
        for name in now:
            if name not in self.parameters:
                yield f"parameter {name!r} was added after {self._since}"

    def looks(self) -> Iterator[tuple[str, str, str]]:
        """Yield, for each changed attribute of a parameter: the parameter's name, the attribute, and a description."""
        for (name, param), before in zip(self.parameters.items(), self._looks, strict=True):
            requires_grad, dtype, shape, device = before
            after = f"after {self._since}"
            if param.requires_grad != requires_grad:
                text = f"parameter {name!r} was {'frozen' if requires_grad else 'unfrozen'} {after}"
                yield name, "requires_grad", text
            if param.dtype != dtype:
                yield name, "dtype", f"parameter {name!r} was cast from {dtype} to {param.dtype} {after}"
            if param.shape != shape:
                text = f"parameter {name!r} was resized from {tuple(shape)} to {tuple(param.shape)} {after}"
                yield name, "shape", text
            if param.device != device:
                yield name, "device", f"parameter {name!r} was moved from {device} to {param.device} {after}"


def _looks(params: list[Parameter]) -> list[tuple[bool, torch.dtype, torch.Size, torch.device]]:
    return [(p.requires_grad, p.dtype, p.shape, p.device) for p in params]


def _kinds(buffers: dict[str, Tensor]) -> dict[str, Kind]:
    return {name: (buffer.dtype, buffer.shape, buffer.device) for name, buffer in buffers.items()}


def _words(kind: Kind | None) -> str:
    return "not there" if kind is None else f"{kind[0]} {tuple(kind[1])} on {kind[2]}"
