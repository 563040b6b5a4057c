"""Virtual environments for peers that cannot share one: mpi-pytest and pytest-mpi both install ``pytest_mpi``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

__all__ = ["INSTALL", "default_cache", "find_mpiexec", "install", "python_of"]

INSTALL = "python benchmarks/comparisons/harness_peers.py --install-peers"
_REQUIREMENTS = {
    "mpi-pytest": ["mpi-pytest==2026.0", "mpi4py", "pytest-xdist"],  # it uses xdist wherever that can be imported
    "pytest-mpi": ["pytest-mpi==0.6", "mpi4py"],
    "torch-testing": ["expecttest==0.3.0"],  # torch.testing._internal imports it, but the wheel does not require it
}


def default_cache() -> Path:
    """Return the folder that keeps the environments from one run of the benchmark to the next."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "pdlcheck" / "harness-peers"


def python_of(environment: str, cache: Path) -> str | None:
    """Return the interpreter of an environment, this one's for the empty name; None if it is not installed."""
    if not environment:
        return sys.executable
    python = cache / environment / "bin" / "python"
    return str(python) if (cache / environment / "complete").exists() else None


def find_mpiexec() -> str | None:
    """Return the launcher of this environment's MPI wheel if there is one: it fits the library that mpi4py loads."""
    here = Path(sysconfig.get_path("scripts")) / "mpiexec"
    return str(here) if here.exists() else shutil.which("mpiexec")


def install(environment: str, cache: Path) -> None:
    """Create an environment with one peer in it; torch, pytest and all other packages are this interpreter's own.

    Raises:
        SystemExit: pip failed; its message is on stderr.
    """
    target = cache / environment
    if (target / "complete").exists():
        return
    shutil.rmtree(target, ignore_errors=True)
    cache.mkdir(parents=True, exist_ok=True)
    print(f"creating {target} with {', '.join(_REQUIREMENTS[environment])}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", target], check=True)
    packages = subprocess.run(
        [target / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    Path(packages, "of_the_caller.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [target / "bin" / "python", "-m", "pip", "install", "--quiet", *_REQUIREMENTS[environment]]
    if subprocess.run(pip, cwd=tempfile.gettempdir(), check=False).returncode:
        raise SystemExit(f"cannot install {environment}; its side of the table needs a package index")
    (target / "complete").touch()
