"""float32 copies of low-precision weights, for steps too small for the low precision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pdlcheck.primitives.flat import sum_dtype

__all__ = ["MasterWeights"]


class MasterWeights:
    """The weights that the optimizer updates, in float32; the model computes with their rounded values.

    A bfloat16 weight of 1 has neighbours at 0.996 and 1.008. A step of 0.001 does not change it, nor do a thousand such
    steps. The float32 copy holds their sum and passes it to the model. The cost is 4 bytes for each parameter, and 4
    more for its gradient. Parameters of float32 or float64 are their own masters. Their gradients add up until the
    optimizer's ``zero_grad()``, so a model that has some needs it in each step.

    No communication: synchronise the result of :meth:`parameters`, or the model before :meth:`take_gradients`.

    Args:
        module_or_params: a module, a tensor or tensors with the weights. Each weight counts once; frozen ones are left
            out. For parameter groups with different options, make masters of each group.

    Raises:
        TypeError: something other than tensors.
        ValueError: no parameter requires a gradient.

    Example:
        >>> model = nn.Linear(1, 1, bias=False).bfloat16()
        >>> _ = nn.init.ones_(model.weight)
        >>> masters = MasterWeights(model)
        >>> optimizer = torch.optim.SGD(masters.parameters(), lr=0.001)
        >>> for _ in range(1000):
        ...     model.weight.grad = torch.ones_like(model.weight)
        ...     masters.take_gradients()
        ...     optimizer.step()
        ...     masters.write_back()
        >>> abs(model.weight.item()) < 1e-4, torch.tensor(1.0).bfloat16().sub(0.001).item()
        (True, 1.0)

    Source: P. Micikevicius et al., "Mixed precision training", ICLR (2018), section 3.1.
    """

    def __init__(self, module_or_params: nn.Module | Tensor | Iterable[Tensor]) -> None:
        if isinstance(module_or_params, Tensor):
            module_or_params = [module_or_params]
        listed = list(module_or_params.parameters() if isinstance(module_or_params, nn.Module) else module_or_params)
        for p in listed:
            if not isinstance(p, Tensor):
                raise TypeError(
                    f"MasterWeights takes a module or tensors, got {type(p).__name__}; "
                    "of groups of parameters make masters each"
                )
        self._weights = list({id(p): p for p in listed if p.requires_grad}.values())
        if not self._weights:
            raise ValueError("MasterWeights got an empty model: no parameter requires a gradient")
        low = [sum_dtype(p.dtype) != p.dtype for p in self._weights]
        self._masters = [
            nn.Parameter(p.detach().float()) if is_low else p for p, is_low in zip(self._weights, low, strict=True)
        ]

    def parameters(self) -> list[Tensor]:
        """Return the masters, in the order of the parameters; make the optimizer from them."""
        return list(self._masters)

    def take_gradients(self) -> None:
        """Move the gradients of the model to the masters, in float32, and replace the masters' gradients.

        Call it after backward, before unscaling and clipping. With gradient accumulation, call it after the last
        backward.
        """
        for weight, master in self._pairs():
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the model. Call it after the step."""
        for weight, master in self._pairs():
            weight.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """Return the masters by position. The model's own state does not have their last digits."""
        return {"masters": [master.detach().clone() for master in self._masters]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the masters of ``state`` and round them into the model.

        Raises:
            ValueError: ``state`` holds the masters of another model, or no masters; nothing is changed.
        """
        if "masters" not in state:
            raise ValueError("MasterWeights got a state without 'masters'; pass what state_dict() gave")
        found, own = [tuple(t.shape) for t in state["masters"]], [tuple(t.shape) for t in self._masters]
        if found != own:
            raise ValueError(f"MasterWeights has shapes {own}, the state has {found}; load the state of the same model")
        for master, saved in zip(self._masters, state["masters"], strict=True):
            master.copy_(saved)
        self.write_back()

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        pairs = zip(self._weights, self._masters, strict=True)
        return [(weight, master) for weight, master in pairs if weight is not master]
