"""The private names of the environment variables."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

from pdlcheck.compat.private import uses

__all__ = [
    "encoded_environment",
]


@uses("os._Environ._data", lost="each call of ranks takes longer")
def encoded_environment() -> MutableMapping[Any, Any] | None:
    """Return the environment as bytes, to read and set it quickly; None if Python does not keep it so.

    A variable that is set here must be given to ``os.putenv`` as well.
    """
    return getattr(os.environ, "_data", None)
