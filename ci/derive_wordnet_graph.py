"""Derive the graph of WordNet 3.0's pointers from the data files of Debian's package `wordnet-base`.

Run `apt-get download wordnet-base && dpkg-deb -x wordnet-base_*.deb FOLDER`, then
`python ci/derive_wordnet_graph.py FOLDER/usr/share/wordnet`. It writes `wordnet_3_0.npz` and `wordnet_3_0.LICENSE` in
`pdlcheck/primitives/pagerank/datasets/`; the same files give the same bytes.

Rules:
- A node is a synset of data.noun, data.verb, data.adj, data.adv, in this order and in the order of their lines.
- Its name consists of its first word in lower case, its type, and the number of the sense in index.noun and so on.
- An edge is a pointer of its entry, of any kind, between words or synsets. Repeated pairs of synsets are kept.
- The licence is the head of data.noun, without its line numbers.

Source: wndb(5WN), which defines the files.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np

from pdlcheck.primitives.pagerank import Graph
from pdlcheck.primitives.pagerank.datasets import WORDNET, pack

PACKAGE = Path(__file__).resolve().parent.parent / "pdlcheck" / "primitives" / "pagerank" / "datasets"
FILES = {"n": "noun", "v": "verb", "a": "adj", "r": "adv"}


def pointer_graph(folder: Path) -> Graph:
    """Return the graph that the rules of the module define."""
    node: dict[tuple[str, str], int] = {}
    names, pointers = [], []
    for kind, file in FILES.items():
        senses = _senses(folder / f"index.{file}")
        for line in (folder / f"data.{file}").read_text("ascii").splitlines():
            if line.startswith(" "):  # a line of the licence
                continue
            offset, _, synset_type, words, *fields = line.partition("|")[0].split()
            word = re.sub(r"\(\w+\)$", "", fields[0]).lower()  # without the syntactic marker of an adjective
            names.append(f"{word}.{synset_type}.{senses[word].index(offset) + 1:02}")
            node[kind, offset] = len(node)
            count = 2 * int(words, 16)
            pointers.append(fields[count + 1 : count + 1 + 4 * int(fields[count])])
    src, dst = [], []
    for i, fields in enumerate(pointers):  # groups of four fields: symbol, offset, kind, the words at both ends
        for offset, kind in zip(fields[1::4], fields[2::4], strict=True):
            src.append(i)
            dst.append(node[kind, offset])
    return Graph(np.array(src), np.array(dst), len(names), names=tuple(names))


def _senses(index: Path) -> dict[str, list[str]]:
    """Return the offsets of each word's synsets, in the order of the senses."""
    lines = (line.split() for line in index.read_text("ascii").splitlines() if not line.startswith(" "))
    return {fields[0]: fields[-int(fields[2]) :] for fields in lines}


def licence(folder: Path) -> str:
    """Return the text at the head of a data file, without the line numbers."""
    lines = (folder / "data.noun").read_text("ascii").splitlines()
    head = [re.sub(r"^ +\d+ ?", "", line).rstrip() for line in lines if line.startswith(" ")]
    return "\n".join(head) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of data.noun, index.noun and the others")
    parser.add_argument("--out", type=Path, default=PACKAGE / WORDNET)
    options = parser.parse_args()
    graph = pointer_graph(options.folder)
    # zip entries carry the date 1980-01-01, so the bytes depend on the graph alone
    np.savez_compressed(options.out, **pack(graph))
    options.out.with_suffix(".LICENSE").write_text(licence(options.folder))
    pairs = len(np.unique(graph.src * graph.num_nodes + graph.dst))
    loops = int((graph.src == graph.dst).sum())
    print(f"{graph.num_nodes} synsets, {graph.num_edges} pointers between {pairs} pairs, {loops} to themselves")
    print(f"{int(graph.dangling.sum())} synsets without a pointer")
    print(f"{options.out.stat().st_size} bytes in {options.out}")


if __name__ == "__main__":
    main()
