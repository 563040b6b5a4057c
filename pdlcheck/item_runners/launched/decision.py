"""The decision after collection whether the processes of a launch become one session. Does not import torch."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, NoReturn

import pytest

from pdlcheck.compat.python.exits import run_exit_functions
from pdlcheck.harness.collection import cases, launch
from pdlcheck.harness.conftest_hooks import of_conftest_files
from pdlcheck.harness.running import held_terminal
from pdlcheck.item_runners.launched import session as launched
from pdlcheck.launch.environment import Launch
from pdlcheck.launch.nesting import leave_mpi_environment
from pdlcheck.worlds.standard_streams import flush_streams

__all__ = ["begin", "decide", "serve_if_agent"]


def begin(config: pytest.Config) -> None:
    """Hold the output of a process that may have to serve rank 0, before tests are collected."""
    own = launch.candidate(config)
    if own is not None and own.rank != 0 and launch.launch(config) is None:
        held_terminal.hold(config)


def decide(session: pytest.Session) -> None:
    """Make the processes of the launch one session if one of the collected tests needs ranks.

    Every process of the launch collects the same tests, so all make the same decision.

    Raises:
        pytest.UsageError: a test needs ranks, and the variables of the launcher are wrong, or tests without ranks use
            an MPI that all launched processes have initialised.
    """
    config = session.config
    own = launch.candidate(config)
    needs_ranks = any(cases.world_of(item) is not None for item in session.items)
    if needs_ranks:
        launch.require_launch(config)
    if own is None or launch.launch(config) is not None:
        return
    if not needs_ranks:
        held_terminal.show(config)
        return
    _refuse_mpi_of_all(session, own)
    leave_mpi_environment()
    launch.take_over(config, own)
    if config.option.collectonly:
        return
    from pdlcheck.worlds.processes.controller import forkserver

    forkserver.start(preload=launched.PRELOAD, seed=config.getoption("--pdl-seed"), rank=own.rank)
    if own.rank == 0 and (placement := launched.placement(config)) is not None:
        placement.join()


def serve_if_agent(session: pytest.Session) -> None:
    """Fork ranks for rank 0 until it ends, if this process is an agent; then end with rank 0's exit code.

    Rank 0 writes the reports, caches and tables of this process. Therefore only the end hooks of conftest files run
    here.
    """
    config = session.config
    own = launch.launch(config)
    if own is None or own.rank == 0:
        return
    held_terminal.drop(config)
    exitcode = 0
    if not config.option.collectonly:
        from pdlcheck.worlds.launched.agent import serve

        exitcode = serve(own)
    _end(session, exitcode)


def _end(session: pytest.Session, exitcode: int) -> NoReturn:
    """End the process as pytest would, without the plugins that write what rank 0 writes."""
    session.exitstatus = exitcode
    config = session.config
    with contextlib.ExitStack() as stack:
        stack.callback(os._exit, exitcode)
        stack.callback(run_exit_functions)
        stack.callback(flush_streams)
        stack.callback(of_conftest_files(config, "pytest_unconfigure"), config=config)
        finish = of_conftest_files(config, "pytest_sessionfinish")
        stack.callback(finish, session=session, exitstatus=exitcode)
    raise AssertionError("os._exit returned")


def _refuse_mpi_of_all(session: pytest.Session, own: Launch) -> None:
    """Raise a usage error if tests without ranks use an MPI that all launched processes have initialised.

    Such tests would run only in rank 0, and wait there for members of MPI that run no tests.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.COMM_WORLD.size < 2:
        return
    plain = [item for item in session.items if cases.world_of(item) is None and _uses_mpi(item)]
    if plain:
        raise pytest.UsageError(
            f"{own.launcher} launched {own.world_size} processes, whose MPI {len(plain)} tests without ranks use, such "
            f"as {plain[0].nodeid}; other tests need ranks of pdlcheck. Run the two kinds apart, or pass "
            "--pdl-launch=join (one session, in which MPI has a single process) or --pdl-launch=ignore (every "
            "process runs every test)"
        )


def _uses_mpi(item: pytest.Item) -> bool:
    values = vars(getattr(item, "module", None) or object).values()
    return any(
        getattr(value, "__name__", "").startswith("mpi4py") or type(value).__module__.startswith("mpi4py")
        for value in values
        if not isinstance(value, str)
    )
