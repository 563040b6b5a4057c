"""Readers of edges in files: text, KONECT, Matrix Market, METIS, npz and Parquet, compressed or not."""

from pdlcheck.primitives.pagerank.files.column_names import Choice
from pdlcheck.primitives.pagerank.files.reading import FORMATS, EdgeFile, read_edge_file, read_edges

__all__ = ["FORMATS", "Choice", "EdgeFile", "read_edge_file", "read_edges"]
