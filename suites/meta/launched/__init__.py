"""Sessions whose ranks torchrun, mpiexec, srun or a person has started."""
