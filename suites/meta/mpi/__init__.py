"""The process group over mpi4py, and the world whose ranks mpiexec starts."""
