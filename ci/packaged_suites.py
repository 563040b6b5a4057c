"""Install the wheel without extras and run the suites from it, outside the clone.

    python ci/packaged_suites.py [--as owner|read-only|nobody] [--with EXTRA] [--keep FOLDER] [PYTEST ARGUMENTS]

Builds the wheel of this clone and makes a virtual environment with only the requirements of the wheel. They are copied
from the environment of this Python, so no network is needed. Then it calls ``pytest --pyargs pdlcheck.suites`` in an
empty folder. All suites take six minutes on one free core.

``--as read-only``: the environment, the current folder and HOME cannot be written.
``--as nobody``: the same, as another user whose HOME does not exist; this needs root and ``setpriv``.
``--with EXTRA``: the environment has what this extra requires, too; may be repeated.
``--keep FOLDER``: make the environment there and leave it; a later call uses it again, with a new wheel.

The exit code is that of pytest. Any further argument is given to pytest, such as ``--world sim,gloo`` or ``-k ring``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Sequence
from importlib.metadata import Distribution, distribution, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
NOBODY = 65534
RUNS_ALONE = ("HOME", "PATH", "LANG", "LC_ALL", "TMPDIR", "NUMBA_CACHE_DIR")  # the variables that the run inherits


def main(arguments: Sequence[str] | None = None) -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("--as", dest="user", choices=["owner", "read-only", "nobody"], default="owner")
    parser.add_argument("--with", dest="extras", action="append", default=[], metavar="EXTRA")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    options, pytest_arguments = parser.parse_known_args(arguments)
    if options.user == "nobody" and os.geteuid() != 0:
        parser.error("--as nobody needs root: call it with sudo, or in a container")
    with tempfile.TemporaryDirectory(prefix="pdlcheck-wheel-") as temporary:
        os.chmod(temporary, 0o755)
        folder = options.keep.absolute() if options.keep else Path(temporary)
        python = make_environment(folder / "venv", options.extras)
        install_wheel(python, Path(temporary))
        empty = Path(temporary) / "empty"
        empty.mkdir()
        try:
            return run_suites(python, empty, options.user, pytest_arguments)
        finally:
            make_writable(folder / "venv")
            make_writable(empty)


def make_environment(folder: Path, extras: Sequence[str] = ()) -> Path:
    """Return the Python of a virtual environment in ``folder`` that has what the wheel requires, and pip."""
    python = folder / "bin" / "python"
    if python.exists():
        make_writable(folder)
    else:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    libraries = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    for found in required(ROOT / "pyproject.toml", extras):
        copy_distribution(found, libraries)
    return python


def required(project: Path, extras: Sequence[str] = ()) -> list[Distribution]:
    """Return the installed distributions that ``project`` requires with these extras, and those that they require."""
    described = tomllib.loads(project.read_text())["project"]
    waiting = [*described["dependencies"], "pip"]
    for extra in extras:
        waiting += described["optional-dependencies"][extra]
    found: dict[str, Distribution] = {}
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        if name == described["name"]:  # an extra that names another one
            for extra in requirement.extras:
                waiting += described["optional-dependencies"][extra]
            continue
        found[name] = distribution(name)
        waiting += found[name].requires or []
    return list(found.values())


def copy_distribution(found: Distribution, libraries: Path) -> None:
    """Put the files of one distribution into ``libraries``, as hard links where the file system can."""
    for file in found.files or []:
        source = Path(str(file.locate()))
        if ".." in file.parts or not source.exists() or file.suffix == ".pyc":
            continue  # scripts name another Python in their first line
        target = libraries / file
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)


def install_wheel(python: Path, folder: Path) -> None:
    """Build the wheel of this clone in ``folder`` and install it with ``python``."""
    source = folder / "source"  # a copy, because setuptools writes beside its sources
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".git", "__pycache__", "build", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--wheel-dir", folder, source]
    if int(version("setuptools").partition(".")[0]) >= 77:  # pip must fetch a newer one
        build.insert(1, "--no-build-isolation")
    subprocess.run([*pip, *build], check=True, cwd=folder)
    (wheel,) = folder.glob("pdlcheck-*.whl")
    install = ["install", "--no-deps", "--force-reinstall", wheel]
    subprocess.run([*pip, "--python", python, *install], check=True, cwd=folder)


def run_suites(python: Path, folder: Path, user: str, arguments: Sequence[str]) -> int:
    """Run the packaged suites in ``folder`` as ``user`` and return the exit code of pytest."""
    environment = {name: os.environ[name] for name in RUNS_ALONE if name in os.environ}
    command = [str(python), "-m", "pytest", "-rs", "--pyargs", "pdlcheck.suites", *arguments]
    if user != "owner":
        environment |= {"HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
        for each in (folder, *(path for path in python.parents[1].rglob("*") if path.is_dir())):
            os.chmod(each, 0o555)
        if os.geteuid() == 0:
            command = [*without_the_rights_of_root(other=user == "nobody"), *command]
    start = time.perf_counter()
    code = subprocess.run(command, cwd=folder, env=environment).returncode
    print(f"pytest --pyargs pdlcheck.suites, as {user}: exit code {code}, {time.perf_counter() - start:.0f} s")
    return code


def without_the_rights_of_root(*, other: bool) -> list[str]:
    """Return the command prefix without which root could write where the file modes forbid it."""
    if not other:
        return ["setpriv", "--bounding-set", "-dac_override"]
    who = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    reads = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]  # Python may lie in root's home
    return ["setpriv", *who, *reads]


def make_writable(folder: Path) -> None:
    for each in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        os.chmod(each, 0o755)


if __name__ == "__main__":
    sys.exit(main())
