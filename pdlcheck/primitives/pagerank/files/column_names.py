"""The meanings of column names, and the columns that the caller chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = [
    "IS_DESTINATION",
    "IS_SOURCE",
    "IS_WEIGHT",
    "NEVER_A_WEIGHT",
    "WEIGHT_OR_NOT",
    "Choice",
    "place_of",
    "weight_column",
]

SOURCES = "src source from fromnode fromnodeid fromid sourceid srcid sourcenode start u node1 nodeid1 id1 follower"
DESTINATIONS = "dst dest destination target to tonode tonodeid toid targetid dstid targetnode end v node2 nodeid2 id2"
NO_WEIGHTS = "time timestamp ts date datetime unixts unixtime year created createdat when id index edgeid rowid"

WEIGHT_OR_NOT = "pass --weights if it is a weight, --no-weights if not (weights=True, weights=False)"


def _one_of(words: str, *more: str) -> Callable[[str], bool]:
    known = {*words.split(), *more}
    return lambda name: "".join(c for c in name.lower() if c.isalnum()) in known


IS_SOURCE, IS_DESTINATION = _one_of(SOURCES), _one_of(DESTINATIONS, "followee")
IS_WEIGHT = _one_of("weight weights w edgeweight")
NEVER_A_WEIGHT = _one_of(NO_WEIGHTS, "")  # pandas writes its index without a name


def place_of(meaning: Callable[[str], bool], names: Sequence[str]) -> int | None:
    """Return the one column whose name has this meaning; ``None`` if no column has it, or several have it."""
    places = [place for place, name in enumerate(names) if meaning(name)]
    return places[0] if len(places) == 1 else None


@dataclass(frozen=True)
class Choice:
    """The caller's choices for a file of edges; ``None`` leaves a choice to the file.

    ``columns`` are the two ends of an edge and perhaps its weight, as names of the header or numbers from 1.
    """

    columns: tuple[str | int, ...] | None = None
    delimiter: str | None = None
    header: bool | None = None
    names: bool = False
    weights: bool | None = None

    def __post_init__(self) -> None:
        if self.columns is not None:
            if len(self.columns) not in (2, 3) or len(set(self.columns)) < len(self.columns):
                raise ValueError(f"columns must be SRC, DST and perhaps WEIGHT, all different, got {self.columns}")
            if self.weights is not None and self.weights != (len(self.columns) == 3):
                raise ValueError(
                    f"columns are {self.columns} and weights={self.weights}; name a third column for weights, or two "
                    "columns for none"
                )
            numbers = [column for column in self.columns if not isinstance(column, str)]
            if any(isinstance(column, bool) or not isinstance(column, int) or column < 1 for column in numbers):
                raise ValueError(f"columns count from 1, got {self.columns}")
        if self.delimiter is not None and (
            len(self.delimiter) != 1 or ord(self.delimiter) > 127 or self.delimiter in '"\r\n#%+-.eE0123456789'
        ):
            raise ValueError(
                f"delimiter must be one ASCII character that is no part of a number, got {self.delimiter!r}"
            )

    def places(self, file: str, header: Sequence[str] | None, width: int) -> list[int]:
        """Return the places of the chosen columns, from 0.

        Raises:
            ValueError: the header does not have a name exactly once, or a number is beyond the columns of the file.
        """
        assert self.columns is not None
        there = ", ".join(header) if header is not None else f"{width}"
        found = []
        for column in self.columns:
            if isinstance(column, int):
                if column > width:
                    raise ValueError(f"{file}: column {column} is asked for, its columns are {there}; choose others")
                found.append(column - 1)
                continue
            names = list(header or ())
            if names.count(column) != 1:
                times = "twice or more" if column in names else "not there"
                raise ValueError(f"{file}: column {column!r} is {times}, its columns are {there}; choose others")
            found.append(names.index(column))
        return found


def weight_column(
    where: str, names: Sequence[str], others: Sequence[int], numeric: Sequence[int], weights: bool | None
) -> int:
    """Return the column of weights among named columns, -1 for none.

    Args:
        where: the file, perhaps with the line, for messages.
        names: the names of all columns.
        others: the columns that are not the ends of an edge.
        numeric: those of the others that hold numbers.
        weights: the caller's choice; ``None`` takes a column with a name for weights, and none with a name for times or
            ids.

    Raises:
        ValueError: the only other column may be a weight or not. Or the caller wants weights, and it is not clear which
            column holds them.
    """
    if weights is False:
        return -1
    called = [k for k in others if IS_WEIGHT(names[k])]
    if len(called) == 1:
        return called[0]
    if weights and len(numeric) == 1:
        return numeric[0]
    if weights:
        raise ValueError(
            f"{where}: no column is called weight, the columns are {', '.join(names)}; choose them with --columns "
            "SRC,DST,WEIGHT (columns=...)"
        )
    if len(others) == 1 and numeric and not NEVER_A_WEIGHT(names[numeric[0]]):
        raise ValueError(f"{where}: column {names[numeric[0]]!r} may be a weight or not; {WEIGHT_OR_NOT}")
    return -1
