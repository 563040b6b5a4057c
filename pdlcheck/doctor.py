"""The examination behind ``pdlcheck doctor``: what this machine has, and how to get what is missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import torch
import torch.distributed as dist

from pdlcheck import __version__
from pdlcheck.compat import private
from pdlcheck.cores import usable_cores
from pdlcheck.report.records import Part
from pdlcheck.verification.worlds import try_world
from pdlcheck.worlds import WORLDS
from pdlcheck.worlds.mpi.job import find_mpiexec, why_not

__all__ = ["examine", "examine_private_names"]

REQUIRED = ("numpy", "pytest", "hypothesis", "cloudpickle", "rich")
OPTIONAL = {  # packages and the extras that install them
    "numba": "pagerank",
    "xxhash": "checkpoint",
    "pytest-benchmark": "bench",
    "dgl": "dgl",
    "scikit-learn": "data",
    "pyarrow": "parquet",
    "altair": "report",
}
NEEDED = {"dgl": ", on Python 3.11"}  # what a package needs besides the command
REQUIRED_WORLDS = ("gloo", "sim")
PACKAGES = {"scikit-learn": "sklearn", "pytest-benchmark": "pytest_benchmark"}  # import names
CUDA_BUILD = "a CUDA build of torch: pytorch.org/get-started"


def examine(trying: Callable[[str], None] = lambda name: None) -> list[Part]:
    """Examine everything that pdlcheck can use.

    Each world runs two ranks, or one rank if it has only one device.

    Args:
        trying: called with the name of each world before it is tried, because a trial takes seconds.
    """
    return [
        Part("pdlcheck", __version__),
        Part("python", f"{platform.python_version()} {sys.executable}"),
        Part("platform", f"{platform.system()} {platform.release()} {platform.machine()}"),
        Part("cores", _cores()),
        Part("memory", _memory()),
        Part("torch", f"{torch.__version__}, {_build()}"),
        *_devices(),
        *_backends(),
        *(_world(name, trying) for name in sorted(WORLDS)),
        *(replace(_package(name, f"pip install {name}"), required=True) for name in REQUIRED),
        *(_package(name, f"pip install 'pdlcheck[{extra}]'{NEEDED.get(name, '')}") for name, extra in OPTIONAL.items()),
        *examine_private_names(),
    ]


def examine_private_names() -> list[Part]:
    """Return a part for each installed library that lacks private names, or one part if all of them are there."""
    libraries = private.installed_libraries()
    lacking = {library: rows for library in libraries if (rows := private.missing(library))}
    if not lacking:
        number = sum(len(private.names(library)) for library in libraries)
        return [Part("private names", f"all {number} of {', '.join(libraries)} are there")]
    return [
        Part(
            f"private names of {library}",
            "\n".join(f"no {row.path}: {row.purpose.rstrip('.')}. Without it: {row.lost}" for row in rows),
            f"another version of {library} or of pdlcheck",
        )
        for library, rows in lacking.items()
    ]


def _cores() -> str:
    there = os.cpu_count() or 1
    usable = usable_cores()
    return str(there) if usable == there else f"{usable} of {there}"


def _memory() -> str:
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return "unknown on this platform"
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"


def _build() -> str:
    return "CPU build" if torch.version.cuda is None else f"CUDA {torch.version.cuda} build"


def _devices() -> list[Part]:
    if torch.cuda.is_available():
        parts = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = f"{properties.total_memory / 2**30:.0f} GiB"
            parts.append(Part(f"cuda:{index}", f"{properties.name}, {memory}"))
        return [*parts, _package("triton", "pip install triton")]
    if torch.version.cuda is None:
        return [Part("cuda", "no, torch is a CPU build", f"an NVIDIA GPU and {CUDA_BUILD}")]
    return [Part("cuda", "no device found", "an NVIDIA GPU; nvidia-smi lists those that its driver sees")]


def _backends() -> list[Part]:
    gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
    return [
        Part("gloo", "in torch" if gloo else "no", "" if gloo else "a torch wheel for Linux or macOS"),
        Part("nccl", "in torch" if nccl else "no", "" if nccl else CUDA_BUILD),
        _mpi(),
    ]


def _mpi() -> Part:
    """Return the state of mpi4py and the mpiexec that pdlcheck would use."""
    version = _version("mpi4py")
    found = [f"mpi4py {version} installed" if version else "no mpi4py", find_mpiexec() or "no mpiexec"]
    why = why_not()
    return Part("mpi", ", ".join(found), f"{why}: pip install 'pdlcheck[mpi]'" if why else "")


def _world(name: str, trying: Callable[[str], None]) -> Part:
    trying(name)
    trial, required = try_world(name), name in REQUIRED_WORLDS
    if trial.works:
        ranks = "rank" if trial.ranks == 1 else "ranks"
        found = f"works: {trial.ranks} {ranks} ran in {trial.seconds:.1f} s"
        return Part(f"world {name}", found, required=required)
    return Part(f"world {name}", f"does not work: {trial.why}", trial.cure or "see the message", required=required)


def _package(name: str, command: str) -> Part:
    version = _version(name)
    return Part(name, f"{version} installed") if version else Part(name, "no", command)


def _version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None.

    The package is not imported, because an import can be slow.
    """
    try:
        found = find_spec(PACKAGES.get(distribution, distribution))
        return importlib.metadata.version(distribution) if found else None
    except importlib.metadata.PackageNotFoundError:
        return None
