"""The settings of ``pdlcheck run``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pdlcheck.faults import Absent, Corrupt, Fault, Kill, Stall
from pdlcheck.scripts.program import Program
from pdlcheck.worlds.registry import is_simulated

__all__ = ["Plan", "fault_of"]

_AT: dict[str, Callable[[int, int], Fault]] = {"kill": Kill, "stall": Stall, "corrupt": Corrupt}
_NO_LIMIT_S = 10 * 24 * 3600.0
_FORMS = "kill:RANK@OPERATION, stall:RANK@OPERATION, corrupt:RANK@OPERATION or absent:RANK"


def fault_of(text: str) -> Fault:
    """Return the fault that the command line names.

    Raises:
        ValueError: there is no such fault.

    Example:
        >>> fault_of("kill:1@3")
        Kill(rank=1, operation=3)
    """
    found = re.fullmatch(r"(\w+):(\d+)(?:@(\d+))?", text)
    kind, rank, operation = found.groups() if found else ("", "", None)
    make: Callable[..., Fault] | None = Absent if kind == "absent" and operation is None else None
    if kind in _AT and operation is not None:
        return _AT[kind](int(rank), int(operation))
    if make is None:
        raise ValueError(f"a fault is {_FORMS}; got {text!r}")
    return make(int(rank))


@dataclass(frozen=True)
class Plan:
    """The settings of one call of ``pdlcheck run``.

    Args:
        program: the program.
        world: the name of the world.
        world_size: the number of ranks; None if the command line does not say it.
        device: the device of the ranks; None for the world's default.
        seed: the seed of random streams and of the schedule.
        schedule: the schedule, as ``--schedule`` takes it; None for a random one from the seed.
        schedules: the number of schedules to run under.
        semantics: the name of a profile of the simulated network.
        faults: the faults that simulated ranks suffer, as the command line names them.
        timeline: the folder for pictures of a run.
        own_globals: installed modules whose globals each simulated rank has for itself.
        sizes: the numbers of ranks whose results must agree; empty to run on one number of ranks.
        cuda_as_cpu: run the CUDA code of the ranks on the CPU.
        timeout_s: the time limit of a run in seconds; None for none.
        placement: starts the processes of the ranks; None on this machine alone.
    """

    program: Program
    world: str = "sim"
    world_size: int | None = None
    device: str | None = None
    seed: int = 0
    schedule: str | None = None
    schedules: int = 1
    semantics: str = "rendezvous"
    faults: tuple[str, ...] = ()
    timeline: Path | None = None
    own_globals: tuple[str, ...] = ()
    cuda_as_cpu: bool = False
    sizes: tuple[int, ...] = ()
    timeout_s: float | None = None
    placement: Any = None

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.world_size or 2

    def options(self) -> dict[str, Any]:
        """Return the options of the world."""
        options: dict[str, Any] = {"device": self.device, "seed": self.seed}
        if self.cuda_as_cpu:
            options["cuda_as_cpu"] = True
        if is_simulated(self.world):
            options |= {
                "schedule": self.schedule or "random",
                "semantics": self.semantics,
                "faults": [fault_of(text) for text in self.faults],
                "timeline": self.timeline is not None,
                "own_globals": self.own_globals,
                "timeout_s": self.timeout_s,
            }
        else:
            options["timeout_s"] = self.timeout_s or _NO_LIMIT_S
            if self.placement is not None:
                options["placement"] = self.placement
        return options

    def replay(self, schedule: str) -> str:
        """Return the command that runs the program again under this schedule, on simulated ranks."""
        again = replace(self, schedule=schedule, schedules=1)
        words = ["pdlcheck", "run", "-n", str(again.ranks)]
        simulated = is_simulated(again.world)
        words += [] if simulated else ["--world", again.world]
        words += [] if not again.seed else ["--seed", str(again.seed)]
        words += [] if not simulated or schedule == f"random:{again.seed}" else ["--schedule", schedule]
        words += [] if again.semantics == "rendezvous" else ["--semantics", again.semantics]
        words += [] if not again.faults else ["--faults", ",".join(again.faults)]
        words += [] if again.device is None else ["--device", again.device]
        words += ["--compare-world-sizes", ",".join(map(str, again.sizes))] if again.sizes else []
        words += ["--cuda-as-cpu"] if again.cuda_as_cpu else []
        words += [word for name in again.own_globals for word in ("--own-globals", name)]
        return shlex.join([*words, *again.program.words])
