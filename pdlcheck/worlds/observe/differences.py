"""The texts of the signatures of several ranks, and the key by which the ranks of a group meet."""

from __future__ import annotations

from collections.abc import Iterable

from pdlcheck.operations.signature import Signature

__all__ = ["Callers", "describe_differences", "key_among"]


def key_among(name: str, among: str) -> str:
    """Return the key by which the ranks of a group meet.

    Another default group may have a group of the same name; ``among`` names the ranks of this one's.
    """
    return f"{name}@{among}" if among else name


class Callers:
    """The source lines that communicate for several callers, such as the line of a wrapper."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}
        self._shared: set[str] = set()

    def note(self, signature: Signature) -> None:
        """Record a posted operation."""
        where, caller = signature.where, signature.caller
        if caller and self._first.setdefault(where, caller) != caller:
            self._shared.add(where)

    def told(self, signature: Signature) -> str:
        """Return the text of a signature, with its caller if several callers have reached the same line."""
        return f"{signature}, called at {signature.caller}" if signature.where in self._shared else str(signature)


def describe_differences(signatures: Iterable[Signature]) -> dict[int, str]:
    """Return the text of each signature, by rank.

    The text includes the caller if the ranks reached the same line through different callers, as in a helper function.
    """
    ways: dict[str, set[str]] = {}
    signatures = list(signatures)
    for one in signatures:
        ways.setdefault(one.where, set()).add(one.caller)
    return {
        one.rank: f"{one}, called at {one.caller}" if one.caller and len(ways[one.where]) > 1 else str(one)
        for one in signatures
    }
