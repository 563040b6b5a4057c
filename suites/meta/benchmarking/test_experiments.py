"""The models beside the measurements hold on rows that they generate, and report when they do not hold."""

from __future__ import annotations

import pytest

from pdlcheck.bench.cpu_load import CpuLoad
from pdlcheck.bench.experiments import experiments
from pdlcheck.bench.intervals import paired_ratio, unpaired_ratio
from pdlcheck.bench.measurement import Subject, combine
from pdlcheck.bench.models import amdahl_s, fit_link, karp_flatt, serial_fraction
from pdlcheck.bench.passes import merge_rows, pass_ratios, pass_values, passes_interval
from pdlcheck.bench.records import LoadReading, RankRecord, RankTimes


def row(name, seconds, **facts):
    return name, {"median_s": seconds, **facts}


def found_of(rows):
    return {one.title: one for one in experiments(rows)}


def sync_rows(never, part, wrong=1.0):
    ways = {"": 1, " [every 2]": 2, " [every 4]": 4, " [every 10]": 10}
    rows = [row(f"test_sync_every[2ranks-flat]{way}", never + part / k) for way, k in ways.items()]
    return [*rows, row("test_sync_every[2ranks-flat] [never]", never * wrong)]


def test_an_epoch_that_synchronises_every_k_steps():
    (right,) = experiments(sync_rows(0.1, 0.3))
    assert right.held
    assert right.error < 1e-9
    assert "T0 = 100 ms, Ts = 300 ms" in right.sentence
    (wrong,) = experiments(sync_rows(0.1, 0.3, wrong=2.0))  # without synchronisation the time doubles
    assert not wrong.held
    assert wrong.error > 0.1


def bubble_rows(overhead, excess=0.0):
    whole, half = (5 * (3 * stage + overhead) for stage in (0.02, 0.01))
    name = "test_bubble_of_sleeping_stages[2ranks-4microbatches-gpipe]"
    return [row(name, whole + excess, stage_s=0.02), row(f"{name} [half of T]", half)]


def test_the_bubble_of_a_pipeline():
    (right,) = experiments(bubble_rows(0.002))
    assert right.held
    assert "The bubble is 20% of it" in right.sentence
    (wrong,) = experiments(bubble_rows(0.002, excess=0.05))  # extra time that no pair of passes explains
    assert not wrong.held


def test_whether_more_ranks_pay():
    def rows(sync_s):
        return [
            row("test_strong_scaling[1ranks]", 0.2),
            row("test_strong_scaling[2ranks]", 0.1 + sync_s),
            row("test_processes_and_threads[1ranks-1threads]", 0.2),
            row("test_processes_and_threads[2ranks-1threads]", 0.1),
            row("test_processes_and_threads[2ranks-2threads]", 0.5),
        ]

    pays, does_not = (found_of(rows(sync_s)) for sync_s in (0.02, 0.15))
    assert "predicted to be faster" in pays["does it pay to use 2 ranks"].sentence
    assert "predicted to be slower" in does_not["does it pay to use 2 ranks"].sentence
    assert pays["does it pay to use 2 ranks"].held
    assert does_not["does it pay to use 2 ranks"].held
    assert "2 x 2 takes 5.0 times as long" in pays["processes x threads, as much work"].sentence
    assert "1.67 x as fast, efficiency 83%" in pays["strong scaling of a training step"].sentence


def test_the_held_out_number_of_ranks_is_predicted():
    rows = [row(f"test_strong_scaling[{ranks}ranks]", amdahl_s(1.0, ranks, 0.1)) for ranks in (1, 2, 4, 8)]
    found = found_of(rows)["strong scaling of a training step"]
    assert found.error == pytest.approx(0, abs=1e-9)
    assert "measured 213 ms" in found.sentence


def test_the_link_of_a_collective_and_its_share_of_a_socket():
    rows = [row(f"test_all_reduce[2ranks-{n}B]", 1e-3 + n / 1e9, nbytes=n) for n in (4, 2**16, 2**24)]
    rows.append(row("test_socket[2ranks]", 0.01, nbytes=2**24, algbw_GBps=2.0))
    (found,) = experiments(rows)
    assert "measured: alpha = 1 ms, beta = 1 GB/s, 50% of a plain socket" in found.sentence
    assert found.error == pytest.approx(0)
    assert set(found.plot.lines) == {"model", "a plain socket"}


def test_many_ranks_are_predicted_by_the_virtual_clock():
    link = fit_link({n: 2 * (1e-4 + n / 2 / 1e9) for n in (4, 2**16, 2**24)})  # a ring of two on 0.1 ms and 1 GB/s
    rows = [row(f"test_all_reduce[2ranks-{n}B]", link.seconds(n), nbytes=n) for n in (4, 2**16, 2**24)]
    rows += [row(f"test_weak_scaling[{n}ranks]", 1.0 + n / 10, steps=2, gradient_bytes=1_024_000) for n in (1, 2)]
    found = found_of(rows)["weak scaling of a training step"]
    predicted = dict(found.plot.lines["prediction by the virtual clock"])
    for ranks in (2, 64, 1024):
        ring_s = 2 * (ranks - 1) * (1e-4 + 1_024_000 / ranks / 1e9)
        assert predicted[ranks] == pytest.approx(100 * 1.1 / (1.1 + 2 * ring_s), rel=1e-4)
    assert "Prediction, not measured" in found.sentence
    assert f"1024 ranks {predicted[1024]:.0f}%" in found.sentence


def test_the_memory_of_the_first_worker():
    name = "test_data_parallel[1ranks-1MB-2workers]"
    skewed = [row(name, 0.2, first_worker_bytes_over_others=1.5), row(f"{name} [plain]", 0.1)]
    even = [row(name, 0.1, first_worker_bytes_over_others=1.0), row(f"{name} [plain]", 0.1)]
    assert "1.50 times the memory" in experiments(skewed)[0].sentence
    assert "Use a process for each device" in experiments(skewed)[0].sentence
    assert "No worker needs more memory" in experiments(even)[0].sentence


def test_versions_of_pagerank():
    rows = [row(f"test_version[1ranks-er10-{name}]", seconds) for name, seconds in (("v0-f64", 0.4), ("v1-f32", 0.1))]
    (found,) = experiments(rows)
    assert "v1-f32 is the fastest, v0-f64 takes 4.0 times as long" in found.sentence
    assert found.plot.points["f64"][0][:2] == ("v0", pytest.approx(2000))
    assert experiments(rows[:1]) == []


@pytest.mark.parametrize(
    ("flat", "advice"), [(0.01, "send few large messages"), (0.5, "messages cost less than copies")]
)
def test_the_loop_over_tensors_costs_a_message_each(flat, advice):
    name = "test_gradient_sync[2ranks-20tensors]"
    rows = [row(name, flat), row(f"{name} [none]", 0.1), row(f"{name} [loop]", 0.3), row(f"{name} [message]", 0.01)]
    (found,) = experiments(rows)
    assert found.error == pytest.approx(0)
    assert advice in found.sentence


def test_rows_that_are_missing_make_no_experiment():
    assert experiments([]) == []
    assert experiments([row("test_sync_every[2ranks-flat]", 1.0), ("no row", {})]) == []


def test_laws_and_their_errors():
    assert karp_flatt(1.0, amdahl_s(1.0, 8, 0.25), 8) == pytest.approx(0.25)
    with pytest.raises(ValueError, match="got world_size=1"):
        karp_flatt(1.0, 1.0, 1)
    with pytest.raises(ValueError, match=r"got ranks \[2, 4\]"):
        serial_fraction({2: 1.0, 4: 0.5})
    with pytest.raises(ValueError, match="two sizes or more"):
        fit_link({4: 1.0})


def test_intervals_hold_the_ratio_and_narrow_with_rounds():
    import numpy as np

    draw = np.random.default_rng(0)
    wide, narrow = (
        unpaired_ratio(2 * draw.lognormal(sigma=0.2, size=n), draw.lognormal(sigma=0.2, size=n)) for n in (10, 1000)
    )
    assert wide.low < 2 < wide.high
    assert narrow.low < 2 < narrow.high
    assert narrow.high - narrow.low < (wide.high - wide.low) / 3
    drift = np.linspace(1, 3, 50)  # the machine gets slower: turns hide it
    assert paired_ratio(2 * drift, drift) == (2, 2, 2)
    with pytest.raises(ValueError, match="as many rounds of both, got 1 and 2"):
        paired_ratio([1.0], [1.0, 2.0])


def test_passes_are_merged_and_the_ratio_is_taken_round_by_round():
    def one_pass(slow):
        def made(name, seconds, **facts):
            return {
                "name": name,
                "fullname": f"f.py::{name}",
                "stats": {"data": [slow * one for one in seconds], "iterations": 1},
                "extra_info": {"median_s": 0.0, **facts},
            }

        return [made("a", [2.0, 4.0, 6.0], over={"b": [0, 0, 0]}), made("a [b]", [1.0, 2.0, 3.0], way="b")]

    ours, _ = merge_rows([*one_pass(1.0), *one_pass(3.0), *one_pass(5.0)])
    assert ours["extra_info"]["pass_rounds"] == [3, 3, 3]
    assert len(ours["stats"]["data"]) == 9
    assert pass_values(ours["stats"]["data"], [3, 3, 3]) == [4.0, 12.0, 20.0]
    assert ours["extra_info"]["over"]["b"] == pytest.approx([2, 2, 2])
    assert ours["extra_info"]["median_s"] == 10.0
    assert ours["stats"]["median"] == 10.0


def test_a_round_that_was_interrupted_does_not_count():
    ours, theirs = [2.0] * 8, [1.0] * 8
    ours[3] = 200.0
    assert pass_ratios(ours, [theirs], [4, 4]) == pytest.approx([2, 2])
    assert passes_interval([2.0]).high == float("inf")  # one pass says nothing about the next


@pytest.mark.parametrize(
    ("nodes", "busy_s", "foreign"),
    [
        (("a", "a"), (2.5, 2.5), 0.25),  # one machine was busy for 2.5 s, its ranks for 2 s of them
        (("a", "b"), (1.0, 2.0), 0.5),  # two machines; each rank used 1 s of its own
        (("a", "b"), (1.0, None), None),
    ],
)
def test_the_load_of_other_programs_is_that_of_the_node_with_most(nodes, busy_s, foreign):
    times = RankTimes("f", 1, [0.1, 0.1], None, None, None)
    records = [
        RankRecord((times,), 1, 1, "cpu", LoadReading(2.0, 1.0, busy, node))
        for node, busy in zip(nodes, busy_s, strict=True)
    ]
    (found,) = combine(records, Subject())
    assert found.facts.get("foreign_load") == foreign


def test_a_reading_names_its_node():
    with CpuLoad() as load:
        pass
    assert load.reading.node
