"""Virtual time: what a run on simulated ranks would take on a cluster, and a picture of it. Does not import torch."""

from pdlcheck.clock.computing import compute
from pdlcheck.clock.links import Link, Topology
from pdlcheck.clock.timeline import Message, Span, Timeline

__all__ = ["Link", "Message", "Span", "Timeline", "Topology", "compute"]
