"""What makes a process unfit to be forked into ranks: whatever a fork would lack, or would share with other forks."""

from __future__ import annotations

import atexit
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from pdlcheck.worlds.processes.rank.at_end import finalizers

__all__ = ["Watch", "without_group"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_C10D = c10d.__file__


class Watch:
    """Knows what there was at its making."""

    def __init__(self) -> None:
        self._at_exit = _registered()
        self._files = set(_files())

    def unfit(self) -> str:
        """Why this process must not be forked by now; empty if it may."""
        if not os.path.isdir("/proc/self/task"):
            return "there is no /proc to look for threads"
        if len(os.listdir("/proc/self/task")) > 1:
            return "it has threads, which forks would lack"
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return "it uses CUDA, which does not survive a fork"
        if c10d.GroupMember.WORLD is not None:
            return "it has a process group, whose connections forks would share"
        if _has_children():
            return "it has child processes, which are not those of its forks"
        if set(_files()) - self._files:
            return "it has open files, whose positions forks would share"
        if _registered() != self._at_exit:
            return "it has functions to call at its end, which each fork would call"
        return ""


class _WithoutGroup(c10d._World):
    """torch's own state, where asking for the default group is told."""

    @property
    def default_pg(self) -> dist.ProcessGroup | None:
        if not _torch_is_imported():
            _asked.append(True)
            raise _NoGroupYet("a template of ranks has no process group")
        return None

    @default_pg.setter
    def default_pg(self, value: object) -> None:
        raise _NoGroupYet("a template of ranks has no process group")


class _NoGroupYet(BaseException):
    """Not for users to catch."""


_asked: list[bool] = []


@contextmanager
def without_group() -> Iterator[list[bool]]:
    """While the block runs, to ask for the default group fails; yields a list that is empty if nobody did.

    An answer would be wrong: the forks have one.
    """
    world = c10d._world
    kind = type(world)
    world.__class__ = _WithoutGroup  # many modules have this very object
    try:
        yield _asked
    finally:
        world.__class__ = kind


def _torch_is_imported() -> bool:
    """The asking line belongs to a module or class body of torch: a default argument, which None serves as well."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename == _C10D:
        frame = frame.f_back
    code = frame.f_code
    return code.co_filename.startswith(_TORCH) and not code.co_flags & inspect.CO_OPTIMIZED


def _registered() -> tuple[int, int]:
    """Numbers of functions that are called at the end of the process."""
    return atexit._ncallbacks(), len(finalizers())


def _files() -> Iterator[tuple[str, str]]:
    """Open descriptors and what they lead to, but for /dev/null."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # that of the folder itself
            continue
        if target != os.devnull:
            yield fd, target


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
