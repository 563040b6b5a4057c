"""The example of docs/tracing.md, and what it prints."""

from __future__ import annotations

import re

import pytest
import torch

from pdlcheck.cli import main
from pdlcheck.tracing import Mapping
from pdlcheck.tracing.mapping import place
from pdlcheck.worlds import get_world
from suites.meta.clone import ROOT


def test_the_example_prints_what_the_page_shows(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "tracing.md").read_text()
    source, shown = (re.search(rf"```{kind}\n(.*?)```", page, re.S)[1] for kind in ("python", "text"))
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(source, "train.py", "exec"), names)
    names["train"]("trusted")
    names["train"]("perturbed", perturb=1)
    get_world("sim").run(names["train"], "parallel", world_size=2)
    command, _, output = shown.partition("\n")
    assert main(command.split()[2:]) == 1
    printed = capsys.readouterr().out
    assert without_numbers(printed) == without_numbers(output), printed
    assert "Linear" in printed


def without_numbers(text: str) -> str:
    return re.sub(r"-?\d[\d.e+-]*", "#", text)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("layers.*.up", {"layers.0.up"}),
        ("layers.*", {"layers.0"}),
        ("layers.**", {"layers.0", "layers.0.up", "layers.0.up.weight"}),
        ("**.up", {"layers.0.up", "up"}),
        ("**", {"layers.0", "layers.0.up", "layers.0.up.weight", "up"}),
    ],
)
def test_patterns_take_one_part_of_a_name_or_several(pattern, names):
    every = ["layers.0", "layers.0.up", "layers.0.up.weight", "up"]
    mapping = Mapping({pattern: None}, ranks={"tp": (0, 1)})
    placed = [place(mapping, {"tp": (0, 1)}, name, torch.ones(1), is_output=False, is_gradient=False) for name in every]
    assert {name for name, one in zip(every, placed, strict=True) if one is None} == names
