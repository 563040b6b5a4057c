"""The named parts of a training's state that are compared: tensors, settings and random streams."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pdlcheck.watching.replica_sets import Ranks, ReplicaSets

__all__ = ["STREAMS", "Entry", "Source", "stream_digest"]

STREAMS = ("cuda", "numpy", "python", "torch")
STATISTICS = ("running_mean", "running_var")  # a batch norm takes them from the samples of its rank


class Entry(NamedTuple):
    """One part of the state of a rank.

    Args:
        kind: such as "parameters" or "settings".
        name: what a report calls it, such as ``parameter '0.weight'``.
        text: what is compared besides the elements: the shape and the dtype, or the value.
        ranks: the ranks that must hold the same.
        tensor: its elements; None if the text says all.
    """

    kind: str
    name: str
    text: str
    ranks: Ranks
    tensor: Tensor | None = None


class Source(NamedTuple):
    """The objects whose state is compared, and what is left out.

    Args:
        model: the model.
        optimizers: the optimizers; the gradients of the first one's parameters count.
        scaler: an object with ``state_dict()``, or None.
        sets: the ranks that hold copies.
        buffers: whether buffers are compared; None leaves out the statistics of batch norm.
        optimizer_state: whether the states of the optimizers are compared.
        ignore: patterns of names of parameters and buffers that are left out.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    scaler: Any
    sets: ReplicaSets
    buffers: bool | None
    optimizer_state: bool
    ignore: Sequence[str]

    def names(self) -> dict[Tensor, str]:
        """Return the name of each parameter: as in the model, or its place in the optimizer."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        for number, optimizer in enumerate(self.optimizers):
            for at, group in enumerate(optimizer.param_groups):
                for place, parameter in enumerate(group["params"]):
                    names.setdefault(parameter, f"{number}.{at}.{place} of optimizer, group, place")
        return {one: name for one, name in names.items() if not self._ignored(name)}

    def gradients(self) -> list[Entry]:
        """Return the gradients that the first optimizer is given."""
        names = self.names()
        parameters = [one for group in self.optimizers[0].param_groups for one in group["params"] if one in names]
        return [
            entry
            for parameter in parameters
            for entry in self._tensor("gradients", f"gradient of {names[parameter]!r}", parameter.grad, like=parameter)
        ]

    def state(self) -> list[Entry]:
        """Return everything except the gradients."""
        names = self.names()
        found = [
            entry
            for parameter, name in names.items()
            for entry in self._tensor("parameters", f"parameter {name!r}", parameter)
        ]
        for name, buffer in self._compared_buffers():
            found += self._tensor("buffers", f"buffer {name!r}", buffer)
        for number, optimizer in enumerate(self.optimizers):
            which = f" of optimizer {number}" if len(self.optimizers) > 1 else ""
            if self.optimizer_state:
                for parameter, state in optimizer.state.items():
                    if parameter in names:
                        of = f" of {names[parameter]!r}{which}"
                        found += self._nested("optimizer state", of, state, like=parameter)
            for at, group in enumerate(optimizer.param_groups):
                settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                found += self._nested("settings", f" of group {at}{which}", settings)
        if self.scaler is not None:
            found += self._nested("scaler", " of the scaler", self.scaler.state_dict())
        return found

    def _compared_buffers(self) -> Iterator[tuple[str, Tensor]]:
        if self.buffers is False:
            return
        for path, module in self.model.named_modules():
            for name, buffer in module.named_buffers(path, recurse=False):
                last = name.rpartition(".")[2]
                own = last in STATISTICS and not isinstance(module, nn.SyncBatchNorm)
                if not self._ignored(name) and not (own and self.buffers is None):
                    yield name, buffer

    def _ignored(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.ignore)

    def _nested(self, kind: str, of: str, value: Any, path: str = "", like: Tensor | None = None) -> Iterable[Entry]:
        """Yield the tensors, numbers and texts of nested dictionaries and lists. Other objects are left out."""
        if isinstance(value, Mapping):
            for key, one in value.items():
                yield from self._nested(kind, of, one, f"{path}.{key}" if path else str(key), like)
        elif isinstance(value, Tensor):
            yield from self._tensor(kind, f"{path!r}{of}", value, like=like)
        elif isinstance(value, list | tuple):
            for place, one in enumerate(value):
                yield from self._nested(kind, of, one, f"{path}[{place}]", like)
        elif value is None or isinstance(value, bool | int | float | str):
            yield Entry(kind, f"{path!r}{of}", repr(value), self._holders(like))

    def _holders(self, tensor: Tensor | None) -> Ranks:
        return self.sets.whole if tensor is None else self.sets.of(tensor)

    def _tensor(self, kind: str, name: str, tensor: Tensor | None, like: Tensor | None = None) -> Iterable[Entry]:
        """Yield the entries of a tensor that more than one rank holds.

        ``like`` is the parameter that the tensor belongs to; it says who holds copies if the tensor itself does not.
        """
        owner = tensor if tensor is not None and (hasattr(tensor, "placements") or like is None) else like
        ranks = self._holders(owner)
        if len(ranks) < 2:
            return
        if tensor is None:
            yield Entry(kind, name, "None", ranks)
            return
        given: Any = tensor
        local = given.to_local() if hasattr(given, "placements") else given
        parts = {"": local}
        if local.layout == torch.sparse_coo:
            sparse = local.coalesce()
            parts = {", indices": sparse.indices(), ", values": sparse.values()}
        for which, part in parts.items():
            text = f"{tuple(local.shape)} {local.dtype}".replace("torch.", "")
            yield Entry(kind, f"{name}{which}", text, ranks, part if _has_elements(part) else None)


def _has_elements(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized


def stream_digest(name: str) -> str:
    """Return a digest of the state of a random stream: "python", "numpy", "torch" or "cuda"."""
    state: Any
    if name == "python":
        state = repr(random.getstate())
    elif name == "numpy":
        kind, key, *rest = np.random.get_state()
        state = f"{kind} {np.asarray(key).tobytes().hex()} {rest}"
    else:
        state = (torch.get_rng_state() if name == "torch" else torch.cuda.get_rng_state()).numpy().tobytes().hex()
    return hashlib.blake2b(state.encode(), digest_size=8).hexdigest()
