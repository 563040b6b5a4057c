"""The settings that no call brings with it; values that files or wider fixtures have set stay for later calls.

These are: torch's default device and modes, numpy's handling of errors, decimal's context, ``sys.stdout`` and
``sys.stderr``.
"""

from __future__ import annotations

import decimal
import sys
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch

from pdlcheck.compat.torch.devices import default_device
from pdlcheck.worlds.decimals import is_same
from pdlcheck.worlds.modes import Modes, leave_above, modes

__all__ = ["hold", "put_back"]


class _Settings(NamedTuple):
    device: torch.device | None
    numpy: dict[str, Any]
    decimal: decimal.Context
    out: TextIO
    err: TextIO
    modes: Modes


def _present() -> _Settings:
    errors, context = dict(np.geterr()), decimal.getcontext().copy()
    return _Settings(default_device(), errors, context, sys.stdout, sys.stderr, modes())


_held = _present()


def hold() -> None:
    """Keep the present settings for later calls."""
    global _held
    _held = _present()


def put_back() -> None:
    """Restore the settings that :func:`hold` has kept."""
    now = _present()
    if now.device != _held.device:
        torch.set_default_device(_held.device)
    if now.numpy != _held.numpy:
        np.seterr(**_held.numpy)
    if not is_same(now.decimal, _held.decimal):
        decimal.setcontext(_held.decimal.copy())
    leave_above(_held.modes)  # after the default device, because that is a mode too
    sys.stdout, sys.stderr = _held.out, _held.err
