"""DiLoCo: local SGD whose rounds are steps of an outer optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from pdlcheck.primitives.agreement import require_agreement
from pdlcheck.primitives.flat import sum_dtype
from pdlcheck.primitives.local_sgd import LocalSGD
from pdlcheck.primitives.optimizer_state import hyper_parameters, lost_options, optimizer_parameters

__all__ = ["DiLoCo"]

OUTER = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)


class DiLoCo(LocalSGD):
    """Local SGD with momentum between the rounds: an outer optimizer steps along the mean movement of the ranks.

    Every rank keeps the reference, the model after the last round. In a round, ``reference - mean model`` is the
    gradient of the reference. The outer optimizer takes a step with it, and every rank continues from the result. The
    message is the one of :class:`LocalSGD`. The memory grows by two copies of the model: the reference and the outer
    momentum. Both are equal on every rank, and in float32 if the model has a lower precision.

    - An outer SGD with ``lr=1`` and no momentum is :class:`LocalSGD`, up to round-off.
    - With ``sync_every=1`` and an inner SGD of rate ``a`` without momentum, the outer gradient is ``a`` times the mean
      gradient. The result is synchronous SGD with the outer momentum and the rate ``a * lr``.
    - Between rounds, each rank has its own weights and its own inner momentum (``momentum="keep"``, as in the paper).
    - Frozen parameters and buffers are treated as in :class:`LocalSGD`.

    Args:
        optimizer, model, sync_every, momentum, buffers, group, node_group: as in :class:`LocalSGD`; ``optimizer`` is
            the inner one. A finished rank counts as one that did not move.
        outer: makes the outer optimizer from the parameters of the reference; the same on every rank.

    Raises:
        TypeError, ValueError: as in :class:`LocalSGD`; also if ranks have different outer optimizers.

    Example:
        >>> def train():
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     with DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), model, sync_every=2) as diloco:
        ...         for step in range(100):
        ...             model.zero_grad()
        ...             model(torch.ones(2, 1)).sub(dist.get_rank()).square().mean().backward()
        ...             diloco.step()
        ...     return round(model.weight.item(), 2)
        >>> world.run(train, world_size=2)
        [0.5, 0.5]

    Source: A. Douillard et al., "DiLoCo: Distributed low-communication training of language models", arXiv:2311.08105
    (2023).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        sync_every: int | None,
        outer: Callable[..., Optimizer] = OUTER,
        momentum: Literal["average", "keep", "reset"] = "keep",
        buffers: Literal["average", "broadcast", "keep"] = "broadcast",
        group: dist.ProcessGroup | None = None,
        node_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            optimizer,
            model,
            sync_every=sync_every,
            momentum=momentum,
            buffers=buffers,
            group=group,
            node_group=node_group,
        )
        self._reference = {
            name: nn.Parameter(parameter.detach().to(sum_dtype(parameter.dtype), copy=True))
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
        }

        def facts() -> dict[str, object]:
            self.outer = outer(list(self._reference.values()))
            if not isinstance(self.outer, Optimizer):
                raise TypeError(f"DiLoCo takes outer as a maker of an optimizer, it made {type(self.outer).__name__}")
            names = {id(parameter): name for name, parameter in self._reference.items()}
            found = hyper_parameters(self.outer)
            found["order of the optimizer's parameters"] = [names.get(id(p)) for p in optimizer_parameters(self.outer)]
            return {name.replace("optimizer", "outer optimizer"): value for name, value in found.items()}

        require_agreement("DiLoCo", self._who, facts)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of :class:`LocalSGD`, the reference, and the state of the outer optimizer.

        The reference and the outer optimizer are equal on every rank.
        """
        reference = {name: parameter.detach().clone() for name, parameter in self._reference.items()}
        return {**super().state_dict(), "reference": reference, "outer": self.outer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. Every rank must call it.

        Raises:
            ValueError: on every rank alike, before anything is changed: as in :meth:`LocalSGD.load_state_dict`; the
                reference is from another model; the outer optimizer differs.
        """
        super().load_state_dict(state)
        with torch.no_grad():
            for name, parameter in self._reference.items():
                parameter.copy_(state["reference"][name])
        self.outer.load_state_dict(dict(state["outer"]))

    def _require_mine(self, caller: str, state: Mapping[str, Any]) -> None:
        super()._require_mine(caller, state)
        saved = {name: tuple(tensor.shape) for name, tensor in state["reference"].items()}
        mine = {name: tuple(tensor.shape) for name, tensor in self._reference.items()}
        if saved != mine:
            wrong = sorted(name for name in {*saved, *mine} if saved.get(name) != mine.get(name))[0]
            raise ValueError(
                f"{caller} got the reference of another model: {wrong!r} has shape {saved.get(wrong)} there and "
                f"{mine.get(wrong)} here; load the model that it was saved with"
            )
        _require_outer(caller, self.outer, state["outer"])

    def _take_over(self, means: Mapping[str, Tensor]) -> None:
        """Take the outer step."""
        super()._take_over({name: mean for name, mean in means.items() if name not in self._reference})
        for name, reference in self._reference.items():
            reference.grad = reference.detach() - means[name]
        self.outer.step()
        super()._take_over({name: reference.detach() for name, reference in self._reference.items()})


def _require_outer(caller: str, outer: Optimizer, saved: Mapping[str, Any]) -> None:
    groups, _ = saved["param_groups"], saved["state"]  # reads "state" only to require it
    cure = "make outer as it was made for the one that was saved"
    mine, theirs = ([len(group["params"]) for group in found] for found in (outer.param_groups, groups))
    if mine != theirs:
        raise ValueError(
            f"{caller} got an outer optimizer with groups of {theirs} parameters, here they have {mine}; {cure}"
        )
    for number, (group, found) in enumerate(zip(outer.param_groups, groups, strict=True)):
        lost = lost_options(group, found)
        if lost:
            raise ValueError(
                f"{caller} got an outer optimizer of another kind: group {number} lacks {lost[0]!r}; {cure}"
            )
