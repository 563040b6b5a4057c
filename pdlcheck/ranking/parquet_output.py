"""The writer of scores as Parquet. This is the one file that imports pyarrow to write."""

from __future__ import annotations

from typing import IO

import numpy as np

from pdlcheck.extras import extra
from pdlcheck.primitives.pagerank import Graph, PageRankResult
from pdlcheck.ranking.output import node_array

with extra("parquet", "writing .parquet"):
    import pyarrow as pa
    import pyarrow.parquet as pq

__all__ = ["write_parquet"]


def write_parquet(file: IO[bytes], result: PageRankResult, graph: Graph) -> None:
    """Write columns ``node`` and ``score``, best first; error bound and iterations are metadata of the table."""
    order = np.argsort(-result.scores, kind="stable")
    ids = node_array(graph)[order]
    nodes = pa.array(ids, pa.string()) if ids.dtype == object else pa.array(ids)
    facts = {"error_bound": repr(result.error_bound), "iterations": str(result.iterations)}
    table = pa.table({"node": nodes, "score": result.scores[order]}).replace_schema_metadata(facts)
    pq.write_table(table, file)
