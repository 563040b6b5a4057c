"""The private names of ``torch.nn.Module``."""

from __future__ import annotations

from typing import Any

from pdlcheck.compat.private import uses

__all__ = ["submodules"]


@uses("torch.nn.Module._modules", lost="names such as self.fc1.weight in messages")
def submodules(owner: Any) -> dict[str, Any]:
    """Return the modules in the attributes of an object, each under all its names; empty if it is no module."""
    return getattr(owner, "_modules", {})
