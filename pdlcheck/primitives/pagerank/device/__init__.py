"""PageRank on one torch device: rounds as Triton kernels or as torch's CSR product, and the rule that ends them."""

from pdlcheck.primitives.pagerank.device.edges import require_room_on
from pdlcheck.primitives.pagerank.device.solver import is_on_device, solve_on_device

__all__ = ["is_on_device", "require_room_on", "solve_on_device"]
