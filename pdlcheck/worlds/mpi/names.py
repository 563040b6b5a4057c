"""The names under which ``torch.distributed`` knows the MPI backend."""

__all__ = ["BACKEND", "SCHEME"]

BACKEND = "pdlcheck_mpi"  # the name "mpi" is torch's own, and a wheel without MPI rejects it
SCHEME = "mpi"
