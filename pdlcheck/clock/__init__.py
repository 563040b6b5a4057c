"""Virtual time: the predicted times of a simulated run on a cluster, and pictures of it.

This module does not import torch.
"""

from pdlcheck.clock.computing import compute
from pdlcheck.clock.links import Link, Topology
from pdlcheck.clock.timeline import Message, Span, Timeline

__all__ = ["Link", "Message", "Span", "Timeline", "Topology", "compute"]
