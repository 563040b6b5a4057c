"""Warnings about how a world runs a program that is itself correct."""

from __future__ import annotations

import warnings

__all__ = ["advise"]


def advise(advice: str | Warning, *, stacklevel: int = 1) -> None:
    """Issue a warning, also where the user's filters turn warnings into errors.

    A correct program must not fail because of advice from pdlcheck. A filter that names the warning, by its class or by
    its message, still applies; ``error::pdlcheck.errors.SharedTensorWarning`` is an example.

    Args:
        advice: a message, which is issued as a ``UserWarning``, or a warning.
        stacklevel: as in :func:`warnings.warn`, counted from the caller.
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
    """Return whether the filter that makes ``warning`` an error names it, unlike a filter for every (User)Warning."""
    for action, message, category, _, _ in warnings.filters:
        if isinstance(warning, category) and (message is None or message.match(str(warning))):
            return action == "error" and (message is not None or not issubclass(UserWarning, category))
    return False
