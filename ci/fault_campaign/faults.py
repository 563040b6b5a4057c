"""A fault: what goes wrong, on which rank, when, and what a report must say of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["LIMIT_S", "PATIENT_S", "Base", "Fault"]

LIMIT_S = 1.5  # of the calls in which a rank never answers
PATIENT_S = 30.0  # of all others: none may need it


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
        silent: the test passes, and what the rank has done harms nobody else.
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


_WHERE = ["body", "controller", "setup", "teardown"]


@dataclass(frozen=True)
class Base:
    """What every fault has, and the source of what differs."""

    number: int
    kind: str
    rank: int
    world_size: int
    watch: bool
    rng: random.Random
    world: str

    @property
    def has_processes(self) -> bool:
        """Its ranks are processes, not threads of the controller."""
        return self.world != "sim"

    @property
    def note(self) -> str:
        """What is added to an exception of this rank."""
        return rf"rank {self.rank} of {self.world_size} raised this"

    @property
    def body_or_controller(self) -> str:
        """Where a function is called that may return."""
        return self.rng.choice(["body", "body", "controller"])

    def anywhere(self, action: Sequence[str], *expects: str, **more: object) -> Fault:
        """The rank itself does it, at a random moment of a random phase."""
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
