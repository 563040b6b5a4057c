"""One entry for each harness: the trivial test as its users write it, and the command that starts it.

Every test does the same: one gloo all_reduce of one float over all ranks, and one assertion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["CONTINUOUS", "FRESH", "OURS", "PLAIN", "PROPERTY", "REAL_TESTS", "SIDES", "SPAWN", "Side"]

_BODY = """\
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x)
    assert x.item() == world_size * (world_size + 1) / 2
"""

_MPI_CONFTEST = """\
import os

import pytest
import torch.distributed as dist
from mpi4py import MPI


@pytest.fixture(scope="session", autouse=True)
def group():
    store = dist.FileStore(os.path.join(os.path.dirname(__file__), "store"), MPI.COMM_WORLD.size)
    dist.init_process_group("gloo", store=store, rank=MPI.COMM_WORLD.rank, world_size=MPI.COMM_WORLD.size)
    yield
    dist.destroy_process_group()
"""


_TORCH_CONFTEST = "import torch.testing._internal.common_distributed\n"


def _ours(tests: int, world_size: int) -> str:
    head = "import pytest\nimport torch\nimport torch.distributed as dist\n"
    return head + "".join(
        f"\n\n@pytest.mark.world_size({world_size})\ndef test_sum_{i}(rank, world_size):\n{_BODY}" for i in range(tests)
    )


def _spawn(tests: int, world_size: int) -> str:
    head = (
        "import torch\nimport torch.distributed as dist\nimport torch.multiprocessing as mp\n\n\n"
        "def total(rank, world_size, file):\n"
        "    store = dist.FileStore(file, world_size)\n"
        '    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)\n'
        f"{_BODY}    dist.destroy_process_group()\n"
    )
    return head + "".join(
        f"\n\ndef test_sum_{i}(tmp_path):\n"
        f'    mp.spawn(total, args=({world_size}, str(tmp_path / "store")), nprocs={world_size})\n'
        for i in range(tests)
    )


def _multi_process(tests: int, world_size: int) -> str:
    head = (
        "import torch\nimport torch.distributed as dist\n"
        "from torch.testing._internal.common_distributed import MultiProcessTestCase\n\n\n"
        "class TestSum(MultiProcessTestCase):\n"
        "    @property\n    def world_size(self):\n"
        f"        return {world_size}\n\n"
        "    def setUp(self):\n        super().setUp()\n        self._spawn_processes()\n\n"
        "    def total(self):\n        rank, world_size = self.rank, self.world_size\n"
        "        store = dist.FileStore(self.file_name, world_size)\n"
        '        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)\n'
        f"{_indented(_BODY)}        dist.destroy_process_group()\n"
    )
    return head + "".join(f"\n    def test_sum_{i}(self):\n        self.total()\n" for i in range(tests))


def _continuous(tests: int, world_size: int) -> str:
    head = (
        "import torch\nimport torch.distributed as dist\n"
        "from torch.testing._internal.common_distributed import MultiProcContinuousTest\n\n\n"
        "class TestSum(MultiProcContinuousTest):\n"
        f"    world_size = {world_size}\n\n"
        '    @classmethod\n    def backend_str(cls):\n        return "gloo"\n'
    )
    body = "        rank, world_size = self.rank, self.world_size\n" + _indented(_BODY)
    return head + "".join(f"\n    def test_sum_{i}(self):\n{body}" for i in range(tests))


def _under_mpi(mark: str) -> Callable[[int, int], str]:
    def source(tests: int, world_size: int) -> str:
        head = "import pytest\nimport torch\nimport torch.distributed as dist\n"
        body = "    rank, world_size = dist.get_rank(), dist.get_world_size()\n" + _BODY
        decorator = f"@pytest.mark.{mark.format(world_size)}"
        return head + "".join(f"\n\n{decorator}\ndef test_sum_{i}():\n{body}" for i in range(tests))

    return source


def _indented(body: str) -> str:
    return "".join(f"    {line}\n" for line in body.splitlines())


def _plain(tests: int, world_size: int) -> str:
    head = "import torch\nimport torch.distributed as dist  # as every harness has to\n"
    body = "    x = torch.tensor([1.0])\n    assert x.item() == 1\n"
    return head + "".join(f"\n\ndef test_sum_{i}():\n{body}" for i in range(tests))


def _property(examples: int, world_size: int) -> str:
    return (
        "import pytest\nimport torch\nimport torch.distributed as dist\n"
        "from hypothesis import Phase, given, settings\nfrom hypothesis import strategies as st\n\n\n"
        f"@pytest.mark.world_size({world_size})\n"
        f"@settings(max_examples={examples}, deadline=None, database=None, phases=[Phase.generate])\n"
        "@given(values=st.lists(st.integers(-8, 8), min_size=4, max_size=8))\n"
        "def test_sum(rank, world_size, values):\n"
        "    x = torch.tensor(values) * (rank + 1)\n    dist.all_reduce(x)\n"
        "    assert x.tolist() == [v * world_size * (world_size + 1) // 2 for v in values]\n"
    )


def _real(_: int, world_size: int) -> str:
    return (
        "import pytest\nfrom peers.real_tests import BODIES, CASES\n\n"
        f"pytestmark = pytest.mark.world_size({world_size})\n"
        "bodies = pytest.mark.parametrize('body', BODIES, ids=lambda body: body.__name__)\n\n\n"
        "@bodies\ndef test_warm_up(body, rank, world_size):\n    body(rank, world_size, CASES)\n\n\n"
        "@bodies\n@pytest.mark.parametrize('case', range(CASES))\n"
        "def test_real(body, case, rank, world_size):\n    body(rank, world_size, case)\n\n\n"
        "def test_end(rank):\n    pass\n"
    )


@dataclass(frozen=True)
class Side:
    """One harness.

    Args:
        name: the name that its users call it by.
        source: makes the test file from the number of tests and world_size.
        options: options of its pytest command.
        environment: name of the separate environment that it needs; empty for this interpreter's.
        mpiexec: pytest itself runs on every rank, under mpiexec.
        starts_processes: it starts processes for every test, so few tests are enough to measure, and many would take
            long.
        requires: an option that this pytest command must support for the side to exist.
        conftest: conftest of the folder of the tests.
        items: number of tests that pytest reports for a file with this many.
    """

    name: str
    source: Callable[[int, int], str]
    options: tuple[str, ...] = ()
    environment: str = ""
    mpiexec: bool = False
    starts_processes: bool = False
    requires: str = ""
    conftest: str = ""
    items: Callable[[int], int] = int

    def command(self, python: str, mpiexec: str, world_size: int) -> Sequence[str]:
        """Return the command line that runs the tests of the working directory."""
        pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *self.options]
        if not self.mpiexec:
            return pytest
        return [mpiexec, "--allow-run-as-root", "--oversubscribe", "-n", str(world_size), *pytest]


_OURS = ("-p", "pdlcheck", "--world")
OURS = "pdlcheck pool"
FRESH = "pdlcheck fresh"
PLAIN = "pytest alone, no ranks"
SPAWN = "mp.spawn"
CONTINUOUS = "MultiProcContinuousTest"
SIDES = (
    Side(OURS, _ours, (*_OURS, "gloo")),
    Side("pdlcheck sim", _ours, (*_OURS, "sim")),
    Side("pdlcheck reinit", _ours, (*_OURS, "gloo", "--isolation", "reinit"), requires="--isolation"),
    Side(FRESH, _ours, (*_OURS, "gloo", "--isolation", "fresh"), requires="--isolation"),
    Side(SPAWN, _spawn, starts_processes=True),
    Side(
        "MultiProcessTestCase",
        _multi_process,
        environment="torch-testing",
        starts_processes=True,
        conftest=_TORCH_CONFTEST,
    ),
    Side(CONTINUOUS, _continuous, environment="torch-testing", conftest=_TORCH_CONFTEST),
    Side(
        "mpi-pytest",
        _under_mpi("parallel(nprocs={})"),
        ("-p", "xdist", "-p", "pytest_mpi.plugin", "-m", "parallel"),
        environment="mpi-pytest",
        mpiexec=True,
        conftest=_MPI_CONFTEST,
    ),
    Side(
        "pytest-mpi",
        _under_mpi("mpi(min_size={})"),
        ("-p", "pytest_mpi", "--with-mpi"),
        environment="pytest-mpi",
        mpiexec=True,
        conftest=_MPI_CONFTEST,
    ),
    Side(PLAIN, _plain),
)
PROPERTY = Side("pdlcheck Hypothesis", _property, (*_OURS, "gloo"), items=lambda examples: 1)
REAL_TESTS = Side("pdlcheck pool, real tests", _real, (*_OURS, "gloo"), items=lambda cases: 10 * (cases + 1) + 1)
