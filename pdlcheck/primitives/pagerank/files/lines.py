"""The compiled parser of lines of edges: bytes in, ids and weights out. It releases the GIL.

numba inlines its small functions. LLVM would not inline a function that is called several times, which takes 60 %
longer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pdlcheck.primitives.pagerank.compiled import compiled

__all__ = ["PROBLEMS", "copy_fields", "count_lines", "parse_lines"]

NOT_AN_ID, NEGATIVE_ID, HUGE_ID, EMPTY_ID, NOT_A_WEIGHT, NEGATIVE_WEIGHT = 1, 2, 3, 4, 5, 6
EMPTY_FIELD, ONE_FIELD, FEW_FIELDS, MANY_FIELDS = 7, 8, 9, 10
NAMES = "where ids are names, pass --names (names=True)"
PROBLEMS = {
    NOT_AN_ID: "this is not a number; the ids of the first edge are whole numbers, so all must be; correct it, begin a "
    f"comment with # or %; {NAMES}",
    NEGATIVE_ID: f"a node id is negative; correct it; {NAMES}",
    HUGE_ID: f"a node id is beyond 2**63 - 1; {NAMES}",
    EMPTY_ID: "a node id is empty; fill it, the file may be truncated",
    NOT_A_WEIGHT: "a weight is not a decimal number; correct it, or pass --no-weights (weights=False)",
    NEGATIVE_WEIGHT: "a weight is negative; it must be 0 or more, 0 stands for an edge that carries nothing; "
    "--no-weights (weights=False) leaves weights out",
    EMPTY_FIELD: "a field between commas is empty; fill it, the file may be truncated",
    ONE_FIELD: "an edge needs two ids, here is one; complete the line, the file may be truncated",
    FEW_FIELDS: "this line has fewer fields than the first edge; complete it, the file may be truncated",
    MANY_FIELDS: "this line has more fields than the first edge; correct it, or choose columns with --columns "
    "(columns=...)",
}
"""The problems of a line by the number that :func:`parse_lines` returns, each with its cure."""

NEWLINE, COMMA, MINUS, PLUS, POINT, ZERO, NINE = (ord(c) for c in "\n,-+.09")
HASH, PERCENT, BLANK, TAB, RETURN, SMALL_E, LARGE_E = (ord(c) for c in "#% \t\reE")
TENTH_OF_LARGEST = (2**63 - 1) // 10
EXACT = 2**53  # smaller integers are exact in float64, and so are the powers of ten up to 22: one rounding is right
POWERS = 10.0 ** np.arange(23)


@compiled()
def count_lines(text: Any) -> int:
    """Return the number of newlines."""
    lines = 0
    for i in range(text.size):
        lines += text[i] == NEWLINE
    return lines


@compiled()
def parse_lines(
    text: Any,
    delimiter: int,
    width: int,
    src_at: int,
    dst_at: int,
    weight_at: int,
    src: Any,
    dst: Any,
    weights: Any,
    far_edge: Any,
    far_begin: Any,
) -> tuple[int, int, int, int, int, int]:
    """Read the edges of ``text``: uint8, whole lines that each end in a newline.

    With ``delimiter`` 0, blanks, tabs or one comma are between fields; else the byte ``delimiter`` is. Empty lines and
    lines that begin with # or % are skipped. A line has ``width`` fields, or any number of fields if that is 0.
    ``src_at``, ``dst_at`` and ``weight_at`` are the places of the fields of an edge; ``weight_at`` is -1 without
    weights. The arrays have room for one element per line. Weights whose nearest float64 takes more than one
    multiplication are left out: ``far_edge`` gets their edges, and ``far_begin`` the places where their text begins.

    Returns:
        The number of edges, the number of weights left out, and the largest id (-1: none). Then for the first wrong
        line: its problem (0: none), the place where it begins, and its number. Lines of the text count from 1.
    """
    edges, far = 0, 0
    largest: Any = -1
    i, line = 0, 0
    last = max(src_at, dst_at, weight_at)
    ends_first = src_at == 0 and dst_at == 1
    while i < text.size:
        line += 1
        begin = i
        i = _after_blanks(text, i, delimiter)
        if text[i] == HASH or text[i] == PERCENT:
            while text[i] != NEWLINE:
                i += 1
        if text[i] == NEWLINE:
            i += 1
            continue
        field = 0
        first: Any = 0
        second: Any = 0
        problem, more, wrong = 0, True, 0
        if ends_first:  # the same as the loop below, without a test of the meaning of each field
            problem, first, i = _id(text, i, delimiter)
            if problem == 0:
                problem, more, i = _to_next_field(text, i, delimiter, NOT_AN_ID)
            field = 1
            if more and problem == 0:
                problem, second, i = _id(text, i, delimiter)
                if problem == 0:
                    problem, more, i = _to_next_field(text, i, delimiter, NOT_AN_ID)
                field = 2
        while more and problem == 0:
            if field == src_at:
                problem, first, i = _id(text, i, delimiter)
                wrong = NOT_AN_ID
            elif field == dst_at:
                problem, second, i = _id(text, i, delimiter)
                wrong = NOT_AN_ID
            elif field == weight_at:
                at = i
                problem, exact, weight, i = _weight(text, i)
                wrong = NOT_A_WEIGHT
                weights[edges] = weight
                if not exact and problem == 0:
                    far_edge[far], far_begin[far] = edges, at
                    far += 1
            else:
                i = _after_field(text, i, delimiter)
            if problem == 0:
                problem, more, i = _to_next_field(text, i, delimiter, wrong)
            field += 1
        if problem == 0 and (field <= last or field < width):
            problem = ONE_FIELD if field == 1 else FEW_FIELDS
        if problem == 0 and 0 < width < field:
            problem = MANY_FIELDS
        if problem != 0:
            return edges, far, largest, problem, begin, line
        i += 1
        src[edges], dst[edges] = first, second
        edges += 1
        largest = max(largest, first, second)
    return edges, far, largest, 0, 0, 0


@compiled()
def copy_fields(text: Any, begins: Any, delimiter: int, fields: Any) -> None:
    """Copy the field that begins at ``text[begins[k]]`` into row k of ``fields``.

    ``fields`` holds zeros before. A field that is longer than the row is cut.
    """
    for k in range(begins.size):
        i, place = begins[k], 0
        while not _ends_field(text[i], delimiter) and place < fields.shape[1]:
            fields[k, place] = text[i]
            i, place = i + 1, place + 1


@compiled(inline="always")
def _ends_field(c: Any, delimiter: int) -> bool:
    between = COMMA if delimiter == 0 else delimiter
    return c in (NEWLINE, RETURN, BLANK, TAB, between)


@compiled(inline="always")
def _after_blanks(text: Any, i: int, delimiter: int) -> int:
    while text[i] == BLANK or text[i] == RETURN or (text[i] == TAB and delimiter != TAB):
        i += 1
    return i


@compiled(inline="always")
def _after_field(text: Any, i: int, delimiter: int) -> int:
    """Return the end of a field that is not read."""
    if delimiter == 0:
        while not _ends_field(text[i], delimiter):
            i += 1
    else:
        while text[i] != NEWLINE and text[i] != delimiter:
            i += 1
    return i


@compiled(inline="always")
def _to_next_field(text: Any, i: int, delimiter: int, wrong: int) -> tuple[int, bool, int]:
    """Go from the end of a field to the next: return a problem or 0, whether there is one, and where it begins.

    The problem is ``wrong`` if the field does not end here.
    """
    if not _ends_field(text[i], delimiter):
        return wrong, True, i
    i = _after_blanks(text, i, delimiter)
    if text[i] == NEWLINE:
        return 0, False, i
    if delimiter == 0:
        if text[i] != COMMA:
            return 0, True, i
        i = _after_blanks(text, i + 1, delimiter)
        return (EMPTY_FIELD if text[i] == NEWLINE or text[i] == COMMA else 0), True, i
    if text[i] != delimiter:
        return wrong, True, i
    return 0, True, _after_blanks(text, i + 1, delimiter)


@compiled(inline="always")
def _id(text: Any, i: int, delimiter: int) -> tuple[int, int, int]:
    begin = i
    value: Any = 0
    while ZERO <= text[i] <= NINE:
        digit = np.int64(text[i]) - ZERO
        if value >= TENTH_OF_LARGEST and (value > TENTH_OF_LARGEST or digit > 7):
            return HUGE_ID, value, i
        value = value * 10 + digit
        i += 1
    if i == begin:
        if text[i] == NEWLINE or text[i] == COMMA or text[i] == delimiter:
            return EMPTY_ID, value, i
        negative = text[i] == MINUS and ZERO <= text[i + 1] <= NINE
        return (NEGATIVE_ID if negative else NOT_AN_ID), value, i
    return 0, value, i


@compiled(inline="always")
def _weight(text: Any, i: int) -> tuple[int, bool, float, int]:
    """Return a problem or 0, whether the value is the nearest float64, the value, and the end of the field."""
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
        return NOT_A_WEIGHT, True, 0.0, i
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
            return NOT_A_WEIGHT, True, 0.0, i
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
