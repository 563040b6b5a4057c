"""Tests of sessions whose ranks are started by torchrun, mpiexec, srun or by hand."""
