"""The page of measurements is made from its rows and from saved runs."""

from __future__ import annotations

import importlib.util
import tomllib

import pytest

from ..clone import ROOT

COMMAND = ROOT / "ci" / "measurements.py"
pytestmark = pytest.mark.skipif(not COMMAND.exists(), reason="needs ci/: run the suites in a clone of the repository")


RUN = {"test_sum[2ranks]": {"median_s": 0.0123, "over": {"torch": [1.25, 1.1, 1.4]}, "edges": 12345.6}}


@pytest.fixture
def program():
    spec = importlib.util.spec_from_file_location("_measurements", COMMAND)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def measurements(program, monkeypatch):
    monkeypatch.setattr(program, "_run", {"a.json": RUN}.get)
    return program


def test_the_page_is_what_its_rows_say(program, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["measurements.py"])
    assert program.main() == 0, capsys.readouterr().out
    for rows in tomllib.loads(program.ROWS.read_text()).values():
        assert rows[0].get("command"), "a row without a command has that of the row before"


def test_figures_come_from_the_run(measurements):
    row = {"what": "a sum", "run": "a.json", "command": "`pdlcheck bench`"}
    row["figure"] = "{time test_sum[2ranks]}, {ratio test_sum[2ranks] / torch}, {fact edges of test_sum[2ranks]}"
    text = measurements.page("Before\n<!-- here -->\nold\n<!-- end of here -->\nafter\n", {"here": [row]})
    assert "| a sum | 12.3 ms, 1.25, 1.23e+04 | `pdlcheck bench` |\n<!-- end of here -->\nafter\n" in text
    assert "old" not in text
    assert text.startswith("Before\n<!-- here -->\n| what |")


def test_a_row_that_the_run_lacks_is_named(measurements):
    row = {"what": "a sum", "run": "a.json", "figure": "{time test_sun[2ranks]}"}
    with pytest.raises(ValueError, match=r"no row 'test_sun\[2ranks\]'; it has test_sum\[2ranks\]"):
        measurements.figure(row)


def test_a_table_without_marks_is_refused(measurements):
    with pytest.raises(ValueError, match=r"needs <!-- here --> and <!-- end of here --> once each"):
        measurements.page("no marks", {"here": []})
