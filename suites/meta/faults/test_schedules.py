"""``schedules("all")`` under faults: the schedules that it omits show no outcome that it has not seen."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import Inconclusive
from pdlcheck.faults import Absent, Corrupt, Kill, Stall
from pdlcheck.worlds import get_world
from pdlcheck.worlds.outcome import Raised, Returned
from pdlcheck.worlds.simulated.schedules import Exhaustive, dependency


def explored(program, world_size, faults, reduction=True, limit=20_000):
    """Return all outcomes of the runs (values, errors, stopped ranks) and the number of runs."""
    search, seen = Exhaustive(reduction=reduction), set()
    while search.advance():
        with get_world("sim", schedule=search, faults=faults).open(world_size) as ranks:
            try:
                seen.add(str([_told(outcome) for outcome in ranks.run_bodies([program] * world_size)]))
            except Inconclusive as error:
                seen.add(str(error))
        assert search.runs + search.redundant < limit, "a smaller program, please"
    return seen, search.runs


def _told(outcome):
    match outcome:
        case Returned():
            return outcome.value
        case Raised():
            return repr(outcome.error)
        case _:
            return "stopped"


def tell(seen, call, *args, **kwargs):
    try:
        return call(*args, **kwargs)
    except RuntimeError as error:
        seen.append(str(error).split(".")[0].replace("\n", " "))
        return None


def post_then_wait():
    """Detect a killed rank at the post or at the wait."""
    seen = []
    if dist.get_rank() == 0:
        work = tell(seen, dist.irecv, torch.ones(1), 1)
        seen.append("posted")
        if work is not None:
            tell(seen, work.wait)
    else:
        dist.send(torch.ones(1), 0)
    return seen


def lose_elsewhere():
    """Kill rank 1 when it sends to rank 2; rank 0 may detect it at its receive."""
    rank, seen = dist.get_rank(), []
    if rank == 0:
        work = tell(seen, dist.irecv, torch.ones(1), 1)
        seen.append("posted")
        if work is not None:
            tell(seen, work.wait)
    elif rank == 1:
        dist.send(torch.ones(1), 2)
    return seen


def ask():
    """Poll an operation that a killed rank completes."""
    seen = []
    if dist.get_rank() == 0 and (work := tell(seen, dist.irecv, torch.ones(1), 1)):
        seen.append(work.is_completed())
        tell(seen, work.wait)
    elif dist.get_rank() == 1:
        dist.send(torch.ones(1), 0)
    return seen


def take_what_comes():
    """Receive one message of two on rank 0: from rank 1 before it is lost, or from rank 2."""
    seen = []
    if dist.get_rank() == 0:
        seen.append(tell(seen, dist.recv, torch.zeros(1)))
    else:
        tell(seen, dist.isend, torch.ones(1), 0)
    if dist.get_rank() == 1:
        dist.send(torch.ones(1), 2)
    return seen


def reduce_all():
    seen = []
    for _ in range(2):
        x = torch.ones(1)
        tell(seen, dist.all_reduce, x)
        seen.append(x.item())
    return seen


def monitor():
    seen = []
    tell(seen, dist.monitored_barrier, wait_all_ranks=True)
    return seen


def regroup():
    seen = []
    pair = tell(seen, dist.new_group, [0, 2])
    if dist.get_rank() != 1:
        tell(seen, dist.all_reduce, torch.ones(1), group=pair)
    return seen


def rendezvous():
    seen = []
    tell(seen, dist.init_process_group, "gloo")
    return seen


CASES = [
    (post_then_wait, 2, [Kill(1, 0)]),
    (post_then_wait, 2, [Stall(1, 0)]),
    (lose_elsewhere, 3, [Kill(1, 0)]),
    (lose_elsewhere, 3, [Stall(1, 0)]),
    (ask, 2, [Kill(1, 0)]),
    (ask, 2, [Stall(1, 0)]),
    (take_what_comes, 3, [Kill(1, 1)]),
    (take_what_comes, 3, [Stall(1, 1)]),
    (reduce_all, 2, [Kill(1, 1)]),
    (reduce_all, 3, [Kill(1, 0), Kill(2, 0)]),
    (reduce_all, 2, [Stall(1, 1)]),
    (reduce_all, 2, [Corrupt(1, 1)]),
    (reduce_all, 2, [Corrupt(0, 0, "stale"), Corrupt(1, 1, "bit_flip", "input")]),
    (monitor, 3, [Kill(1, 0)]),
    (monitor, 3, [Kill(0, 0)]),
    (monitor, 3, [Kill(1, 0), Kill(2, 0)]),
    (monitor, 3, [Stall(1, 0)]),
    (regroup, 3, [Kill(1, 0)]),
    (rendezvous, 3, [Absent(1)]),
]


def random_program(seed):
    """Draw a world size, for each rank a list of (operation, peer), and faults."""
    draw = random.Random(seed)
    world_size = draw.choice([2, 2, 3])
    code = [[] for _ in range(world_size)]
    for _ in range(draw.randint(1, 2 if world_size == 3 else 3)):
        kind = draw.choice(["message", "message", "any", "collective", "ask"])
        if kind == "collective":
            for rank in code:
                rank.append((draw.choice(["reduce", "ireduce"]), 0))
        elif kind == "ask":
            draw.choice(code).append(("ask", 0))
        else:
            src, dst = draw.sample(range(world_size), 2)
            code[src].append((draw.choice(["send", "isend"]), dst))
            code[dst].append(("any", 0) if kind == "any" else (draw.choice(["recv", "irecv"]), src))
    faults = []
    for rank in draw.sample(range(world_size), draw.choice([1, 1, 2]) if world_size == 3 else 1):
        posts = sum(name != "ask" for name, _ in code[rank])
        if posts:
            faults.append(draw.choice([Kill, Kill, Stall, Corrupt])(rank, draw.randrange(posts)))
    return world_size, code, faults


def interpret(code):
    """Run one rank's list; return everything that the rank has seen."""
    rank, seen, works, tensors = dist.get_rank(), [], [], []
    calls = {
        "any": lambda x, peer: dist.recv(x),
        "ireduce": lambda x, peer: dist.all_reduce(x, async_op=True),
        "irecv": dist.irecv,
        "isend": dist.isend,
        "recv": dist.recv,
        "reduce": lambda x, peer: dist.all_reduce(x),
        "send": dist.send,
    }
    for name, peer in code[rank]:
        if name == "ask":
            seen.extend(work.is_completed() for work in works[-1:])
            continue
        tensors.append(torch.full((1,), 10.0 * rank + len(tensors)))
        work = tell(seen, calls[name], tensors[-1], peer)
        seen.append(name)
        if name.startswith("i") and work is not None:
            works.append(work)
    for work in works:
        tell(seen, work.wait)
    return seen + [x.item() for x in tensors]


@pytest.mark.parametrize("seed", range(24))
def test_the_reduction_misses_no_outcome_of_a_random_program(seed):
    world_size, code, faults = random_program(seed)

    def program():
        return interpret(code)

    assert explored(program, world_size, faults)[0] == explored(program, world_size, faults, reduction=False)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("program", "world_size", "faults"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_the_reduction_misses_no_outcome(program, world_size, faults):
    seen, runs = explored(program, world_size, faults)
    everything, all_runs = explored(program, world_size, faults, reduction=False)
    assert seen == everything
    assert runs <= all_runs


def test_outcomes_that_differ_are_there_to_be_missed(monkeypatch):
    assert len(explored(post_then_wait, 2, [Kill(1, 0)])[0]) == 2
    monkeypatch.setattr(dependency, "_kills", lambda access: False)  # as if a death were any other operation
    assert len(explored(lose_elsewhere, 3, [Kill(1, 0)])[0]) < len(
        explored(lose_elsewhere, 3, [Kill(1, 0)], reduction=False)[0]
    )
