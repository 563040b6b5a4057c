"""One session over the processes that torchrun, mpiexec or srun has started."""
