"""The private names of the environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pdlcheck.compat.private import uses

__all__ = [
    "encoded_environment",
]


@uses("os._Environ._data", lost="each call of ranks takes longer")
def encoded_environment() -> Mapping[Any, Any] | None:
    """Return the environment as bytes, to see quickly whether it has changed; None if Python does not keep it so."""
    return getattr(os.environ, "_data", None)
