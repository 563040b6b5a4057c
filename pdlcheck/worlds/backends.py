"""The backends of torch.distributed on which rank processes run: what the controller must know of gloo, MPI and NCCL.

What a rank does in another way on one of them is in :mod:`pdlcheck.worlds.processes.rank.backends`. This module does
not import torch at the top: the controller imports it before the fork server has started.
"""

from __future__ import annotations

from pdlcheck.errors import WorldUnavailable
from pdlcheck.worlds.choices import DEVICES

__all__ = ["BACKENDS", "CUDA_CURE", "Backend", "backend_of"]

CUDA_CURE = "a CUDA build of torch on a machine with an NVIDIA GPU: https://pytorch.org/get-started/locally"


class Backend:
    """A backend of torch, without anything special.

    Args:
        name: the name that ``init_process_group`` takes.
    """

    devices: tuple[str, ...] = ("cpu",)
    """The kinds of devices that the ranks may have; the first one is the default."""
    is_watched = False
    """Operations are compared before their data moves."""
    forks_templates = False
    """Ranks can be forked from a process that has torch and the test file imported."""
    device_for_each_rank = False
    """No two ranks of a machine may share a device."""
    uses_launched_processes = True
    """Under a launcher such as torchrun, the launched processes fork the ranks; mpiexec starts its own."""
    cure = "use backend gloo"
    """What to do if this torch lacks the backend."""

    def __init__(self, name: str) -> None:
        self.name = name

    def why_not(self) -> str:
        """Return why ranks cannot use the backend on this machine; empty if they can."""
        import torch.distributed as dist

        there = dist.is_available() and dist.is_backend_available(self.name)
        return "" if there else f"this torch has no backend {self.name!r}"

    def check(self) -> None:
        """Raise ``WorldUnavailable`` if ranks cannot use the backend on this machine."""
        if why := self.why_not():
            raise WorldUnavailable(f"{why}; {self.cure}", world=self.name, cure=self.cure)

    @property
    def start_advice(self) -> tuple[str, str]:
        """Return the advice for ranks that did not start, and the command that may help; the latter may be empty."""
        return "see `pdlcheck doctor`", ""


class _Gloo(Backend):
    devices = DEVICES
    is_watched = True
    forks_templates = True


class _Mpi(Backend):
    is_watched = True
    uses_launched_processes = False

    @property
    def cure(self) -> str:  # type: ignore[override]  # a constant elsewhere
        from pdlcheck.worlds.mpi.job import CURE

        return CURE

    def why_not(self) -> str:
        from pdlcheck.worlds.mpi.job import why_not

        why = why_not()
        return f"ranks of MPI cannot start: {why}" if why else ""

    @property
    def start_advice(self) -> tuple[str, str]:
        return f"{self.cure} brings an MPI and an mpiexec that fit each other", self.cure  # a machine may have several


class _Nccl(Backend):
    devices = ("cuda",)
    device_for_each_rank = True
    cure = f"install {CUDA_CURE}"


BACKENDS = {backend.name: backend for backend in (_Gloo("gloo"), _Mpi("mpi"), _Nccl("nccl"))}


def backend_of(name: str) -> Backend:
    """Return the backend with this name; if pdlcheck does not define it, return a plain ``Backend``."""
    return BACKENDS.get(name) or Backend(name)
