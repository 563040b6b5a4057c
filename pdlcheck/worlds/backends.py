"""The backends of torch.distributed on which rank processes run: all that differs between gloo, MPI and NCCL.

This module does not import torch at the top: the controller imports it before the fork server has started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdlcheck.errors import WorldUnavailable
from pdlcheck.worlds.choices import DEVICES

if TYPE_CHECKING:
    from pdlcheck.worlds.processes.controller.forkserver import ForkServer
    from pdlcheck.worlds.processes.controller.placement import Placement
    from pdlcheck.worlds.processes.rank.coordinator import OperationCoordinator

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

    def local_placement(self, server: ForkServer) -> Placement:
        """Return the placement of ranks on this machine."""
        from pdlcheck.worlds.processes.controller.local import LocalPlacement

        return LocalPlacement(server)

    @property
    def start_advice(self) -> tuple[str, str]:
        """Return the advice for ranks that did not start, and the command that may help; the latter may be empty."""
        return "see `pdlcheck doctor`", ""

    def watch(self, announcer: OperationCoordinator) -> None:
        """Make every group of this backend a watched group; a rank calls this before it joins a group."""
        raise NotImplementedError(f"operations of {self.name} are not watched")

    def group_arguments(self) -> dict[str, Any]:
        """Return the arguments of ``init_process_group`` for the default group; a rank calls this."""
        return {"backend": self.name}


class _Gloo(Backend):
    devices = DEVICES
    is_watched = True
    forks_templates = True

    def watch(self, announcer: OperationCoordinator) -> None:
        from pdlcheck.worlds.processes.rank.watched_gloo import watch_gloo

        watch_gloo(announcer)


class _Mpi(Backend):
    is_watched = True

    @property
    def cure(self) -> str:  # type: ignore[override]  # a constant elsewhere
        from pdlcheck.worlds.mpi.job import CURE

        return CURE

    def why_not(self) -> str:
        from pdlcheck.worlds.mpi.job import why_not

        why = why_not()
        return f"ranks of MPI cannot start: {why}" if why else ""

    def local_placement(self, server: ForkServer) -> Placement:
        from pdlcheck.worlds.mpi.placement import MpiPlacement

        return MpiPlacement(server)

    @property
    def start_advice(self) -> tuple[str, str]:
        return f"{self.cure} brings an MPI and an mpiexec that fit each other", self.cure  # a machine may have several

    def watch(self, announcer: OperationCoordinator) -> None:
        from pdlcheck.worlds.processes.rank.watched_mpi import watch_mpi  # it imports MPI

        watch_mpi(announcer)

    def group_arguments(self) -> dict[str, Any]:
        import pdlcheck.worlds.mpi as mpi  # importing it registers the backend

        return {"backend": mpi.BACKEND}


class _Nccl(Backend):
    devices = ("cuda",)
    device_for_each_rank = True
    cure = f"install {CUDA_CURE}"

    def group_arguments(self) -> dict[str, Any]:
        from pdlcheck.worlds.processes.rank.own_device import own_device

        # With a device id, NCCL connects at once. An unusable device then raises here, not in the first test.
        return {"backend": self.name, "device_id": own_device()}


BACKENDS = {backend.name: backend for backend in (_Gloo("gloo"), _Mpi("mpi"), _Nccl("nccl"))}


def backend_of(name: str) -> Backend:
    """Return the backend with this name; if pdlcheck does not define it, return a plain ``Backend``."""
    return BACKENDS.get(name) or Backend(name)
