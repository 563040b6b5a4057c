"""The layout of edges in a text file: found in its first lines, or chosen by the caller."""

from __future__ import annotations

import contextlib
import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdlcheck.primitives.pagerank.files.column_names import (
    IS_DESTINATION,
    IS_SOURCE,
    IS_WEIGHT,
    NEVER_A_WEIGHT,
    WEIGHT_OR_NOT,
    Choice,
    place_of,
    weight_column,
)
from pdlcheck.primitives.pagerank.files.headings import Heading, read_heading
from pdlcheck.primitives.pagerank.files.source import Source

__all__ = ["TextLayout", "find_layout", "split_fields"]

SAMPLE_NBYTES = 1 << 16
LONGEST_HEADING = 1 << 22  # bytes of comments
SAMPLE_EDGES = 100
DELIMITERS = "\t,;|"
BOM = b"\xef\xbb\xbf"
INTEGER = re.compile(r"[+-]?[0-9]+")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
PLAIN = re.compile(r"\s*[0-9]+(\s*,\s*|\s+)[0-9]+((\s*,\s*|\s+)[-+.0-9eE]+)*\s*")
FIELD = re.compile(r"[^\s,]+")
TIMES = 1e8  # times in seconds since 1970 are above this from 1973 on


@dataclass(frozen=True)
class TextLayout:
    """The places of the fields of an edge in a line.

    Columns count from 0; ``weight`` is -1 if there is none. ``delimiter`` is ``None`` for blanks, tabs or one comma.
    ``width`` is the number of fields in each line. After the header, the lines begin at byte ``begin``; ``line`` lines
    are before them.
    """

    delimiter: str | None
    width: int
    src: int
    dst: int
    weight: int
    begin: int
    line: int
    integers: bool
    quoted: bool
    heading: Heading
    header: tuple[str, ...] | None = None

    def describe(self) -> str:
        """Return one line with the format, the columns and the kind of ids."""
        names = {None: "blanks, tabs or commas", "\t": "tabs", ",": "commas", ";": "semicolons", " ": "blanks"}
        kind = f"{self.heading.kind} file" if self.heading.kind else "text"
        between = names.get(self.delimiter, repr(self.delimiter))

        def column(place: int) -> str:
            return f"column {place + 1}" if self.header is None else repr(self.header[place])

        weights = "no weights" if self.weight < 0 else f"weights from {column(self.weight)}"
        used = {self.src, self.dst, self.weight}
        unread = [column(place) for place in range(self.width) if place not in used]
        ids = "integers" if self.integers else "names"
        ends = f"edges from {column(self.src)} to {column(self.dst)}"
        left_out = f"; not read: {', '.join(unread)}" if unread else ""
        return f"{kind}, {between} between fields, {ends}, ids are {ids}, {weights}{left_out}"


def split_fields(line: str, delimiter: str | None) -> list[str]:
    """Return the fields of one line; quotes hold together the text between them."""
    line = line.strip(" \r\n" if delimiter == "\t" else None)
    if delimiter is None and '"' not in line:
        return line.split()
    fields = next(csv.reader([line], delimiter=delimiter or " ", skipinitialspace=True, strict=True), [])
    return [field.strip() for field in fields]


def find_layout(source: Source, choice: Choice, *, plain_text: bool = False) -> TextLayout | None:
    """Return the layout of ``source``, or ``None`` if no line is an edge.

    It looks at the first lines without reading them.

    Args:
        source: the text, of which no line was read before.
        choice: the caller's choice of delimiter, header, columns, names and weights.
        plain_text: treat the comments of KONECT and SNAP as mere comments.

    Raises:
        ValueError: the first line is no edge, or a third column may be a weight or not.
    """
    comments, lines = _first_lines(source)
    if not lines:
        return None
    heading = Heading() if plain_text else read_heading(comments)
    if heading.bipartite:
        raise ValueError(
            f"{source.name}: its first line says bip, so equal ids of its two sides are different nodes; give the "
            "sides different ids, or pass --format text where equal ids are one node"
        )
    (number, after, first), *others = lines
    second = others[0][2] if others else None
    delimiter = _delimiter(first, second) if choice.delimiter is None else choice.delimiter.replace(" ", "") or None
    fields = _fields(source, number, first, delimiter)
    below = None
    if second is not None:
        with contextlib.suppress(csv.Error):
            below = _split_line(second, delimiter)
    header = _is_header(fields, below, choice)
    layout = TextLayout(
        *(delimiter, len(fields), 0, 1, -1, after if header else 0, number if header else 0, True, False, heading),
        header=tuple(fields) if header else None,
    )
    if header and not others:
        raise ValueError(f"{source.name}:{number}: the only line is a header; add edges, or pass --no-header")
    rows = [] if header else [fields]
    for _, _, text in lines[1:SAMPLE_EDGES]:
        with contextlib.suppress(csv.Error):
            rows.append(_split_line(text, delimiter))
    if not rows:
        raise ValueError(f"{source.name}:{others[0][0]}: a quote is not closed; double a quote that is part of a name")
    layout = replace(layout, width=len(rows[0]))
    layout = _with_columns(source, layout, rows, choice, number + (1 if header else 0))
    ids = (rows[0][layout.src], rows[0][layout.dst])
    integers = not choice.names and all(INTEGER.fullmatch(field) for field in ids)
    quoted = any('"' in text for _, _, text in lines[:SAMPLE_EDGES])
    return replace(layout, integers=integers, quoted=quoted)


def _first_lines(source: Source) -> tuple[list[str], list[tuple[int, int, str]]]:
    """Return the comments before the first other line, and the lines that are not comments.

    Each of these lines is its number, the byte where the next line begins, and its text.
    """
    nbytes = SAMPLE_NBYTES
    while True:
        sample = source.peek(nbytes)
        ends = len(sample) < nbytes
        comments, lines = _split(sample, ends)
        if ends or len(lines) > 1:
            return comments, lines
        if nbytes >= LONGEST_HEADING:
            if not lines:
                raise ValueError(f"{source.name}: its first {nbytes} bytes hold no edge; an edge is a line of two ids")
            return comments, lines
        nbytes *= 4


def _split(sample: bytes, ends: bool) -> tuple[list[str], list[tuple[int, int, str]]]:
    comments: list[str] = []
    lines: list[tuple[int, int, str]] = []
    begin = len(BOM) if sample.startswith(BOM) else 0
    number = 0
    while begin < len(sample):
        newline = sample.find(b"\n", begin)
        if newline < 0:
            if not ends:
                break
            newline = len(sample)
        number += 1
        text = sample[begin:newline].decode(errors="replace").strip("\r")
        begin = newline + 1
        if text.lstrip().startswith(("#", "%")):
            if not lines:
                comments.append(text.strip())
        elif text.strip():
            lines.append((number, begin, text))
    return comments, lines


def _fields(source: Source, number: int, text: str, delimiter: str | None) -> list[str]:
    try:
        return _split_line(text, delimiter)
    except csv.Error as error:
        raise ValueError(f"{source.name}:{number}: {error}; double a quote that is part of a name") from error


def _split_line(text: str, delimiter: str | None) -> list[str]:
    if delimiter is None and PLAIN.fullmatch(text):
        return re.split(r"\s*,\s*|\s+", text.strip())
    return split_fields(text, delimiter)


def _delimiter(first: str, second: str | None) -> str | None:
    """Return ``None`` for two or three numbers between blanks, tabs or commas; else see :func:`_delimited`."""
    plain = [PLAIN.fullmatch(line) and len(FIELD.findall(line)) < 4 for line in (first, second) if line is not None]
    return None if all(plain) else _delimited(first, second)


def _delimited(first: str, second: str | None) -> str | None:
    """Return the delimiter that gives both lines equally many fields, two at least; ``None`` if there is none."""
    for delimiter in DELIMITERS:
        widths = []
        for line in (first, second):
            with contextlib.suppress(csv.Error):  # a quote may end in a later line
                widths.append(len(split_fields(line or first, delimiter)))
        if widths and min(widths) == max(widths) > 1:
            return delimiter
    return None


def _is_header(fields: Sequence[str], below: Sequence[str] | None, choice: Choice) -> bool:
    if choice.header is not None:
        return choice.header
    if choice.columns is not None and any(isinstance(column, str) for column in choice.columns):
        return True
    if place_of(IS_SOURCE, fields) is not None and place_of(IS_DESTINATION, fields) is not None:
        return True
    if below is None or len(below) < 2 or len(fields) < 2:
        return False
    if any(NUMBER.fullmatch(field) for field in fields):
        return False
    return all(INTEGER.fullmatch(field) for field in below[:2]) or any(NUMBER.fullmatch(field) for field in below[2:])


def _with_columns(source: Source, layout: TextLayout, rows: list[list[str]], choice: Choice, number: int) -> TextLayout:
    """Return ``layout`` with the columns of ``choice``, or else those that names, heading and values suggest."""
    where = f"{source.name}:{number}"
    if layout.header is not None and len(layout.header) != layout.width:
        raise ValueError(
            f"{where}: this line has {layout.width} fields, the header has {len(layout.header)}; make them equal, or "
            "pass --delimiter"
        )
    if choice.columns is not None:
        places = choice.places(source.name, layout.header, layout.width)
        return replace(layout, src=places[0], dst=places[1], weight=places[2] if len(places) > 2 else -1)
    if layout.width < 2:
        raise ValueError(
            f"{where}: an edge needs two ids, here is one: {rows[0]}; complete the line, the file may be truncated, "
            "or pass --delimiter"
        )
    src, dst = 0, 1
    if layout.header is not None:
        named = place_of(IS_SOURCE, layout.header), place_of(IS_DESTINATION, layout.header)
        if named[0] is not None and named[1] is not None:
            src, dst = named[0], named[1]
            others = [k for k in range(layout.width) if k not in (src, dst)]
            numeric = [k for k in others if all(len(row) > k and NUMBER.fullmatch(row[k]) for row in rows)]
            weight = weight_column(where, layout.header, others, numeric, choice.weights)
            return replace(layout, src=src, dst=dst, weight=weight)
    return replace(layout, weight=_third_column(where, layout, rows, choice))


def _third_column(where: str, layout: TextLayout, rows: list[list[str]], choice: Choice) -> int:
    """Return 2 if the third column holds weights, else -1."""
    known = layout.heading.weights
    if choice.weights is False or (layout.width == 2 and not choice.weights):
        return -1
    if layout.width == 2:
        raise ValueError(f"{where}: weights are asked for, but this line has two fields; leave out --weights")
    if choice.weights:
        return 2
    if isinstance(known, str):
        raise ValueError(
            f"{where}: the third column is {known} (KONECT), which may be negative or no weight at all; {WEIGHT_OR_NOT}"
        )
    if known is not None:
        return 2 if known else -1
    name = layout.header[2] if layout.header is not None else ""
    if layout.width > 3:
        raise ValueError(
            f"{where}: a line has {layout.width} fields, and no header says which are the edges; choose them with "
            "--columns, as in --columns 1,2 or --columns 1,2,3 with weights (columns=...)"
        )
    if IS_WEIGHT(name):
        return 2
    if not NUMBER.fullmatch(rows[0][2]):
        if layout.header is not None:
            return -1
        raise ValueError(
            f"{where}: the third field is no weight: {rows[0][2]!r}; choose the columns of an edge with --columns, as "
            "in --columns 1,2 (columns=...), or pass --no-weights (weights=False)"
        )
    values = [row[2] for row in rows if len(row) > 2 and NUMBER.fullmatch(row[2])]
    if layout.header is not None and NEVER_A_WEIGHT(name):
        return -1
    fractions = any(not INTEGER.fullmatch(value) for value in values)
    if fractions and all(abs(float(value)) < TIMES for value in values):
        return 2
    found = next((value for value in values if abs(float(value)) >= TIMES), values[0])
    raise ValueError(f"{where}: the third column holds {found}, a weight, a count or a time; {WEIGHT_OR_NOT}")
