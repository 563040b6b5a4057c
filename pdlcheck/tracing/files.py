"""The files of a trace: one safetensors file for each rank, with the records as JSON in its header."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pdlcheck.extras import extra
from pdlcheck.tracing.errors import TraceError
from pdlcheck.tracing.records import Record, record_from_json, record_to_json

with extra("trace", "pdlcheck.trace"):
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

__all__ = ["RankTrace", "Trace", "clear_traces", "read_trace", "write_trace"]

_FORMAT = "1"
_NAME = re.compile(r"rank-(\d+)\.safetensors")


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank; tensors are read when they are needed.

    Args:
        rank: the rank.
        axes: its coordinate on each axis, and the number of ranks there.
        steps: the number of steps.
        perturbed: the run was perturbed.
        parameters: the logical names of its parameters that are trained.
        modules: the logical names of its modules, and their classes.
        records: what it recorded.
        file: the open file.
    """

    rank: int
    axes: dict[str, tuple[int, int]]
    steps: int
    perturbed: bool
    parameters: list[str]
    modules: dict[str, str]
    records: list[Record]
    file: Any

    def tensor(self, record: Record) -> Tensor:
        """Return the tensor of a record, divided as the record says."""
        found: Tensor = self.file.get_tensor(record.key)
        return found if record.divide == 1 else found.double() / record.divide


@dataclass(frozen=True)
class Trace:
    """The trace of all ranks of a run."""

    directory: Path
    ranks: list[RankTrace]

    @property
    def steps(self) -> int:
        """The number of steps that all ranks recorded."""
        return min(rank.steps for rank in self.ranks)


def clear_traces(directory: Path, rank: int, world_size: int) -> None:
    """Remove the file that this rank is about to write; rank 0 removes those of an earlier run with more ranks."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        found = _NAME.fullmatch(path.name)
        if found and (int(found[1]) == rank or (rank == 0 and int(found[1]) >= world_size)):
            path.unlink(missing_ok=True)


def write_trace(
    directory: Path, header: Mapping[str, Any], tensors: dict[str, Tensor], records: Iterable[Record]
) -> None:
    """Write the file of a rank in one go: it is absent or complete."""
    text = json.dumps({**header, "records": [record_to_json(record) for record in records]})
    path = directory / f"rank-{header['rank']}.safetensors"
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"pdlcheck_trace": _FORMAT, "header": text})
    os.replace(partial, path)


def read_trace(directory: Path) -> Trace:
    """Return the trace in a directory.

    Raises:
        TraceError: the directory holds none, or an incomplete one; the message says what to do.
    """
    if not directory.is_dir():
        raise TraceError(f"{directory} is no directory; give the directory that pdlcheck.trace wrote")
    paths = {int(found[1]): path for path in directory.iterdir() if (found := _NAME.fullmatch(path.name))}
    if not paths:
        raise TraceError(f"{directory} holds no file rank-*.safetensors; give the directory that pdlcheck.trace wrote")
    headers = {rank: _open(path) for rank, path in sorted(paths.items())}
    sizes = {header["world_size"] for header, _ in headers.values()}
    if len(sizes) > 1:
        raise TraceError(
            f"{directory} holds files of runs with {' and '.join(map(str, sorted(sizes)))} ranks; "
            "remove the directory and record again"
        )
    if missing := sorted(set(range(size := sizes.pop())) - headers.keys()):
        raise TraceError(
            f"{directory} lacks the file of rank {missing[0]} of {size}: that rank did not leave `with pdlcheck.trace` "
            "without an error, or wrote to a disk of its own; gather the files of all ranks in one directory"
        )
    ranks = [_rank(header, file) for header, file in headers.values()]
    if not min(one.steps for one in ranks):
        raise TraceError(f"{directory} has no step: the optimizer's step() never ran; pass the optimizer that trains")
    return Trace(directory, ranks)


def _open(path: Path) -> tuple[dict[str, Any], Any]:
    try:
        file = safe_open(path, framework="pt")
        metadata = file.metadata() or {}  # type: ignore[no-untyped-call]
    except (SafetensorError, OSError) as error:
        raise TraceError(f"{path} cannot be read ({error}): it is truncated or damaged; record it again") from error
    if metadata.get("pdlcheck_trace") != _FORMAT:
        found = metadata.get("pdlcheck_trace")
        what = f"has format {found}; this version reads {_FORMAT}" if found else "is no trace of pdlcheck"
        raise TraceError(f"{path} {what}; record it again with pdlcheck.trace")
    try:
        header = json.loads(metadata["header"])
        names = set(file.keys())  # type: ignore[no-untyped-call]
        if missing := [one["key"] for one in header["records"] if one.get("key") and one["key"] not in names]:
            raise TraceError(f"{path} lacks the tensor {missing[0]!r} of its header; record it again")
        return header, file
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path} has a damaged header ({error!r}); record it again") from error


def _rank(header: dict[str, Any], file: Any) -> RankTrace:
    try:
        return RankTrace(
            rank=header["rank"],
            axes={axis: (at, of) for axis, (at, of) in header["axes"].items()},
            steps=header["steps"],
            perturbed=header["perturbed"],
            parameters=header["parameters"],
            modules=header["modules"],
            records=[record_from_json(one) for one in header["records"]],
            file=file,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"the header of rank {header.get('rank')} is damaged ({error!r}); record it again") from error
