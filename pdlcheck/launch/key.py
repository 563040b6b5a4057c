"""The key of a launch over several nodes, from the environment; a process needs it to connect to rank 0."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["KEY_VARIABLE", "given_key"]

KEY_VARIABLE = "PDLCHECK_LAUNCH_KEY"
_SHORTEST = 16  # characters
_WAYS = (
    f"set {KEY_VARIABLE} to the same text on every node, of {_SHORTEST} characters or more that nobody can guess "
    "(openssl rand -hex 16), or pass --init-method file:///PATH on a file system that they share"
)


def given_key(environment: Mapping[str, str]) -> bytes:
    """Return the key that the user has set.

    Raises:
        ValueError: no key is set, or it is too short.

    Example:
        >>> given_key({"PDLCHECK_LAUNCH_KEY": "0123456789abcdef"})
        b'0123456789abcdef'
    """
    key = environment.get(KEY_VARIABLE, "")
    if not key:
        raise ValueError(f"processes on several nodes need a key, as they run what they send to one another: {_WAYS}")
    if len(key) < _SHORTEST:
        raise ValueError(f"{KEY_VARIABLE} has {len(key)} characters, too few: {_WAYS}")
    return key.encode()
