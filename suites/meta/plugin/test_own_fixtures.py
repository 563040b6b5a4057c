"""The fixtures of pytest in ranks that take turns while they use them: each rank has its own, on every world."""

from __future__ import annotations

import pytest

WORLDS = pytest.mark.parametrize("world", ["sim", "gloo"])


@WORLDS
def test_caplog_and_the_levels_it_sets_are_of_one_rank(run, world):
    run(
        """
log = logging.getLogger("mine")

@pytest.fixture
def heard(caplog, rank):
    log.warning("set-up of %d", rank)
    return caplog

@W
def test_records(rank, heard):
    log.warning("of %d", rank)
    dist.barrier()
    if rank == 0:
        heard.clear()
    log.warning("then %d", rank)
    dist.barrier()
    assert heard.messages == (["then 0"] if rank == 0 else ["of 1", "then 1"])
    assert heard.text.count(f"then {rank}") == 1 and f"then {1 - rank}" not in heard.text
    assert [record.getMessage() for record in heard.get_records("setup")] == [f"set-up of {rank}"]

@W
def test_levels(rank, caplog):
    if rank == 0:
        with caplog.at_level(logging.DEBUG), caplog.filtering(lambda record: record.name == "mine"):
            dist.barrier()
            log.debug("heard")
            logging.debug("filtered")
            dist.barrier()
        dist.barrier()
        assert caplog.messages == ["heard"]
    else:
        dist.barrier()
        log.debug("too low")
        caplog.set_level(logging.CRITICAL)
        dist.barrier()
        log.error("still too low")
        dist.barrier()
        assert caplog.messages == []

def test_after(caplog):
    assert logging.getLogger().level == logging.WARNING
    log.info("too low")
    log.warning("heard")
    assert caplog.messages == ["heard"]
""",
        world=world,
    ).assert_outcomes(passed=3)


@WORLDS
def test_what_a_rank_reads_from_capsys_is_its_own_and_what_it_does_not_read_is_reported(run, world):
    result = run(
        """
@pytest.fixture
def captured(capsys, rank):
    print("set-up of", rank)
    yield capsys
    assert capsys.readouterr().out.count(f"unread by {rank}\\n") == 1

@W
def test_text(rank, captured):
    print("of", rank)
    dist.barrier()
    print("then", rank)
    dist.barrier()
    assert captured.readouterr().out == f"set-up of {rank}\\nof {rank}\\nthen {rank}\\n"
    print("unread by", rank)

@W
def test_descriptors(rank, capfd):
    os.write(1, b"of %d\\n" % rank)
    dist.barrier()
    os.system(f"echo then {rank} >&2")
    dist.barrier()
    assert capfd.readouterr() == (f"of {rank}\\n", f"then {rank}\\n")

@W
def test_bytes(rank, capsysbinary):
    sys.stdout.buffer.write(b"%d" % rank)
    dist.barrier()
    assert capsysbinary.readouterr().out == b"%d" % rank
""",
        "-rA",
        world=world,
    )
    result.assert_outcomes(passed=3)
    for rank in range(2):
        assert result.stdout.str().count(f"unread by {rank}\n") == 1
    result.stdout.no_fnmatch_line("then *")


@WORLDS
def test_what_a_rank_patches_is_of_one_rank_and_undone_in_whatever_order(run, world):
    run(
        """
class Thing:
    value = "none"
    gone = "there"
    @staticmethod
    def call(): return "none"

class Slotted:
    __slots__ = ("value",)

slotted, table, start, path = Slotted(), {"old": 0}, os.getcwd(), list(sys.path)
slotted.value = "none"

@pytest.fixture
def patched(monkeypatch, rank):
    monkeypatch.setattr(Thing, "value", rank)
    return monkeypatch

@pytest.fixture(scope="module")
def of_all():
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("OF_ALL", "yes")
        yield

@W
def test_patches(rank, patched, tmp_path, of_all):
    patched.setattr(slotted, "value", rank)
    patched.setattr(Thing, "call", lambda: rank)
    patched.setenv("MINE", str(rank))
    patched.setitem(table, "new", rank)
    patched.syspath_prepend(str(tmp_path))
    patched.chdir(tmp_path)
    if rank == 0:
        patched.delattr(Thing, "gone")
        patched.delitem(table, "old")
    for _ in range(3):
        dist.barrier()
        assert (Thing.value, Thing.call(), slotted.value) == (rank, rank, rank)
        assert os.environ["MINE"] == str(rank) and os.environ["OF_ALL"] == "yes"
        assert table == ({"new": 0} if rank == 0 else {"old": 0, "new": 1})
        assert hasattr(Thing, "gone") == (rank == 1)
        assert sys.path[0] == os.getcwd() == str(tmp_path)

@W
def test_blocks_that_overlap(rank):
    if rank == 1:
        dist.barrier()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Thing, "value", rank)
        dist.barrier()
        dist.barrier()
        assert Thing.value == rank
    assert Thing.value == "none"
    if rank == 0:
        dist.barrier()

@W
def test_after(rank):
    assert (Thing.value, Thing.call(), slotted.value) == ("none", "none", "none")
    assert Thing.gone == "there" and table == {"old": 0}
    assert "MINE" not in os.environ and os.getcwd() == start and sys.path == path

def test_without_ranks():
    assert (Thing.value, os.getcwd(), os.environ.get("MINE")) == ("none", start, None)
""",
        world=world,
    ).assert_outcomes(passed=4)


@WORLDS
def test_what_a_function_on_ranks_patches_is_of_one_rank(run, world):
    run(
        """
import colorsys

def overlap():
    rank = dist.get_rank()
    if rank == 1:
        dist.barrier()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(colorsys, "ONE_THIRD", rank)
        dist.barrier()
        dist.barrier()
        seen = colorsys.ONE_THIRD
    if rank == 0:
        dist.barrier()
    return seen

def test_function(world):
    assert world.run(overlap, world_size=2) == [0, 1]
    assert 0 < colorsys.ONE_THIRD < 1
""",
        world=world,
    ).assert_outcomes(passed=1)


def test_so_it_is_on_ranks_that_a_test_has_made_itself(pytester):
    """A separate process runs them, because the code that tracks the patches stays installed."""
    pytester.makepyfile(
        """
import colorsys
from contextlib import contextmanager
from unittest import mock

import pytest
import torch.distributed as dist

from pdlcheck.worlds import get_world

def overlap(patches):
    if dist.get_rank() == 1:
        dist.barrier()
    with patches():
        dist.barrier()
        seen = colorsys.ONE_THIRD
        dist.barrier()
    if dist.get_rank() == 0:
        dist.barrier()
    return seen

@contextmanager
def by_pytest():
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(colorsys, "ONE_THIRD", dist.get_rank())
        yield

def by_mock():
    return mock.patch.object(colorsys, "ONE_THIRD", dist.get_rank())

@pytest.mark.parametrize("patches", [by_pytest, by_mock])
def test_function(patches):
    assert get_world("sim").run(overlap, patches, world_size=2) == [0, 1]
    assert 0 < colorsys.ONE_THIRD < 1
"""
    )
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)


@WORLDS
def test_what_a_rank_mocks_is_of_one_rank_and_undone_in_whatever_order(run, world):
    run(
        """
import colorsys
from unittest import mock

def overlap(rank, patch, value):
    if rank == 1:
        dist.barrier()
    with patch:
        dist.barrier()
        dist.barrier()
        seen = value()
    if rank == 0:
        dist.barrier()
    return seen

@W
def test_attribute(rank):
    patch = mock.patch("colorsys.ONE_THIRD", rank)
    assert overlap(rank, patch, lambda: colorsys.ONE_THIRD) == rank
    assert 0 < colorsys.ONE_THIRD < 1

@W
def test_new_attribute(rank):
    patch = mock.patch.object(colorsys, "NEW", rank, create=True)
    assert overlap(rank, patch, lambda: colorsys.NEW) == rank
    assert not hasattr(colorsys, "NEW")

@W
def test_several(rank):
    patch = mock.patch.multiple("colorsys", ONE_THIRD=rank, ONE_SIXTH=rank)
    assert overlap(rank, patch, lambda: (colorsys.ONE_THIRD, colorsys.ONE_SIXTH)) == (rank, rank)

@W
@pytest.mark.parametrize("clear", [False, True])
def test_dict(rank, clear):
    patch = mock.patch.dict("os.environ", {"MINE": str(rank)}, clear=clear)
    assert overlap(rank, patch, lambda: os.environ["MINE"]) == str(rank)
    assert "MINE" not in os.environ and os.environ["RANK"] == str(rank)

@W
@mock.patch("colorsys.rgb_to_hls")
def test_decorated(mocked, rank):
    dist.barrier()
    colorsys.rgb_to_hls(rank)
    dist.barrier()
    mocked.assert_called_once_with(rank)

@W
def test_started(rank):
    patch = mock.patch.object(colorsys, "rgb_to_yiq", return_value=rank)
    mocked = patch.start()
    dist.barrier()
    assert colorsys.rgb_to_yiq() == rank
    patch.stop()
    mocked.assert_called_once_with()

def test_after():
    assert colorsys.rgb_to_hls(0, 0, 0) == (0, 0, 0) == colorsys.rgb_to_yiq(0, 0, 0)
    assert "MINE" not in os.environ and 0 < colorsys.ONE_SIXTH < colorsys.ONE_THIRD < 1
    with mock.patch("colorsys.ONE_THIRD", 5):
        assert colorsys.ONE_THIRD == 5
""",
        world=world,
    ).assert_outcomes(passed=8)


@WORLDS
def test_recwarn_hears_the_warnings_of_its_rank(run, world):
    run(
        """
@W
def test_warns(rank, recwarn):
    dist.barrier()
    warnings.warn(f"of {rank}")
    dist.barrier()
    assert [str(warning.message) for warning in recwarn] == [f"of {rank}"]

def test_after():
    with pytest.warns(UserWarning):
        warnings.warn("heard")
""",
        world=world,
    ).assert_outcomes(passed=2)


@WORLDS
def test_what_a_rank_asks_for_late_is_its_own_too(run, world):
    result = run(
        """
log = logging.getLogger("mine")

@pytest.fixture
def asked(request, rank):
    dist.barrier()
    request.getfixturevalue("monkeypatch").setenv("ASKED", str(rank))
    caplog = request.getfixturevalue("caplog")
    log.warning("one %d", rank)
    dist.barrier()
    log.warning("two %d", rank)
    assert os.environ["ASKED"] == str(rank)
    return caplog

@W
def test_in_a_fixture(asked, rank):
    dist.barrier()
    assert os.environ["ASKED"] == str(rank)
    assert [record.getMessage() for record in asked.get_records("setup")] == [f"one {rank}", f"two {rank}"]

@W
@pytest.mark.parametrize("name", ["capsys", "capfd"])
def test_captured(request, rank, name):
    captured = request.getfixturevalue(name)
    dist.barrier()
    print("of", rank)
    dist.barrier()
    assert captured.readouterr() == (f"of {rank}\\n", "")

@W
def test_on_one_rank(request, rank):
    if rank == 1:
        captured = request.getfixturevalue("capsys")
    print("first", rank)
    dist.barrier()
    print("then", rank)
    dist.barrier()
    if rank == 1:
        assert captured.readouterr().out == "first 1\\nthen 1\\n"

@W
def test_logged_and_recorded(request, rank):
    request.getfixturevalue("record_property")("mine", rank)
    caplog = request.getfixturevalue("caplog")
    dist.barrier()
    log.warning("of %d", rank)
    dist.barrier()
    assert caplog.messages == [f"of {rank}"]

def test_after(): assert "ASKED" not in os.environ
""",
        "-rA",
        world=world,
    )
    result.assert_outcomes(passed=6)
    for words in ("first 0", "then 0"):
        result.stdout.fnmatch_lines([words])
    result.stdout.no_fnmatch_line("then 1")


@WORLDS
def test_capsys_begins_where_its_rank_asks_for_it_and_may_be_read_in_every_phase(run, world):
    result = run(
        """
@pytest.fixture
def chatty(rank):
    print("chat of", rank)
    dist.barrier()
    print("more of", rank)

@pytest.fixture
def read_late(capsys, rank):
    print("set-up of", rank)
    dist.barrier()
    assert capsys.readouterr().out == f"set-up of {rank}\\n"
    with capsys.disabled():
        dist.barrier()
    print("again", rank)
    yield
    dist.barrier()
    print("end of", rank)
    assert capsys.readouterr().out == f"again {rank}\\nbody of {rank}\\nend of {rank}\\n"

@W
def test_nothing_of_before(chatty, capsys, rank):
    assert capsys.readouterr().out == ""
    print("of", rank)
    dist.barrier()
    assert capsys.readouterr().out == f"of {rank}\\n"

@W
def test_phases(rank, read_late):
    print("body of", rank)
    dist.barrier()

def test_after(capsys):
    print("mine")
    assert capsys.readouterr().out == "mine\\n"
""",
        "-rA",
        world=world,
    )
    result.assert_outcomes(passed=3)
    for rank in range(2):
        assert result.stdout.str().count(f"more of {rank}\n") == 1


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_what_a_rank_patches_is_not_called_by_what_watches_it(run, world):
    """Regression test: on processes a wait called the patched ``time.sleep`` five hundred times."""
    result = run(
        """
@W
def test_naps(rank, monkeypatch):
    naps = []
    monkeypatch.setattr(time, "sleep", naps.append)
    dist.barrier()
    time.sleep(5)
    dist.barrier()
    assert naps == [5]

@W
def test_folder(monkeypatch):
    asked = []
    monkeypatch.setattr(os, "getcwd", lambda: asked.append(1))
    dist.barrier()
    assert not asked
""",
        world=world,
    )
    result.assert_outcomes(passed=2)
