"""Run a small project of each third-party pytest plugin, with pdlcheck and without; the outcomes must be equal.

    python ci/guests.py                  all plugins; each is installed into a temporary folder
    python ci/guests.py pytest-mock      one of them

Prints a table in Markdown. The exit code is 1 if an outcome differs. The projects that need no other plugin are in
`suites/meta/guests/projects.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from suites.meta.guests.projects import Project
from suites.meta.guests.test_guests import outcome

PLAIN = """
import pytest
def test_passes(): pass
def test_fails(): assert [1, 2] == [1, 3]
@pytest.mark.skip(reason="later")
def test_skipped(): pass
@pytest.mark.xfail
def test_expected(): assert False
@pytest.mark.parametrize("n", range(3))
def test_numbers(n): assert n < 3
"""
MPI = """
@pytest.mark.mpi(min_size=1)
def test_size():
    from mpi4py import MPI
    assert MPI.COMM_WORLD.size == 1
"""
PLUGINS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {  # name: distributions, tests, arguments
    "pytest-xdist": ((), "", ("-n", "2")),
    "pytest-cov": ((), "", ("--cov=test_a",)),
    "pytest-timeout": ((), "@pytest.mark.timeout(20)\ndef test_limited(): pass\n", ("--timeout=30",)),
    "pytest-benchmark": ((), "def test_speed(benchmark): benchmark(lambda: None)\n", ("--benchmark-disable",)),
    "hypothesis": (
        (),
        "from hypothesis import given, strategies as st\n@given(st.integers())\ndef test_given(n): assert n == n\n",
        (),
    ),
    "pytest-mock": (("pytest-mock",), "def test_mock(mocker): mocker.patch('os.getcwd', return_value='x')\n", ()),
    "pytest-asyncio": (
        ("pytest-asyncio",),
        "import asyncio\n@pytest.mark.asyncio\nasync def test_async(): await asyncio.sleep(0)\n",
        (),
    ),
    "anyio": (
        ("anyio", "idna", "sniffio"),
        "@pytest.mark.anyio\nasync def test_async(anyio_backend_name): assert anyio_backend_name == 'asyncio'\n"
        "@pytest.fixture\ndef anyio_backend(): return 'asyncio'\n",
        (),
    ),
    "pytest-rerunfailures": (("pytest-rerunfailures",), "", ("--reruns", "1")),
    "pytest-repeat": (("pytest-repeat",), "", ("--count", "2")),
    "pytest-order": (("pytest-order",), "@pytest.mark.order(1)\ndef test_first(): pass\n", ()),
    "pytest-html": (("pytest-html", "pytest-metadata", "jinja2", "markupsafe"), "", ("--html=report.html",)),
    "pytest-sugar": (("pytest-sugar", "termcolor"), "", ()),
    "pytest-mpi": (("pytest-mpi", "sybil"), MPI, ("--with-mpi",)),
    "mpi-pytest": (("mpi-pytest",), "@pytest.mark.parallel(1)\ndef test_parallel(): pass\n", ()),
    "pytest-django": (
        ("pytest-django", "django", "asgiref", "sqlparse"),
        "def test_settings(settings): assert settings.USE_TZ\n",
        ("--ds=my_settings",),
    ),
    "pytest-check": (("pytest-check",), "import pytest_check\ndef test_soft(): pytest_check.equal(1, 1)\n", ()),
}


def compare(name: str) -> tuple[bool, str]:
    """Run one plugin's project twice; return whether the outcomes agree, and the counts."""
    distributions, tests, arguments = PLUGINS[name]
    with tempfile.TemporaryDirectory() as temporary:
        installed, folder = Path(temporary, "installed"), Path(temporary, "project")
        folder.mkdir()
        installed.mkdir()
        if distributions:
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(installed)]
            subprocess.run([*command, *distributions], check=True, stderr=subprocess.DEVNULL)
        (folder / "test_a.py").write_text(PLAIN + tests)
        (folder / "my_settings.py").write_text("SECRET_KEY = 'x'\nUSE_TZ = True\n")
        path = os.pathsep.join([str(installed), str(folder)])
        project = Project({}, arguments, {"PYTHONPATH": path, "DJANGO_SETTINGS_MODULE": ""})
        *without, _ = outcome(folder, project, "-p", "no:pdlcheck")
        *with_us, text = outcome(folder, project)
    if not without[1]:
        return False, f"the project itself does not run: exit code {without[0]}"
    counts = (without[2] or ["no summary"])[-1]
    return with_us == without, counts if with_us == without else f"{counts}; with pdlcheck: {text[-500:]}"


def main() -> int:
    names = sys.argv[1:] or list(PLUGINS)
    print("| plugin | the same | outcome |\n|---|---|---|")
    found = []
    for name in names:
        same, counts = compare(name)
        found.append(same)
        print(f"| {name} | {'yes' if same else 'NO'} | {counts} |", flush=True)
    print(f"\n{sum(found)} of {len(found)} the same")
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
