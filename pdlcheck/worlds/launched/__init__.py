"""Ranks in processes that torchrun, mpiexec or srun have started, on one node or several."""
