"""Each mutation of ``ci/mutations/`` still matches its line; ``ci/break_primitives.py`` shows that suites detect it."""

from __future__ import annotations

import json

import pytest

from ..clone import ROOT

FILES = sorted((ROOT / "ci" / "mutations").glob("*.json"))  # empty in a wheel


@pytest.mark.skipif(not FILES, reason="needs ci/: run the suites in a clone of the repository")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_broken_line_stands_once_in_its_file(file):
    for mutation in json.loads(file.read_text()):
        times = (ROOT / mutation["file"]).read_text().count(mutation["old"])
        assert times == 1, f"{times} times in {mutation['file']}: {mutation['old'].strip()}"
        for word in mutation["tests"].split():
            assert not word.startswith("suites/") or list(ROOT.glob(word.partition("::")[0])), f"there is no {word}"
        assert mutation["new"] != mutation["old"]
