"""The pictures of a run: Chrome-trace JSON and SVG, by hand and for every test of a session."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist

from pdlcheck.clock import Link, Topology, compute
from pdlcheck.clock.svg import _nice
from pdlcheck.errors import Deadlock
from pdlcheck.primitives import ring_all_reduce
from pdlcheck.worlds import get_world

from .timed_programs import gpipe, one_f_one_b

TOPOLOGY = Topology(devices=2, intra=Link(20e-6, 1), inter=Link(100e-6, 0.1))
SVG = "{http://www.w3.org/2000/svg}"


def all_kinds():
    """Compute beside a collective, send messages in both directions, and let one rank be last."""
    rank, n = dist.get_rank(), dist.get_world_size()
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    compute(1e-3 * (rank + 1))
    work.wait()
    ring_all_reduce(torch.ones(n * 10))


def then_all_send():
    compute(1e-3)
    dist.barrier()
    dist.send(torch.ones(3), (dist.get_rank() + 1) % dist.get_world_size())


def run(program, *args, world_size=4, fails=False, **options):
    world = get_world("sim", **options)
    if fails:
        with pytest.raises(Deadlock):
            world.run(program, *args, world_size=world_size)
    else:
        world.run(program, *args, world_size=world_size)
    return world.timeline


RUNS = {
    "all_kinds": lambda: run(all_kinds, topology=TOPOLOGY),
    "1f1b": lambda: run(one_f_one_b, 4, 1e-3, topology=TOPOLOGY),
    "free_links": lambda: run(gpipe, 3, 1e-3, topology=Topology(intra=Link())),
    "steps": lambda: run(all_kinds, timeline=True),
    "deadlock": lambda: run(then_all_send, topology=TOPOLOGY, fails=True),
    "deadlock_in_steps": lambda: run(then_all_send, timeline=True, fails=True),
    "deadlock_at_once": lambda: run(dist.recv, torch.ones(1), 0, world_size=2, timeline=True, fails=True),
    "buffered": lambda: run(all_kinds, topology=TOPOLOGY, semantics="buffered"),
    "64_ranks": lambda: run(gpipe, 3, 1e-3, world_size=64, topology=TOPOLOGY, schedule="first"),
    "nothing": lambda: run(int, timeline=True),
}


@pytest.fixture(params=RUNS)
def timeline(request):
    return RUNS[request.param]()


# -- Chrome trace ----------------------------------------------------------------------------------


def test_a_chrome_trace_holds_every_span_and_message(timeline, tmp_path):
    events = json.loads(timeline.save(tmp_path / "run.json").read_text())["traceEvents"]
    by_phase = defaultdict(list)
    for event in events:
        by_phase[event["ph"]].append(event)
    assert set(by_phase) <= {"M", "X", "s", "f"}
    names = {event["pid"]: event["args"]["name"] for event in by_phase["M"] if event["name"] == "process_name"}
    assert names == {rank: f"rank {rank}" for rank in range(timeline.world_size)}
    scale = 1 if timeline.in_steps else 1e6
    assert [
        (event["pid"], event["cat"], event["name"].removeprefix("wait: "), event["ts"], event["args"]["what"])
        for event in by_phase["X"]
    ] == [(span.rank, span.kind, span.op, span.start_s * scale, span.what) for span in timeline.spans]
    for event, span in zip(by_phase["X"], timeline.spans, strict=True):
        assert event["args"] == {
            "what": span.what,
            "at": span.where,
            "nbytes": span.nbytes,
            "never ends": span.never_ends,
        }
        if not span.never_ends:
            assert event["dur"] == pytest.approx((span.end_s - span.start_s) * scale)
        assert event["dur"] >= 0
        assert event["dur"] > 0 or span.kind == "communication"


def test_boxes_of_a_thread_do_not_overlap(timeline, tmp_path):
    events = json.loads(timeline.save(tmp_path / "run.json").read_text())["traceEvents"]
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert {thread for _, thread in threads} <= {0, 1, 2}
    for boxes in threads.values():
        boxes.sort()
        for (_, end), (start, _) in pairwise(boxes):
            assert start >= end - 1e-6


def test_the_two_ends_of_a_flow_lie_on_the_send_and_on_its_receive(timeline, tmp_path):
    events = json.loads(timeline.save(tmp_path / "run.json").read_text())["traceEvents"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == len(timeline.messages)
    boxes = {(event["pid"], event["tid"], event["name"], event["ts"]) for event in events if event["ph"] == "X"}
    for number, message in enumerate(timeline.messages):
        start, end = starts[number], ends[number]
        assert (start["pid"], end["pid"], end["bp"]) == (message.src, message.dst, "e")
        assert (start["pid"], start["tid"], "send", start["ts"]) in boxes
        assert (end["pid"], end["tid"], "recv", end["ts"]) in boxes


# -- SVG -------------------------------------------------------------------------------------------


def drawn(timeline, tmp_path):
    return ElementTree.fromstring(timeline.save(tmp_path / "run.svg").read_text(encoding="utf-8"))


def boxes_of(picture):
    return [(box.get("class"), box) for box in picture.iter(f"{SVG}rect") if box.get("class")]


def number(element, name):
    return float(element.get(name))


def test_all_of_a_picture_lies_on_its_canvas(timeline, tmp_path):
    picture = drawn(timeline, tmp_path)
    width, height = number(picture, "width"), number(picture, "height")
    for box in picture.iter(f"{SVG}rect"):
        x, y = float(box.get("x", 0)), float(box.get("y", 0))
        assert min(x, y) >= 0
        assert x + number(box, "width") <= width + 0.01
        assert y + number(box, "height") <= height + 0.01
    for line in picture.iter(f"{SVG}line"):
        assert all(0 <= number(line, name) <= width for name in ("x1", "x2"))
        assert all(0 <= number(line, name) <= height for name in ("y1", "y2"))


def test_a_picture_has_a_lane_for_each_rank_and_an_arrow_for_each_message(timeline, tmp_path):
    picture = drawn(timeline, tmp_path)
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert [text for text in texts if text.startswith("rank ")] == [f"rank {r}" for r in range(timeline.world_size)]
    assert texts[0].startswith(f"{timeline.world_size} rank")
    arrows = [line for line in picture.iter(f"{SVG}line") if line.get("class") == "message"]
    assert len(arrows) == len(timeline.messages)


def test_a_box_is_as_long_as_what_it_shows(tmp_path):
    timeline = run(one_f_one_b, 4, 1e-3, topology=TOPOLOGY)
    picture = drawn(timeline, tmp_path)
    shown = [(number(box, "x"), number(box, "width")) for kind, box in boxes_of(picture) if kind == "compute"]
    spans = [span for span in timeline.spans if span.kind == "compute"]
    assert len(shown) == len(spans)
    pixels = 1180 / timeline.step_time_s
    for (x, width), span in zip(shown, spans, strict=True):
        assert x == pytest.approx(76 + span.start_s * pixels, abs=0.01)
        assert width == pytest.approx((span.end_s - span.start_s) * pixels, abs=0.01)


def test_ranks_that_wait_for_ever_are_red(tmp_path):
    picture = drawn(RUNS["deadlock"](), tmp_path)
    red = [box for kind, box in boxes_of(picture) if box.get("stroke")]
    assert [box.get("class") for box in red] == ["wait"] * 4
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert texts[0] == "4 ranks, 4 of them wait for ever"
    titles = [title.text for title in picture.iter(f"{SVG}title")]
    assert sum("waits for send to rank 0 of float32 (3,)" in title and "for ever" in title for title in titles) == 1


def test_the_title_tells_the_figures(tmp_path):
    picture = drawn(run(gpipe, 3, 1e-3, topology=Topology(intra=Link())), tmp_path)
    assert next(picture.iter(f"{SVG}text")).text == "4 ranks, 18 ms, bubble 50.0%"


def test_narrow_boxes_are_drawn_together(tmp_path):
    def many():
        for _ in range(3000):
            compute(1e-6)

    picture = drawn(run(many, world_size=2, topology=TOPOLOGY), tmp_path)
    boxes = boxes_of(picture)
    assert len(boxes) == 2
    assert all(number(box, "width") == pytest.approx(1180, abs=0.1) for _, box in boxes)


@pytest.mark.parametrize(("step", "nice"), [(0.3, 0.5), (1.0, 1.0), (1.1, 2.0), (7.0, 10.0), (40.0, 50.0)])
def test_the_axis_counts_in_round_numbers(step, nice):
    assert _nice(step) == pytest.approx(nice)


def test_another_suffix_is_refused_with_the_cure(tmp_path):
    with pytest.raises(ValueError, match=r"path must end in .json or .svg, got 'run.png'; name it run.svg"):
        RUNS["steps"]().save(tmp_path / "run.png")
    assert not list(tmp_path.iterdir())


# -- in a pytest session ---------------------------------------------------------------------------

TESTS = """
    import pytest, torch, torch.distributed as dist

    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("n", [3], ids=["a/b c"])
    def test_well(rank, n):
        dist.all_reduce(torch.ones(n))

    @pytest.mark.world_size(3)
    def test_ring(rank, world_size):
        dist.send(torch.ones(1), (rank + 1) % world_size)

    def test_controller(world):
        world.run(lambda: dist.barrier(), world_size=2)
        world.run(lambda: dist.all_reduce(torch.ones(1)), world_size=4)

    def test_runs_nothing(world):
        pass

    def test_without_ranks():
        pass
"""


def test_a_session_draws_every_test_of_simulated_ranks(pytester):
    pytester.makepyfile(test_it=TESTS)
    result = pytester.runpytest_inprocess("--timeline", "pictures", "--world", "sim,gloo", "-k", "sim or without")
    result.assert_outcomes(passed=4, failed=1, deselected=4)
    result.stdout.fnmatch_lines(["*timeline*", "pictures/test_it.py-test_ring-sim-3.svg"])
    folder = pytester.path / "pictures"
    stems = [
        "test_it.py-test_controller-sim",
        "test_it.py-test_ring-sim-3",
        "test_it.py-test_well-sim-2-a-b-c-DIGEST",
    ]
    assert sorted(re.sub(r"-[0-9a-f]{8}\.", "-DIGEST.", path.name) for path in folder.iterdir()) == [
        stem + suffix for stem in stems for suffix in (".json", ".svg")
    ]
    ring = ElementTree.parse(folder / f"{stems[1]}.svg").getroot()
    assert next(ring.iter(f"{SVG}text")).text == "3 ranks, 3 of them wait for ever"
    last = ElementTree.parse(folder / f"{stems[0]}.svg").getroot()
    assert next(last.iter(f"{SVG}text")).text == "4 ranks, 1 steps"


# an inner run in this process finds the files of a project that is installed in place already imported
ERRORS = ("-W", "error", "-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")

OF_ODD_NAMES = """
    import pytest

    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("p", range(5), ids=["a/b", "a-b", "x" * 300, "x" * 301, "\u00e4" * 300])
    def test_a(rank, p): pass
"""


def test_each_test_has_a_picture_of_its_own_whatever_it_is_called(pytester):
    pytester.makepyfile(test_it=OF_ODD_NAMES)
    pytester.runpytest_inprocess("--timeline", "pictures", *ERRORS).assert_outcomes(passed=5)
    assert len(list((pytester.path / "pictures").iterdir())) == 2 * 5


def test_a_picture_that_cannot_be_written_is_a_warning(pytester):
    pytester.makepyfile(test_it=TESTS)
    name = "test_it.py-test_controller-sim.json"
    (pytester.path / "pictures" / name).mkdir(parents=True)  # blocks the path of the file
    result = pytester.runpytest_inprocess("--timeline", "pictures", "-k", "controller or ring", *ERRORS)
    result.assert_outcomes(passed=1, failed=1, deselected=3, warnings=1)
    result.stdout.fnmatch_lines(
        ["*timeline*", "pictures/test_it.py-test_ring-sim-3.svg", "*no picture of *controller* in pictures: Is a dir*"]
    )


def test_a_file_is_no_folder_for_pictures(pytester):
    pytester.makepyfile(test_it=TESTS, taken="")
    result = pytester.runpytest_inprocess("--timeline", "taken.py")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--timeline takes a folder for pictures; 'taken.py' is a file*"])


def test_without_the_option_nothing_is_kept_or_written(pytester):
    pytester.makepyfile(test_it=TESTS)
    before = set(pytester.path.iterdir())
    pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "well").assert_outcomes(passed=1, deselected=4)
    assert {path.name for path in set(pytester.path.iterdir()) - before} <= {"__pycache__", ".benchmarks"}
