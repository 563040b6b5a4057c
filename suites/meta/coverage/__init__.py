"""The features of torch.distributed on simulated ranks, each compared with a single process.

A feature is an entry in ``FEATURES`` of a file of this folder: its name, a program for ranks, a function for a single
process. ``python ci/matrix.py`` runs all of them under every semantics.
"""

from __future__ import annotations

from . import (
    checkpoints,
    collectives,
    data_parallel,
    functional,
    groups,
    messages,
    objects,
    pipelines,
    reductions,
    sharded,
    store,
    tensors,
)
from .cell import Cell, measure
from .columns import SEMANTICS
from .entry import Feature

__all__ = ["AREAS", "FEATURES", "SEMANTICS", "Cell", "Feature", "measure"]

AREAS = {
    "reduce-ops": reductions.FEATURES,
    "collectives": collectives.FEATURES,
    "object collectives": objects.FEATURES,
    "messages": messages.FEATURES,
    "sub-groups and meshes": groups.FEATURES,
    "barriers and the store": store.FEATURES,
    "functional collectives": functional.FEATURES,
    "data parallel": data_parallel.FEATURES,
    "sharded data parallel": sharded.FEATURES,
    "DTensor and tensor parallel": tensors.FEATURES,
    "pipelining": pipelines.FEATURES,
    "checkpoints": checkpoints.FEATURES,
}
FEATURES = [feature for features in AREAS.values() for feature in features]
