"""A module that reads its rank at import has one value for all simulated ranks: a warning names the place."""

from __future__ import annotations

import importlib
import sys
import warnings

import pytest

from pdlcheck.worlds import check_same_on_worlds, get_world
from pdlcheck.worlds.simulated.module_globals.import_time_reads import early_reads

PARSER = "import argparse\nparser = argparse.ArgumentParser()\n"


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Yield a function that writes a user's module and imports it."""
    monkeypatch.syspath_prepend(tmp_path)
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "A"):
        monkeypatch.setenv(variable, "")  # monkeypatch then removes what a module sets
        monkeypatch.delenv(variable)
    written = []

    def imported(source):
        written.append(f"early_{len(written)}")
        (tmp_path / f"{written[-1]}.py").write_text("import os\nfrom os import environ, getenv\n" + source)
        return importlib.import_module(written[-1])

    yield imported
    for name in written:
        sys.modules.pop(name)


def told_of(module):
    return [str(one) for one in early_reads() if one.name.startswith(f"{module.__name__}.")]


@pytest.mark.parametrize(
    ("source", "name", "variable", "line"),
    [
        ("RANK = int(os.environ.get('RANK', -1))\ndef f(): return RANK\n", "RANK", "RANK", 3),
        ("size: int = int(getenv('WORLD_SIZE', '1'))\ndef f(): return size\n", "size", "WORLD_SIZE", 3),
        ("many = 'WORLD_SIZE' in environ\nclass A:\n  def f(self): return many\n", "many", "WORLD_SIZE", 3),
        ("try:\n  r = int(environ['RANK'])\nexcept KeyError:\n  r = 0\nf = lambda: r\n", "r", "RANK", 4),
        (
            PARSER + "parser.add_argument('--gpu', default=os.getenv('LOCAL_RANK', 0))\ndef f(): parser.parse_args()\n",
            "parser",
            "LOCAL_RANK",
            5,
        ),
    ],
    ids=["assigned", "annotated", "contained", "tried", "default of an argument"],
)
def test_what_functions_use_is_told_with_its_line(imported, source, name, variable, line):
    module = imported(source)
    (told,) = told_of(module)
    assert told.startswith(f"{module.__name__}.{name} is made of {variable} at ")
    assert told.endswith(f"{module.__name__}.py:{line}")


@pytest.mark.parametrize(
    "source",
    [
        "def rank(): return int(os.environ.get('RANK', -1))\n",
        "rank = lambda: int(os.environ.get('RANK', -1))\ndef f(): return rank()\n",
        "os.environ.setdefault('RANK', '0')\ndef f(): return os\n",
        "os.environ['RANK'] = '0'\ndef f(): return os\n",
        "launched = 'RANK' in os.environ\nif launched: os.environ['A'] = 'x'\n",
        "RANK = 0\ndef f(self): return self.RANK\nrank = os.environ.get('RANK')\n",
        "home = os.environ.get('HOME')\ndef f(): return home, 'RANK'\n",
        "if __name__ == '__main__':\n  rank = os.environ.get('RANK')\ndef f(): return rank\n",
        "import logging\nlog = logging.getLogger()\nlog.debug('%s', os.getenv('RANK'))\ndef f(): log.debug('x')\n",
        "def f(rank=None): return rank or os.getenv('RANK')\nrank = f()\n",
    ],
)
def test_what_is_read_later_written_or_unused_is_not_told(imported, source):
    assert told_of(imported(source)) == []


def test_simulated_ranks_are_warned_once(imported):
    module = imported("RANK = int(os.environ.get('RANK', -1))\ndef rank(): return RANK\n")
    with pytest.warns(UserWarning, match=rf"share what a module makes .*: {module.__name__}.RANK is made of RANK at"):
        assert get_world("sim").run(module.rank, world_size=2) == [-1, -1]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*share what a module makes")
        get_world("sim").run(module.rank, world_size=2)


@pytest.mark.slow
def test_the_difference_to_processes_is_put_on_it(imported):
    module = imported("RANK = int(os.environ.get('RANK', -1))\ndef rank(): return RANK\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(
            AssertionError, match=r"cause  read when a module is .*\n .*early_0.RANK is made of RANK at"
        ):
            check_same_on_worlds(module.rank, world_size=2)
