"""What a run of a program has shown, in words and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdlcheck.json_values import plain
from pdlcheck.report.measured import bytes_text
from pdlcheck.scripts.counts import Counts
from pdlcheck.worlds.exceptions import text_of
from pdlcheck.worlds.stack_position import user_traceback

__all__ = ["FORMAT_VERSION", "KIND", "Finding"]

FORMAT_VERSION = 1
KIND = "pdlcheck run"


@dataclass
class Finding:
    """What one or more runs of a program have shown.

    Args:
        world: the name of the world.
        world_size: the number of ranks.
        runs: the number of runs, each under another schedule.
        counts: what each rank has done in the last run; empty if it failed.
        error: the failure; None if there was none.
        replay: the command that runs the program again as it failed.
        notes: what the user should know besides.
    """

    world: str
    world_size: int
    runs: int = 1
    counts: Sequence[Counts] = ()
    error: BaseException | None = None
    replay: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def held(self) -> bool:
        """Return whether the ranks communicated and no fault was found."""
        return self.error is None and any(one.joined for one in self.counts)

    def record(self) -> dict[str, object]:
        """Return the finding as JSON has it."""
        error = self.error
        return {
            "version": FORMAT_VERSION,
            "kind": KIND,
            "world": self.world,
            "world_size": self.world_size,
            "runs": self.runs,
            "held": self.held,
            "error": None if error is None else type(error).__name__,
            "message": None if error is None else text_of(error),
            "fields": plain(getattr(error, "fields", {})),
            "notes": [*getattr(error, "__notes__", ()), *self.notes],
            "replay": self.replay,
            "ranks": [one.record() for one in self.counts],
            "text": self.text(),
        }

    def text(self) -> str:
        """Return the verdict, for people."""
        lines = [*self.notes] if self.error is None else [_failure(self.error), *self.notes]
        if self.error is None:
            lines.insert(0, self._seen())
        if self.replay:
            lines.append(f"replay: {self.replay}")
        return "\n".join(lines)

    def _seen(self) -> str:
        counts = self.counts
        if not counts:
            return "nothing was checked: the program started no ranks; does it need an option to train in parallel?"
        if not any(one.joined for one in counts):
            return (
                f"nothing was checked: {self.world_size} ranks on {self.world} ended, and none communicated; does the "
                "program need an option to train in parallel?"
            )
        of = [
            _several(self.world_size, "rank"),
            _several(max(one.steps for one in counts), "optimizer step"),
            _several(max(one.collectives for one in counts), "collective"),
            _several(sum(one.messages for one in counts) // 2, "message"),
            f"{bytes_text(max(one.nbytes for one in counts))} for each rank",
        ]
        runs = f" under {self.runs} schedules" if self.runs > 1 else ""
        return f"no fault seen on {self.world}{runs}: {', '.join(one for one in of if one)}"


def _several(number: int, noun: str) -> str:
    return "" if not number else f"{number:,} {noun}{'' if number == 1 else 's'}".replace(",", " ")


def _failure(error: BaseException) -> str:
    """Return the traceback of a failure, without the frames of pdlcheck, and its notes."""
    text = user_traceback(error).rstrip()
    text = text.removeprefix("Traceback (most recent call last):\n") if "\n  File " not in text else text
    kind = type(error)
    return text.replace(f"{kind.__module__}.{kind.__name__}: ", f"{kind.__name__}: ")
