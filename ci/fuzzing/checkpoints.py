"""Fuzz targets of checkpoints: each is loaded, or refused with all objects unchanged."""

from __future__ import annotations

import io
import os
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from fuzzing.mutations import mutated
from fuzzing.target import Target, corpus_of, require
from pdlcheck.errors import CheckpointError
from pdlcheck.primitives import load_checkpoint
from pdlcheck.primitives.checkpoint.container import Block, framed, write

__all__ = ["TARGETS"]

_ODD: list[Any] = [None, True, -1, 0, 1, 2**70, float("nan"), "", "x", b"", b"\xff", [], {}, (), [0], ("value", None)]
_ODD += [("tensor", "0"), ("dict", [(1, 2)]), ("list", 3), [[[]]], {"rng": 1}, torch.ones(1), float("inf"), 1j]


def _check(path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = _state(model, optimizer)
    try:
        load_checkpoint(path, model=model, optimizer=optimizer)
    except (CheckpointError, ValueError, TypeError) as error:
        plain = type(error) in (CheckpointError, ValueError, TypeError)
        require(plain, f"{type(error).__name__} is raised: {error}")
        require(_state(model, optimizer) == before, f"an object was touched, and then {error}")


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[bytes, ...]:
    held = [*model.parameters(), torch.get_rng_state()]
    momentum = str(optimizer.state_dict())
    return (*(tensor.detach().numpy().tobytes() for tensor in held), momentum.encode())


def _sealed(blocks: Sequence[Block]) -> bytes:
    """Return a file with a correct length and digest, whatever its blocks contain."""
    with tempfile.TemporaryFile() as file:
        write(file.fileno(), blocks)
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)


def _body(file: bytes) -> bytes:
    return file.split(b"\n", 3)[3]


def _blocks(file: bytes) -> list[bytes]:
    body = _body(file)
    count = int.from_bytes(body[:8], "little")
    lengths = [int.from_bytes(body[8 * k : 8 * k + 8], "little") for k in range(1, count + 1)]
    begin, found = 8 * (1 + count), []
    for length in lengths:
        found.append(body[begin : begin + length])
        begin += length
    return found


def _tree_of_pickle(tree: bytes, data: bytes) -> bytes:
    """Return the archive of torch.save with another pickle in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(tree)) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            new.writestr(name, data if name.endswith("data.pkl") else old.read(name))
    return buffer.getvalue()


def _pickle(tree: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(tree)) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def _edited_tree(file: bytes, places: Sequence[tuple[int, Any]]) -> bytes:
    """Return a checkpoint in which some values are replaced by odd ones."""
    tree, *held = _blocks(file)
    payload = torch.load(io.BytesIO(tree), weights_only=True)
    for place, value in places:
        payload = _replaced(payload, place % max(_size(payload), 1), value)[0]
    buffer = io.BytesIO()
    torch.save(payload, buffer)
    return _sealed(framed([buffer.getvalue(), *held]))


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []


def _size(value: Any) -> int:
    return 1 + sum(map(_size, _children(value)))


def _replaced(value: Any, place: int, by: Any) -> tuple[Any, int]:
    """Replace the value at one place, counted in order from 0, by ``by``; also return the rest of the count."""
    if place == 0:
        return by, -1
    place -= 1
    changed = []
    for child in _children(value):
        if place >= 0:
            child, place = _replaced(child, place, by)
        changed.append(child)
    if isinstance(value, dict):
        return type(value)(zip(value, changed, strict=True)), place
    return (type(value)(changed) if isinstance(value, list | tuple) else value), place


_FILES = [file for file in corpus_of("checkpoint") if file.startswith(b"pdlcheck checkpoint")]
_TREES = [_blocks(file) for file in _FILES]
_odd = st.sampled_from(_ODD) | st.sampled_from(_FILES).map(len)

TARGETS = [
    Target("checkpoint", mutated(corpus_of("checkpoint")), _check),
    Target("checkpoint-body", mutated([_body(file) for file in _FILES]).map(lambda body: _sealed([body])), _check),
    Target(
        "checkpoint-pickle",
        st.sampled_from(_TREES).flatmap(
            lambda blocks: mutated([_pickle(blocks[0])] * 3 + [_pickle(tree[0]) for tree in _TREES]).map(
                lambda data: _sealed(framed([_tree_of_pickle(blocks[0], data), *blocks[1:]]))
            )
        ),
        _check,
    ),
    Target(
        "checkpoint-tree",
        st.builds(_edited_tree, st.sampled_from(_FILES), st.lists(st.tuples(st.integers(0, 400), _odd), max_size=3)),
        _check,
    ),
]
