"""Warnings about how a world runs a program, which is right by itself."""

from __future__ import annotations

import warnings

__all__ = ["advise"]


def advise(advice: str | Warning, *, stacklevel: int = 1) -> None:
    """Warn, also where the user has made errors of warnings: a right program does not fail by what we advise.

    A filter that names the warning, by its class or by its message, holds, as
    ``error::pdlcheck.errors.SharedTensorWarning`` does.

    Args:
        advice: a message, which is a ``UserWarning``, or a warning.
        stacklevel: as of :func:`warnings.warn`, counted from the caller.
    """
    warning = UserWarning(advice) if isinstance(advice, str) else advice
    try:
        warnings.warn(warning, stacklevel=stacklevel + 1)
    except Warning as raised:
        if raised is not warning or _is_named(warning):
            raise
        with warnings.catch_warnings():
            warnings.simplefilter("always", type(warning))
            warnings.warn(warning, stacklevel=stacklevel + 1)


def _is_named(warning: Warning) -> bool:
    """Return whether the filter that makes an error of it is about it: not about every UserWarning, or all warnings."""
    for action, message, category, _, _ in warnings.filters:
        if isinstance(warning, category) and (message is None or message.match(str(warning))):
            return action == "error" and (message is not None or not issubclass(UserWarning, category))
    return False
