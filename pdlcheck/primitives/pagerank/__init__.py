"""PageRank: a graph, four published versions, a solver with an error bound (also over ranks), and a dense reference."""

from pdlcheck.extras import extra

with extra("pagerank", "PageRank"):
    import networkx  # noqa: F401
    import numba  # noqa: F401
    import scipy  # noqa: F401

from pdlcheck.primitives.pagerank.datasets import (
    debian_dependencies,
    document_graph,
    include_graph,
    rmat,
    torch_headers,
    uniform,
    wordnet_pointers,
)
from pdlcheck.primitives.pagerank.files import read_edges
from pdlcheck.primitives.pagerank.formats import as_graph
from pdlcheck.primitives.pagerank.graph import Graph
from pdlcheck.primitives.pagerank.many import pagerank_many
from pdlcheck.primitives.pagerank.ranks import PageRankShard, gather_scores, pagerank_over_ranks
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
    "PageRankShard",
    "as_graph",
    "debian_dependencies",
    "document_graph",
    "gather_scores",
    "include_graph",
    "pagerank",
    "pagerank_many",
    "pagerank_over_ranks",
    "pagerank_reference",
    "pagerank_v0",
    "pagerank_v1",
    "pagerank_v2",
    "pagerank_v3",
    "read_edges",
    "rmat",
    "torch_headers",
    "transition_matrix",
    "uniform",
    "wordnet_pointers",
]
