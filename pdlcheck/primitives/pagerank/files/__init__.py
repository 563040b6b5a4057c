"""Edges in files: text, npz, parquet."""

from pdlcheck.primitives.pagerank.files.reading import read_edges

__all__ = ["read_edges"]
