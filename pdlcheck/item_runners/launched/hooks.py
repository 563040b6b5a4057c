"""The pytest hooks of a session under torchrun, mpiexec or srun.

``pdlcheck.plugin`` registers them only in processes whose environment has the variables of a launcher. This module
does not import torch.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from pdlcheck.harness.collection import cases, launch
from pdlcheck.item_runners.launched import decision as launch_decision
from pdlcheck.item_runners.launched import session as launched

__all__ = ()


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, object, object]:
    """Keep this process out of MPI, and report a conftest file that fails to the other processes of the launch."""
    launched.stay_out_of_mpi(early_config)
    return (yield from launched.excuse(early_config))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Run an agent instead of a pytest session on every rank except 0."""
    return launched.follow(config)


@pytest.hookimpl(wrapper=True, tryfirst=True, specname="pytest_cmdline_main")
def pytest_cmdline_main_of_rank_0(config: pytest.Config) -> Generator[None, object, object]:
    """Run the session of rank 0, and end the agents afterwards."""
    return (yield from launched.lead(config))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Begin the decision whether this session uses the launch."""
    if not cases.runs_in_a_rank(config):
        launch_decision.begin(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Decide whether the collected tests use the launch."""
    if not cases.runs_in_a_rank(session.config):
        launch_decision.decide(session)


def pytest_report_collectionfinish(config: pytest.Config) -> str | list[str]:
    """Return the line about the launch."""
    return launch.headline(config) or []


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Serve the calls of the controller if this process is an agent."""
    launch_decision.serve_if_agent(session)
