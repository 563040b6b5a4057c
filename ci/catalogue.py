"""Run every faulty program of the catalogue in the simulated world, on bare gloo and on watched gloo.

    python ci/catalogue.py [--only TEXT] [--repeat N] [--write]

Prints a line for each program, and totals. ``--write`` makes ``docs/catalogue.md`` from them. Fails if a correct twin
fails on gloo, except for the twins that are known to fail.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from catalogue_page.page import NO_FAULT, NOT_ON_GLOO, Seen, counts, page  # noqa: E402  # needs the path above
from catalogue_page.shown import classify, same_values  # noqa: E402

from pdlcheck.worlds import get_world  # noqa: E402
from pdlcheck.worlds.processes.controller import forkserver  # noqa: E402
from suites.meta.catalogue import FAULTS, Fault  # noqa: E402
from suites.meta.catalogue.entry import lines_named_by  # noqa: E402

PAGE = ROOT / "docs" / "catalogue.md"
TIMEOUT_S = 3.0  # a program that runs longer counts as hanging
PATIENT_S = 30.0  # for programs that must end
AT_ONCE = 8  # programs wait most of the time
PRELOAD = ("suites.meta.catalogue", "torch.nn.parallel", "torch.distributed.tensor", "torch.distributed.device_mesh")
_here = threading.local()


def outcome(run: Callable[[], list[Any]]) -> Exception | list[Any]:
    """Return the results of the ranks, or the error."""
    try:
        return run()
    except Exception as error:
        return error


def in_simulation(fault: Fault) -> tuple[str, str, str]:
    """Return the verdict, the count of marked lines that it names, and the first schedule that shows it."""
    for seed in range(fault.schedules):
        world = get_world("sim", seed=seed)
        found = outcome(lambda world=world: world.run(fault.program, False, world_size=fault.world_size))  # type: ignore[misc]
        if isinstance(found, BaseException):
            named, marked = lines_named_by(found), fault.lines()
            wrongly = f", {len(named - marked)} wrongly" if named - marked else ""
            return type(found).__name__, f"{len(named & marked)} of {len(marked)}{wrongly}", str(seed + 1)
    return NO_FAULT, "", ""


def on_processes(fault: Fault, right: bool, *, watch: bool, timeout_s: float) -> BaseException | list[Any]:
    """Run on new processes; each thread has its own worlds."""
    if not hasattr(_here, "worlds"):
        _here.worlds = {on: get_world("gloo", watch=on, isolation="fresh") for on in (False, True)}
    world = _here.worlds[watch]
    world.timeout_s = timeout_s
    return outcome(lambda: world.run(fault.program, right, world_size=fault.world_size))


def look(fault: Fault, simulated: tuple[str, str, str], expected: list[Any], repeat: int) -> Seen:
    """Run a program and its twin on gloo; ``expected`` holds the twin's results in the simulated world."""
    right = on_processes(fault, True, watch=False, timeout_s=PATIENT_S)
    if isinstance(right, BaseException):
        twin = classify(right, expected).text
    else:
        twin = "" if same_values(right, expected) else f"returns {right}, in the simulated world {expected}"
    values = expected if isinstance(right, BaseException) else right
    plain = [on_processes(fault, False, watch=False, timeout_s=TIMEOUT_S) for _ in range(repeat)]
    watched = on_processes(fault, False, watch=True, timeout_s=TIMEOUT_S)
    return Seen(fault, *simulated, [classify(run, values) for run in plain], classify(watched, values), twin)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="programs whose name contains TEXT")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs of each program on gloo alone; 3")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("the page is written of all programs: leave --only out")
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ["PYTHONWARNINGS"] = "ignore::FutureWarning"  # inherited by the ranks
    start = time.perf_counter()
    forkserver.start(preload=PRELOAD)
    faults = [fault for fault in FAULTS if options.only in fault.name]
    # runs before the threads start, one at a time: the simulated world replaces torch.distributed meanwhile
    simulated = [in_simulation(fault) for fault in faults]
    twins = [get_world("sim").run(fault.program, True, world_size=fault.world_size) for fault in faults]
    print(f"simulated {len(faults)} programs and their twins in {time.perf_counter() - start:.0f} s", flush=True)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        looks = threads.map(look, faults, simulated, twins, [options.repeat] * len(faults))
        seen = [each for each in looks if tell(each)]
    forkserver.stop()
    for line in counts(seen):
        print(line)
    wrong = [each for each in seen if bool(each.twin) != (each.fault.name in NOT_ON_GLOO)]
    print(f"{len(wrong)} of {len(seen)} right twins surprise on gloo, {time.perf_counter() - start:.0f} s")
    if options.write:
        PAGE.write_text(page(seen, repeat=options.repeat, timeout_s=TIMEOUT_S))
    return 1 if wrong else 0


def tell(each: Seen) -> bool:
    """Print one program; return True."""
    schedule = f" in schedule {each.schedule}" if each.schedule not in ("", "1") else ""
    lines = f", lines {each.lines}" if each.lines else ""
    print(f"{each.fault.name:46} sim {each.sim}{schedule}{lines}; gloo {each.on_gloo}; watched {each.watched.text}")
    if each.twin:
        print(f"    its right twin on gloo: {each.twin}")
    sys.stdout.flush()
    return True


if __name__ == "__main__":
    sys.exit(main())
