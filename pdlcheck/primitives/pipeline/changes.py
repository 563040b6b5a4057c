"""Changes of a pipeline's layers after it was made. Stages and messages fit only the layers at that time."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import torch
from torch import nn

from pdlcheck.compat.torch.modules import submodules
from pdlcheck.primitives.data_parallel.changes import Wrapped
from pdlcheck.uncompiled import uncompiled

__all__ = ["Made"]

SINCE = "the pipeline was made"


@uncompiled
class Made:
    """The contents of ``module`` at construction; :meth:`change` reports later changes.

    Each step calls it, so it is cheap. A parameter may be frozen or cast if the effect stays within its stage. It may
    not if its gradient goes to other ranks, or to an optimizer that the pipeline has made.

    Args:
        module: the layers of this process.
        exchanged: the parameters whose gradients go to other ranks or to such an optimizer.
    """

    def __init__(self, module: nn.Module, exchanged: Iterable[nn.Parameter]) -> None:
        self._module = module
        self._layers = dict(submodules(module))
        self._wrapped = Wrapped(module, set(), SINCE)
        ids = set(map(id, exchanged))
        self._exchanged = {name: p for name, p in self._wrapped.parameters.items() if id(p) in ids}
        self._trained = self._trained_now()
        self._cast: str | None = None
        self._dtypes: dict[tuple[torch.dtype, ...], int] = {}
        self.dtypes = self._dtypes_now()

    def change(self, backward: bool) -> str | None:
        """Return a description of the first change that makes a step impossible, or None.

        A cast changes ``dtypes``, a number that stands for the dtypes of all parameters.

        Args:
            backward: whether the step computes gradients.
        """
        found = self._other_layer()
        if found is None and self._wrapped.moved():
            kept = (text for _, what, text in self._wrapped.looks() if what not in ("requires_grad", "dtype"))
            found = next(self._wrapped.others(), None) or next(kept, None)
            if found is None:
                self._wrapped.accept()
                self._cast, self.dtypes = self._exchanged_now("dtype"), self._dtypes_now()
        if found is None and backward:
            found = self._cast
            if found is None and self._trained_now() != self._trained:
                found = self._exchanged_now("requires_grad")
        return None if found is None else f"Pipeline: {found}; make the pipeline anew from the changed model"

    def _other_layer(self) -> str | None:
        now = submodules(self._module)
        if now == self._layers:
            return None
        name = next(n for n in {**self._layers, **now} if now.get(n) is not self._layers.get(n))
        what = "added" if name not in self._layers else "removed" if now.get(name) is None else "replaced"
        return f"layer {name!r} was {what} after {SINCE}"

    def _exchanged_now(self, what: str) -> str | None:
        """Return a description of the first exchanged parameter whose attribute ``what`` has changed, or None."""
        return next((text for name, w, text in self._wrapped.looks() if w == what and name in self._exchanged), None)

    def _trained_now(self) -> list[bool]:
        return [*map(attrgetter("requires_grad"), self._exchanged.values())]

    def _dtypes_now(self) -> int:
        dtypes = tuple(parameter.dtype for parameter in self._wrapped.parameters.values())
        return self._dtypes.setdefault(dtypes, len(self._dtypes))
