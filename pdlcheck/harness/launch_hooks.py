"""The pytest hooks of a session under torchrun, mpiexec or srun: a plugin that is there only where their traces are.

Registered by ``pdlcheck.plugin`` in processes whose environment has the variables of a launcher. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from pdlcheck.harness.collection import cases
from pdlcheck.harness.running import launch_decision, launched

__all__ = ()


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, object, object]:
    launched.stay_out_of_mpi(early_config)
    return (yield from launched.excuse(early_config))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    return launched.follow(config)


@pytest.hookimpl(wrapper=True, tryfirst=True, specname="pytest_cmdline_main")
def pytest_cmdline_main_of_rank_0(config: pytest.Config) -> Generator[None, object, object]:
    return (yield from launched.lead(config))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if not cases.runs_in_a_rank(config):
        launch_decision.begin(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    if not cases.runs_in_a_rank(session.config):
        launch_decision.decide(session)


def pytest_report_collectionfinish(config: pytest.Config) -> str | list[str]:
    return launched.headline(config) or []


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    launch_decision.serve_if_agent(session)
