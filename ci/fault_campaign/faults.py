"""A fault: its action, rank and moment, and the expected report."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["LIMIT_S", "PATIENT_S", "Base", "Fault"]

LIMIT_S = 1.5  # for calls in which a rank never answers
PATIENT_S = 30.0  # for all other calls; none may need it


@dataclass(frozen=True)
class Fault:
    """One fault on one rank of one test.

    Args:
        where: ``body``, ``setup`` or ``teardown`` of a test that runs on ranks, ``controller`` for ``world.run``,
            ``idle`` between two tests, ``run`` for the whole pytest run.
        moment: ``before`` any communication, ``inside`` (the other ranks wait in a collective), ``after`` one.
        action: statements that the rank executes; empty if a signal comes from outside.
        expects: regular expressions that the report must contain, all of them.
        within_s: time from the fault to the report; 0 if nothing is to be reported.
        signo: name of the signal that comes from outside.
        limit_s: time limit of the test.
        extra: statements of the other ranks.
        watch: True if the ranks are watched (the default), False if they have the bare group.
        silent: True if the test passes, and the fault harms no other test.
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
    silent: bool = False

    @property
    def name(self) -> str:
        """Return the name of the test, which is unique."""
        return f"test_{self.number:04}_{self.kind.replace('-', '_')}"

    @property
    def phase(self) -> str:
        """Return the phase of the test that must fail."""
        return {"setup": "setup", "teardown": "teardown"}.get(self.where, "call")

    def __str__(self) -> str:
        start = "watched" if self.watch else "plain"
        what = self.signo or "; ".join(self.action)
        moment = "" if self.where in ("idle", "run") else f" {self.moment} a collective"
        return f"{self.kind} on rank {self.rank} of {self.world_size} ({start}) in {self.where}{moment}: {what}"


_WHERE = ["body", "controller", "setup", "teardown"]


@dataclass(frozen=True)
class Base:
    """The common part of every fault, and the random source of the rest."""

    number: int
    kind: str
    rank: int
    world_size: int
    watch: bool
    rng: random.Random
    world: str

    @property
    def has_processes(self) -> bool:
        """Return whether the ranks are processes, not threads of the controller."""
        return self.world != "sim"

    @property
    def note(self) -> str:
        """Return the note that is added to an exception of this rank."""
        return rf"rank {self.rank} of {self.world_size} raised this"

    @property
    def body_or_controller(self) -> str:
        """Draw the place of a call to a function that may return."""
        return self.rng.choice(["body", "body", "controller"])

    def anywhere(self, action: Sequence[str], *expects: str, **more: object) -> Fault:
        """Make a fault that the rank itself commits, at a random moment of a random phase."""
        where = more.pop("where", None) or self.rng.choices(_WHERE, [5, 2, 1, 1])[0]
        return self.make(
            where=str(where),
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
