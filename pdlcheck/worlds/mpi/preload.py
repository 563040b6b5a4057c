"""The import of MPI's library in the fork server, so that ranks find it loaded."""

import contextlib

__all__ = ()

with contextlib.suppress(Exception):  # a rank that needs MPI gets the error again, and reports it
    import pdlcheck.worlds.mpi.group  # noqa: F401
