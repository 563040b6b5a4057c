"""Faults in which a rank ends, is ended, or never answers."""

from __future__ import annotations

import re

from fault_campaign.faults import LIMIT_S, Base, Fault

__all__ = [
    "close_all",
    "exit",
    "kill_idle",
    "kill_outside",
    "kill_self",
    "kill_server",
    "segv",
    "sleep",
    "spoil_pipe",
    "stop",
    "stop_idle",
    "stop_server",
]


def kill_self(base: Base) -> Fault:
    return base.anywhere(["os.kill(os.getpid(), signal.SIGKILL)"], base.killed_by("SIGKILL"))


def kill_outside(base: Base) -> Fault:
    signo = base.rng.choice(["SIGKILL", "SIGKILL", "SIGTERM", "SIGSEGV"])
    return base.make(signo=signo, expects=(base.killed_by(signo),), where=base.rng.choice(["body", "controller"]))


def kill_idle(base: Base) -> Fault:
    signo = base.rng.choice(["SIGKILL", "SIGKILL", "SIGTERM"])
    message = rf"pdlcheck: rank {base.rank} was killed by {signo} while nothing ran on it"
    return base.make(signo=signo, where="idle", expects=(message,), within_s=0.0)


def segv(base: Base) -> Fault:
    action = base.rng.choice(["os.kill(os.getpid(), signal.SIGSEGV)", "ctypes.string_at(0)"])
    return base.anywhere([action], base.killed_by("SIGSEGV"), r"File .*test_faults\.py")


def stop(base: Base) -> Fault:
    messages = [late(base), rf"rank {base.rank}: stopped by SIGSTOP or SIGTSTP"]
    if base.rng.random() < 0.5:
        return base.make(signo="SIGSTOP", expects=tuple(messages), limit_s=LIMIT_S, within_s=LIMIT_S + 1.5)
    return base.anywhere(["os.kill(os.getpid(), signal.SIGSTOP)"], *messages, limit_s=LIMIT_S, within_s=LIMIT_S + 1.5)


def kill_server(base: Base) -> Fault:
    """Kill the process that forks the ranks; the ranks end with it."""
    message = r"RankDied: rank \d went down with the process that had forked it"
    return base.make(signo="SIGKILL", expects=(message,), where=base.rng.choice(["body", "controller"]))


def stop_idle(base: Base) -> Fault:
    message = rf"pdlcheck: rank {base.rank} was stopped by SIGSTOP or SIGTSTP while nothing ran on it"
    return base.make(signo="SIGSTOP", where="idle", expects=(message,), within_s=0.0)


def late(base: Base) -> str:
    """Return a pattern for the head of a report of late ranks; other ranks may wait for them."""
    spans = (range(first, last) for first in range(base.rank + 1) for last in range(base.rank + 1, base.world_size + 1))
    named = "|".join([str(base.rank), *(f"{span[0]}-{span[-1]}" for span in spans if len(span) > 2)])
    return rf"RankTimeout: no result within {LIMIT_S:g} s from ranks? (\d+(-\d+)?, )*({named})\b"


def exit(base: Base) -> Fault:
    code = base.rng.choice([0, 1, 3, 70])
    if base.rng.random() < 0.5 and base.has_processes:
        message = rf"RankDied: rank {base.rank} ended its process with exit code {code} before its function returned"
        return base.anywhere([f"os._exit({code})"], message)
    # the rank's pytest shows the line; a function of world.run has none
    named = rf"RankFailed: rank {base.rank} called sys.exit\({code}\)|E +SystemExit: {code}"
    return base.anywhere([f"sys.exit({code})"], named, base.note)


def sleep(base: Base) -> Fault:
    """Let the rank never answer; not for simulated ranks that sleep, because they let the others go on."""
    busy, native = r"busy at .*test_faults\.py:\d+", r"busy outside Python"
    actions = [
        ("while True: pass", busy),
        ("threading.Lock().acquire() and threading.Event().wait()", busy),
    ]
    if base.has_processes:
        actions += [
            ("time.sleep(3600)", busy),
            ("while True: ctypes.PyDLL(None).sleep(3600)", native),  # keeps the interpreter lock
        ]
    else:
        actions += [("ctypes.PyDLL(None).usleep(3_000_000)", rf"{busy}, its turn has lasted [3-9]")]
    action, sign = base.rng.choice(actions)
    return base.anywhere(
        [action],
        late(base),
        rf"rank {base.rank}: {sign}",
        rf"stack of rank {base.rank}, innermost call last",
        re.escape(action) if sign != native else rf"(?s)stack of rank {base.rank}.*test_faults\.py",
        limit_s=LIMIT_S,
        within_s=LIMIT_S + (1.5 if base.has_processes else 2.5),
    )


def stop_server(base: Base) -> Fault:
    """Stop the process that forks the ranks, and kill one of them: its successor needs another server."""
    message = rf"pdlcheck: rank {base.rank} was killed by SIGKILL while nothing ran on it"
    return base.make(signo="SIGKILL", where="idle", expects=(message,), within_s=0.0)


def spoil_pipe(base: Base) -> Fault:
    """Let the rank write foreign data into its pipe to the controller."""
    data = base.rng.choice([b"a line\n", b"\xff\xff\xff\xf9", b"\0\0\0\x05abcde", b"\x7f\xff\xff\xff" + b"x" * 99])
    message = rf"RankDied: rank {base.rank} was killed by pdlcheck, as it wrote b"
    into = "into its pipe to the controller"
    return base.anywhere([f"spoil({data!r})"], message, into, where=base.body_or_controller)


def close_all(base: Base) -> Fault:
    """Close all descriptors, as a program that becomes a daemon does.

    It is not determined which code fails first, gloo's or that of the pipe.
    """
    died = rf"RankDied: rank {base.rank}\b"
    cause = r"Bad file descriptor|closed its pipe to the controller|gloo::EnforceNotMet"
    return base.anywhere(["os.closerange(3, 256)"], died, cause, where=base.body_or_controller)
