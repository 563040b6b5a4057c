"""Write a large file of edges, run ``pdlcheck pagerank`` on it, print seconds and peak memory, delete the file.

Usage: python benchmarks/comparisons/rank_large_file.py [--edges 100000000] [--nodes 10000000] [--folder /tmp]

Both ends of an edge can be any node. The file is text, ``src<tab>dst``; the same seed makes the same file.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numba
import numpy as np

LINES = 1 << 20
LONGEST_LINE = 24


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", type=int, default=100_000_000)
    parser.add_argument("--nodes", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    needed, free = options.edges * LONGEST_LINE, shutil.disk_usage(options.folder).free
    if needed > free:
        parser.error(f"the file may take {needed / 1e9:.1f} GB, {options.folder} has {free / 1e9:.1f} GB")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder, "edges.tsv")
        write(path, options.nodes, options.edges, options.seed)
        print(f"seed {options.seed}: {path.stat().st_size / 1e9:.2f} GB of text", flush=True)
        began = time.perf_counter()
        command = [sys.executable, "-m", "pdlcheck", "pagerank", str(path), "--top", "5"]
        code = subprocess.run(command, check=False).returncode
        seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    load = os.getloadavg()[0]
    print(f"{seconds:.1f} s in all, peak memory {peak / 2**30:.2f} GiB, load {load:.1f}, exit code {code}")
    return code


def write(path: Path, nodes: int, edges: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    text = np.empty(LINES * LONGEST_LINE, np.uint8)
    with path.open("wb") as file:
        for first in range(0, edges, LINES):
            count = min(LINES, edges - first)
            src, dst = rng.integers(0, nodes, (2, count))
            file.write(text[: write_lines(src, dst, text)].data)


@numba.njit
def write_lines(src: Any, dst: Any, text: Any) -> int:
    """Write the lines as bytes into ``text``; return the number of bytes."""
    at = 0
    for e in range(src.size):
        for value, end in ((src[e], 9), (dst[e], 10)):
            digits, rest = 1, value // 10
            while rest > 0:
                digits, rest = digits + 1, rest // 10
            for k in range(at + digits - 1, at - 1, -1):
                text[k] = 48 + value % 10
                value //= 10
            text[at + digits] = end
            at += digits + 1
    return at


if __name__ == "__main__":
    sys.exit(main())
