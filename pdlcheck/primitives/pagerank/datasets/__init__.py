"""Graphs to rank: real ones that can be built offline, and random ones that a seed reproduces."""

from pdlcheck.primitives.pagerank.datasets.document import document_graph
from pdlcheck.primitives.pagerank.datasets.generated import rmat, uniform
from pdlcheck.primitives.pagerank.datasets.headers import include_graph, torch_headers
from pdlcheck.primitives.pagerank.datasets.packed import DEBIAN, WORDNET, debian_dependencies, pack, wordnet_pointers

__all__ = [
    "DEBIAN",
    "WORDNET",
    "debian_dependencies",
    "document_graph",
    "include_graph",
    "pack",
    "rmat",
    "torch_headers",
    "uniform",
    "wordnet_pointers",
]
