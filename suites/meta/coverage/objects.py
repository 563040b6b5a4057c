"""Python objects, pickled by torch."""

from __future__ import annotations

import torch

from ..parity import objects
from .entry import WORLD_SIZE, Feature, everywhere

RANKS = range(WORLD_SIZE)


def _of(rank):
    return {"rank": rank, "text": "x" * rank, "nested": [None, (rank, 0.5)]}


def _on(**values):
    """Return the results of some ranks; the others return None."""
    return [values.get(f"rank_{rank}") for rank in RANKS]


def _in_a_group():
    value = [_of(1), _of(3)], [3]
    return _on(rank_1=value, rank_3=value)


FEATURES = [
    Feature("all_gather_object", objects.all_gather_of_objects, lambda: everywhere([_of(r) for r in RANKS])),
    Feature("gather_object", objects.gather_of_objects, lambda: _on(rank_2=[_of(r) for r in RANKS])),
    Feature("broadcast_object_list", objects.broadcast_of_objects, lambda: everywhere([_of(3), "second", 3])),
    Feature("scatter_object_list", objects.scatter_of_objects, lambda: [[["for", r]] for r in RANKS]),
    Feature(
        "send_object_list, recv_object_list", objects.messages_of_objects, lambda: _on(rank_2=(1, [_of(1), "more"]))
    ),
    Feature("object collectives in a sub-group", objects.objects_in_a_group, _in_a_group),
    Feature(
        "all_gather_object of tensors",
        objects.tensors_as_objects,
        lambda: everywhere([torch.arange(rank + 1).tolist() for rank in RANKS]),
    ),
]
