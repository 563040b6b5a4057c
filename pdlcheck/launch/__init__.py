"""The launch of this process by torchrun, mpiexec or srun, as the environment describes it. Does not import torch."""
