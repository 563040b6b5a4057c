"""PageRank of a graph whose edges are spread over ranks."""

from pdlcheck.primitives.pagerank.ranks.gather import gather_scores
from pdlcheck.primitives.pagerank.ranks.solve import PageRankShard, pagerank_over_ranks

__all__ = ["PageRankShard", "gather_scores", "pagerank_over_ranks"]
