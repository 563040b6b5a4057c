"""Weight stashing: the backward pass of a micro-batch uses the weights of its forward pass, despite later updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pdlcheck.primitives.pipeline.cells import Schedule

__all__ = ["Stash", "weight_versions"]


def weight_versions(schedule: Schedule, stage: int, *, vertical_sync: bool = False) -> list[int]:
    """Return, for each micro-batch, the number of updates that the weights of its passes in ``stage`` have had.

    Args:
        schedule: an asynchronous one.
        stage: the stage of the weights.
        vertical_sync: every stage uses the version that stage 0 had when the micro-batch entered the pipeline.

    Example:
        >>> from pdlcheck.primitives.pipeline import pipedream
        >>> weight_versions(pipedream(3, 6), 1)
        [0, 0, 1, 2, 3, 4]
        >>> weight_versions(pipedream(3, 6), 1, vertical_sync=True)
        [0, 0, 0, 1, 2, 3]
    """
    watched = 0 if vertical_sync else stage
    versions, updates = [0] * schedule.n_microbatches, 0
    for cell in schedule.rows[schedule.stage_ranks[watched]]:
        if cell is None or cell.stage != watched:
            continue
        if cell.kind == "F":
            versions[cell.microbatch] = updates
        else:
            updates += 1
    return versions


class Stash:
    """The versions of one stage's weights that current micro-batches still need.

    A version is copied if an update would overwrite it while a pass still needs it. The latest version is the module's
    own.

    Args:
        module: its parameters are the latest version.
        optimizer: makes the optimizer of these parameters.
        versions: the result of :func:`weight_versions`.
    """

    def __init__(self, module: nn.Module, optimizer: Callable[[list[Tensor]], Optimizer], versions: list[int]) -> None:
        self._params = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._optimizer = optimizer(list(self._params.values()))
        self._versions = versions
        self.start()

    def start(self) -> None:
        """Reset the stash before the first micro-batch: no updates yet."""
        self._updates = 0
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._needed = Counter(self._versions)
        self.peak = 1

    def weights(self, microbatch: int) -> Mapping[str, Tensor]:
        """Return the weights for both passes of ``microbatch``: copies, as its backward pass may come after updates."""
        version = self._versions[microbatch]
        if version not in self._kept:
            self._keep(version)
        return self._kept[version]

    def update(self, microbatch: int) -> None:
        """Move the gradients of ``microbatch``'s backward pass to the latest weights. Call :meth:`step` afterwards."""
        version = self._versions[microbatch]
        for name, weight in self._kept[version].items():
            self._params[name].grad, weight.grad = weight.grad, None
        self._needed[version] -= 1
        if not self._needed[version]:
            del self._kept[version]

    def step(self) -> None:
        """Take a step of the optimizer, after copying the current weights if a pass still needs them."""
        if self._needed[self._updates] and self._updates not in self._kept:
            self._keep(self._updates)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._updates += 1

    def _keep(self, version: int) -> None:
        assert version == self._updates, "a version that has been overwritten was not kept"
        self._kept[version] = {name: _copy(parameter) for name, parameter in self._params.items()}
        self.peak = max(self.peak, len(self._kept))


def _copy(parameter: Tensor) -> Tensor:
    with torch.no_grad():
        copied = parameter.detach().clone().requires_grad_()
    if hasattr(parameter, "grad_dtype"):  # older versions of torch do not have it
        copied.grad_dtype = parameter.grad_dtype
    return copied
