"""A pytest session under torchrun, mpiexec or srun: rank 0 runs it, the other processes lend it their place.

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
PRELOAD = ("pytest", "hypothesis", "pdlcheck.harness.rank.preloaded")  # what every rank of a test session needs

# by which MPI joins the run of mpiexec: neither this process nor its ranks, which come and go, are that member
_OF_MPI = ("PMIX_", "PMI_")

_found: pytest.StashKey[Launch | ValueError | None] = pytest.StashKey()
_launch: pytest.StashKey[Launch] = pytest.StashKey()
_placement: pytest.StashKey[LaunchedPlacement | pytest.UsageError] = pytest.StashKey()


def mode_of(config: pytest.Config, options: Any = None) -> str:
    """Return ``join``, ``ignore`` or ``auto``: the option, or the ini value; ``join`` where a place to meet is given.

    Args:
        config: of the session.
        options: those known before conftest files are loaded; default: those of ``config``.
    """
    options = config.option if options is None else options
    if options.pdl_launch is not None:
        return str(options.pdl_launch)
    mode = config.getini("pdlcheck_launch")
    if mode not in LAUNCH_MODES:
        raise pytest.UsageError(f"pdlcheck_launch must be one of {', '.join(LAUNCH_MODES)}; got {mode!r}")
    return "join" if mode == "auto" and options.pdl_init_method is not None else str(mode)


def candidate(config: pytest.Config) -> Launch | None:
    """Return the launch that the environment describes, whether or not this session is one with its other processes."""
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
    """Return the launch whose processes are one session, this one's; None where every process runs its own."""
    candidate(config)
    return config.stash.get(_launch, None)


def take_over(config: pytest.Config, own: Launch) -> None:
    """From now on the processes of this launch are one session."""
    config.stash[_launch] = own


def require_launch(config: pytest.Config) -> None:
    """Raise a usage error where the variables of a launcher are wrong, as soon as a test needs ranks."""
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
    """What a launcher has left; not what a conftest has set since, for tests that make their own group."""
    if config.pluginmanager.has_plugin(HOOKS):
        return os.environ
    return {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}


def _joins(config: pytest.Config) -> Launch | None:
    """Before conftest files are loaded: return the launch if an option or ini value asks for one session."""
    options = config.known_args_namespace
    if mode_of(config, options) != "join":
        return None
    found = _find(config, options.pdl_init_method)
    return None if isinstance(found, ValueError) else found  # told later


def stay_out_of_mpi(config: pytest.Config) -> None:
    """In one session over a launch, before anything of the user's is imported: MPI has a single process in this one.

    Its initialisation waits for all processes of mpiexec, which do not all import the tests.
    """
    if _joins(config) is not None:
        leave_mpi_environment()


def leave_mpi_environment() -> None:
    """Let neither this process nor those that it starts join MPI as members of the run of mpiexec."""
    for name in [name for name in os.environ if name.startswith(_OF_MPI)]:
        del os.environ[name]


def excuse(config: pytest.Config) -> Generator[None, object, object]:
    """Where conftest files cannot be loaded in this process of a launch: tell the others, which would wait for it.

    Only where an option or ini value has made the processes one session. Elsewhere nobody waits for anybody yet.
    """
    try:
        return (yield)
    except BaseException as error:  # pytest.exit and a skip of the whole file are no Exception
        if isinstance(error, KeyboardInterrupt):  # whoever pressed Ctrl-C wants the end of this process now
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
    """On every rank but 0 of one session: fork ranks for rank 0 until it ends; return its exit code."""
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
            config.stash[_placement] = pytest.UsageError(f"{error}; {CURE}")
    made = config.stash[_placement]
    if isinstance(made, pytest.UsageError):
        raise made
    return made


def spans_nodes(config: pytest.Config) -> bool:
    """Whether ranks of this session may be on other machines."""
    own = launch(config)
    return own is not None and own.local_world_size != own.world_size


def headline(config: pytest.Config) -> str | None:
    """What the session says of the launch, once its tests are collected."""
    own = launch(config)
    if own is None:
        return None
    here = "" if own.local_world_size is None else f", {own.local_world_size} of them on this node"
    mpi = "; tests that call MPI themselves need --world mpi" if own.launcher == "mpiexec" else ""
    return f"pdlcheck: {own.world_size} ranks launched by {own.launcher}{here}{mpi}"


def lead(config: pytest.Config) -> Generator[None, object, object]:
    """On rank 0 of one session: send the other processes home with its exit code, whatever it did."""
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
