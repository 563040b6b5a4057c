"""Patches by fixtures of function scope hold on one simulated rank; patches by wider fixtures hold on all."""

from __future__ import annotations

import pytest

SOURCE = """
from contextlib import ExitStack
from unittest import TestCase, mock

@pytest.fixture
def entered():
    with mock.patch("os.getlogin", return_value="me") as login:
        yield login

@pytest.fixture
def started():
    patch = mock.patch("os.getlogin")
    yield patch.start()
    patch.stop()

@pytest.fixture
def stacked():
    with ExitStack() as stack:
        yield stack.enter_context(mock.patch.object(os, "getlogin"))

@pytest.fixture
def in_a_dict(rank):
    with mock.patch.dict(os.environ, {"OF": str(rank)}):
        yield mock.Mock(side_effect=lambda: os.environ["OF"])

@pytest.fixture
def by_monkeypatch():
    login = mock.Mock()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(os, "getlogin", login)
        yield login

@pytest.fixture
def login(request, how): return request.getfixturevalue(how)

def logs_in(rank, login):
    if rank == 0:
        os.getlogin()
    dist.barrier()
    assert login.call_count == (rank == 0)

@W
@pytest.mark.parametrize("how", ["entered", "started", "stacked", "by_monkeypatch"])
def test_rank_0_alone_logs_in(rank, login): logs_in(rank, login)

@W
def test_named(rank, entered): logs_in(rank, entered)

@W
def test_environment(rank, in_a_dict):
    dist.barrier()
    assert in_a_dict() == str(rank)

class TestMethods:
    def setup_method(self):
        self.patch = mock.patch("os.getlogin")
        self.login = self.patch.start()

    def teardown_method(self): self.patch.stop()

    @W
    def test_method(self, rank): logs_in(rank, self.login)

@W
class TestUnittests(TestCase):
    def setUp(self):
        patch = mock.patch("os.getlogin")
        self.login = patch.start()
        self.addCleanup(patch.stop)

    def test_method(self): logs_in(dist.get_rank(), self.login)

@W
def test_stopall(rank):
    login = mock.patch("os.getlogin", return_value=str(rank)).start()
    dist.barrier()
    assert os.getlogin() == str(rank)
    if rank == 0:
        mock.patch.stopall()
        assert os.getlogin is not login
    dist.barrier()
    assert (os.getlogin is login) == (rank == 1)
    mock.patch.stopall()

def test_nothing_is_left(): assert not isinstance(os.getlogin, mock.Mock) and "OF" not in os.environ
"""


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_patch_of_a_fixture_is_of_one_rank(run, world):
    run(SOURCE, world=world).assert_outcomes(passed=10)


def test_what_a_rank_calls_is_not_what_another_has_called(run):
    """Regression test: on simulated ranks another rank's call counted, and the test passed."""
    result = run(
        SOURCE
        + """
@W
def test_wrong(rank, entered):
    os.getlogin()
    dist.barrier()
    if rank == 0:
        entered.assert_not_called()
""",
        "-k",
        "wrong",
        world="sim",
    )
    result.assert_outcomes(failed=1, deselected=10)
    result.stdout.fnmatch_lines(["*Expected 'getlogin' to not have been called. Called 1 times.*"])


def test_a_patch_of_a_wider_fixture_is_of_all_simulated_ranks(run):
    run(
        """
from unittest import mock

@pytest.fixture(scope="module")
def login():
    with mock.patch("os.getlogin") as login:
        yield login

@W
def test_everybody(rank, login, tmp_path):
    os.getlogin()
    dist.barrier()
    assert login.call_count == 2

def test_controller(login):
    os.getlogin()
    assert login.call_count == 3
""",
        world="sim",
    ).assert_outcomes(passed=2)
