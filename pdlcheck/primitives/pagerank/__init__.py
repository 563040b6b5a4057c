"""PageRank: a graph, four published versions, a fast solver that bounds its error, and a dense reference."""

from pdlcheck.primitives.pagerank.datasets import (
    debian_dependencies,
    document_graph,
    include_graph,
    rmat,
    torch_headers,
    uniform,
    wordnet_pointers,
)
from pdlcheck.primitives.pagerank.graph import Graph, as_graph
from pdlcheck.primitives.pagerank.reference import pagerank_reference
from pdlcheck.primitives.pagerank.solve import PageRankResult, pagerank
from pdlcheck.primitives.pagerank.versions import (
    pagerank_v0,
    pagerank_v1,
    pagerank_v2,
    pagerank_v3,
    transition_matrix,
)

__all__ = [
    "Graph",
    "PageRankResult",
    "as_graph",
    "debian_dependencies",
    "document_graph",
    "include_graph",
    "pagerank",
    "pagerank_reference",
    "pagerank_v0",
    "pagerank_v1",
    "pagerank_v2",
    "pagerank_v3",
    "rmat",
    "torch_headers",
    "transition_matrix",
    "uniform",
    "wordnet_pointers",
]
