"""A pytest session under torchrun, mpiexec or srun: rank 0 runs it, and the other processes provide places for ranks.

Every process collects the tests. Only if one of them needs ranks do the processes become one session; otherwise each
runs pytest by itself, as it would without this plugin. Does not import torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from pdlcheck.errors import WorldUnavailable
from pdlcheck.harness.collection.launch import joined, joins, launch
from pdlcheck.launch.environment import Launch
from pdlcheck.launch.nesting import leave_mpi_environment
from pdlcheck.launch.waiting import CURE

if TYPE_CHECKING:
    from pdlcheck.worlds.launched.placement import LaunchedPlacement

__all__ = ["PRELOAD", "excuse", "follow", "lead", "placement", "stay_out_of_mpi"]

PRELOAD = ("pytest", "hypothesis", "pdlcheck.item_runners.processes.rank.preloaded")  # modules that every rank needs

_placement: pytest.StashKey[LaunchedPlacement | pytest.UsageError] = pytest.StashKey()


def stay_out_of_mpi(config: pytest.Config) -> None:
    """Remove the variables of MPI in one session over a launch, before the user's code is imported.

    MPI then has a single process here. Its initialisation would wait for all processes of mpiexec, and not all of them
    import the tests.
    """
    if joins(config) is not None:
        leave_mpi_environment()


def excuse(config: pytest.Config) -> Generator[None, object, object]:
    """Report a failed load of conftest files to the other processes of a launch, which would wait for this one.

    This applies only if an option or ini value has made the processes one session; otherwise no process waits for
    another one yet.
    """
    try:
        return (yield)
    except BaseException as error:  # pytest.exit and a skip of the whole file are not subclasses of Exception
        if isinstance(error, KeyboardInterrupt):  # a Ctrl-C ends this process now
            raise
        options = config.known_args_namespace
        if not (options.help or options.version):
            with contextlib.suppress(pytest.UsageError):  # they cannot be reached
                own = joins(config)
                if own is not None:
                    _excuse(config, own, f"{type(error).__name__}: {error}")
        raise


def _excuse(config: pytest.Config, own: Launch, why: str) -> None:
    if own.rank == 0:
        _made(config, own).close(int(pytest.ExitCode.USAGE_ERROR))
    else:
        from pdlcheck.worlds.launched.agent import excuse

        excuse(own, why)


def follow(config: pytest.Config) -> int | None:
    """Fork ranks for rank 0 until it ends, on every other rank of one session; return its exit code."""
    if config.option.help or config.option.version:
        return None
    own = launch(config)
    if own is None or own.rank == 0:
        return None
    from pdlcheck.worlds.processes.controller import forkserver

    seed = config.getoption("--pdl-seed")
    # The fork server imports torch while this process imports it too, to meet the others.
    forkserver.start(preload=PRELOAD, seed=seed, rank=own.rank)
    from pdlcheck.worlds.launched.agent import serve

    return serve(own)


def placement(config: pytest.Config) -> LaunchedPlacement | None:
    """Return the placement of ranks under a launcher; created on first use, because the other processes wait for it."""
    own = launch(config)
    return None if own is None else _made(config, own)


def _made(config: pytest.Config, own: Launch) -> LaunchedPlacement:
    if _placement not in config.stash:
        from pdlcheck.worlds.launched.placement import LaunchedPlacement

        try:
            config.stash[_placement] = LaunchedPlacement(own)
        except WorldUnavailable as error:
            config.stash[_placement] = pytest.UsageError(f"{error}; {CURE}")
    made = config.stash[_placement]
    if isinstance(made, pytest.UsageError):
        raise made
    return made


def lead(config: pytest.Config) -> Generator[None, object, object]:
    """Send the exit code of rank 0 to the other processes of one session, however rank 0 ends."""
    exitcode = int(pytest.ExitCode.INTERNAL_ERROR)
    try:
        result = yield
        exitcode = int(result)  # type: ignore[call-overload]  # pytest's hook returns an exit code
    except pytest.UsageError:
        exitcode = int(pytest.ExitCode.USAGE_ERROR)
        raise
    finally:
        own = joined(config)
        if own is not None and own.rank == 0:
            with contextlib.suppress(pytest.UsageError):  # they cannot be reached
                _made(config, own).close(exitcode)
    return result
