"""The first comments of the edge lists of KONECT and SNAP, which describe the edges below."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Heading", "read_heading"]

KONECT = re.compile(r"%\s*(sym|asym|bip)\s+([a-z]+)\s*$")
SNAP_KIND = re.compile(r"#\s*(Undirected|Directed) graph\b")
SNAP_COUNTS = re.compile(r"#\s*Nodes:\s*(\d+)\s+Edges:\s*(\d+)")
WITHOUT_WEIGHTS = {"unweighted"}
WITH_WEIGHTS = {"positive", "posweighted", "multiposweighted"}  # the multiplicity of an edge, or a weight above 0
SIGNED = {"signed", "multisigned", "weighted", "multiweighted", "dynamic"}  # PageRank is not defined for these


@dataclass(frozen=True)
class Heading:
    """The description of a file in its own comments; ``None`` for each missing fact.

    ``weights`` is the meaning of a third column: a weight, no weight, or the word of KONECT for another meaning.
    """

    kind: str | None = None
    undirected: bool = False
    bipartite: bool = False
    weights: bool | str | None = None
    num_nodes: int | None = None
    num_edges: int | None = None


def read_heading(comments: list[str]) -> Heading:
    """Return the heading in the comments before the first edge."""
    if comments and (konect := KONECT.match(comments[0].strip())):
        form, word = konect.groups()
        if word in WITHOUT_WEIGHTS | WITH_WEIGHTS | SIGNED:
            weights = word in WITH_WEIGHTS if word not in SIGNED else word
            return Heading("KONECT", form == "sym", form == "bip", weights)
    undirected, counts = False, (None, None)
    for comment in comments:
        if kind := SNAP_KIND.match(comment):
            undirected = kind[1] == "Undirected"
        if found := SNAP_COUNTS.match(comment):
            counts = int(found[1]), int(found[2])  # type: ignore[assignment]
    kind_of_file = "SNAP" if undirected or counts != (None, None) else None
    return Heading(kind_of_file, undirected, num_nodes=counts[0], num_edges=counts[1])
