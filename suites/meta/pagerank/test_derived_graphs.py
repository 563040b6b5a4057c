"""The scripts in ci/ that derive the packaged graphs follow their rules."""

from __future__ import annotations

import importlib.util

import pytest

from ..clone import ROOT

CI = ROOT / "ci"


def script(name):
    if not (path := CI / name).exists():
        pytest.skip(f"needs ci/{name}: run the suites in a clone of the repository")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LICENCE = "  1 A licence  \n  2   \n  3 of two lines.  \n"
WORDNET = {
    "data.noun": LICENCE
    + "00000100 03 n 02 Dog 0 hound 1 002 @ 00000200 n 0000 + 00000300 v 0101 | a pet; 'a | b'  \n"
    + "00000200 03 n 01 animal 0 001 ~ 00000100 n 0000 | alive  \n",
    "data.verb": "00000300 29 v 01 dog 0 001 + 00000100 n 0101 01 + 02 00 | to follow  \n",
    "data.adj": "00000400 00 s 02 tame(a) 0 pet(p) 0 002 & 00000400 a 0000 & 00000400 a 0102 | of a pet  \n",
    "data.adv": "00000500 02 r 01 doggedly 0 000 | not giving in  \n",
    "index.noun": LICENCE + "animal n 1 1 ~ 1 0 00000200  \ndog n 2 2 @ + 2 1 00000999 00000100  \n",
    "index.verb": "dog v 1 1 + 1 0 00000300  \n",
    "index.adj": "tame a 1 1 & 1 0 00000400  \n",
    "index.adv": "doggedly r 1 0 1 0 00000500  \n",
}


def test_a_pointer_between_two_synsets_of_wordnet_is_an_edge(tmp_path):
    for name, text in WORDNET.items():
        (tmp_path / name).write_text(text)
    derive = script("derive_wordnet_graph.py")
    graph = derive.pointer_graph(tmp_path)
    assert graph.names == ("dog.n.02", "animal.n.01", "dog.v.01", "tame.s.01", "doggedly.r.01")
    edges = list(zip(graph.src.tolist(), graph.dst.tolist(), strict=True))
    assert edges == [(0, 1), (0, 2), (1, 0), (2, 0), (3, 3), (3, 3)]
    assert derive.licence(tmp_path) == "A licence\n\nof two lines.\n"
