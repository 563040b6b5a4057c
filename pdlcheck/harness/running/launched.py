"""A pytest session under torchrun, mpiexec or srun: rank 0 runs it, and the other processes provide places for ranks.

Every process collects the tests. Only if one of them needs ranks do the processes become one session; otherwise each
runs pytest by itself, as it would without this plugin. Does not import torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from pdlcheck.errors import WorldUnavailable
from pdlcheck.harness.collection.options import LAUNCH_MODES
from pdlcheck.worlds.launched.environment import Launch, launch_of
from pdlcheck.worlds.launched.traces import RANK_VARIABLES
from pdlcheck.worlds.launched.waiting import CURE

if TYPE_CHECKING:
    from pdlcheck.worlds.launched.placement import LaunchedPlacement

__all__ = [
    "HOOKS",
    "PRELOAD",
    "candidate",
    "excuse",
    "follow",
    "headline",
    "launch",
    "lead",
    "leave_mpi_environment",
    "mode_of",
    "placement",
    "require_launch",
    "spans_nodes",
    "stay_out_of_mpi",
    "take_over",
]

HOOKS = "pdlcheck.harness.launch_hooks"  # the plugin of a session that began with the variables of a launcher
PRELOAD = ("pytest", "hypothesis", "pdlcheck.harness.rank.preloaded")  # modules that every rank of a test session needs

# MPI joins the run of mpiexec by these variables. Neither this process nor its short-lived ranks are such a member.
_OF_MPI = ("PMIX_", "PMI_")

_found: pytest.StashKey[Launch | ValueError | None] = pytest.StashKey()
_launch: pytest.StashKey[Launch] = pytest.StashKey()
_placement: pytest.StashKey[LaunchedPlacement | pytest.UsageError] = pytest.StashKey()


def mode_of(config: pytest.Config, options: Any = None) -> str:
    """Return ``join``, ``ignore`` or ``auto``: the option, or the ini value, or ``join`` if ``--init-method`` is given.

    Args:
        config: configuration of the session.
        options: the options known before conftest files are loaded; default: those of ``config``.
    """
    options = config.option if options is None else options
    if options.pdl_launch is not None:
        return str(options.pdl_launch)
    mode = config.getini("pdlcheck_launch")
    if mode not in LAUNCH_MODES:
        raise pytest.UsageError(f"pdlcheck_launch must be one of {', '.join(LAUNCH_MODES)}; got {mode!r}")
    return "join" if mode == "auto" and options.pdl_init_method is not None else str(mode)


def candidate(config: pytest.Config) -> Launch | None:
    """Return the launch that the environment describes, whether or not its processes are one session."""
    if _launch in config.stash:
        return config.stash[_launch]
    mode = mode_of(config)
    if mode == "ignore" or (mode == "auto" and _uses_xdist(config)):
        return None
    found = _find(config, config.option.pdl_init_method)
    if isinstance(found, ValueError) and mode == "auto":
        return None
    if isinstance(found, ValueError):
        raise pytest.UsageError(str(found))
    if found is not None and getattr(config.option, "numprocesses", None):
        raise pytest.UsageError(
            f"-n divides one machine among workers, {found.launcher} has divided it already: leave -n away, or "
            "pass -n 0 after an -n in addopts"
        )
    if found is not None and mode == "join":
        config.stash[_launch] = found
    return found


def launch(config: pytest.Config) -> Launch | None:
    """Return the launch whose processes are one session; None if every process runs its own session."""
    candidate(config)
    return config.stash.get(_launch, None)


def take_over(config: pytest.Config, own: Launch) -> None:
    """Make the processes of this launch one session from now on."""
    config.stash[_launch] = own


def require_launch(config: pytest.Config) -> None:
    """Raise a usage error if a test needs ranks and the variables of a launcher are wrong."""
    found = config.stash.get(_found, None)
    if isinstance(found, ValueError) and mode_of(config) != "ignore" and not _uses_xdist(config):
        raise pytest.UsageError(f"{found}; {CURE}")


def _uses_xdist(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput") or bool(getattr(config.option, "numprocesses", None))


def _find(config: pytest.Config, init_method: str | None) -> Launch | ValueError | None:
    if _found not in config.stash:
        try:
            config.stash[_found] = launch_of(_environment(config), init_method)
        except ValueError as error:
            config.stash[_found] = error
    return config.stash[_found]


def _environment(config: pytest.Config) -> Mapping[str, str]:
    """Return the variables that a launcher has set.

    If the session began without them, leave out those that a conftest has set since for tests that create their own
    group.
    """
    if config.pluginmanager.has_plugin(HOOKS):
        return os.environ
    return {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}


def _joins(config: pytest.Config) -> Launch | None:
    """Return the launch if an option or ini value asks for one session, before conftest files are loaded."""
    options = config.known_args_namespace
    if mode_of(config, options) != "join":
        return None
    found = _find(config, options.pdl_init_method)
    return None if isinstance(found, ValueError) else found  # reported later


def stay_out_of_mpi(config: pytest.Config) -> None:
    """Remove the variables of MPI in one session over a launch, before the user's code is imported.

    MPI then has a single process here. Its initialisation would wait for all processes of mpiexec, and not all of them
    import the tests.
    """
    if _joins(config) is not None:
        leave_mpi_environment()


def leave_mpi_environment() -> None:
    """Keep this process, and those that it starts, from joining MPI as members of the run of mpiexec."""
    for name in [name for name in os.environ if name.startswith(_OF_MPI)]:
        del os.environ[name]


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
                own = _joins(config)
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


def spans_nodes(config: pytest.Config) -> bool:
    """Return whether ranks of this session may be on other machines."""
    own = launch(config)
    return own is not None and own.local_world_size != own.world_size


def headline(config: pytest.Config) -> str | None:
    """Return the line about the launch that the session prints once its tests are collected."""
    own = launch(config)
    if own is None:
        return None
    here = "" if own.local_world_size is None else f", {own.local_world_size} of them on this node"
    mpi = "; tests that call MPI themselves need --world mpi" if own.launcher == "mpiexec" else ""
    return f"pdlcheck: {own.world_size} ranks launched by {own.launcher}{here}{mpi}"


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
        own = config.stash.get(_launch, None)
        if own is not None and own.rank == 0:
            with contextlib.suppress(pytest.UsageError):  # they cannot be reached
                _made(config, own).close(exitcode)
    return result
