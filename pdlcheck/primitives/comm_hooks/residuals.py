"""The residuals of a lossy hook: for each parameter, the part of its gradients that was not sent yet.

Residuals are kept by parameter, so the assignment of parameters to buckets does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.primitives.arguments import members
from pdlcheck.primitives.flat import sum_dtype

__all__ = ["Residuals"]


class Residuals:
    """One vector for each parameter, initially zero; float32 for float16 and bfloat16 parameters.

    DDP makes new buckets after the first step, and another bucket size must not change the result. So no residual is
    kept by bucket.

    Args:
        caller: the name of the state that holds the residuals, for messages.
        module: the module that DDP wraps, or the wrapper.
    """

    def __init__(self, caller: str, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"{caller} takes the torch.nn.Module that is wrapped, got {type(module).__name__}")
        if hasattr(module, "register_comm_hook") and isinstance(inner := getattr(module, "module", None), nn.Module):
            module = inner
        self.caller = caller
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError(f"{caller} got an empty model: no parameter requires a gradient")
        for name, p in self.parameters.items():
            if p.is_complex():  # torch's buckets expose only half of the numbers of a complex gradient
                raise TypeError(f"{caller} compresses real gradients, {name!r} is {p.dtype}; use another hook for it")
        self._names = {id(p): name for name, p in self.parameters.items()}
        self._held: dict[str, Tensor] = {}

    def name(self, parameter: Tensor) -> str:
        """Return the name in ``module`` of a parameter of a bucket."""
        if id(parameter) not in self._names:
            raise ValueError(
                f"{self.caller} does not know a parameter of shape {tuple(parameter.shape)} that is in a bucket; "
                "make the state from the module that was wrapped, after its last change"
            )
        return self._names[id(parameter)]

    def of(self, parameter: Tensor) -> Tensor:
        """Return the residual of a parameter, flat, on the parameter's device."""
        held = self._held.get(self.name(parameter))
        if held is None:
            return torch.zeros(parameter.numel(), dtype=sum_dtype(parameter.dtype), device=parameter.device)
        return held.to(parameter.device)

    def keep(self, parameter: Tensor, residual: Tensor) -> None:
        """Store ``residual`` as the residual of ``parameter``."""
        self._held[self.name(parameter)] = residual.detach()

    def scale(self, factor: float) -> None:
        """Multiply every residual by ``factor``."""
        for residual in self._held.values():
            residual.mul_(factor)

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the residuals, with the shapes of their parameters."""
        return {name: held.clone().view(self.parameters[name].shape) for name, held in self._held.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace all residuals by copies of the saved ones. Raise ValueError if one fits no parameter."""
        self.require(state)
        self._held = {
            name: tensor.detach().clone().reshape(-1).to(sum_dtype(self.parameters[name].dtype))
            for name, tensor in state.items()
        }

    def require(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError if a saved residual fits no parameter."""
        for name, tensor in state.items():
            if name not in self.parameters:
                raise ValueError(f"{self.caller} got a saved residual of {name!r}, the model has no such parameter")
            if tensor.shape != self.parameters[name].shape:
                raise ValueError(
                    f"{self.caller} got a saved residual of shape {tuple(tensor.shape)} for {name!r}, "
                    f"whose shape is {tuple(self.parameters[name].shape)}"
                )

    def require_place(self, saved: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
        """Raise ValueError if a state was saved by another rank, or in a group of another size."""
        who = members(self.caller, group)
        if (saved["rank"], saved["world_size"]) != (who.rank, who.world_size):
            raise ValueError(
                f"{self.caller} got the state of rank {saved['rank']} of {saved['world_size']} on rank {who.rank} of "
                f"{who.world_size}; a rank's residual is its own: load each its own, or begin with a new state"
            )
