"""``pdlcheck compare`` finds a planted slow-down, sees no difference in equal runs, and refuses other files."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pdlcheck.cli import main
from pdlcheck.comparison.pairs import compare
from pdlcheck.comparison.runs import read_run

PASSES, ROUNDS = 3, 20


def write(folder, name, *, seed, slower=1.0, machine=1.0, passes=PASSES, others="bcd", machine_info=None):
    """Write a run of tests, one with a counterpart and others without; the machine's speed varies by pass."""
    draw = np.random.default_rng(seed)
    names = ["test_a[2ranks]", "test_a[2ranks] [torch]", *(f"test_{letter}[2ranks]" for letter in others)]
    data = {one: [] for one in names}
    for _ in range(passes):
        mood = machine * draw.lognormal(sigma=0.15)
        for row in names:
            own = draw.lognormal(sigma=0.01)  # noise of this function in this pass
            for _ in range(ROUNDS):
                data[row].append(mood * own * draw.lognormal(sigma=0.05) * (slower if row == "test_a[2ranks]" else 1.0))
    rows = []
    for row, seconds in data.items():
        facts = {"pass_rounds": [ROUNDS] * passes, "median_s": 1.0}
        if row.endswith("[torch]"):
            facts["way"] = "torch"
        stats = {"data": seconds, "median": float(np.median(seconds))}
        rows.append({"name": row, "fullname": f"bench.py::{row}", "stats": stats, "extra_info": facts})
    path = folder / f"{name}.json"
    info = machine_info or {"pdlcheck": {"cpu": "EPYC", "usable_cores": 2, "packages": {"torch": "2.13.0"}}}
    path.write_text(json.dumps({"benchmarks": rows, "machine_info": info, "commit_info": {"id": "0123456789abcdef"}}))
    return path


def verdicts(before, after, limit=1.1):
    found = compare(read_run(before), read_run(after), limit)
    return {pair.name.partition("::")[2]: pair.verdict for pair in found.pairs}


def test_a_slow_down_of_a_fifth_is_found_ten_times_of_ten(tmp_path):
    for seed in range(10):
        a, b = write(tmp_path, "a", seed=seed), write(tmp_path, "b", seed=100 + seed, slower=1.2)
        assert verdicts(a, b)["test_a[2ranks]"] == "slower", seed
        assert verdicts(b, a)["test_a[2ranks]"] == "faster", seed


def test_equal_runs_are_not_told_apart_also_on_a_machine_twice_as_slow(tmp_path):
    for seed in range(10):
        a = write(tmp_path, "a", seed=seed, others="bcdefgh")
        b = write(tmp_path, "b", seed=100 + seed, others="bcdefgh", machine=2.0)
        found = verdicts(a, b).values()
        assert "slower" not in found, seed
        assert "faster" not in found, seed


def test_runs_without_any_spread_are_told_apart_too(tmp_path):
    def constant(name, seconds):
        rows = [
            {
                "name": row,
                "fullname": row,
                "stats": {"data": [value] * 6, "median": value},
                "extra_info": {"pass_rounds": [2, 2, 2]},
            }
            for row, value in (("a", seconds), ("b", 0.1), ("c", 0.1))
        ]
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"benchmarks": rows}))
        return read_run(path)

    before, same, slower = constant("before", 0.1), constant("same", 0.1), constant("slower", 0.2)
    assert [pair.verdict for pair in compare(before, same, 1.1).pairs] == ["as fast"] * 3
    assert [pair.verdict for pair in compare(before, slower, 1.1).pairs] == ["slower", "as fast", "as fast"]


def few_rows(folder, name, seconds, *, seed):
    """Write a run of two functions of a project, which share the code that became slower."""
    draw = np.random.default_rng(seed)
    rows = []
    for row in ("forward", "backward"):
        stats = {"data": [seconds * draw.lognormal(sigma=0.01) for _ in range(12)], "median": seconds}
        rows.append({"name": row, "fullname": row, "stats": stats, "extra_info": {"pass_rounds": [4] * 3}})
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"benchmarks": rows}))
    return path


def test_few_rows_that_all_became_slower_are_slower(tmp_path):
    before, after = few_rows(tmp_path, "a", 0.01, seed=0), few_rows(tmp_path, "b", 0.012, seed=1)
    same = few_rows(tmp_path, "c", 0.01, seed=2)
    found = compare(read_run(before), read_run(after), 1.1)
    assert [(pair.verdict, pair.judged_by) for pair in found.pairs] == [("slower", "time")] * 2
    assert not compare(read_run(before), read_run(same), 1.1).slower


def test_a_limit_lets_small_changes_pass(tmp_path):
    a, b = write(tmp_path, "a", seed=0), write(tmp_path, "b", seed=1, slower=1.2)
    assert verdicts(a, b, limit=1.3)["test_a[2ranks]"] in ("as fast", "unclear")


def test_the_command_prints_machines_rows_and_the_verdict(tmp_path, capsys):
    a, b = write(tmp_path, "a", seed=0), write(tmp_path, "b", seed=1, slower=1.5)
    assert main(["compare", str(a), str(b)]) == 1
    text = capsys.readouterr().out
    assert "slower in b than in a: 1 row: bench.py::test_a[2ranks]" in text
    assert "EPYC" in text
    assert "0123456789" in text
    assert main(["compare", str(a), str(a)]) == 0
    assert "no row of" in capsys.readouterr().out


def test_markdown_shows_what_changed_and_folds_the_rest(tmp_path, capsys):
    a, b = write(tmp_path, "a", seed=0), write(tmp_path, "b", seed=1, slower=1.5)
    assert main(["compare", str(a), str(b), "--markdown"]) == 1
    text = capsys.readouterr().out
    assert "| benchmark | a | b |" in text
    assert "<details><summary>all 5 rows</summary>" in text
    assert main(["compare", str(a), str(b), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [row["verdict"] for row in found["comparisons"][0]["rows"]][:2] == ["slower", "reference"]


def test_runs_in_folders_of_their_own_are_told_apart(tmp_path, capsys):
    for name in ("main", "branch"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "run", seed=0)
    main(["compare", str(tmp_path / "main" / "run.json"), str(tmp_path / "branch" / "run.json")])
    assert "branch/run" in capsys.readouterr().out


def test_one_pass_is_said_to_be_too_few(tmp_path, capsys):
    a, b = (write(tmp_path, name, seed=seed, passes=1) for seed, name in enumerate("ab"))
    main(["compare", str(a), str(b)])
    assert "intervals are too narrow: measure in passes, with `pdlcheck bench --passes 3`" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("{", "is no JSON"),
        ("[]", "is no run of pytest-benchmark"),
        ('{"benchmarks": [{"fullname": "a"}]}', "is no run of pytest-benchmark (KeyError"),
        ('{"benchmarks": [{"fullname": "a", "name": "a", "stats": {"data": [-1]}}]}', "a has the times [-1.0]"),
        ("[" * 100_000, "is no JSON"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path, capsys, content, words):
    good, bad = write(tmp_path, "a", seed=0), tmp_path / "bad.json"
    if content is not None:
        bad.write_text(content)
    assert main(["compare", str(good), str(bad)]) == 2
    said = capsys.readouterr().err
    assert "bad.json" in said
    assert words in said


def test_wrong_arguments(tmp_path, capsys):
    a = write(tmp_path, "a", seed=0)
    assert main(["compare", str(a)]) == 2
    assert "give two files or more" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["compare", str(a), str(a), "--limit", "1"])
    assert "must be above 1" in capsys.readouterr().err
    other = tmp_path / "b.json"
    other.write_text('{"benchmarks": []}')
    assert main(["compare", str(a), str(other)]) == 1
    assert "no row in common" in capsys.readouterr().err
