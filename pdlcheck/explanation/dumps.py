"""The dumps of torch's Flight Recorder: what each rank has posted last, and what became of it.

torch writes them when a collective times out (``TORCH_FR_BUFFER_SIZE``, ``TORCH_NCCL_DUMP_ON_TIMEOUT``), one file for
each rank whose name ends with the rank: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

from __future__ import annotations

import ast
import io
import json
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["Dump", "Entry", "read_dumps"]

_STATES = {"completed", "started", "scheduled"}


@dataclass(frozen=True)
class Entry:
    """One operation of one rank.

    Args:
        rank: the rank that posted it.
        group: the name of its group.
        seq: the number of the collective in its group, from 1; 0 for a message.
        op: what it is: ``all_reduce``, ``send 0->1``.
        shapes, dtypes: of its inputs.
        where: the user's line.
        state: ``scheduled``, ``started`` or ``completed``.
    """

    rank: int
    group: str
    seq: int
    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    where: str
    state: str

    @property
    def text(self) -> str:
        """Return the operation in words."""
        of = ", ".join(f"{dtype} {shape}" for dtype, shape in zip(self.dtypes, self.shapes, strict=False))
        return f"{self.op}{f' of {of}' if of else ''} at {self.where}"


@dataclass(frozen=True)
class Dump:
    """The dump of one rank.

    Args:
        rank: the rank.
        entries: its last operations, in the order in which it posted them.
        groups: the ranks of each group, by name.
    """

    rank: int
    entries: Sequence[Entry]
    groups: Mapping[str, tuple[int, ...]]


def read_dumps(paths: Iterable[Path]) -> list[Dump]:
    """Read the dumps of several ranks, in rank order.

    Raises:
        ValueError: a file is no dump, or two files are of one rank.
    """
    dumps: dict[int, Dump] = {}
    for path in paths:
        found = re.search(r"(\d+)(?:\.json)?$", path.name)
        if found is None:
            raise ValueError(f"{path}: the name of a dump ends with its rank, such as fr_trace_3")
        rank = int(found[1])
        if rank in dumps:
            raise ValueError(f"{path}: there is another dump of rank {rank}; name the files of one hang")
        dumps[rank] = _dump(rank, path)
    return [dumps[rank] for rank in sorted(dumps)]


def _dump(rank: int, path: Path) -> Dump:
    data = path.read_bytes()
    try:
        content = json.loads(data) if data[:1] == b"{" else _Plain(io.BytesIO(data)).load()
        completed = {
            str(key): int(status["last_completed_collective"]) for key, status in content.get("pg_status", {}).items()
        }
        entries = [_entry(rank, one, completed.get(str(one.get("pg_id")), 0)) for one in content["entries"]]
        groups = dict(map(_group, content.get("pg_config", {}).items()))
    except Exception as error:
        raise ValueError(
            f"{path} is no dump of torch's Flight Recorder, or a damaged one ({type(error).__name__}: {error})"
        ) from None
    return Dump(rank, entries, groups)


class _Plain(pickle.Unpickler):
    """A reader of pickles that hold plain values alone, because a pickle with classes can run any code."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise ValueError(f"it holds {module}.{name}, and a dump holds plain values alone")


def _group(item: tuple[str, Mapping[str, Any]]) -> tuple[str, tuple[int, ...]]:
    key, config = item
    ranks = config.get("ranks", ())
    return str(config.get("name") or key), tuple(ast.literal_eval(ranks) if isinstance(ranks, str) else ranks)


def _entry(rank: int, found: Mapping[str, Any], last_completed: int) -> Entry:
    state = str(found["state"])
    if state not in _STATES:
        raise ValueError(f"an operation in the unknown state {state!r}")
    name, description = found.get("process_group") or (str(found.get("pg_id", "")), "")
    messages = bool(found.get("is_p2p"))
    if not messages and int(found["collective_seq_id"]) <= last_completed:
        state = "completed"  # gloo's recorder says so here alone
    return Entry(
        rank=rank,
        group=_group_text(str(name), str(description)),
        seq=0 if messages else int(found["collective_seq_id"]),
        op=str(found["profiling_name"]).rpartition(":")[2],
        shapes=tuple(tuple(shape) for shape in found.get("input_sizes", ())),
        dtypes=tuple(str(dtype).lower() for dtype in found.get("input_dtypes", ())),
        where=_where(found.get("frames", ())),
        state=state,
    )


def _group_text(name: str, description: str) -> str:
    if description in ("default_pg", ""):
        return "the default group" if description else f"group {name}"
    return f"group {name} ({description})"


def _where(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the innermost line outside of torch."""
    for frame in frames:
        path = str(frame.get("filename", ""))
        if "/torch/" not in path and not path.startswith("<"):
            return f"{Path(path).name}:{frame.get('line')}"
    return "an unknown line"
