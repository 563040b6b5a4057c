"""Two ranks exchange 8 MiB on gloo, with the send or the receive posted first. Both orders take turns in one run.

torchrun --nproc-per-node 2 docs/findings/receive_first.py
sudo python examples/ci/two_hosts.py --rate 1gbit 2 docs/findings/receive_first.py
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

NUMEL = 1 << 21
ROUNDS = 15


def exchange(sent: torch.Tensor, received: torch.Tensor, *, receive_first: bool) -> None:
    """Send to the other rank while receiving from it."""
    other = 1 - dist.get_rank()
    ops = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
    for work in dist.batch_isend_irecv(ops[::-1] if receive_first else ops):
        work.wait()


def main() -> None:
    dist.init_process_group("gloo")
    sent, received = torch.ones(NUMEL), torch.empty(NUMEL)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(ROUNDS):
        for receive_first, found in seconds.items():
            dist.barrier()
            start = time.perf_counter()
            exchange(sent, received, receive_first=receive_first)
            dist.barrier()
            found.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        for receive_first, found in seconds.items():
            quarters = statistics.quantiles(found, n=4)
            name = "receive" if receive_first else "send"
            print(f"{name} first: {quarters[1] * 1e3:.1f} ms ({quarters[0] * 1e3:.1f} .. {quarters[2] * 1e3:.1f})")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
