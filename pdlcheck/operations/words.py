"""Phrases about ranks: which ranks, and one line for ranks that share a description.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdlcheck.operations.signature import spans

__all__ = ["alike", "in_common", "listed", "spans", "who"]

_MANY = 4


def who(sides: Sequence[Sequence[int]]) -> str:
    """Return a phrase for groups of ranks.

    Example:
        >>> who([[2]]), who([[0], [1]]), who([[2], [0, 1, 3, 4, 5]])
        ('rank 2', 'ranks 0 and 1', 'rank 2 and ranks 0, 1, 3-5')
    """
    if len(sides) > 1 and all(len(side) == 1 for side in sides):
        return f"ranks {listed([side[0] for side in sides])}"
    return listed([f"rank{'s' * (len(side) > 1)} {spans(side)}" for side in sides])


def listed(parts: Sequence[object]) -> str:
    """Return a phrase that lists all parts if they are few, and the first ones if they are many.

    Example:
        >>> listed("a"), listed("ab"), listed("abc"), listed("abcdef")
        ('a', 'a and b', 'a, b and c', 'a, b, c, d, ...')
    """
    texts = [str(part) for part in parts]
    if len(texts) > _MANY:
        return f"{', '.join(texts[:_MANY])}, ..."
    return " and ".join([*filter(None, [", ".join(texts[:-1])]), texts[-1]])


def in_common(words: Mapping[int, str]) -> list[str]:
    """Return one line for all ranks with the same description.

    Example:
        >>> in_common({0: "blocked", 1: "has returned", 2: "blocked"})
        ['ranks 0, 2: blocked', 'rank 1: has returned']
    """
    return [f"{who([ranks])}: {said}" for said, ranks in alike(words).items()]


def alike(words: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks by their description, in the order of the first rank of each."""
    ranks: dict[str, list[int]] = {}
    for rank, said in words.items():
        ranks.setdefault(said, []).append(rank)
    return ranks
