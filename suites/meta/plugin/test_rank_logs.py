"""Logs in a rank, whose handlers are attached once: the same as pytest shows them, for any use of logging in tests."""

from __future__ import annotations

import logging

import pytest
from _pytest.logging import catching_logs

# modules with state must be imported before pytester records the imported modules
import pdlcheck.item_runners.processes.items
import pdlcheck.item_runners.simulated.items

HEARS_ALL = hasattr(catching_logs, "attached_loggers")  # pytest 8 attaches its handlers to the root logger only

SOURCE = """
import logging, logging.config

import pytest
from _pytest.logging import catching_logs

HEARS_ALL = hasattr(catching_logs, "attached_loggers")
pytestmark = pytest.mark.world_size(2)


def test_a_logger_that_stops_propagating(rank, caplog):
    logging.getLogger("mine").propagate = False
    logging.getLogger("later").warning("by the root")
    assert caplog.messages == ["by the root"]


def test_is_heard_from_the_next_phase_on(rank, caplog):
    logging.getLogger("mine").warning("of %d", rank)
    logging.getLogger("mine").propagate = True
    assert caplog.messages == [f"of {rank}"] * HEARS_ALL
    assert [record.levelname for record in caplog.get_records("call")] == ["WARNING"] * HEARS_ALL


def test_and_only_once_when_it_propagates_again(rank, caplog):
    logging.getLogger("mine").warning("once")
    assert caplog.messages == ["once"]


def test_a_level_of_a_test_ends_with_it(rank, caplog):
    caplog.set_level(logging.DEBUG)
    logging.debug("said")
    assert caplog.messages == ["said"]


def test_the_next_one_has_its_own(rank, caplog):
    assert caplog.messages == []
    logging.debug("not said")
    assert caplog.messages == []


def test_a_configuration_that_throws_handlers_away(rank):
    logging.config.dictConfig({"version": 1, "root": {"handlers": []}, "disable_existing_loggers": False})
    assert not logging.getLogger().handlers


def test_does_so_for_its_own_phase(rank, caplog):
    logging.warning("heard")
    assert caplog.messages == ["heard"]


def test_fails(rank):
    logging.getLogger("mine").info("info of %d", rank)
    logging.getLogger("mine").error("error of %d", rank)
    assert False
"""


def _run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    pytester.makeini("[pytest]\n")
    pytester.makepyfile(SOURCE)
    return pytester.runpytest_inprocess("--world", "gloo", "-p", "no:randomly", "-p", "no:cacheprovider", *options)


@pytest.mark.slow
def test_handlers_hear_what_pytests_own_would(pytester):
    result = _run(pytester)
    result.assert_outcomes(passed=7, failed=1)
    for rank in (0, 1):
        result.stdout.fnmatch_lines([f"*Captured log call [[]rank {rank}]*", f"ERROR *error of {rank}"])
    result.stdout.no_fnmatch_line("INFO *info of*")


@pytest.mark.slow
def test_a_level_of_the_run_is_that_of_the_ranks(pytester):
    result = _run(pytester, "--log-level=INFO", "-k", "fails or own")
    for rank in (0, 1):
        result.stdout.fnmatch_lines([f"INFO *info of {rank}", f"ERROR *error of {rank}"])
    result.assert_outcomes(passed=2, failed=1)


LIVE = """
import logging

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.world_size(2)


def test_logs(rank, caplog):
    logging.getLogger("mine").debug("debug of %d", rank)
    dist.barrier()
    try:
        raise ValueError("of %d" % rank)
    except ValueError:
        logging.exception("after the barrier")
    assert caplog.messages[0] == f"debug of {rank}", "the level of the run is the lowest that anybody asked for"


def test_next(rank):
    logging.warning("next")
"""


@pytest.mark.slow
def test_the_live_log_and_the_log_file_have_what_ranks_log(pytester):
    pytester.makepyfile(test_live=LIVE)
    options = ("--log-cli-level=INFO", "--log-file=all.log", "--log-file-level=DEBUG", "--log-file-format=%(message)s")
    quiet = ("-p", "no:randomly", "-p", "no:cacheprovider")
    result = pytester.runpytest_inprocess("--world", "gloo", *quiet, *options)
    result.assert_outcomes(passed=2)
    shown, _, second = result.stdout.str().partition("test_next[gloo-2]")
    for rank in (0, 1):
        assert shown.count(f"ERROR    root:test_live.py:15 [rank {rank}] after the barrier\n") == 1
        assert shown.count(f"ValueError: of {rank}\n") == 1
        assert second.count(f"WARNING  root:test_live.py:20 [rank {rank}] next\n") == 1
    assert "debug of" not in shown
    lines = (pytester.path / "all.log").read_text().splitlines()
    said = [line for line in lines if line.startswith("[rank")]
    assert sorted(said[:2]) == ["[rank 0] debug of 0", "[rank 1] debug of 1"]
    assert sorted(said[2:4]) == ["[rank 0] after the barrier", "[rank 1] after the barrier"]
    assert sorted(said[4:]) == ["[rank 0] next", "[rank 1] next"]


CONTROLLER = """
import logging

from pdlcheck.harness.collection.cases import runs_in_a_rank

apart = logging.getLogger("apart")
apart.propagate = False


def pytest_runtest_setup(item):
    if not runs_in_a_rank(item.config):
        apart.warning("apart in the set-up of %s", item.originalname)


def pytest_runtest_teardown(item):
    if not runs_in_a_rank(item.config):
        logging.error("root at the end of %s", item.originalname)
        apart.info("too low")


def pytest_runtest_logfinish():
    print("left:", [handler for handler in apart.handlers if type(handler).__name__ == "LogCaptureHandler"])
"""


def test_the_controller_hears_the_hooks_that_run_in_it_and_leaves_no_handler_behind(pytester):
    pytester.makeconftest(CONTROLLER)
    pytester.makepyfile(
        "import pytest\n\n"
        "def test_plain(): pass\n\n"
        "@pytest.mark.world_size(2)\ndef test_first(rank): pass\n\n"
        "@pytest.mark.world_size(2)\ndef test_next(rank): assert False\n"
    )
    quiet = ("-p", "no:randomly", "-p", "no:cacheprovider")
    result = pytester.runpytest_inprocess("--world", "gloo", *quiet, "-rA", "-s")
    result.assert_outcomes(passed=2, failed=1)
    for name in ("test_plain", "test_first", "test_next"):
        assert result.stdout.str().count(f"apart in the set-up of {name}") == HEARS_ALL
        assert result.stdout.str().count(f"root at the end of {name}") == 1
    result.stdout.no_fnmatch_line("*too low*")
    assert result.stdout.str().count("left: []") == 3


BETWEEN_PHASES = """
import logging

import pytest
from _pytest.logging import catching_logs

HEARS_ALL = hasattr(catching_logs, "attached_loggers")


@pytest.fixture
def apart():
    logger = logging.getLogger("apart")
    logger.propagate = False
    yield logger
    logger.propagate = True


@pytest.mark.world_size(2)
def test_hears(rank, apart, caplog):
    apart.warning("apart")
    assert caplog.messages == ["apart"] * HEARS_ALL
"""


def test_a_logger_that_a_fixture_sets_apart_is_heard_in_the_body_on_every_world(pytester):
    pytester.makepyfile(BETWEEN_PHASES)
    quiet = ("-p", "no:randomly", "-p", "no:cacheprovider")
    result = pytester.runpytest_inprocess("--world", "gloo,sim", *quiet)
    result.assert_outcomes(passed=2)


def test_on_simulated_ranks_logs_are_those_of_pytests_own_handlers(pytester, monkeypatch):
    def reports() -> list[tuple[object, ...]]:
        result = pytester.runpytest_inprocess("--world", "sim", "-p", "no:cacheprovider", "--log-format", "%(message)s")
        reported = result.reprec.getreports("pytest_runtest_logreport")  # type: ignore[attr-defined]
        monkeypatch.setattr(logging.getLogger("mine"), "propagate", True)
        return [(report.nodeid, report.when, report.outcome, report.sections) for report in reported]

    pytester.makepyfile(SOURCE)
    quick = reports()
    monkeypatch.setattr(pdlcheck.item_runners.simulated.items, "attach_quickly", lambda config: None)
    assert quick == reports()
    logs = "".join(text for *_, sections in quick for name, text in sections if name == "Captured log call")
    assert "error of 0" in logs
    assert "error of 1" in logs
