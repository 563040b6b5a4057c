"""The numbering of a file's nodes from 0: only the nodes that have edges."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdlcheck.primitives.pagerank.compiled import compiled
from pdlcheck.primitives.pagerank.memory import require_free_memory
from pdlcheck.primitives.pagerank.node_ids import NodeIds
from pdlcheck.primitives.pagerank.threads import ENOUGH, Team, ranges

__all__ = ["number_nodes"]

MORE_MEMORY = "use a machine with more memory"

Ids = NDArray[Any]
EMPTY = -1
ONE, SIX, LAST = np.uint64(1), np.uint64(6), np.uint64(63)  # 64 bits to a word
MIXER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio


def number_nodes(src: Ids, dst: Ids, largest: int, what: str) -> NodeIds | None:
    """Replace ids by numbers from 0, in place and in order of id, if some id below ``largest`` is missing.

    Args:
        src: ids of 0 or more, int32 or int64.
        dst: ids of 0 or more, int32 or int64.
        largest: the largest id of both.
        what: the name of the file for errors.

    Returns:
        The id of each number; ``None`` if ids are the numbers from 0 to ``largest``, and nothing was replaced.

    Raises:
        MemoryError: the tables of ids do not fit in memory.
    """
    if largest < 32 * len(src) + ENOUGH:
        return _by_bits(src, dst, largest, what)
    return _by_hashing(src, dst, what)


def _by_bits(src: Ids, dst: Ids, largest: int, what: str) -> NodeIds | None:
    """Replace ids by numbers, with one bit for each id up to the largest in each thread."""
    words = largest // 64 + 1
    with Team(len(src) // ENOUGH) as team:
        require_free_memory(f"{what}: numbering ids up to {largest}", 8 * (team.size + 2) * words, MORE_MEMORY)
        # one bitmap per thread, because threads that share one wait for each other's cache lines
        bits = np.zeros((team.size, words), np.uint64)
        parts = ranges(len(src), team.size)
        for ids in (src, dst):
            team.run(lambda k, ids=ids: _mark(ids[slice(*parts[k])], bits[k]))  # type: ignore[misc]
        seen: NDArray[np.uint64] = np.bitwise_or.reduce(bits, axis=0)
        before = np.empty(words, np.int64)
        count = _count(seen, before)
        if count == largest + 1:
            return None
        for ids in (src, dst):
            team.run(lambda k, ids=ids: _replace(ids[slice(*parts[k])], seen, before))  # type: ignore[misc]
    nodes = np.empty(count, np.int64)
    _list(seen, nodes)
    return NodeIds(nodes)


def _by_hashing(src: Ids, dst: Ids, what: str) -> NodeIds:
    """Replace ids by numbers, with a hash table of the ids that occur."""
    table, count = np.full(1 << 16, EMPTY, np.int64), 0
    for ids in (src, dst):
        done = 0
        while done < len(ids):
            more, count = _insert(ids[done:], table, count)
            done += more
            if done < len(ids):
                require_free_memory(f"{what}: numbering more than {count} nodes", 4 * table.nbytes, MORE_MEMORY)
                larger = np.full(2 * len(table), EMPTY, np.int64)
                _insert(table[table != EMPTY], larger, 0)
                table = larger
    nodes = np.sort(table[table != EMPTY])
    numbers = np.empty(len(table), np.int64)
    _enter(nodes, table, numbers)
    with Team(len(src) // ENOUGH) as team:
        parts = ranges(len(src), team.size)
        for ids in (src, dst):
            team.run(lambda k, ids=ids: _look_up(ids[slice(*parts[k])], table, numbers))  # type: ignore[misc]
    return NodeIds(nodes)


@compiled()
def _mark(ids: Any, bits: Any) -> None:
    for e in range(ids.size):
        node = np.uint64(ids[e])
        bits[np.int64(node >> SIX)] |= ONE << (node & LAST)


@compiled()
def _ones(word: Any) -> Any:
    """Return the number of bits that are set in a word."""
    word -= (word >> ONE) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@compiled()
def _count(bits: Any, before: Any) -> int:
    """Return the number of bits that are set, and store in ``before`` the number before each word."""
    count = 0
    for w in range(bits.size):
        before[w] = count
        count += _ones(bits[w])
    return count


@compiled()
def _replace(ids: Any, bits: Any, before: Any) -> None:
    for e in range(ids.size):
        node = np.uint64(ids[e])
        w = np.int64(node >> SIX)
        ids[e] = before[w] + _ones(bits[w] & ((ONE << (node & LAST)) - ONE))


@compiled()
def _list(bits: Any, nodes: Any) -> None:
    count = 0
    for w in range(bits.size):
        for k in range(64):
            if (bits[w] >> np.uint64(k)) & ONE:
                nodes[count] = 64 * w + k
                count += 1


@compiled()
def _place(node: Any, table: Any) -> Any:
    """Return the place of ``node`` in the table, or the free place where it belongs.

    The length of the table is a power of two.
    """
    mixed = np.uint64(node) * MIXER
    place = np.int64(mixed >> np.uint64(20)) & (table.size - 1)
    while table[place] != EMPTY and table[place] != node:
        place = (place + 1) & (table.size - 1)
    return place


@compiled()
def _insert(ids: Any, table: Any, count: int) -> tuple[int, int]:
    """Insert ids until the table is half full; return how many were read, and how many are in the table."""
    for e in range(ids.size):
        place = _place(ids[e], table)
        if table[place] == EMPTY:
            if 2 * count >= table.size:
                return e, count
            table[place] = ids[e]
            count += 1
    return ids.size, count


@compiled()
def _enter(nodes: Any, table: Any, numbers: Any) -> None:
    for number in range(nodes.size):
        numbers[_place(nodes[number], table)] = number


@compiled()
def _look_up(ids: Any, table: Any, numbers: Any) -> None:
    for e in range(ids.size):
        ids[e] = numbers[_place(ids[e], table)]
