"""Derive the Debian package dependency graph from the package lists of apt, on Debian 12 (bookworm).

Run `apt-get update` first, then `python ci/derive_debian_graph.py`. It reads `apt-cache dumpavail` and writes
`pdlcheck/primitives/pagerank/datasets/debian_bookworm.npz`; the same lists give the same bytes.

Rules:
- A node is a package of the archive, in the version that apt would install. Packages whose Filename does not lie under
  pool/ were installed by hand and do not count. Nodes are sorted by name.
- Depends and Pre-Depends count. Versions, architectures and build profiles of an item are ignored.
- Every existing alternative of an item `a | b` counts, because the installed one depends on the machine.
- The name of a package means that package. A name that no package has is virtual and means all packages that provide
  it.
- An item that no package of the archive satisfies is dropped. There is one edge per pair of packages.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pdlcheck.primitives.pagerank import Graph
from pdlcheck.primitives.pagerank.datasets import DEBIAN, pack

HERE = Path(__file__).resolve().parent
FIELDS = ("Package", "Filename", "Depends", "Pre-Depends", "Provides")


def stanzas(text: str) -> Iterator[dict[str, str]]:
    """Yield one dict per package, with the fields that matter; a line that starts with a blank continues a field."""
    for block in text.split("\n\n"):
        lines = re.sub(r"\n[ \t]+", " ", block).splitlines()
        fields = dict(line.split(": ", 1) for line in lines if ": " in line)
        if "Package" in fields:
            yield {name: fields.get(name, "") for name in FIELDS}


def names_in(item: str) -> list[str]:
    """Return the package names of the alternatives in `a (>= 1) | b:any`."""
    found = (re.match(r"\s*([a-z0-9][a-z0-9.+-]*)", part) for part in item.split("|"))
    return [match.group(1) for match in found if match]


def dependency_graph(text: str) -> Graph:
    """Return the graph that the rules of the module define."""
    packages = {p["Package"]: p for p in stanzas(text) if p["Filename"].startswith("pool/")}
    names = sorted(packages)
    index = {name: i for i, name in enumerate(names)}
    providers: dict[str, list[str]] = defaultdict(list)
    for name in names:
        for item in packages[name]["Provides"].split(","):
            for virtual in names_in(item):
                providers[virtual].append(name)
    edges = set()
    for name in names:
        for item in f"{packages[name]['Depends']},{packages[name]['Pre-Depends']}".split(","):
            for wanted in names_in(item):
                for target in [wanted] if wanted in packages else providers[wanted]:
                    edges.add((index[name], index[target]))
    src, dst = np.array(sorted(edges), np.int64).T
    return Graph(src, dst, len(names), names=tuple(names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dumpavail", type=Path, help="read this file, not the output of apt-cache dumpavail")
    parser.add_argument(
        "--out", type=Path, default=HERE.parent / "pdlcheck" / "primitives" / "pagerank" / "datasets" / DEBIAN
    )
    options = parser.parse_args()
    if options.dumpavail:
        text = options.dumpavail.read_text(encoding="utf-8")
    else:
        command = ["apt-cache", "dumpavail"]
        text = subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout
    graph = dependency_graph(text)
    # zip entries carry the date 1980-01-01, so the bytes depend on the graph alone
    np.savez_compressed(options.out, **pack(graph))
    loops = int((graph.src == graph.dst).sum())
    print(f"{graph.num_nodes} packages, {graph.num_edges} dependencies")
    print(f"{int(graph.dangling.sum())} packages without dependencies, {loops} that depend on themselves")
    print(f"{options.out.stat().st_size} bytes in {options.out}")


if __name__ == "__main__":
    main()
