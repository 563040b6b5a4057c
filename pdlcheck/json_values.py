"""Values as JSON has them."""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["plain"]


def plain(value: object) -> object:
    """Return a value that JSON has. NaN, infinite and complex numbers become text, and so do other objects.

    Example:
        >>> plain({"step": 3, "losses": (0.5, float("nan"))})
        {'step': 3, 'losses': [0.5, 'nan']}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    return repr(value)
