"""Tests of the process group over mpi4py, and of the world whose ranks mpiexec starts."""
