"""Imported by the fork server, so that ranks find MPI's library loaded."""

import contextlib

__all__ = ()

with contextlib.suppress(Exception):  # a rank that needs it meets the error again, and reports it
    import pdlcheck.worlds.mpi.group  # noqa: F401
