"""``pdlcheck report``: the contents of its three forms, and the arguments that it refuses."""

from __future__ import annotations

import json
import sys

import pytest

from pdlcheck.cli import main
from pdlcheck.verification.saved import read_verification

from .material import FAILURE, write_run, write_verification


def report(folder, *files, output):
    assert main(["report", *map(str, files), "--output", str(output)]) == 0
    return output.read_text() if output != "-" else ""


def test_markdown_has_a_sentence_for_each_experiment(tmp_path):
    text = report(tmp_path, write_run(tmp_path / "a.json"), output=tmp_path / "a.md")
    assert "# pdlcheck: EPYC" in text
    assert "2 of 2 models hold" in text
    assert "### gradients synchronised every k-th step, flat, 2 ranks (the model holds)" in text
    assert "T0 = 100 ms, Ts = 300 ms" in text
    assert "Prediction, not measured" in text
    assert "50% socket" in text, "a row stands beside the roof of its run"
    assert "| 0.5 | 250 | 225 .. 300 |" in text, "the points of a plot are a table"
    assert "a step takes 300 ms, the bubble is 20% of it" in text, "a simulated pipeline"
    assert "| processor | EPYC |" in text


def test_a_model_that_does_not_hold_comes_first_and_is_said_at_the_top(tmp_path):
    text = report(tmp_path, write_run(tmp_path / "a.json", right=False), output=tmp_path / "a.md")
    assert "**measured: 21 rows, 5 experiments; 1 of 2 models hold.**" in text
    assert text.index("(the model does not hold)") < text.index("(the model holds)")


def test_a_later_run_is_compared_with_the_first(tmp_path):
    before, after = write_run(tmp_path / "a.json"), write_run(tmp_path / "b.json", slower=1.5, machine="Xeon")
    text = report(tmp_path, before, after, output=tmp_path / "a.md")
    assert "# pdlcheck: EPYC beside Xeon" in text
    assert "**slower in b than in a: 2 rows" in text
    assert "## b beside a" in text
    text = report(tmp_path, before, before, output=tmp_path / "a.md")
    assert "no row of" in text
    assert "**slower" not in text


def test_runs_without_a_common_row_are_not_said_to_be_equal(tmp_path):
    other = {"name": "test_own", "fullname": "own.py::test_own", "stats": {"data": [0.1, 0.3, 0.2], "median": 0.2}}
    (tmp_path / "b.json").write_text(json.dumps({"benchmarks": [other]}))
    text = report(tmp_path, write_run(tmp_path / "a.json"), tmp_path / "b.json", output=tmp_path / "a.md")
    assert "have no row in common: nothing is compared**" in text
    assert "no row of" not in text
    assert "| test_own | 200 ms |" in text, "a row that pytest-benchmark measured has its median"


def test_a_test_of_somebody_else_may_have_a_name_of_ours(tmp_path):
    rows = [
        {"name": name, "fullname": name, "stats": {"data": [0.1], "median": 0.1}, "extra_info": {"median_s": 0.1}}
        for name in ("test_all_reduce[2ranks-a]", "test_all_reduce[2ranks-b]", "test_all_reduce[2ranks-c]")
    ]
    (tmp_path / "a.json").write_text(json.dumps({"benchmarks": rows}))
    assert "3 rows, 0 experiments" in report(tmp_path, tmp_path / "a.json", output=tmp_path / "a.md")


def test_failures_of_a_verification_are_shown_in_full(tmp_path):
    text = report(tmp_path, write_verification(tmp_path / "v.json", held=False), output=tmp_path / "a.md")
    assert "**verified: 3 properties, 1 failing: NOT all held.**" in text
    assert FAILURE in text
    assert "Run it again: `pytest -k x`" in text
    assert "| ring_all_reduce | sim | 1 | 20 | FAILS | 1.5 |" in text
    assert "mpi: left out: mpi4py is missing; pip install mpi4py" in text
    assert "1 skipped: needs a GPU" in text
    text = report(tmp_path, write_verification(tmp_path / "v.json"), output=tmp_path / "a.md")
    assert "verified: 3 properties, none failing, all held." in text
    assert "FAILS" not in text


def test_the_terminal_shows_the_same(tmp_path, capsys):
    files = [write_run(tmp_path / "a.json", right=False), write_verification(tmp_path / "v.json", held=False)]
    assert main(["report", *map(str, files), "--output", "-"]) == 0
    text = capsys.readouterr().out
    assert "gradients synchronised every k-th step, flat, 2 ranks: the model does not hold" in text
    assert "FAILS  test_comm.py::test_sum[sim]" in text
    assert FAILURE in text
    assert "replay  pytest -k x" in text
    assert "test_all_reduce[2ranks-4B]" in text
    assert "EPYC" in text


def test_what_is_verified_is_written_and_read_alike(tmp_path):
    path = write_verification(tmp_path / "v.json", held=False)
    found = read_verification(json.loads(path.read_text()))
    assert found.suites.failures[0].detail == FAILURE
    assert found.packages.agreements[0].difference == 1e-12
    assert found.replicas.runs[0].replicas == 2
    assert not found.held


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.json", None, "none.json: No such file or directory"),
        ("a.json", "{", "a.json is no JSON"),
        ("a.json", "[]", "a.json is no run of pytest-benchmark"),
        ("a.json", '{"made_by": "pdlcheck verify"}', "a.json is of another version of pdlcheck (KeyError: 'suites')"),
    ],
)
def test_files_that_are_no_runs_are_refused(tmp_path, monkeypatch, capsys, name, content, words):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_text(content)
    assert main(["report", name]) == 2
    assert f"pdlcheck report: {words}" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("a.pdf", "--output must end in .html or .md, or be -; got 'a.pdf'"),
        ("/no/such/folder/a.html", "--output /no/such/folder/a.html cannot be written: No such file or directory"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused(tmp_path, capsys, output, words):
    assert main(["report", str(write_run(tmp_path / "a.json")), "--output", output]) == 2
    assert words in capsys.readouterr().err


def test_without_the_library_of_plots_the_cure_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    run = write_run(tmp_path / "a.json")
    assert main(["report", str(run), "--output", str(tmp_path / "a.html")]) == 2
    assert "pip install 'pdlcheck[report]'" in capsys.readouterr().err
    assert report(tmp_path, run, output=tmp_path / "a.md")


def test_verify_refuses_a_file_that_it_cannot_write_before_it_starts(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["verify", "--world", "sim", "--json", "/no/such/folder/v.json"])
    assert stopped.value.code == 2
    assert "--json /no/such/folder/v.json cannot be written: No such file" in capsys.readouterr().err
