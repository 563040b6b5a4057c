"""A file with a correct digest that ``save_checkpoint`` did not write is refused, and no object changes."""

from __future__ import annotations

import io
import random

import pytest
import torch

from pdlcheck.errors import CheckpointError
from pdlcheck.primitives import save_checkpoint
from pdlcheck.primitives.checkpoint.container import framed, pack, read, write

from .training import parts, weights


def sealed_by_hand(path, *blocks):
    fill(path, framed(blocks) if blocks else pack({"model": {}, "tensors": {}}))


def sealed_with_a_tensor_too_many(path):
    _, tree = pack({"step": 3, "world_size": 2, "about": {}, "ranks": [], "tensors": {}})
    sealed_by_hand(path, tree, b"tensor")


def sealed_without_lengths(path):
    fill(path, [b"anything at all"])


def sealed_with_lengths_of_more(path):
    fill(path, framed([b"tree", b"tensor"])[:-1])


def fill(path, body):
    with path.open("wb") as file:
        write(file.fileno(), body)


def forge(path, **fields):
    """Write a file with a correct digest and these ``fields``."""
    fill(path, pack(read(path)[1] | fields))


def step_in_words(path):
    forge(path, step="abc")


def step_below_zero(path):
    forge(path, step=-1)


def world_size_in_words(path):
    forge(path, world_size="x")


def fewer_ranks_than_it_says(path):
    forge(path, world_size=2)


def no_ranks(path):
    forge(path, ranks=None)


def no_classes(path):
    forge(path, about=None)


def other_names(path):
    forge(path, about={"model": ["Linear", None]})


def group_without_shapes(path):
    forge(path, about={name: ["Adam", [[["weight"]]]] for name in read(path)[1]["about"]})


def node_of_rank_0(path, name, node):
    first, *rest = read(path)[1]["ranks"]
    forge(path, ranks=[first | {name: node}, *rest])


def number_for_a_tree(path):
    node_of_rank_0(path, "model", 7)


def tensor_that_it_lacks(path):
    node_of_rank_0(path, "model", ("dict", [("weight", ("tensor", "0" * 32))]))


def unknown_kind(path):
    node_of_rank_0(path, "model", ("set", []))


def streams_of_nobody(path):
    node_of_rank_0(path, "rng", ("dict", [("torch", ("value", 1))]))


def stream_that_reads_beyond(path):
    ranks = read(path)[1]["ranks"]
    streams = dict(ranks[0]["rng"][1])
    kind, keys, _, *rest = streams["numpy"][1]
    streams["numpy"] = ("list", [kind, keys, ("value", 10**6), *rest])
    node_of_rank_0(path, "rng", ("dict", list(streams.items())))


def dtype_of_no_tensor(path):
    payload = read(path)[1]
    blocks = pack(payload)
    buffer = io.BytesIO()
    torch.save({**payload, "tensors": [("a", "no_such_dtype", (1,), (1,), 0)]}, buffer)
    sealed_by_hand(path, buffer.getvalue(), blocks[2])


FORGED = [
    sealed_with_a_tensor_too_many,
    sealed_without_lengths,
    sealed_with_lengths_of_more,
    sealed_by_hand,
    step_in_words,
    step_below_zero,
    world_size_in_words,
    fewer_ranks_than_it_says,
    no_ranks,
    no_classes,
    other_names,
    group_without_shapes,
    number_for_a_tree,
    tensor_that_it_lacks,
    unknown_kind,
    streams_of_nobody,
    stream_that_reads_beyond,
    dtype_of_no_tensor,
]


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("load_checkpoint")
@pytest.mark.parametrize("spoil", FORGED)
def test_a_file_with_a_right_digest_that_save_checkpoint_did_not_write_is_refused(subject, tmp_path, spoil):
    held = parts()
    path = save_checkpoint(tmp_path, 3, **held)
    assert subject(path, **held) == 3
    spoil(path)
    before, torchs, pythons = weights(held), torch.get_rng_state(), random.getstate()
    with pytest.raises(CheckpointError, match="is intact, but not a checkpoint of save_checkpoint; nothing was loaded"):
        subject(path, **held)
    assert weights(held) == before
    assert torch.equal(torch.get_rng_state(), torchs)
    assert random.getstate() == pythons
