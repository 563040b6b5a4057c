"""The faults: one is drawn from the seed and its number alone, so it can be replayed without the others."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["KINDS", "WORLDS", "Fault", "draw"]

WORLDS = ("gloo", "mpi")

LIMIT_S = 1.5  # of the calls in which a rank never answers
PATIENT_S = 30.0  # of all others: none may need it
_OF_THE_RUN = ("ctrl-c", "kill-pytest")
_SHARE_OF_THE_RUN = 0.06  # each needs a pytest run of its own


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong on one rank of one test.

    Args:
        where: ``body``, ``setup`` or ``teardown`` of a test that runs on ranks, ``controller`` for ``world.run``,
            ``idle`` between two tests, ``run`` for the whole pytest run.
        moment: ``before`` any communication, ``inside`` (the other ranks wait in a collective), ``after`` one.
        action: statements that the rank executes; empty where the signal comes from outside.
        expects: regular expressions that the report must contain, all of them.
        within_s: from the fault to the report; 0 where nothing is to be reported.
        signo: name of the signal that comes from outside.
        limit_s: time limit of the test.
        extra: statements of the other ranks.
        watch: the ranks are watched (the default), or have the bare group.
    """

    number: int
    kind: str
    rank: int
    world_size: int
    watch: bool
    where: str = "body"
    moment: str = "inside"
    delay_s: float = 0.0
    rounds: int = 0
    action: tuple[str, ...] = ()
    expects: tuple[str, ...] = ()
    within_s: float = 1.0
    signo: str = ""
    limit_s: float = PATIENT_S
    extra: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        """Of the test; unique."""
        return f"test_{self.number:04}_{self.kind.replace('-', '_')}"

    @property
    def phase(self) -> str:
        """The phase of the test that must fail."""
        return {"setup": "setup", "teardown": "teardown"}.get(self.where, "call")

    def __str__(self) -> str:
        start = "watched" if self.watch else "plain"
        what = self.signo or "; ".join(self.action)
        moment = "" if self.where in ("idle", "run") else f" {self.moment} a collective"
        return f"{self.kind} on rank {self.rank} of {self.world_size} ({start}) in {self.where}{moment}: {what}"


def draw(seed: int, number: int, world_sizes: Sequence[int], world: str = "gloo") -> Fault:
    """The fault with this number, for one of ``WORLDS``."""
    rng = random.Random(f"{seed} {number}")
    of_the_run = rng.random() < _SHARE_OF_THE_RUN
    kind = rng.choice([kind for kind in KINDS if (kind in _OF_THE_RUN) == of_the_run])
    size = rng.choice(list(world_sizes))
    base = _Base(number, kind, rng.randrange(size), size, rng.random() < 0.5, rng, world)
    return KINDS[kind](base)


@dataclass(frozen=True)
class _Base:
    """What every fault has, and the source of what differs."""

    number: int
    kind: str
    rank: int
    world_size: int
    watch: bool
    rng: random.Random
    world: str

    def anywhere(self, action: Sequence[str], *expects: str, **more: object) -> Fault:
        """The rank itself does it, at a random moment of a random phase."""
        where = self.rng.choices(["body", "controller", "setup", "teardown"], [5, 2, 1, 1])[0]
        return self.make(
            where=where,
            moment=more.pop("moment", None) or self.rng.choice(["before", "inside", "after"]),
            action=tuple(action),
            expects=expects,
            **more,
        )

    def make(self, **more: object) -> Fault:
        return Fault(
            number=self.number,
            kind=self.kind,
            rank=self.rank,
            world_size=self.world_size,
            watch=bool(more.pop("watch", self.watch)),
            delay_s=round(float(more.pop("delay_s", self.rng.choice([0.0, self.rng.uniform(0.0, 0.3)]))), 4),  # type: ignore[arg-type]
            rounds=self.rng.randrange(4),
            **more,  # type: ignore[arg-type]
        )

    def killed_by(self, signo: str) -> str:
        return rf"RankDied: rank {self.rank} was killed by {signo}\b"


def _kill_self(base: _Base) -> Fault:
    return base.anywhere(["os.kill(os.getpid(), signal.SIGKILL)"], base.killed_by("SIGKILL"))


def _kill_outside(base: _Base) -> Fault:
    signo = base.rng.choice(["SIGKILL", "SIGKILL", "SIGTERM", "SIGSEGV"])
    return base.make(signo=signo, expects=(base.killed_by(signo),), where=base.rng.choice(["body", "controller"]))


def _kill_idle(base: _Base) -> Fault:
    signo = base.rng.choice(["SIGKILL", "SIGKILL", "SIGTERM"])
    told = rf"pdlcheck: rank {base.rank} was killed by {signo} while nothing ran on it"
    return base.make(signo=signo, where="idle", expects=(told,), within_s=0.0)


def _segv(base: _Base) -> Fault:
    action = base.rng.choice(["os.kill(os.getpid(), signal.SIGSEGV)", "ctypes.string_at(0)"])
    return base.anywhere([action], base.killed_by("SIGSEGV"), r"File .*test_faults\.py")


def _stop(base: _Base) -> Fault:
    late = [_late(base), rf"rank {base.rank}: stopped by SIGSTOP or SIGTSTP"]
    if base.rng.random() < 0.5:
        return base.make(signo="SIGSTOP", expects=tuple(late), limit_s=LIMIT_S, within_s=LIMIT_S + 1.5)
    return base.anywhere(
        ["os.kill(os.getpid(), signal.SIGSTOP)"], *late, limit_s=LIMIT_S, within_s=LIMIT_S + 1.5
    )


def _kill_server(base: _Base) -> Fault:
    """The process that forks the ranks is killed, and they go down with it."""
    told = r"RankDied: rank \d went down with the process that had forked it"
    return base.make(signo="SIGKILL", expects=(told,), where=base.rng.choice(["body", "controller"]))


def _stop_idle(base: _Base) -> Fault:
    told = rf"pdlcheck: rank {base.rank} was stopped by SIGSTOP or SIGTSTP while nothing ran on it"
    return base.make(signo="SIGSTOP", where="idle", expects=(told,), within_s=0.0)


def _late(base: _Base) -> str:
    """The head of a report of ranks that did not answer; others may wait for them."""
    spans = (range(first, last) for first in range(base.rank + 1) for last in range(base.rank + 1, base.world_size + 1))
    named = "|".join([str(base.rank), *(f"{span[0]}-{span[-1]}" for span in spans if len(span) > 2)])
    return rf"RankTimeout: no result within {LIMIT_S:g} s from ranks? (\d+(-\d+)?, )*({named})\b"


def _raises(base: _Base, moment: str) -> Fault:
    words = f"fault {base.number} on rank {base.rank}"
    error = base.rng.choice(["ValueError", "AssertionError", "Odd", "KeyboardInterrupt", "BrokenPipeError"])
    named = {
        "Odd": rf"Odd: {words} and 2",
        "KeyboardInterrupt": rf"RankFailed: rank {base.rank} raised KeyboardInterrupt",
    }.get(error, rf"{error}: {words}")
    raising = f"raise {error}({words!r}, 2)" if error == "Odd" else f"raise {error}({words!r})"
    note = rf"rank {base.rank} of {base.world_size} raised this"
    return base.anywhere([raising], named, note, re.escape(raising), moment=moment)


def _raise_before(base: _Base) -> Fault:
    return _raises(base, "before")


def _raise_inside(base: _Base) -> Fault:
    return _raises(base, "inside")


def _raise_after(base: _Base) -> Fault:
    return _raises(base, "after")


def _exit(base: _Base) -> Fault:
    code = base.rng.choice([0, 1, 3, 70])
    if base.rng.random() < 0.5:
        told = rf"RankDied: rank {base.rank} ended its process with exit code {code} before its function returned"
        return base.anywhere([f"os._exit({code})"], told)
    # the rank's pytest shows the line; a function of world.run has none
    named = rf"RankFailed: rank {base.rank} called sys.exit\({code}\)|E +SystemExit: {code}"
    return base.anywhere([f"sys.exit({code})"], named, rf"rank {base.rank} of {base.world_size} raised this")


def _sleep(base: _Base) -> Fault:
    action, sign = base.rng.choice(
        [
            ("time.sleep(3600)", r"busy at .*test_faults\.py:\d+"),
            ("while True: pass", r"busy at .*test_faults\.py:\d+"),
            ("threading.Lock().acquire() and threading.Event().wait()", r"busy at .*test_faults\.py:\d+"),
            ("while True: ctypes.PyDLL(None).sleep(3600)", r"busy outside Python"),  # it keeps the interpreter lock
        ]
    )
    return base.anywhere(
        [action],
        _late(base),
        rf"rank {base.rank}: {sign}",
        rf"stack of rank {base.rank}, innermost call last",
        re.escape(action) if "PyDLL" not in action else rf"(?s)stack of rank {base.rank}.*test_faults\.py",
        limit_s=LIMIT_S,
        within_s=LIMIT_S + 1.5,
    )


def _mismatch(base: _Base) -> Fault:
    """Another shape on one rank: bare gloo ends the process of the rank that receives more than it expects.

    What a bare MPI does then is undefined.
    """
    watch = base.watch or base.world == "mpi"
    collective = base.rng.choice(
        [
            "dist.all_reduce(torch.ones({n}))",
            "dist.all_gather([torch.empty({n}) for _ in range(dist.get_world_size())], torch.ones({n}))",
        ]
    )
    wrong, right = base.rng.choice([(10, 1000), (5000, 1000)])
    if watch:
        expects = (
            r"CollectiveMismatch: ",
            rf"rank {base.rank}: .*\({wrong},\)",
            rf"ranks? [\d, -]+: .*\({right},\)",
        )
    else:
        victim = base.rank if wrong < right else r"\d"
        expects = (rf"RankDied: rank {victim} was killed by SIGABRT", r"Received data size doesn't match|op\.preamble")
    return base.make(
        watch=watch,
        moment="together",
        where=base.rng.choice(["body", "controller"]),
        action=(collective.format(n=wrong),),
        extra=(collective.format(n=right),),
        expects=expects,
    )


def _memory(base: _Base) -> Fault:
    aborted = base.killed_by("SIGABRT")
    action, told = base.rng.choice(
        [
            ("hoard()", r"MemoryError"),
            ("torch.ones(2**40)", r"RuntimeError: .*DefaultCPUAllocator"),
            ("ctypes.CDLL('libstdc++.so.6')._Znwm(ctypes.c_size_t(2**40))", rf"{aborted}[\s\S]*bad_alloc"),
        ]
    )
    note = () if "_Znwm" in action else (rf"rank {base.rank} of {base.world_size} raised this",)
    return base.anywhere(["limit_memory(2**26)", action], told, *note)


def _ctrl_c(base: _Base) -> Fault:
    """At any moment from the start of Python to tests on a warm pool."""
    again = ("twice",) if base.rng.random() < 0.3 else ()
    return base.make(where="run", signo="SIGINT", action=again, delay_s=base.rng.uniform(0.1, 6.0), within_s=3.0)


def _kill_pytest(base: _Base) -> Fault:
    """Nobody is left to clean up."""
    return base.make(
        where="run",
        signo=base.rng.choice(["SIGKILL", "SIGTERM"]),
        delay_s=base.rng.uniform(0.1, 6.0),
        within_s=3.0,
    )


KINDS = {
    "kill-self": _kill_self,
    "kill-outside": _kill_outside,
    "kill-idle": _kill_idle,
    "kill-server": _kill_server,
    "segv": _segv,
    "stop": _stop,
    "stop-idle": _stop_idle,
    "raise-before": _raise_before,
    "raise-inside": _raise_inside,
    "raise-after": _raise_after,
    "exit": _exit,
    "sleep": _sleep,
    "mismatch": _mismatch,
    "memory": _memory,
    "ctrl-c": _ctrl_c,
    "kill-pytest": _kill_pytest,
}
