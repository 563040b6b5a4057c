"""A pytest session under torchrun, mpiexec or srun: rank 0 runs it, the other processes lend it their place.

Does not import torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from pdlcheck.errors import WorldUnavailable
from pdlcheck.worlds.launched import Launch, launch_of

if TYPE_CHECKING:
    from pdlcheck.worlds.launched.placement import LaunchedPlacement

__all__ = ["PRELOAD", "excuse", "follow", "headline", "launch", "lead", "placement", "spans_nodes", "stay_out_of_mpi"]

PRELOAD = ("pytest", "hypothesis", "pdlcheck.harness.rank.preloaded")  # what every rank of a test session needs

# by which MPI joins the run of mpiexec: neither this process nor its ranks, which come and go, are that member
_OF_MPI = ("PMIX_", "PMI_")

_found: pytest.StashKey[Launch | None] = pytest.StashKey()
_launch: pytest.StashKey[Launch | None] = pytest.StashKey()
_placement: pytest.StashKey[LaunchedPlacement] = pytest.StashKey()


def launch(config: pytest.Config) -> Launch | None:
    """The launch that this session is part of, if it is."""
    if _launch not in config.stash:
        try:
            found = _find(config, config.getoption("--init-method"))
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        if found is not None and getattr(config.option, "numprocesses", None):
            raise pytest.UsageError(
                f"-n divides one machine among workers, {found.launcher} has divided it already: leave -n away, or "
                "pass -n 0 after an -n in addopts"
            )
        config.stash[_launch] = found
    return config.stash[_launch]


def _find(config: pytest.Config, init_method: str | None) -> Launch | None:
    if _found not in config.stash:
        config.stash[_found] = launch_of(os.environ, init_method)
    return config.stash[_found]


def stay_out_of_mpi(config: pytest.Config) -> None:
    """In a launch, before anything of the user's is imported: MPI is, where tests import it, one of a single process.

    Its initialisation waits for all processes of mpiexec, which do not all import the tests.
    """
    with contextlib.suppress(ValueError):  # told later
        if _find(config, config.known_args_namespace.init_method) is not None:
            for name in [name for name in os.environ if name.startswith(_OF_MPI)]:
                del os.environ[name]


def excuse(config: pytest.Config) -> Generator[None, object, object]:
    """Where conftest files cannot be loaded in this process of a launch: tell the others, which would wait for it."""
    try:
        return (yield)
    except BaseException as error:  # pytest.exit and a skip of the whole file are no Exception
        if isinstance(error, KeyboardInterrupt):  # whoever pressed Ctrl-C wants the end of this process now
            raise
        options = config.known_args_namespace
        if not (options.help or options.version):
            with contextlib.suppress(ValueError, pytest.UsageError):  # they cannot be reached
                own = _find(config, options.init_method)
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
    """On every rank but 0 of a launch: fork ranks for rank 0 until it ends; return its exit code."""
    if config.option.help or config.option.version:
        return None
    own = launch(config)
    if own is None or own.rank == 0:
        return None
    from pdlcheck.worlds.processes.controller import forkserver

    seed = config.getoption("--pdl-seed")
    # which imports torch while this process does, to meet the others
    forkserver.start(preload=PRELOAD, seed=seed, rank=own.rank)
    from pdlcheck.worlds.launched.agent import serve

    return serve(own)


def placement(config: pytest.Config) -> LaunchedPlacement | None:
    """Where the ranks of this session are, under a launcher; made on first use, as the other processes wait for it."""
    own = launch(config)
    return None if own is None else _made(config, own)


def _made(config: pytest.Config, own: Launch) -> LaunchedPlacement:
    if _placement not in config.stash:
        from pdlcheck.worlds.launched.placement import LaunchedPlacement

        try:
            config.stash[_placement] = LaunchedPlacement(own)
        except WorldUnavailable as error:
            raise pytest.UsageError(str(error)) from None
    return config.stash[_placement]


def spans_nodes(config: pytest.Config) -> bool:
    """Whether ranks of this session may be on other machines."""
    own = launch(config)
    return own is not None and own.local_world_size != own.world_size


def headline(config: pytest.Config) -> str | None:
    """What the session's header says of the launch."""
    own = launch(config)
    if own is None:
        return None
    here = "" if own.local_world_size is None else f", {own.local_world_size} of them on this node"
    mpi = "; tests that call MPI themselves need --world mpi" if own.launcher == "mpiexec" else ""
    return f"pdlcheck: {own.world_size} ranks launched by {own.launcher}{here}{mpi}"


def lead(config: pytest.Config) -> Generator[None, object, object]:
    """On rank 0 of a launch: send the other processes home with its exit code, whatever it did."""
    exitcode = int(pytest.ExitCode.INTERNAL_ERROR)
    try:
        result = yield
        exitcode = int(result)  # type: ignore[call-overload]  # an exit code, by pytest's word
    except pytest.UsageError:
        exitcode = int(pytest.ExitCode.USAGE_ERROR)
        raise
    finally:
        own = config.stash.get(_launch, None)
        if own is not None and own.rank == 0:
            with contextlib.suppress(pytest.UsageError):  # they cannot be reached
                _made(config, own).close(exitcode)
    return result
