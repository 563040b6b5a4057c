"""The state of a process of this machine, read from the system without the help of its parent."""

from __future__ import annotations

import os
import re

__all__ = ["ended_as", "is_stopped", "is_well", "would_end"]

_NO_SIGNAL = b"\nSigPnd:\t0000000000000000\nShdPnd:\t0000000000000000\n"  # pending, in /proc


def is_well(pid: int) -> bool:
    """Return whether it is certain that the process runs and that no signal is about to end or stop it."""
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            status = file.read(4096)
    except OSError:
        return False
    runs = status.partition(b"State:\t")[2][:1] in (b"R", b"S", b"D")
    has_memory = b"\nVmRSS:" in status  # a process that ends frees its memory first
    return runs and has_memory and _NO_SIGNAL in status


def is_stopped(pid: int) -> bool:
    """Return whether a signal (SIGSTOP, SIGTSTP) keeps the process from running; False without /proc."""
    fields = _stat(pid)
    return bool(fields) and fields[0] in "Tt"


def ended_as(pid: int) -> int | None:
    """Return the exit code, or minus the signal, of an ended process that its parent has not waited for; else None."""
    fields = _stat(pid)
    return os.waitstatus_to_exitcode(int(fields[-1])) if fields and fields[0] == "Z" else None


def _stat(pid: int) -> list[str]:
    """Return the fields after the process name; empty without such a process, or without /proc."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def would_end(pid: int, signo: int) -> bool:
    """Return whether the process neither handles, ignores nor blocks this signal; False without /proc."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            masks = {name: int(mask, 16) for name, mask in re.findall(r"^Sig(Blk|Ign|Cgt):\s(\w+)$", file.read(), re.M)}
    except OSError:
        return False
    return bool(masks) and not any(mask >> (signo - 1) & 1 for mask in masks.values())
