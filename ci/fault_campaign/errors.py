"""Faults in which a rank raises, disagrees with the others, or has no memory."""

from __future__ import annotations

import re

from fault_campaign.faults import Base, Fault

__all__ = [
    "bad_result",
    "fork_returns",
    "memory",
    "mismatch",
    "odd_error",
    "raise_after",
    "raise_before",
    "raise_inside",
]


def _raises(base: Base, moment: str) -> Fault:
    words = f"fault {base.number} on rank {base.rank}"
    error = base.rng.choice(["ValueError", "AssertionError", "Odd", "KeyboardInterrupt", "BrokenPipeError"])
    named = {
        "Odd": rf"Odd: {words} and 2",
        "KeyboardInterrupt": rf"RankFailed: rank {base.rank} raised KeyboardInterrupt",
    }.get(error, rf"{error}: {words}")
    raising = f"raise {error}({words!r}, 2)" if error == "Odd" else f"raise {error}({words!r})"
    return base.anywhere([raising], named, base.note, re.escape(raising), moment=moment)


def raise_before(base: Base) -> Fault:
    return _raises(base, "before")


def raise_inside(base: Base) -> Fault:
    return _raises(base, "inside")


def raise_after(base: Base) -> Fault:
    return _raises(base, "after")


def mismatch(base: Base) -> Fault:
    """Pass another shape on one rank: bare gloo ends the process of a rank that receives more than it expects.

    The behaviour of bare MPI is then undefined.
    """
    watch = base.watch or base.world in ("mpi", "sim")
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


def memory(base: Base) -> Fault:
    """Let the rank run out of memory; simulated ranks use the controller's memory, which nothing here limits."""
    refused = ("torch.ones(2**40)", r"RuntimeError: .*DefaultCPUAllocator")
    if not base.has_processes:
        return base.anywhere([refused[0]], refused[1], base.note)
    aborted = base.killed_by("SIGABRT")
    action, message = base.rng.choice(
        [
            ("hoard()", r"MemoryError"),
            refused,
            ("ctypes.CDLL('libstdc++.so.6')._Znwm(ctypes.c_size_t(2**40))", rf"{aborted}[\s\S]*bad_alloc"),
        ]
    )
    note = () if "_Znwm" in action else (base.note,)
    return base.anywhere(["limit_memory(2**26)", action], message, *note)


def odd_error(base: Base) -> Fault:
    """Raise an exception of an odd class."""
    words = f"fault {base.number} on rank {base.rank}"
    error, message = base.rng.choice(
        [
            ("Silent", r"Silent: <exception str\(\) failed>"),
            ("Unsendable", rf"(Unsendable|Exception|RankFailed).*{words}"),
            ("Slotted", rf"Slotted: {words}"),
            ("RefusesNotes", rf"RefusesNotes: {words}"),
            ("Long", rf"(?s)Long: {words}.*characters.*the end of it"),
        ]
    )
    note = () if error == "RefusesNotes" else (base.note,)
    raising = f"raise {error}({words!r})"
    return base.anywhere([raising], message, *note, re.escape(raising), within_s=4.0)


def bad_result(base: Base) -> Fault:
    """Return a result that the controller cannot read."""
    error = base.rng.choice(["SystemExit", "KeyboardInterrupt", "ValueError"])
    message = rf"result of rank {base.rank} cannot be read by the controller: {error}"
    return base.anywhere([f"return Unreadable({error})"], message, where="controller", moment="after")


def fork_returns(base: Base) -> Fault:
    """Let a child of the rank return from the test as if it were the rank; then the rank itself fails."""
    words = f"fault {base.number} on rank {base.rank}"
    actions = ["if os.fork() == 0: return", "os.wait()", f"raise ValueError({words!r})"]
    return base.anywhere(actions, f"ValueError: {words}", base.note, where=base.body_or_controller)
