"""The resources that a machine lacks if ranks cannot start, with the cure."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket

__all__ = ["full_shared_memory", "lacks", "loopback_is_down"]

_SHARED_MEMORY = "/dev/shm"
_LITTLE = 4 << 20  # bytes
_SMALL = 32 << 20  # bytes in total; less is too small even if nothing else is in it
_NEEDED = 10  # descriptors for each rank


def lacks(error: OSError, world_size: int) -> str:
    """Return the reason why the start of ``world_size`` ranks has failed; known reasons come with a cure."""
    said = f"{error.strerror or error}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        takes = f"{world_size} ranks take about {_NEEDED * world_size}"
        return f"{said}: this process may have {limit}, and {takes}; raise the limit (ulimit -n), or use fewer ranks"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f": {error.filename}" if error.filename else ""
        return f"{said}{where}; delete what is not needed there, or set TMPDIR to another disk"
    if error.errno == errno.ENOMEM:
        return f"{said}; use fewer ranks, or a machine with more memory"
    return str(error)


def loopback_is_down(host: str) -> str:
    """Return the reason why ranks cannot meet at ``host`` on this machine, with the cure; empty if they can."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing: the system only looks for a route
        except OSError as error:
            return f"ranks meet at {host}, and there is no way to it ({error.strerror}): ip link set lo up"
    return ""


def full_shared_memory() -> str:
    """Return a message that shared memory has no room left, with the cure; empty if it has room."""
    if not os.path.isdir(_SHARED_MEMORY) or (room := shutil.disk_usage(_SHARED_MEMORY)).free >= _LITTLE:
        return ""
    what = f"{_SHARED_MEMORY}, where ranks share memory,"
    if room.total < _SMALL:
        cure = "mount it with more (mount -o remount,size=1g; docker run --shm-size 1g)"
        return f"{what} has {room.total >> 20} MB in all: {cure}"
    return f"{what} is full ({room.free} bytes free): delete what is not needed there"
