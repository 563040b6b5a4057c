"""Time a small all_reduce on gloo under two scheduling policies: with and without preemption between threads.

    torchrun --nproc-per-node 2 gloo_polls.py

Needs Linux, and at least as many processes as cores. Both policies take turns in every round.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROUNDS, TIMES = 5, 500
POLICIES = {"SCHED_OTHER": "what threads have", "SCHED_BATCH": "who wakes up waits for its turn"}


def threads(name=""):
    """Return the threads of this process whose name contains ``name``."""
    own = Path("/proc/self/task")
    return [int(path.name) for path in own.iterdir() if name in (path / "comm").read_text()]


def polled_s():
    """Return the CPU time of gloo's connection thread."""
    spent = [Path(f"/proc/self/task/{thread}/schedstat").read_text() for thread in threads("gloo_tcp_loop")]
    return sum(int(text.split()[0]) for text in spent) * 1e-9


def measure(policy, times=TIMES):
    """Return the microseconds of one all_reduce, and those of the connection thread in all of them."""
    for thread in threads():
        os.sched_setscheduler(thread, getattr(os, policy), os.sched_param(0))
    tensor, took = torch.ones(4), []
    dist.all_reduce(tensor)
    polled = polled_s()
    for _ in range(times):
        start = time.perf_counter()
        dist.all_reduce(tensor)
        took.append(1e6 * (time.perf_counter() - start))
    return took, 1e6 * (polled_s() - polled)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    took = {policy: [] for policy in POLICIES}
    polled = dict.fromkeys(POLICIES, 0.0)
    for _ in range(ROUNDS):
        for policy in POLICIES:
            one, more = measure(policy)
            took[policy] += one
            polled[policy] += more
    if dist.get_rank() == 0:
        print(f"{'us an all_reduce':40} {'mean':>6} {'median':>7} {'9 in 10':>8} {'thread for connections':>23}")
        for policy, words in POLICIES.items():
            all_of_them = sorted(took[policy])
            number = len(all_of_them)
            print(
                f"{policy + ', ' + words:40} {sum(all_of_them) / number:6.0f} {all_of_them[number // 2]:7.0f} "
                f"{all_of_them[int(0.9 * number)]:8.0f} {polled[policy] / number:23.0f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
