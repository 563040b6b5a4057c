"""``pdlcheck pagerank``, run as a user runs it: in a process of its own."""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from pdlcheck.primitives.pagerank import Graph, pagerank

pexpect = pytest.importorskip("pexpect", reason="a terminal is played by pexpect: pip install 'pdlcheck[dev]'")

COMMAND = [sys.executable, "-m", "pdlcheck", "pagerank"]


def run(*arguments, folder):
    return subprocess.run([*COMMAND, *map(str, arguments)], cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture
def web(tmp_path):
    """A random graph in a text file, and its scores."""
    src, dst = np.random.default_rng(0).integers(0, 60, (2, 300))
    path = tmp_path / "web.txt"
    path.write_text("# a web\n" + "".join(f"{u} {v}\n" for u, v in zip(src, dst, strict=True)))
    return path, Graph.from_edges(src, dst)


def test_the_best_nodes_are_printed_with_their_scores_and_what_it_took(web):
    path, graph = web
    found = run(path.name, "--top", 3, folder=path.parent)
    assert found.returncode == 0, found.stderr
    best = pagerank(graph).top(3)
    rows = re.findall(r"^ *(\d+) +(\d+) +(\d\.\d+e-\d+) *$", found.stdout, re.M)
    assert [(int(rank), int(node)) for rank, node, _ in rows] == [(i + 1, node) for i, (node, _) in enumerate(best)]
    assert [float(score) for *_, score in rows] == pytest.approx([score for _, score in best], rel=1e-6)
    assert re.search(r"^60 nodes, 300 edges, \d+ iterations, error at most \d(\.\d)?e-(09|1\d)$", found.stdout, re.M)
    assert re.search(r"^seconds: read [\d.]+, build [\d.]+, solve [\d.]+; peak memory [\d.]+ GiB$", found.stdout, re.M)


def test_progress_is_on_stderr_one_line_a_phase(web):
    path, _ = web
    told = run(path, folder=path.parent).stderr.splitlines()
    assert [line.split()[0] for line in told[:3]] == ["read", "build", "solve"]


def test_a_terminal_shows_a_bar(web):
    path, _ = web
    child = pexpect.spawn(COMMAND[0], [*COMMAND[1:], str(path)], timeout=120, encoding="utf-8", dimensions=(30, 100))
    child.expect(r"solve .*round \d+, error at most")
    child.expect(r"60 nodes, 300 edges")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_a_terminal_that_cannot_write_every_letter_gets_its_table(web):
    path, _ = web
    narrow = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "20"}  # so that the ends of words are left out
    found = subprocess.run([*COMMAND, str(path)], env=narrow, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert re.search(r"^\| +1 \| +\d+ \| \d\.\d+\?\|$", found.stdout, re.M), found.stdout


def test_damping_and_tol_are_honoured_and_all_scores_are_saved(web):
    path, graph = web
    found = run(path, "--damping", 0.5, "--tol", "1e-11", "--output", "scores.npz", folder=path.parent)
    assert found.returncode == 0, found.stderr
    with np.load(path.parent / "scores.npz") as saved:
        expected = pagerank(graph, damping=0.5, tol=1e-12).scores
        assert np.abs(saved["scores"] - expected).sum() <= 2e-11
        assert saved["error_bound"] <= 1e-11
    assert sorted(file.name for file in path.parent.iterdir()) == ["scores.npz", "web.txt"]


def test_a_tol_finer_than_float64_is_a_failure_that_still_shows_its_scores(web):
    path, _ = web
    found = run(path, "--tol", "1e-30", folder=path.parent)
    assert found.returncode == 1
    assert "error at most" in found.stdout
    assert "float64 cannot promise --tol 1e-30 here; use a larger one" in found.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 1\n1 x\n", "pdlcheck pagerank: web.txt:2: this is not a number"),
        ("0 1\n1", "pdlcheck pagerank: web.txt:2: an edge needs two ids, here is one"),
        ("0 999999999999999\n", "web.txt:1: node id 999999999999999 asks for 1000000000000000 nodes, which needs"),
    ],
    ids=["word", "truncated", "huge"],
)
def test_a_wrong_file_is_exit_code_1_with_its_line(web, text, message):
    path, _ = web
    path.write_text(text)
    found = run(path.name, "--output", "scores.npz", folder=path.parent)
    assert found.returncode == 1
    assert message in found.stderr
    assert "Traceback" not in found.stderr
    assert not (path.parent / "scores.npz").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.txt"], "argument FILE: must be a file of edges; there is none at 'missing.txt'"),
        (["."], "argument FILE: must be a file of edges"),
        (["web.txt", "--top", "0"], "--top: must be a whole number of at least 1; got '0'"),
        (["web.txt", "--damping", "1"], "--damping: must be a number from 0 to below 1; got '1'"),
        (["web.txt", "--damping", "nan"], "--damping: must be a number from 0 to below 1; got 'nan'"),
        (["web.txt", "--tol", "0"], "--tol: must be a number above 0; got '0'"),
        (["web.txt", "--tol", "tight"], "--tol: must be a number above 0; got 'tight'"),
        (["web.txt", "--output", "scores.txt"], "--output: must be a file that ends in .npz"),
        (["web.txt", "--output", "no/scores.npz"], "in a folder that exists and can be written; got 'no/scores.npz'"),
        (["web.txt", "--output", "a folder.npz"], "must be a file that ends in .npz"),
        (["web.npz", "--output", "./web.npz"], "--output: must not be FILE, whose edges would be lost; got 'web.npz'"),
        (["pipe"], "argument FILE: must be a file of edges; 'pipe' is a pipe, write it to a file first"),
        ([], "the following arguments are required: FILE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_are_exit_code_2_with_the_cure(web, arguments, message):
    (web[0].parent / "a folder.npz").mkdir()
    np.savez(web[0].parent / "web.npz", src=web[1].src, dst=web[1].dst)
    os.mkfifo(web[0].parent / "pipe")
    found = run(*arguments, folder=web[0].parent)
    assert found.returncode == 2
    assert message in found.stderr
    assert "Traceback" not in found.stderr


def sigint_is_on():
    """Also where a shell started this in the background and so had it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("phase", ["read", "build"])
def test_ctrl_c_ends_it_with_one_line_and_leaves_no_file(tmp_path, phase):
    """A gzip file of many equal members: small, but it takes seconds to read."""
    members = 40 if phase == "read" else 3
    (tmp_path / "edges.gz").write_bytes(gzip.compress(b"0 1\n1 2\n2 0\n" * 300_000, 1) * members)
    command = [*COMMAND, "edges.gz", "--output", "scores.npz"]
    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=sigint_is_on
    ) as process:
        told = ""
        while not told.startswith(phase):
            told = process.stderr.readline()
            assert told, "it ended before it could be interrupted"
        asked = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate(timeout=120)
    assert process.returncode == 130
    assert rest.endswith("pdlcheck pagerank: interrupted\n")
    assert "Traceback" not in rest
    assert out == ""
    assert time.monotonic() - asked < 60
    assert [file.name for file in tmp_path.iterdir()] == ["edges.gz"]
