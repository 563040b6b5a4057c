"""The compiled parser of lines of edges: bytes in, ids and weights out. It releases the GIL."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdlcheck.primitives.pagerank.compiled import compiled

__all__ = ["PROBLEMS", "copy_fields", "count_lines", "parse_lines"]

NOT_A_NUMBER, NEGATIVE_ID, HUGE_ID, ONE_FIELD, MANY_FIELDS = 1, 2, 3, 4, 5
EMPTY_FIELD, NO_WEIGHT, A_WEIGHT, NEGATIVE_WEIGHT = 6, 7, 8, 9
PROBLEMS = {
    NOT_A_NUMBER: "this is not a number; ids are whole numbers from 0, weights decimal numbers; number the names of "
    "nodes first, begin a comment with # or %",
    NEGATIVE_ID: "a node id is negative; number the nodes from 0",
    HUGE_ID: "a node id is beyond 2**63 - 1; number the nodes from 0 without large gaps",
    ONE_FIELD: "an edge needs two ids, here is one; complete the line, the file may be truncated",
    MANY_FIELDS: "an edge is two ids and perhaps a weight, here is more; keep three columns, with cut or awk",
    EMPTY_FIELD: "a field between commas is empty; fill it, the file may be truncated",
    NO_WEIGHT: "this edge has no weight, the first one has; give every edge one, or none",
    A_WEIGHT: "this edge has a weight, the first one has none; give every edge one, or none",
    NEGATIVE_WEIGHT: "a weight is negative; it must be 0 or more, 0 stands for an edge that carries nothing",
}
"""What can be wrong with a line, by the number that :func:`parse_lines` gives for it, each with its cure."""

NEWLINE, COMMA, MINUS, PLUS, POINT, ZERO, NINE = (ord(c) for c in "\n,-+.09")
HASH, PERCENT, BLANK, TAB, RETURN, SMALL_E, LARGE_E = (ord(c) for c in "#% \t\reE")
TENTH_OF_LARGEST = (2**63 - 1) // 10
EXACT = 2**53  # below it an integer is a float64 exactly, and so are the powers of ten up to 22: one rounding is right
POWERS = 10.0 ** np.arange(23)


@compiled()
def count_lines(text: Any) -> int:
    """How many newlines there are."""
    lines = 0
    for i in range(text.size):
        lines += text[i] == NEWLINE
    return lines


@compiled()
def parse_lines(
    text: Any, columns: int, src: Any, dst: Any, weights: Any, far_edge: Any, far_begin: Any
) -> tuple[int, int, int, int, int, int, int, int]:
    """Read the edges of ``text``, uint8, whole lines that each end in a newline.

    Fields stand between blanks, tabs, or one comma; empty lines and those that begin with # or % are left out.
    ``columns`` is 2, 3, or 0: as the first edge has them. ``src``, ``dst`` and, unless ``columns`` is 2, the other
    arrays have room for an element per line. Weights whose nearest float64 takes more than one multiplication are left
    out: ``far_edge`` says which, ``far_begin`` where their text begins.

    Returns:
        edges, columns, weights left out, largest id (-1: none), the line that it stands in, and then for the first
        wrong line: its problem (0: none), where it begins, its number. Lines of the text are counted from 1.
    """
    edges, far, largest, largest_line = 0, 0, -1, 0
    i, line = 0, 0
    while i < text.size:
        line += 1
        begin = i
        i = _after_blanks(text, i)
        if text[i] == HASH or text[i] == PERCENT:
            while text[i] != NEWLINE:
                i += 1
        if text[i] == NEWLINE:
            i += 1
            continue
        problem, first, i = _id(text, i)
        if problem == 0:
            problem, i = _to_next_field(text, i)
        if problem == 0 and text[i] == NEWLINE:
            problem = ONE_FIELD
        if problem != 0:
            return edges, columns, far, largest, largest_line, problem, begin, line
        problem, second, i = _id(text, i)
        if problem == 0:
            problem, i = _to_next_field(text, i)
        if problem != 0:
            return edges, columns, far, largest, largest_line, problem, begin, line
        if text[i] == NEWLINE:
            if columns == 3:
                return edges, columns, far, largest, largest_line, NO_WEIGHT, begin, line
            columns = 2
        else:
            at = i
            problem, exact, weight, i = _weight(text, i)
            if problem == 0:
                problem, i = _to_next_field(text, i)
            if problem == 0 and text[i] != NEWLINE:
                problem = MANY_FIELDS
            if problem == 0 and columns == 2:
                problem = A_WEIGHT
            if problem != 0:
                return edges, columns, far, largest, largest_line, problem, begin, line
            columns = 3
            weights[edges] = weight
            if not exact:
                far_edge[far], far_begin[far] = edges, at
                far += 1
        i += 1
        src[edges], dst[edges] = first, second
        edges += 1
        if max(first, second) > largest:
            largest, largest_line = max(first, second), line
    return edges, columns, far, largest, largest_line, 0, 0, 0


@compiled()
def copy_fields(text: Any, begins: Any, fields: Any) -> None:
    """Copy the field that begins at ``text[begins[k]]`` into row k of ``fields``, zeros; what is too long is cut."""
    for k in range(begins.size):
        i, place = begins[k], 0
        while not _ends_field(text[i]) and place < fields.shape[1]:
            fields[k, place] = text[i]
            i, place = i + 1, place + 1


@compiled()
def _ends_field(c: Any) -> bool:
    return c in (BLANK, TAB, NEWLINE, COMMA, RETURN)


@compiled()
def _after_blanks(text: Any, i: int) -> int:
    while text[i] == BLANK or text[i] == TAB or text[i] == RETURN:
        i += 1
    return i


@compiled()
def _to_next_field(text: Any, i: int) -> tuple[int, int]:
    """From the end of a field to the next one, or to the newline."""
    if not _ends_field(text[i]):
        return NOT_A_NUMBER, i
    i = _after_blanks(text, i)
    if text[i] != COMMA:
        return 0, i
    i = _after_blanks(text, i + 1)
    return (EMPTY_FIELD if text[i] == NEWLINE or text[i] == COMMA else 0), i


@compiled()
def _id(text: Any, i: int) -> tuple[int, int, int]:
    begin = i
    value: Any = 0
    while ZERO <= text[i] <= NINE:
        digit = np.int64(text[i]) - ZERO
        if value >= TENTH_OF_LARGEST and (value > TENTH_OF_LARGEST or digit > 7):
            return HUGE_ID, value, i
        value = value * 10 + digit
        i += 1
    if i == begin:
        negative = text[i] == MINUS and ZERO <= text[i + 1] <= NINE
        return (EMPTY_FIELD if text[i] == COMMA else NEGATIVE_ID if negative else NOT_A_NUMBER), value, i
    return 0, value, i


@compiled()
def _weight(text: Any, i: int) -> tuple[int, bool, float, int]:
    """A problem or 0, whether the value is the nearest float64, the value, where the field ends."""
    negative = text[i] == MINUS
    if negative or text[i] == PLUS:
        i += 1
    mantissa: Any = 0
    digits, exponent, exact, point = 0, 0, True, False
    while ZERO <= text[i] <= NINE or (text[i] == POINT and not point):
        if text[i] == POINT:
            point = True
        else:
            digits += 1
            mantissa = mantissa * 10 + (np.int64(text[i]) - ZERO) if mantissa < EXACT else EXACT
            exponent -= point
        i += 1
    if digits == 0:
        return NOT_A_NUMBER, True, 0.0, i
    if text[i] == SMALL_E or text[i] == LARGE_E:
        i += 1
        below = text[i] == MINUS
        if below or text[i] == PLUS:
            i += 1
        begin = i
        power: Any = 0
        while ZERO <= text[i] <= NINE:
            power = min(power * 10 + (np.int64(text[i]) - ZERO), 100_000)
            i += 1
        if i == begin:
            return NOT_A_NUMBER, True, 0.0, i
        exponent += -power if below else power
    if negative and mantissa != 0:
        return NEGATIVE_WEIGHT, True, 0.0, i
    if mantissa == 0:
        return 0, True, 0.0, i
    exact = mantissa < EXACT and -23 < exponent < 23
    value = float(mantissa)
    if exact:
        value = value / POWERS[-exponent] if exponent < 0 else value * POWERS[exponent]
    return 0, exact, value, i
