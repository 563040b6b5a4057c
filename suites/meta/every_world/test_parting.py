"""Reports of deadlocks and mismatches name the last collective that ranks shared, and where they parted."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import CollectiveMismatch, Deadlock
from pdlcheck.worlds import get_world

X = torch.ones(2)


def branches():
    dist.all_reduce(X.clone())  # shared
    if dist.get_rank() % 3 == 1:  # decides
        dist.broadcast(X.clone(), 0)  # one
    else:
        dist.all_reduce(X.clone())  # other


def skips_a_call():
    for step in range(3):
        dist.all_reduce(X.clone())  # shared
        if step != 1 or dist.get_rank() == 0:  # decides
            dist.all_reduce(X.clone())  # one
        dist.all_reduce(X.clone())  # other


def has_more_batches():
    for _ in range(2 + dist.get_rank() % 2):  # decides
        dist.all_reduce(X.clone())


def returns_early():
    dist.all_reduce(X.clone())  # shared
    if dist.get_rank() == 0:  # decides
        return
    dist.all_reduce(X.clone())  # one


def reduced(x):
    dist.all_reduce(x.clone())  # shared


def calls_a_helper():
    reduced(X)
    if dist.get_rank() == 0:  # decides
        reduced(torch.ones(3))  # one
    reduced(X)  # other


def takes_turns():
    for turn in range(dist.get_world_size()):
        if dist.get_rank() == turn:
            dist.broadcast(X.clone(), turn)
        if dist.get_rank() != turn:
            dist.broadcast(X.clone(), turn)
    if dist.get_rank() == 0:  # decides
        dist.barrier()  # one


def takes_turns_in_branches():
    for turn in range(dist.get_world_size()):
        if dist.get_rank() == turn:
            dist.broadcast(X.clone(), turn)
            continue
        dist.broadcast(X.clone(), turn)
    if dist.get_rank() == 0:  # decides
        dist.barrier()  # one


def differs_at_one_line():
    dist.all_reduce(X.clone())
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


def parts_in_a_subgroup():
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.all_reduce(X.clone(), group=group)  # shared
        if dist.get_rank() == 0:  # decides
            dist.barrier(group=group)  # one
    dist.barrier()  # other


def parts_at_once():
    if dist.get_rank():
        dist.all_reduce(X.clone())
    else:
        dist.broadcast(X.clone(), 0)


def is_right():
    for _ in range(4):
        dist.all_reduce(X.clone())


def lines(program, *more):
    """Return the line of each marked statement of a program, by its mark."""
    found = {}
    for one in (program, *more):
        text, first = inspect.getsourcelines(one)
        for number, line in enumerate(text, first):
            if mark := re.search(r"# (\w+)$", line):
                found[mark[1]] = f"{__file__.rpartition('/')[2]}:{number}"
    return found


def message(world, program, error, world_size=2, marked=()):
    """Return what the report says beside the lines of the ranks, with marks in the place of lines."""
    with pytest.raises(error) as caught:
        world.run(program, world_size=world_size)
    text = str(caught.value)
    for mark, line in lines(program, *marked).items():
        text = re.sub(rf"\S*{re.escape(line)}\b", f"<{mark}>", text)
    return text


def test_the_condition_is_named_by_which_ranks_come_to_different_calls(world):
    text = message(world, branches, CollectiveMismatch, world_size=4)
    assert "after collective 0, all_reduce at <shared>, ranks 0, 2, 3 went on to <other>, rank 1 to <one>\n" in text
    assert text.endswith("<decides> decides between these lines: if dist.get_rank() % 3 == 1:  # decides")


def test_ranks_that_have_skipped_a_call_are_out_of_step_since_then(world):
    text = message(world, skips_a_call, Deadlock)
    assert "out of step since collective 4: after collective 3, all_reduce at <shared>, rank 0 went on to <one>" in text
    assert "rank 1 to <other>\n  <decides> decides between these lines: if step != 1 or" in text
    assert "fewer steps" not in text


def test_the_loop_is_named_in_which_a_rank_goes_on(world):
    text = message(world, has_more_batches, Deadlock, world_size=3)
    assert "rank 0 has returned and will not take part" in text
    assert text.endswith("rank 1 went on in the loop at <decides>: for _ in range(2 + dist.get_rank() % 2):  # decides")


def test_the_condition_is_named_by_which_a_rank_returns_early(world):
    text = message(world, returns_early, Deadlock)
    assert "after collective 0, all_reduce at <shared>, rank 0 returned, rank 1 went on to <one>\n" in text
    assert text.endswith("<decides> decides whether <one> runs: if dist.get_rank() == 0:  # decides")


def test_the_callers_of_a_helper_are_named(world):
    text = message(world, calls_a_helper, CollectiveMismatch, marked=[reduced])
    assert "rank 0 went on to <shared>, called at <one>, rank 1 to <shared>, called at <other>" in text
    assert text.endswith("<decides> decides between these lines: if dist.get_rank() == 0:  # decides")


@pytest.mark.parametrize("program", [takes_turns, takes_turns_in_branches])
def test_ranks_that_take_turns_are_not_out_of_step(world, program):
    text = message(world, program, Deadlock)
    assert "out of step" not in text
    assert text.endswith("<decides> decides whether <one> runs: if dist.get_rank() == 0:  # decides")


def test_ranks_at_one_line_have_not_parted(world):
    text = message(world, differs_at_one_line, CollectiveMismatch)
    assert "after collective" not in text
    assert "decides" not in text


def test_the_group_is_named_in_which_ranks_part(world):
    text = message(world, parts_in_a_subgroup, Deadlock, world_size=3)
    words = r"after collective 0 of the group \S+ \(ranks 0, 1\), all_reduce at <shared>, rank 0 went on to <one>"
    assert re.search(words, text)
    assert "rank 1 is at <other>" in text
    assert "<decides> decides between these lines: if dist.get_rank() == 0:" in text


def test_an_earlier_run_of_the_ranks_is_forgotten():
    with get_world("sim").open(2) as ranks:
        ranks.run(is_right)
        with pytest.raises(CollectiveMismatch) as caught:
            ranks.run(parts_at_once)
    assert "after collective" not in str(caught.value)
    assert "decides between these lines: if dist.get_rank():" in str(caught.value)
