"""Ranks as local processes: a fork server with torch imported, and a pool of ranks for each world size."""

from pdlcheck.worlds.processes.world import ProcessWorld

__all__ = ["ProcessWorld"]
