"""Small projects of third parties: files, arguments and environment. Each runs with the plugin and without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

__all__ = ["FIXTURES", "OPTIONS", "PROJECTS", "Project"]

OPTIONS = (
    *("world", "schedule", "timeline", "subject", "isolation", "semantics", "rank-device", "init-method", "rank-pdb"),
)
FIXTURES = {
    "world": "'earth'",
    "rank": "'captain'",
    "device": "'printer'",
    "group": "'admins'",
    "world_size": "10",
    "shared_tmp_path": "'p'",
    "subject": "'mail'",
}


@dataclass(frozen=True)
class Project:
    """A project: its files, and the call of its pytest."""

    files: Mapping[str, str]
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def _options() -> Project:
    """Return a project whose conftest adds each option of our short names, with other meanings."""
    lines = [f"    parser.addoption('--{name}', default='mine')" for name in (*OPTIONS, "require-gpu")]
    tests = f"""
def test_values(request):
    assert request.config.getoption("--world") == "mars" and request.config.getoption("--isolation") == "full"
    names = {[name for name in OPTIONS if name not in ("world", "isolation")]}
    assert all(request.config.getoption("--" + name) == "mine" for name in names)
"""
    conftest = "\n".join(["def pytest_addoption(parser):", *lines])
    return Project({"conftest.py": conftest, "test_a.py": tests}, ("--world", "mars", "--isolation=full"))


def _read_early() -> Project:
    """Return a project whose plugin parses the command line before conftest files are loaded, as jaxtyping's does."""
    of_options = _options()
    plugin = "def pytest_load_initial_conftests(early_config, parser, args):\n    parser.parse_known_args(args)\n"
    ini = "[pytest]\naddopts = -p early_reader\npythonpath = .\n"
    return replace(of_options, files={**of_options.files, "early_reader.py": plugin, "pytest.ini": ini})


MARKERS = """
import pytest, unittest

RUNS = []

@pytest.mark.gpu
def test_gpu(): RUNS.append("gpu")

@pytest.mark.isolation("serializable")
def test_of_a_database(): pass

@pytest.mark.schedules("0 4 * * *")
def test_cron(): pass

@pytest.mark.semantics
def test_compiler(): pass

@pytest.mark.faults("power")
def test_electronics(): pass

@pytest.mark.verifies("REQ-12")
def test_requirement(): pass

@pytest.mark.world_size(3)
def test_game():
    RUNS.append("game")
    assert RUNS.count("game") == 1

@pytest.mark.world_size("large")
def test_large_game(): pass

@pytest.mark.world_size(2)
class TestGame(unittest.TestCase):
    def test_board(self): RUNS.append("board")

@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.world_size(2))])
def test_sizes(size): pass

def test_each_ran_once():
    assert RUNS == ["gpu", "game", "board"]
"""
NAMES = ("gpu", "isolation", "schedules", "semantics", "faults", "verifies", "world_size")
REGISTERED = "\n".join(["[pytest]", "addopts = --strict-markers", "markers =", *(f"    {n}: mine" for n in NAMES)])


def _fixtures() -> Project:
    """Return a project with fixtures and parameters of our names, in all places and of several scopes."""
    files = {}
    for scope in ("function", "session"):
        lines = ["import pytest"]
        for name, value in FIXTURES.items():
            lines += [f"@pytest.fixture(scope='{scope}')", f"def {name}(): return {value}"]
        files[f"of_{scope}/conftest.py"] = "\n".join(lines)
        tests = [f"def test_{name}({name}): assert {name} == {value}" for name, value in FIXTURES.items()]
        files[f"of_{scope}/test_{scope}.py"] = "\n".join(tests)
    parameters = ["import pytest"]
    for name, value in FIXTURES.items():
        parameters += [f"@pytest.mark.parametrize('{name}', [{value}, 1])", f"def test_{name}({name}): assert {name}"]
    files["test_parameters.py"] = "\n".join(
        [
            *parameters,
            "@pytest.mark.parametrize('world_size', [1, 2])",
            "@pytest.mark.parametrize('rank', [0, 1])",
            "def test_of_mp_spawn(rank, world_size): assert rank < 2",
            "class TestOwn:",
            "    @pytest.fixture",
            "    def group(self): return 4",
            "    def test_group(self, group): assert group == 4",
        ]
    )
    files["generated/conftest.py"] = """
def pytest_generate_tests(metafunc):
    if "world" in metafunc.fixturenames: metafunc.parametrize("world", [1, 2])
    if "device" in metafunc.fixturenames: metafunc.parametrize("device", ["cpu", "cuda"])
"""
    files["generated/test_generated.py"] = """
def test_world(world): assert world in (1, 2)
def test_device(device): assert device in ("cpu", "cuda")
"""
    return Project(files)


PLUGIN = """
import pytest

@pytest.fixture(params=["cpu", "tpu"])
def device(request): return request.param

@pytest.fixture(scope="session")
def world(): return "mine"

@pytest.fixture(scope="session")
def rank(world): return world + "!"
"""

DEEPSPEED = """
import os, subprocess, sys
import pytest

class DistributedTest:
    world_size = 2
    def __call__(self, request):
        code = f"import sys; sys.exit(0 if {self.world_size} else 1)"
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0

class TestReduce(DistributedTest):
    @pytest.mark.world_size(3)
    def test(self):
        self(None)

    def test_plain(self): pass
"""

COMPOSER = """
import os, pytest

def pytest_collection_modifyitems(config, items):
    size = int(os.environ.get("WORLD_SIZE", "1"))
    wanted = lambda item: (mark := item.get_closest_marker("world_size")) is None or mark.args[0] == size
    items[:] = [item for item in items if wanted(item)]
"""

PROJECTS = {
    "a conftest that adds our short options": _options(),
    "a conftest that adds them, a plugin that reads them before": _read_early(),
    "registered markers of our names": Project({"pytest.ini": REGISTERED, "test_a.py": MARKERS}),
    "fixtures and parameters of our names": _fixtures(),
    "fixtures of another plugin, loaded before ours": Project(
        {
            "pytest.ini": "[pytest]\naddopts = -p other_plugin\npythonpath = .\n",
            "other_plugin.py": PLUGIN,
            "test_a.py": "def test_a(device, world, rank): assert device in ('cpu', 'tpu') and rank == 'mine!'\n",
        }
    ),
    "doctests, unittest, fork": Project(
        {
            "mod.py": "def f():\n    '''\n    >>> f()\n    1\n    '''\n    return 1\n",
            "test_a.py": "import os, unittest\n"
            "class A(unittest.TestCase):\n    def test_a(self): self.assertEqual(1, 1)\n"
            "def test_fork():\n    p = os.fork()\n    if p == 0: os._exit(0)\n    os.waitpid(p, 0)\n",
        },
        ("--doctest-modules",),
    ),
    "one process of a job, rank 1": Project(
        {"test_a.py": "def test_a(): pass\n"},
        environment={"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"},
    ),
    "the pod of rank 0 of a job": Project(
        {"test_a.py": "def test_a(): pass\n"}, environment={"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.9.8.7"}
    ),
    "variables of a launcher that make no sense": Project(
        {"test_a.py": "def test_a(): pass\n"}, environment={"RANK": "none", "WORLD_SIZE": "2"}
    ),
    "an interactive allocation of Slurm": Project(
        {"test_a.py": "def test_a(): pass\n"},
        environment={"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "1", "SLURM_LOCALID": "0"},
    ),
    "workers of pytest-xdist in a pod": Project(
        {"test_a.py": "def test_a(): pass\ndef test_b(): assert False\n"},
        ("-n", "2"),
        {"RANK": "0", "WORLD_SIZE": "2"},
    ),
    "the shape of DeepSpeed's suite": Project(
        {"pytest.ini": "[pytest]\nmarkers =\n    world_size: of single tests in a class\n", "test_a.py": DEEPSPEED}
    ),
    "the shape of Composer's suite": Project(
        {
            "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["gpu: a", "world_size(val): launched so"]\n'
            'addopts = "--strict-markers"\n',
            "conftest.py": COMPOSER,
            "test_a.py": "import pytest\n@pytest.mark.world_size(2)\ndef test_two(): assert False\n"
            "@pytest.mark.parametrize('world_size', [pytest.param(1, marks=pytest.mark.world_size(1))])\n"
            "def test_one(world_size): assert world_size == 1\n",
        }
    ),
    "the shape of pytest-mpi's suite": Project(
        {
            "conftest.py": "import pytest\n"
            "def pytest_configure(config): config.addinivalue_line('markers', 'mpi(min_size): needs MPI')\n"
            "def pytest_addoption(parser): parser.addoption('--with-mpi', action='store_true')\n"
            "def pytest_collection_modifyitems(config, items):\n"
            "    for item in items:\n"
            "        if item.get_closest_marker('mpi'): item.add_marker(pytest.mark.skip(reason='no --with-mpi'))\n",
            "test_a.py": "import pytest\n@pytest.mark.mpi(min_size=2)\ndef test_a(): assert False\n",
        }
    ),
    "the shape of torchmetrics' suite": Project(
        {
            "conftest.py": "import multiprocessing, pytest\nPOOL = None\n"
            "def pytest_sessionstart():\n    global POOL\n    POOL = multiprocessing.get_context('spawn').Pool(2)\n"
            "def pytest_sessionfinish():\n    POOL.close(); POOL.join()\n",
            "test_a.py": "import operator, pytest\nimport conftest\n@pytest.mark.parametrize('ddp', [True, False])\n"
            "def test_sum(ddp):\n    assert not ddp or conftest.POOL.map(operator.neg, [0, 1]) == [0, -1]\n",
        }
    ),
    "the shape of Lightning's suite": Project(
        {
            "conftest.py": "import os, pytest\n@pytest.fixture(autouse=True)\ndef restore_env():\n"
            "    before = dict(os.environ)\n    yield\n"
            "    leaked = set(os.environ) - set(before) - {'PYTEST_CURRENT_TEST'}\n    assert not leaked, leaked\n",
            "test_a.py": "def test_a(): pass\n",
        }
    ),
    "the shape of accelerate's suite": Project(
        {
            "test_a.py": "import os, subprocess, sys, unittest\n"
            'SCRIPT = \'import os, sys; sys.exit(int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"]))\'\n'
            "class MultiDeviceTester(unittest.TestCase):\n"
            "    def test_launch(self):\n"
            "        for rank in (0, 1):\n"
            "            env = dict(os.environ, RANK=str(rank), WORLD_SIZE='2')\n"
            "            assert subprocess.run([sys.executable, '-c', SCRIPT], env=env).returncode == 0\n"
        }
    ),
    "the shape of mpi-pytest's suites": Project(
        {
            "conftest.py": "import pytest\n"
            "def pytest_configure(config): config.addinivalue_line('markers', 'parallel(nprocs): run on so many')\n"
            "@pytest.hookimpl(tryfirst=True)\n"
            "def pytest_runtest_setup(item):\n"
            "    mark = item.get_closest_marker('parallel')\n"
            "    if mark and mark.args[0] > 1: pytest.skip('not in the single process')\n"
            "@pytest.fixture\ndef group(request): return request.node.get_closest_marker('parallel').args[0]\n",
            "test_a.py": "import pytest\n@pytest.mark.parallel(3)\ndef test_three(): assert False\n"
            "@pytest.mark.parallel(1)\ndef test_one(group): assert group == 1\n",
        }
    ),
    "the shape of torchtitan's suite": Project(
        {
            "test_a.py": "import multiprocessing, unittest\n"
            "class BaseOfDTensorTests(unittest.TestCase):\n"
            "    @property\n    def world_size(self): return 2\n"
            "    def setUp(self): self.method = multiprocessing.get_context('fork')\n"
            "    def test_ranks(self):\n"
            "        started = [self.method.Process(target=int) for _ in range(self.world_size)]\n"
            "        for process in started: process.start()\n"
            "        for process in started: process.join()\n"
            "        assert [process.exitcode for process in started] == [0, 0]\n"
        }
    ),
    "options such as those of pytest-django": Project(
        {
            "pytest.ini": "[pytest]\naddopts = --reuse-db --ds=mine.settings\nDJANGO_SETTINGS = x\n",
            "conftest.py": "def pytest_addoption(parser):\n"
            "    parser.addini('DJANGO_SETTINGS', 'settings')\n"
            "    group = parser.getgroup('django')\n"
            "    group.addoption('--reuse-db', action='store_true', dest='reuse_db')\n"
            "    group._addoption('--ds', action='store', dest='ds')\n"
            "def pytest_load_initial_conftests(early_config, parser, args): assert 'x' not in args\n",
            "test_a.py": "def test_a(request): assert request.config.option.ds == 'mine.settings'\n",
        }
    ),
}
