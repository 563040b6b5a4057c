"""PageRank."""
