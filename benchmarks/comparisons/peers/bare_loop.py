"""The bodies of the real tests in a plain loop on gloo, without a test framework: the baseline of a pool's overhead.

``python -m peers.bare_loop WORLD_SIZE [--take-turns]`` prints the seconds of the slowest rank as JSON. With
``--take-turns`` its threads have the scheduling policy of a pool's ranks, see docs/findings/gloo_polls.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pdlcheck.worlds.processes.rank.batch_scheduling import take_turns
from peers.real_tests import BODIES, CASES


def main() -> None:
    world_size, takes_turns = int(sys.argv[1]), "--take-turns" in sys.argv[2:]
    with tempfile.TemporaryDirectory(prefix="pdlcheck-bare-") as folder:
        mp.spawn(_rank, args=(world_size, folder, takes_turns), nprocs=world_size)  # type: ignore[no-untyped-call]  # torch's
        seconds = [float((Path(folder) / f"{rank}.txt").read_text()) for rank in range(world_size)]
    print(json.dumps({"seconds": max(seconds)}))


def _rank(rank: int, world_size: int, folder: str, takes_turns: bool) -> None:
    torch.set_num_threads(1)
    if takes_turns:
        take_turns()
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    for body in BODIES:
        body(rank, world_size, CASES)
    dist.barrier()
    start = time.perf_counter()
    for body in BODIES:
        for case in range(CASES):
            body(rank, world_size, case)
    (Path(folder) / f"{rank}.txt").write_text(str(time.perf_counter() - start))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
