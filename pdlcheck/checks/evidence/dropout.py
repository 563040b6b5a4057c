"""Dropout layers that draw while a subject runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["DRAWS", "DROPOUTS", "record_dropout"]

DRAWS = "dropout that draws"  # a condition
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@contextmanager
def record_dropout(model: nn.Module) -> Iterator[dict[str, bool]]:
    """Record whether each dropout layer of ``model`` draws during the block, by name."""
    drew: dict[str, bool] = {}

    def watch(name: str, layer: nn.Module) -> Any:
        def before(*_: Any) -> None:
            drew[name] = drew[name] or (layer.training and bool(getattr(layer, "p", 0)))

        drew[name] = False
        return layer.register_forward_pre_hook(before)

    hooks = [watch(name, layer) for name, layer in model.named_modules() if isinstance(layer, DROPOUTS)]
    try:
        yield drew
    finally:
        for hook in hooks:
            hook.remove()
