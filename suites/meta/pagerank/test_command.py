"""``pdlcheck pagerank``, run as a user runs it; output and exit codes alone are tested in this process."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

import networkx as nx
import numpy as np
import pytest

from pdlcheck.cli import main
from pdlcheck.primitives.pagerank import Graph, pagerank

pexpect = pytest.importorskip("pexpect", reason="a terminal is played by pexpect: pip install 'pdlcheck[dev]'")

COMMAND = [sys.executable, "-m", "pdlcheck", "pagerank"]


def run(*arguments, folder):
    return subprocess.run([*COMMAND, *map(str, arguments)], cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Return a function that runs the command in this process, which has already done the slow imports."""

    def call(*arguments, folder):
        monkeypatch.chdir(folder)
        try:
            code = main(["pagerank", *map(str, arguments)])
        except SystemExit as end:
            code = end.code
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return call


@pytest.fixture
def web(tmp_path):
    """Return a random graph in a text file, and the graph."""
    src, dst = np.random.default_rng(0).integers(0, 60, (2, 300))
    path = tmp_path / "web.txt"
    path.write_text("# a web\n" + "".join(f"{u} {v}\n" for u, v in zip(src, dst, strict=True)))
    return path, Graph.from_edges(src, dst)


@pytest.mark.slow
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
    told = found.stderr.splitlines()  # the progress, one line a phase
    assert [line.split()[0] for line in told[:3]] == ["read", "build", "solve"]


@pytest.mark.slow
def test_a_terminal_shows_a_bar(web):
    path, _ = web
    child = pexpect.spawn(COMMAND[0], [*COMMAND[1:], str(path)], timeout=120, encoding="utf-8", dimensions=(30, 100))
    child.expect(r"solve .*round \d+, error at most")
    child.expect(r"60 nodes, 300 edges")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


@pytest.mark.slow
def test_a_terminal_that_cannot_write_every_letter_gets_its_table(web):
    path, _ = web
    narrow = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "20"}  # narrow enough to truncate words
    found = subprocess.run([*COMMAND, str(path)], env=narrow, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert re.search(r"^\| +1 \| +\d+ \| \d\.\d+\?\|$", found.stdout, re.M), found.stdout


def test_damping_and_tol_are_honoured_and_all_scores_are_saved(web, run_here):
    path, graph = web
    found = run_here(path, "--damping", 0.5, "--tol", "1e-11", "--output", "scores.npz", folder=path.parent)
    assert found.returncode == 0, found.stderr
    with np.load(path.parent / "scores.npz") as saved:
        expected = pagerank(graph, damping=0.5, tol=1e-12).scores
        assert np.abs(saved["scores"] - expected).sum() <= 2e-11
        assert saved["error_bound"] <= 1e-11
    assert sorted(file.name for file in path.parent.iterdir()) == ["scores.npz", "web.txt"]


def test_a_tol_finer_than_float64_is_a_failure_that_still_shows_its_scores(web, run_here):
    path, _ = web
    found = run_here(path, "--tol", "1e-30", folder=path.parent)
    assert found.returncode == 1
    assert "error at most" in found.stdout
    assert "float64 cannot promise --tol 1e-30 here; use a larger one" in found.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 1\n1 x\n", "pdlcheck pagerank: web.txt:2: this is not a number"),
        ("0 1\n1", "pdlcheck pagerank: web.txt:2: an edge needs two ids, here is one"),
        ("0 1 1290000000\n", "web.txt:1: the third column holds 1290000000, a weight, a count or a time; pass --w"),
        ("", "pdlcheck pagerank: web.txt is empty, 0 bytes; get the file again"),
    ],
    ids=["word", "truncated", "times", "empty"],
)
def test_a_wrong_file_is_exit_code_1_with_its_line(web, text, message, run_here):
    path, _ = web
    path.write_text(text)
    found = run_here(path.name, "--output", "scores.npz", folder=path.parent)
    assert found.returncode == 1
    assert message in found.stderr
    assert "Traceback" not in found.stderr
    assert not (path.parent / "scores.npz").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.txt"], "FILE: must be a file of edges, or - for standard input; there is none at 'missing.txt'"),
        (["."], "argument FILE: must be a file of edges"),
        (["web.txt", "--top", "0"], "--top: must be a whole number of at least 1; got '0'"),
        (["web.txt", "--damping", "1"], "--damping: must be a number from 0 to below 1; got '1'"),
        (["web.txt", "--damping", "nan"], "--damping: must be a number from 0 to below 1; got 'nan'"),
        (["web.txt", "--tol", "0"], "--tol: must be a number above 0; got '0'"),
        (["web.txt", "--tol", "tight"], "--tol: must be a number above 0; got 'tight'"),
        (["web.txt", "--output", "scores.txt"], "--output: must be a file that ends in .csv, .json, .npz, .parquet"),
        (["web.txt", "--output", "no/scores.npz"], "in a folder that exists and can be written; got 'no/scores.npz'"),
        (["web.txt", "--output", "a folder.npz"], "must be a file that ends in .csv"),
        (["web.txt", "--output", "pipe.csv"], "must be a file that ends in .csv"),
        (["web.txt", "--columns", "1"], "--columns: must be SRC,DST or SRC,DST,WEIGHT, all different"),
        (["web.txt", "--columns", "1,2", "--weights"], "columns are (1, 2) and weights=True; name a third column"),
        (["web.txt", "--delimiter", "::"], "--delimiter: must be one character, or tab, comma, semicolon, space"),
        (["web.txt", "--delimiter", "1"], "delimiter must be one ASCII character that is no part of a number, got '1'"),
        (["web.txt", "--format", "xml"], "--format: invalid choice: 'xml'"),
        (["web.txt", "--num-nodes", "0"], "--num-nodes: must be a whole number of at least 1; got '0'"),
        (["web.npz", "--output", "./web.npz"], "--output: must not be FILE, whose edges would be lost; got 'web.npz'"),
        ([], "the following arguments are required: FILE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_are_exit_code_2_with_the_cure(web, arguments, message, run_here):
    (web[0].parent / "a folder.npz").mkdir()
    np.savez(web[0].parent / "web.npz", src=web[1].src, dst=web[1].dst)
    os.mkfifo(web[0].parent / "pipe.csv")
    found = run_here(*arguments, folder=web[0].parent)
    assert found.returncode == 2
    assert message in found.stderr
    assert "Traceback" not in found.stderr


NAMED = "from,to,weight\nann,bob,2\nbob,[red]cy,0.5\nann,[red]cy,1\n[red]cy,ann,1\n"


def named_scores():
    graph = nx.DiGraph()
    edges = [line.split(",") for line in NAMED.splitlines()[1:]]
    graph.add_weighted_edges_from((u, v, float(weight)) for u, v, weight in edges)
    return nx.pagerank(graph, tol=1e-14, max_iter=2000)


@pytest.mark.parametrize("suffix", ["csv", "json", "npz", "parquet"])
def test_names_go_from_standard_input_to_the_table_and_to_all_scores(tmp_path, suffix, run_here, monkeypatch):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    if suffix == "csv":
        command = [*COMMAND, "-", "--output", f"s.{suffix}"]
        found = subprocess.run(command, cwd=tmp_path, input=NAMED, capture_output=True, text=True, timeout=300)
    else:
        with tempfile.TemporaryFile("w+") as file:
            file.write(NAMED)
            file.seek(0)
            monkeypatch.setattr(sys, "stdin", file)
            found = run_here("-", "--output", f"s.{suffix}", folder=tmp_path)
    assert found.returncode == 0, found.stderr
    assert re.search(r"^ +1 +\[red\]cy +\d\.\d+e-01 *$", found.stdout, re.M)
    how = "text, commas between fields, edges from 'from' to 'to', ids are names, weights from 'weight'"
    where = "standard input" if suffix == "csv" else r"file descriptor \d+"  # the name of the stream in this process
    assert re.search(rf"^{where}: {re.escape(how)}$", found.stderr, re.M)
    scores = saved(tmp_path / f"s.{suffix}")
    assert scores == pytest.approx(named_scores(), abs=1e-8)
    if suffix != "npz":
        assert list(scores.values()) == sorted(scores.values(), reverse=True)
    assert [file.name for file in tmp_path.iterdir()] == [f"s.{suffix}"]


def saved(path):
    """Return the scores in a file, by node."""
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            return {row["node"]: float(row["score"]) for row in csv.DictReader(file)}
    if path.suffix == ".json":
        return {row["node"]: row["score"] for row in json.loads(path.read_text(encoding="utf-8"))["scores"]}
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return dict(zip(arrays["ids"].tolist(), arrays["scores"].tolist(), strict=True))
    import pyarrow.parquet as pq

    return dict(zip(*pq.read_table(path).to_pydict().values(), strict=True))


@pytest.mark.parametrize("suffix", ["csv", "json", "npz"])
def test_ids_with_gaps_are_named_as_in_the_file_and_the_others_are_counted(tmp_path, suffix, run_here):
    (tmp_path / "e.txt").write_text("# Directed graph: e.txt\n# Nodes: 3 Edges: 3\n0\t4\n4\t9\n9\t0\n")
    found = run_here("e.txt", "--output", f"s.{suffix}", folder=tmp_path)
    assert "note: 7 of the ids from 0 to 9 have no edge and are no nodes; --num-nodes 10 ranks them too" in found.stderr
    node = str if suffix == "csv" else int
    assert {node(i): 1 / 3 for i in (0, 4, 9)} == pytest.approx(saved(tmp_path / f"s.{suffix}"))
    found = run_here("e.txt", "--num-nodes", 10, folder=tmp_path)
    assert "10 nodes, 3 edges" in found.stdout
    assert "note" not in found.stderr


def test_ids_from_1_leave_out_0(tmp_path, run_here):
    (tmp_path / "e.txt").write_text("1 2\n2 3\n3 1\n")
    found = run_here("e.txt", folder=tmp_path)
    assert "note: 1 of the ids from 0 to 3 has no edge and is no node; --num-nodes 4 ranks them too" in found.stderr
    assert "3 nodes, 3 edges" in found.stdout


def test_a_file_with_fewer_edges_than_it_says_is_noted(tmp_path, run_here):
    (tmp_path / "e.txt").write_text("# Nodes: 2 Edges: 5\n0 1\n1 0\n")
    found = run_here("e.txt", folder=tmp_path)
    assert "note: its first lines say 5 edges, it has 2; it may be truncated" in found.stderr


@pytest.mark.parametrize("kind", ["a link", "a file", "a pipe"])
def test_output_touches_no_other_file(web, kind, run_here):
    """Neither the target of a link beside it changes, nor the target of the old file if that was a link."""
    folder = web[0].parent
    (folder / "victim").write_text("precious")
    beside = folder / "s.npz.part"
    if kind == "a link":
        beside.symlink_to("victim")
        (folder / "s.npz").symlink_to("victim")
    elif kind == "a file":
        beside.write_text("mine")
    else:
        os.mkfifo(beside)
    before = {file.name for file in folder.iterdir()} | {"s.npz"}
    found = run_here(web[0], "--output", "s.npz", folder=folder)
    assert found.returncode == 0, found.stderr
    assert (folder / "victim").read_text() == "precious"
    assert kind != "a file" or beside.read_text() == "mine"
    assert len(saved(folder / "s.npz")) == 60
    assert not (folder / "s.npz").is_symlink()
    assert {file.name for file in folder.iterdir()} == before


def sigint_is_on():
    """Enable SIGINT, which a shell may have disabled for background processes."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("phase", ["read", "build"])
def test_ctrl_c_ends_it_with_one_line_and_leaves_no_file(tmp_path, phase):
    """The gzip file has many equal members: it is small, but takes seconds to read."""
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
