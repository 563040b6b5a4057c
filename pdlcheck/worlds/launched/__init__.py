"""Ranks in processes that torchrun, mpiexec or srun have started, on one node or several. Does not import torch."""

from pdlcheck.worlds.launched.environment import INSIDE, Launch, launch_of

__all__ = ["INSIDE", "Launch", "launch_of"]
