"""The reasons why a process must not be forked into ranks: state that a fork would lack, or share with other forks."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from pdlcheck.compat.python.exits import number_of_exit_functions
from pdlcheck.compat.torch.c10d import WorldState, world_state
from pdlcheck.worlds.processes.rank.exit_callbacks import finalizers

__all__ = ["Watch", "without_group"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_C10D = c10d.__file__


class Watch:
    """A detector of new state in this process; state from before its creation does not count."""

    def __init__(self) -> None:
        self._at_exit = _registered()
        self._files = set(_files())

    def unfit(self) -> str:
        """Return why this process must not be forked now; empty if it may."""
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


class _WithoutGroup(WorldState):  # type: ignore[misc]  # torch's class, by its private name
    """A class for torch's own state that records each read of the default group, and raises an error at it."""

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
    """An error that ``except Exception`` in user code does not catch."""


_asked: list[bool] = []


@contextmanager
def without_group() -> Iterator[list[bool]]:
    """Raise an error at each read of the default group in the block; yield a list that is empty if there was none.

    Any answer would be wrong, because the forks have a default group.
    """
    world = world_state()
    kind = type(world)
    world.__class__ = _WithoutGroup  # many modules refer to this very object
    try:
        yield _asked
    finally:
        world.__class__ = kind


def _torch_is_imported() -> bool:
    """Return whether a module or class body of torch reads the default group.

    It does so for a default argument, and None serves as well for that.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename == _C10D:
        frame = frame.f_back
    code = frame.f_code
    return code.co_filename.startswith(_TORCH) and not code.co_flags & inspect.CO_OPTIMIZED


def _registered() -> tuple[int, int]:
    """Return how many ``atexit`` functions and finalizers run at the end of the process."""
    return number_of_exit_functions(), len(finalizers())


def _files() -> Iterator[tuple[str, str]]:
    """Yield the open descriptors and their targets, except those of /dev/null."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the descriptor of the folder itself
            continue
        if target != os.devnull:
            yield fd, target


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
