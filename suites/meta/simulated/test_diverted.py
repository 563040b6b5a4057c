"""Warnings and text of simulated ranks that take turns inside blocks that record or redirect them."""

from __future__ import annotations

import builtins
import io
import sys
import warnings
from contextlib import redirect_stdout

import pytest
import torch.distributed as dist

from pdlcheck.worlds import get_world


@pytest.fixture(params=range(4))
def sim(request):
    return get_world("sim", schedule=f"random:{request.param}")


def test_a_rank_records_its_own_warnings_alone(sim):
    def warns(text):
        dist.barrier()
        warnings.warn(text, stacklevel=1)
        dist.barrier()

    def records():
        text = f"of {dist.get_rank()}"
        with pytest.warns(UserWarning, match=text) as recorded:
            warns(text)
        return [str(warning.message) for warning in recorded]

    assert sim.run(records, world_size=3) == [["of 0"], ["of 1"], ["of 2"]]


def test_filters_of_one_rank_do_not_hold_on_another(sim):
    def warns():
        if dist.get_rank() == 0:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                dist.barrier()
                dist.barrier()
            return 0
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            dist.barrier()
            warnings.warn("of the other rank", stacklevel=1)
            dist.barrier()
        return len(recorded)

    assert sim.run(warns, world_size=2) == [0, 1]


def test_a_warning_that_one_rank_has_shown_is_new_to_another_that_records(sim):
    def shows():
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("default")
            for _ in range(3):
                dist.barrier()
                warnings.warn("the same line on both", stacklevel=1)
        return len(recorded)

    assert min(sim.run(shows, world_size=2)) >= 1


def test_blocks_that_end_in_another_order_leave_filters_and_streams_as_they_were(sim):
    filters, shown, out = warnings.filters, warnings.showwarning, sys.stdout
    before = list(filters)

    def cross():
        rank, text = dist.get_rank(), io.StringIO()
        for turn in range(2):
            if turn == rank:
                with warnings.catch_warnings(record=True), redirect_stdout(text):
                    warnings.simplefilter("ignore")
                    dist.barrier()
                    print("of", rank)
            else:
                dist.barrier()
        return text.getvalue()

    assert sim.run(cross, world_size=2) == ["of 0\n", "of 1\n"]
    assert (warnings.filters, warnings.showwarning, sys.stdout) == (filters, shown, out)
    assert warnings.filters is filters
    assert filters == before


def only_rank_0_prints():
    """Silence print on other ranks and never restore it, as training scripts do."""
    prints = builtins.print
    builtins.print = lambda *args, **options: prints(*args, **options) if dist.get_rank() == 0 else None


def only_rank_0_has_a_stream():
    if dist.get_rank() != 0:
        sys.stdout = sys.stderr = io.StringIO()


@pytest.mark.parametrize("silence", [only_rank_0_prints, only_rank_0_has_a_stream])
def test_ranks_that_are_silenced_silence_nobody_else(sim, silence, capsys):
    plain, out, err = builtins.print, sys.stdout, sys.stderr

    def say():
        dist.barrier()
        silence()
        for turn in range(2):
            dist.barrier()
            print("turn", turn, "of rank", dist.get_rank())

    def says():
        dist.barrier()
        print("again")

    sim.run(say, world_size=3)
    assert (builtins.print, sys.stdout, sys.stderr) == (plain, out, err)
    assert capsys.readouterr().out == "turn 0 of rank 0\nturn 1 of rank 0\n"
    with sim.open(2) as ranks:
        ranks.run(silence)
        ranks.run(says)
    assert capsys.readouterr().out == "again\n" * 2
