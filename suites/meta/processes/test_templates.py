"""Fresh ranks as forks of templates: their shared state, the exceptions, and the end of templates."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch.distributed as dist

# Inner runs forget the modules that they import, so modules with state must be imported before.
import pdlcheck.item_runners.processes.items  # noqa: F401
from pdlcheck.worlds.processes import ProcessWorld
from pdlcheck.worlds.processes.controller import forkserver
from pdlcheck.worlds.processes.controller.templates import Beginning

from ..clone import ROOT
from ..still_running import is_running, still_running

FRESH = ("--isolation", "fresh")

# each test records who ran it: test, rank, process, parent, and further words
TELL = """
def tell(rank, *more):
    name = os.environ["PYTEST_CURRENT_TEST"].partition("::")[2].partition("[")[0]
    with open(os.environ["TOLD"], "a") as file:
        file.write(" ".join(map(str, [name, rank, os.getpid(), os.getppid(), *more])) + "\\n")

"""


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Set the file that inner tests write to; return a function that reads the entries by test and rank."""
    path = tmp_path / "told"
    monkeypatch.setenv("TOLD", str(path))

    def read():
        found = {}
        for line in path.read_text().splitlines():
            name, rank, *words = line.split()
            found.setdefault(name, {})[int(rank)] = words
        return found

    return read


@pytest.fixture
def world():
    world = ProcessWorld(isolation="fresh", timeout_s=20)
    yield world
    world.close()


def parents(told_of_test):
    """Return the parents of rank 0 and rank 1."""
    return [told_of_test[rank][1] for rank in range(2)]


def are_templates(pids):
    """Return True if none of them is this process's fork server or its twin, and False if all are."""
    servers = set(forkserver.retain(are_templates).pids)
    found = {int(pid) in servers for pid in pids}
    forkserver.release(are_templates)
    assert len(found) == 1
    return found == {False}


def test_fresh_ranks_share_a_template_and_no_state(run, told):
    source = (
        TELL
        + """
RANK, PORT, LOCAL, SIZE = (os.environ.get(n) for n in ("RANK", "MASTER_PORT", "LOCAL_RANK", "WORLD_SIZE"))
seen = []

def port():
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store.port

@pytest.fixture(scope="session")
def once():
    seen.append("fixture")
    yield
    assert len(seen) == 2

@pytest.mark.parametrize("number", range(3))
@W
def test_one(number, rank, once, monkeypatch):
    seen.append(number)
    assert seen == ["fixture", number]
    assert (RANK, LOCAL, SIZE, PORT) == (str(rank), str(rank), "2", str(port()))
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x)
    assert x.item() == 3
    monkeypatch.setenv("PYTEST_CURRENT_TEST", f"::{number}[")
    tell(rank, torch.rand(()).item())
"""
    )
    conftest = "def pytest_sessionstart():\n    with open('started', 'a') as file:\n        file.write('x')\n"
    run(source, *FRESH, conftest=conftest).assert_outcomes(passed=3)
    tests = told()
    pids = [pid for test in tests.values() for pid, *_ in test.values()]
    assert len(set(pids)) == 6
    assert len({tuple(parents(test)) for test in tests.values()}) == 1
    first, second = parents(tests["0"])
    assert first != second
    assert are_templates([first, second])
    assert still_running([int(pid) for pid in (*pids, first, second)]) == []
    assert tests["0"][0][2] == tests["1"][0][2] != tests["0"][1][2], "the same random stream for each test of a rank"
    assert Path("started").read_text() == "xxx", "the controller and each template"


UNFIT = {
    "thread": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
    "operation": "torch.set_num_threads(2)\nlarge = torch.ones(700, 700)\nlarge = large @ large",
    "atexit": "import atexit\natexit.register(print)",
    "finalizer": "import tempfile\nfolder = tempfile.TemporaryDirectory()\nthere = os.path.isdir(folder.name)",
    "file": "file = open(__file__)",
    "child": "import subprocess\nchild = subprocess.Popen(['sleep', '60'])",
    "rank": "assert dist.get_rank() == int(os.environ['RANK'])",
    "asked": "there = dist.is_initialized()",
}


@pytest.mark.slow
@pytest.mark.parametrize("source", UNFIT.values(), ids=UNFIT)
def test_where_a_fork_would_differ_fresh_ranks_are_no_forks(run, told, source):
    body = """
there = True
if "RANK" in os.environ:
{0}

@pytest.mark.parametrize("number", range(2))
@W
def test_one(number, rank, monkeypatch):
    assert there
    torch.set_num_threads(2)
    torch.ones(700, 700) @ torch.ones(700, 700)
    monkeypatch.setenv("PYTEST_CURRENT_TEST", f"::{{number}}[")
    tell(rank)
"""
    run(TELL + body.format(textwrap.indent(source, "    ")), *FRESH).assert_outcomes(passed=2)
    tests = told()
    for number in "01":
        assert not are_templates(parents(tests[number]))
    assert len({pid for test in tests.values() for pid, *_ in test.values()}) == 4


def test_what_an_unfit_template_registered_for_its_end_is_called(run, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    source = """
import atexit, shutil, tempfile
if "RANK" in os.environ:
    folder = tempfile.TemporaryDirectory(prefix="of-a-finalizer-")
    other = tempfile.mkdtemp(prefix="of-atexit-")
    atexit.register(shutil.rmtree, other)

@W
def test_both_are_there(rank):
    assert os.path.isdir(folder.name) and os.path.isdir(other)
"""
    run(source, *FRESH).assert_outcomes(passed=1)
    assert [path.name for path in temporary.iterdir() if path.name.startswith("of-")] == []


def test_a_thread_of_a_conftest_file_is_seen(run, told):
    conftest = "import threading\ndef pytest_configure():\n"
    conftest += "    threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    source = TELL + "@W\ndef test_one(rank):\n    tell(rank)\n"
    run(source, *FRESH, conftest=conftest).assert_outcomes(passed=1)
    assert not are_templates(parents(told()["test_one"]))


def test_importing_torchs_optimizers_does_no_harm(run, told):
    source = TELL + "import torch.distributed.optim\n@W\ndef test_one(rank):\n    tell(rank)\n"
    run(source, *FRESH).assert_outcomes(passed=1)
    assert are_templates(parents(told()["test_one"]))


def test_a_file_that_cannot_be_collected_in_ranks_is_told_as_ever(run):
    source = "if 'RANK' in os.environ:\n    raise RuntimeError('not here')\n@W\ndef test_one(): pass\n"
    result = run(source, *FRESH)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*RuntimeError: not here*"])


def test_another_file_has_templates_of_its_own(run, told, pytester):
    source = TELL + "@W\ndef test_{0}(rank):\n    tell(rank)\n"
    first = source.format("first")
    second = (
        source.format("second")
        + """
@W
def test_third(rank):
    for line in open(os.environ["TOLD"]):
        if line.startswith("test_first"):
            with pytest.raises(ProcessLookupError):
                os.kill(int(line.split()[3]), 0)
    tell(rank)
"""
    )
    pytester.makepyfile(test_another="import os, pytest\nW = pytest.mark.world_size(2)\n" + first)
    run(second, *FRESH).assert_outcomes(passed=3)
    tests = told()
    assert parents(tests["test_first"]) != parents(tests["test_second"]) == parents(tests["test_third"])
    assert all(are_templates(parents(test)) for test in tests.values())


def test_a_file_that_has_changed_is_collected_anew(run):
    source = """
VALUE = 1

@W
def test_change(rank):
    assert VALUE == 1
    dist.barrier()
    if rank == 0:
        text = open(__file__).read()
        open(__file__, "w").write(text.replace("VALUE = " + "1", "VALUE = " + "200"))

@W
def test_changed(rank):
    assert VALUE == 200
"""
    run(source, *FRESH).assert_outcomes(passed=2)


def test_output_belongs_to_its_test(run):
    source = """
print("at the import")
@W
@pytest.mark.parametrize("word", ["one", "two"])
def test_said(word, rank):
    print(f"said {word}")
    assert rank == 0
"""
    text = run(source, *FRESH).stdout.str()
    for rank in range(2):
        assert text.count(f"Captured stdout call [rank {rank}]") == 2
    assert text.count("\nsaid one\n") == text.count("\nsaid two\n") == 2
    assert "at the import" not in text


def test_kept_ranks_and_fresh_ones_in_turn(run, told):
    modes = ["fresh", "pool", "fresh", "reinit", "fresh", "pool"]
    source = TELL + "".join(
        f"@W\n@pytest.mark.isolation('{mode}')\ndef test_{i}(rank):\n    dist.barrier()\n    tell(rank)\n\n"
        for i, mode in enumerate(modes)
    )
    run(source).assert_outcomes(passed=6)
    tests = told()
    kept = {tests[f"test_{i}"][0][0] for i in (1, 3, 5)}
    fresh = {tests[f"test_{i}"][0][0] for i in (0, 2, 4)}
    assert (len(kept), len(fresh)) == (1, 3)
    assert len({tuple(parents(tests[f"test_{i}"])) for i in (0, 2, 4)}) == 1


@pytest.mark.slow
def test_coverage_counts_the_forks_of_templates(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "random")  # two servers then fork the ranks
    pytester.makepyfile(
        measured="AT_IMPORT = 1\ndef body(x):\n    return x\ndef never():\n    return 1\n",
        test_inner="""
        import os, pytest
        if "RANK" in os.environ:
            import measured
        @pytest.mark.world_size(2)
        @pytest.mark.parametrize("i", [1, 2])
        def test_one(i):
            measured.body(1)
            with open(f"/proc/{os.getppid()}/stat") as file, open("parents", "a+") as parents:
                assert parents.write(file.read().rpartition(")")[2].split()[1] + " ") > 1
        """,
    )
    options = ("--world", "gloo", *FRESH, "--cov=measured", "--cov-report=json")
    subprocess.run([sys.executable, "-m", "pytest", *options], check=True, timeout=120)
    assert len(set(Path("parents").read_text().split())) == 2, "two servers have forked templates"
    (report,) = json.loads(Path("coverage.json").read_text())["files"].values()
    assert report["missing_lines"] == [5]


def test_what_a_test_registers_with_atexit_runs_at_the_end_of_its_rank(run):
    source = """
import atexit
@W
@pytest.mark.parametrize("i", range(8))
def test_one(i, rank):
    atexit.register(lambda: open(f"end-{i}-{rank}", "x"))
"""
    run(source, *FRESH).assert_outcomes(passed=8)
    assert len(list(Path.cwd().glob("end-*"))) == 16


def both():
    dist.barrier()
    return os.getppid()


@pytest.fixture
def templates_of(world):
    """Return a function that returns the parents of the ranks in a run that began with ``list()``."""

    def run(key="some"):
        with world.open(2, beginning=Beginning(key, list)) as ranks:
            assert ranks.have_begun
            return ranks.run(both)

    return run


def wait_until_it_is_lost(pid):
    """Wait until the process is gone, dead or stopped, because a signal takes time on a busy machine."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state in "XZTt":
            return
        time.sleep(0.01)


@pytest.mark.parametrize("signo", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_a_template_that_is_lost_is_replaced(templates_of, signo):
    before = templates_of()
    assert templates_of() == before
    os.kill(before[1], signo)
    wait_until_it_is_lost(before[1])
    after = templates_of()
    assert set(after).isdisjoint(before)
    assert still_running(before) == []


def test_a_template_that_is_killed_in_a_test_fails_only_this(run, told):
    source = (
        "import time\n"
        + TELL
        + """
@W
def test_before(rank):
    tell(rank)

@W
def test_killed(rank):
    if rank == 1:
        os.kill(os.getppid(), 9)
        time.sleep(10)
    dist.barrier()

@W
def test_after(rank):
    dist.barrier()
    tell(rank)
"""
    )
    result = run(source, *FRESH)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*rank 1 *"])
    tests = told()
    assert set(parents(tests["test_before"])).isdisjoint(parents(tests["test_after"]))


def test_the_controllers_surroundings_reach_forks_of_older_templates(world, tmp_path, monkeypatch):
    def around():
        return os.environ.get("MINE"), os.environ.get("GONE"), os.getcwd(), sys.path[0], os.environ["RANK"], sys.argv

    def look():
        with world.open(2, beginning=Beginning("some", list)) as ranks:
            assert ranks.have_begun
            return ranks.run(around), os.path.exists(f"/proc/{ranks.run(os.getppid)[0]}")

    monkeypatch.setenv("GONE", "1")
    (_, before), _ = look()
    assert before[:2] == (None, "1")
    monkeypatch.setenv("MINE", "2")
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("GONE")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["train.py"])
    (_, after), _ = look()
    assert after == ("2", None, str(tmp_path), str(tmp_path), "1", ["train.py"])


def test_nothing_stays_open_when_a_world_is_closed(world, templates_of):
    templates_of()
    world.close()
    fds = len(os.listdir("/proc/self/fd"))
    before = templates_of("one"), templates_of("another")
    assert still_running(before[0]) == []
    world.close()
    assert still_running(before[1]) == []
    assert len(os.listdir("/proc/self/fd")) == fds


@pytest.mark.slow
@pytest.mark.parametrize("signals", [0, 100])
def test_no_process_survives_a_killed_controller(signals):
    code = """
        import os, subprocess, time
        from pdlcheck.worlds.processes import ProcessWorld
        from pdlcheck.worlds.processes.controller import forkserver
        from pdlcheck.worlds.processes.controller.templates import Beginning
        def tell():
            children = [subprocess.Popen(["sleep", "100"]).pid for _ in range(10)]
            return os.getppid(), os.getpid(), *children
        world = ProcessWorld(isolation="fresh")
        with world.open(2, beginning=Beginning("some", list)) as ranks:
            assert ranks.have_begun
            print(*sum(ranks.run(tell), ()), forkserver.retain(world).pid, flush=True)
            ranks.run(lambda: time.sleep(100))
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as controller:
        assert controller.stdout is not None
        pids = [int(word) for word in controller.stdout.readline().split()]
        assert len(set(pids)) == 25
        assert all(is_running(pid) for pid in pids)
        controller.send_signal(signal.SIGKILL)
        for _ in range(signals):  # the template also detects it by itself, at the same time
            for template in filter(is_running, (pids[0], pids[12])):
                os.kill(template, signal.SIGTERM)
            time.sleep(0.0005)
    assert still_running(pids) == []


@pytest.mark.slow
def test_templates_go_down_with_a_killed_fork_server(world, templates_of):
    before = templates_of()
    for pid in forkserver.retain(world).pids:
        os.kill(pid, signal.SIGKILL)
    assert still_running(before) == []
    assert set(templates_of()).isdisjoint(before)


def test_what_ranks_have_started_ends_with_the_fork_server(world):
    def start():
        return subprocess.Popen(["sleep", "100"]).pid

    with world.open(2, beginning=Beginning("some", list)) as ranks:
        assert ranks.have_begun
        pids = [*ranks.run(start), *ranks.pids]
        forkserver.stop()  # the controller still holds its ends of the templates' pipes
        assert still_running(pids) == []
