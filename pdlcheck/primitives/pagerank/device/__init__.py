"""PageRank on one torch device: a sparse round as Triton kernels or as torch's CSR product, and when to stop."""

from pdlcheck.primitives.pagerank.device.solver import solve_on_device

__all__ = ["solve_on_device"]
