"""What the system says of a process of this machine, without its parent's help."""

from __future__ import annotations

import os
import re

__all__ = ["ended_as", "is_stopped", "is_well", "would_end"]

_NO_SIGNAL = b"\nSigPnd:\t0000000000000000\nShdPnd:\t0000000000000000\n"  # pending, in /proc


def is_well(pid: int) -> bool:
    """True if it is certain that the process runs and that no signal is about to end or stop it."""
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            status = file.read(4096)
    except OSError:
        return False
    runs = status.partition(b"State:\t")[2][:1] in (b"R", b"S", b"D")
    has_memory = b"\nVmRSS:" in status  # the first that a process gives back when it ends
    return runs and has_memory and _NO_SIGNAL in status


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP, SIGTSTP) keeps the process from running; False where there is no /proc."""
    fields = _stat(pid)
    return bool(fields) and fields[0] in "Tt"


def ended_as(pid: int) -> int | None:
    """The exit code, or minus the signal, of a process that its parent has not buried; None for any other."""
    fields = _stat(pid)
    return os.waitstatus_to_exitcode(int(fields[-1])) if fields and fields[0] == "Z" else None


def _stat(pid: int) -> list[str]:
    """What follows the name; empty where there is no such process, or no /proc."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def would_end(pid: int, signo: int) -> bool:
    """Whether this signal would end the process, as nothing handles it there; False where there is no /proc."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            masks = {name: int(mask, 16) for name, mask in re.findall(r"^Sig(Blk|Ign|Cgt):\s(\w+)$", file.read(), re.M)}
    except OSError:
        return False
    return bool(masks) and not any(mask >> (signo - 1) & 1 for mask in masks.values())
