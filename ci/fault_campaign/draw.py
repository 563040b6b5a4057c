"""The kinds of faults and the worlds that can suffer them; the seed and the number alone determine a fault."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from fault_campaign import deaths, errors, interrupts, remains
from fault_campaign.faults import Base, Fault

__all__ = ["KINDS", "LAUNCHERS", "WORLDS", "draw"]

LAUNCHERS = ("torchrun", "mpiexec", "two-hosts")  # each starts processes of gloo
WORLDS = ("sim", "gloo", "mpi", *LAUNCHERS)
_OF_THE_RUN = ("ctrl-c", "kill-pytest")
_SHARE_OF_THE_RUN = 0.06  # each needs its own pytest run

KINDS: dict[str, Callable[[Base], Fault]] = {
    "kill-self": deaths.kill_self,
    "kill-outside": deaths.kill_outside,
    "kill-idle": deaths.kill_idle,
    "kill-server": deaths.kill_server,
    "stop-server": deaths.stop_server,
    "segv": deaths.segv,
    "stop": deaths.stop,
    "stop-idle": deaths.stop_idle,
    "exit": deaths.exit,
    "sleep": deaths.sleep,
    "spoil-pipe": deaths.spoil_pipe,
    "close-all": deaths.close_all,
    "raise-before": errors.raise_before,
    "raise-inside": errors.raise_inside,
    "raise-after": errors.raise_after,
    "odd-error": errors.odd_error,
    "bad-result": errors.bad_result,
    "fork-returns": errors.fork_returns,
    "mismatch": errors.mismatch,
    "memory": errors.memory,
    "left-on": remains.left_on,
    "orphan": remains.orphan,
    "shared-memory": remains.shared_memory,
    "flood": remains.flood,
    "ctrl-c": interrupts.ctrl_c,
    "kill-pytest": interrupts.kill_pytest,
}
# simulated ranks are threads of the controller: a fault that ends the process would end the controller
_OF_THREADS = {"exit", "sleep", "mismatch", "memory", "odd-error", "left-on", *_OF_THE_RUN}
_OF_THREADS |= {"raise-before", "raise-inside", "raise-after"}
# A launcher decides what happens to its processes after an interrupt, and their pipes look like gloo's. On mpi a closed
# descriptor hits MPI itself.
_NOT_ON = {
    "mpi": {"close-all"},
    **{launcher: {*_OF_THE_RUN, "kill-server", "stop-server", "spoil-pipe"} for launcher in LAUNCHERS},
}


def draw(seed: int, number: int, world_sizes: Sequence[int], world: str = "gloo") -> Fault:
    """Return the fault with this number, for one of ``WORLDS``."""
    rng = random.Random(f"{seed} {number}")
    kinds = [kind for kind in KINDS if world != "sim" or kind in _OF_THREADS]
    kinds = [kind for kind in kinds if kind not in _NOT_ON.get(world, ())]
    of_the_run = rng.random() < _SHARE_OF_THE_RUN and not _NOT_ON.get(world, set()).issuperset(_OF_THE_RUN)
    kind = rng.choice([kind for kind in kinds if (kind in _OF_THE_RUN) == of_the_run])
    size = rng.choice(list(world_sizes))
    base = Base(number, kind, rng.randrange(size), size, rng.random() < 0.5, rng, world)
    return KINDS[kind](base)
