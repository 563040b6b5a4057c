"""Small compressed files that unpack to very much data: read or refused in little memory."""

from __future__ import annotations

import functools
import gzip
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

PIECE = 1 << 24
PIECES = 24  # 384 MB
MOST_MB = 300

READ = """
import json, re, sys
from pathlib import Path
import numba, scipy.sparse
from pdlcheck.primitives.pagerank import read_edges

def megabytes(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

read_edges(sys.argv[1])  # what it compiles is no memory of the file
for path in sys.argv[2:]:
    Path("/proc/self/clear_refs").write_text("5")
    before = megabytes("VmRSS")
    try:
        said = repr(read_edges(path))
    except ValueError as error:
        said = str(error)
    print(json.dumps([megabytes("VmHWM") - before, said]))
"""

BEGINS = {
    "line.txt.gz": (b"1 2\n", b"a", "has a line of more than 4194304 bytes"),
    "comment.txt.gz": (b"# ", b"a", "its first 4194304 bytes hold no edge"),
    "entry.mtx.gz": (b"%%MatrixMarket matrix coordinate real general\n2 2 1\n", b"1", "has a line of more than"),
    "sizes.mtx.gz": (b"%%MatrixMarket matrix coordinate real general\n", b"%", "no line `rows columns entries`"),
    "node.graph.gz": (b"2 1\n", b"2", "has a line of more than 4194304 bytes"),
    "archive.npz.gz": (b"PK\x03\x04 src.npy", b"\0", "cannot be unpacked"),
    "columns.parquet.gz": (b"PAR1", b"\0", "cannot be unpacked"),
    "line.txt.zst": (b"1 2\n", b"a", "has a line of more than 4194304 bytes"),
}


def read_in_a_process(folder, *paths):
    """Return the megabytes that reading took and the resulting text, for each path."""
    usual = folder / "usual.txt"
    usual.write_text("0 1\n1 0\n")
    command = [sys.executable, "-c", READ, *map(str, [usual, *paths])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def pack_gzip(path, begin, piece):
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(begin)
        for _ in range(PIECES):
            file.write(piece)


def pack_zstd(path, begin, piece):
    import zstandard

    with path.open("wb") as file, zstandard.ZstdCompressor(level=1).stream_writer(file) as packed:
        packed.write(begin)
        for _ in range(PIECES):
            packed.write(piece)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured in /proc: run it on Linux")
def test_bombs_are_refused_in_little_memory(tmp_path):
    paths = {}
    for name, (begin, letter, told) in BEGINS.items():
        needs = {"line.txt.zst": "zstandard", "columns.parquet.gz": "pyarrow"}.get(name)
        if needs is None or find_spec(needs) is not None:
            paths[tmp_path / name] = told
            (pack_zstd if needs == "zstandard" else pack_gzip)(tmp_path / name, begin, letter * PIECE)
    for (path, told), (megabytes, said) in zip(paths.items(), read_in_a_process(tmp_path, *paths), strict=True):
        assert path.stat().st_size < 4 << 20
        assert told in said
        assert str(path) in said
        assert megabytes < MOST_MB, path.name


@pytest.mark.slow
def test_an_archive_that_is_packed_once_more_is_read_from_the_disk(tmp_path):
    """The archive is as large as the bombs, and its extra arrays are real but unused."""
    path = tmp_path / "edges.npz"
    np.savez(path, src=[0, 1], dst=[1, 0], notes=np.zeros(PIECES * PIECE // 8))
    (tmp_path / "edges.npz.gz").write_bytes(gzip.compress(path.read_bytes(), 1))
    [(megabytes, said)] = read_in_a_process(tmp_path, tmp_path / "edges.npz.gz")
    assert said == "Graph(num_nodes=2, num_edges=2, weighted=False)"
    assert megabytes < MOST_MB


def test_what_does_not_fit_on_the_disk_is_told(tmp_path, monkeypatch):
    from pdlcheck.primitives.pagerank import read_edges
    from pdlcheck.primitives.pagerank.files import source

    path = tmp_path / "edges.npz.gz"
    np.savez(tmp_path / "edges.npz", src=[0, 1], dst=[1, 0])
    path.write_bytes(gzip.compress((tmp_path / "edges.npz").read_bytes()))
    assert read_edges(path).num_edges == 2
    full = functools.partial(open, "/dev/full", "r+b", buffering=0)
    monkeypatch.setattr(source.tempfile, "TemporaryFile", full)
    with pytest.raises(OSError, match=r"edges\.npz\.gz: 0 bytes were unpacked into .*: No space left .*; set TMPDIR"):
        read_edges(path)
