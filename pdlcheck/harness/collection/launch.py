"""Whether the processes of torchrun, mpiexec or srun are one pytest session. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

from pdlcheck.harness.collection.options import LAUNCH_MODES
from pdlcheck.launch.environment import Launch, launch_of
from pdlcheck.launch.traces import RANK_VARIABLES
from pdlcheck.launch.waiting import CURE

__all__ = [
    "HOOKS",
    "candidate",
    "headline",
    "joined",
    "joins",
    "launch",
    "mode_of",
    "require_launch",
    "spans_nodes",
    "take_over",
]

HOOKS = "pdlcheck.item_runners.launched.hooks"  # the plugin of a session that began with the variables of a launcher

_found: pytest.StashKey[Launch | ValueError | None] = pytest.StashKey()
_launch: pytest.StashKey[Launch] = pytest.StashKey()


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


def joined(config: pytest.Config) -> Launch | None:
    """Return what :func:`launch` has found, without looking for it."""
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


def joins(config: pytest.Config) -> Launch | None:
    """Return the launch if an option or ini value asks for one session, before conftest files are loaded."""
    options = config.known_args_namespace
    if mode_of(config, options) != "join":
        return None
    found = _find(config, options.pdl_init_method)
    return None if isinstance(found, ValueError) else found  # reported later


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
