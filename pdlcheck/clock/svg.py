"""The picture of a run as one self-contained SVG: a lane for each rank, with time from left to right.

The upper part of a lane is the rank's program. It is blue while the rank computes. It is pale while the rank waits, in
the tint of the operation that it waits for, with a red end if it waits for ever. The lower part is its network port:
sends above, receives below, a collective in both. The tooltip of a box shows the operation, its line and its times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from pdlcheck.clock.record import Run, Span

__all__ = ["svg"]

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 1280, 76, 24, 64, 40
_MOST_ARROWS = 1500
_COLOURS = {  # the colour of an operation, and the pale one of a wait for it
    "compute": ("#4e79a7", "#4e79a7"),
    "send": ("#e8871e", "#fbe3c8"),
    "recv": ("#4f9d52", "#d6ebd6"),
    "collective": ("#9b6bb3", "#e8dcee"),
}
_RED = "#d1373f"
_FONT = "font-family='Helvetica,Arial,sans-serif'"
_PIXEL_PER_LETTER = 6.0


def svg(run: Run) -> str:
    """Return the picture of a run."""
    return "\n".join(_Picture(run).draw()) + "\n"


class _Picture:
    def __init__(self, run: Run) -> None:
        self._run = run
        n = run.world_size
        self._lane = 58.0 if n <= 8 else 40.0 if n <= 16 else 22.0 if n <= 64 else 12.0
        self._last = max((t for span in run.spans for t in (span.start_s, span.end_s) if t < math.inf), default=0.0)
        stuck = any(span.never_ends for span in run.spans)
        self._horizon = (self._last * 1.12 if stuck else self._last) or 1.0
        self._height = _TOP + self._lane * n + _BOTTOM

    def draw(self) -> Iterator[str]:
        height = f"{self._height:g}"
        yield (
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDTH}' height='{height}' "
            f"viewBox='0 0 {_WIDTH} {height}' {_FONT} font-size='11'>"
        )
        yield (
            "<defs><marker id='tip' viewBox='0 0 6 6' refX='5.5' refY='3' markerWidth='5' markerHeight='5' "
            "orient='auto'><path d='M0,0.5 L6,3 L0,5.5 z' fill='#333'/></marker></defs>"
        )
        yield f"<rect width='{_WIDTH}' height='{height}' fill='#ffffff'/>"
        yield f"<text x='{_LEFT}' y='22' font-size='14' font-weight='bold' fill='#222'>{escape(self._title())}</text>"
        yield from self._legend()
        yield from self._axis()
        for rank in range(self._run.world_size):
            yield from self._lane_of(rank)
        yield from self._boxes()
        yield from self._arrows()
        yield "</svg>"

    # -- around the lanes --------------------------------------------------------------------------

    def _title(self) -> str:
        run = self._run
        head = f"{run.world_size} rank{'s' if run.world_size > 1 else ''}"
        if stuck := len({span.rank for span in run.spans if span.never_ends}):
            head += f", {stuck} of them wait for ever"
        elif run.in_steps:
            head += f", {run.end:g} steps"
        else:
            unit, scale = _unit(run.end)
            head += f", {run.end / scale:.4g} {unit}, bubble {run.bubble:.1%}"
            head += "" if run.overlap is None else f", overlap {run.overlap:.1%}"
        return head

    def _legend(self) -> Iterator[str]:
        used = {_colour_of(span) for span in self._run.spans}
        entries = [(name, solid) for name, (solid, _) in _COLOURS.items() if name in used]
        entries.append(("pale: waits for it", "#dddddd"))
        if any(span.never_ends for span in self._run.spans):
            entries.append(("waits for ever", _RED))
        x = float(_LEFT)
        for name, colour in entries:
            yield f"<rect x='{x:g}' y='33' width='11' height='11' rx='2' fill='{colour}'/>"
            yield f"<text x='{x + 15:g}' y='42' fill='#444'>{name}</text>"
            x += 34 + _PIXEL_PER_LETTER * len(name)
        if (left_out := len(self._run.messages)) > _MOST_ARROWS:
            yield f"<text x='{x:g}' y='42' fill='#444'>arrows of {left_out} messages left out</text>"

    def _axis(self) -> Iterator[str]:
        bottom = self._height - _BOTTOM
        unit, scale = ("steps", 1.0) if self._run.in_steps else _unit(self._last)
        step = _nice(self._horizon / scale / 8)
        if self._run.in_steps:
            step = max(1.0, step)
        for k in range(int(self._horizon / scale / step + 1e-9) + 1):
            x = self._x(k * step * scale)
            yield f"<line x1='{x:.2f}' y1='{_TOP}' x2='{x:.2f}' y2='{bottom:g}' stroke='#e6e6e6'/>"
            yield f"<text x='{x:.2f}' y='{bottom + 15:g}' text-anchor='middle' fill='#444'>{k * step:g}</text>"
        x, name = _WIDTH - _RIGHT, unit if unit == "steps" else f"time, {unit}"
        yield f"<text x='{x}' y='{bottom + 31:g}' text-anchor='end' fill='#444'>{name}</text>"

    def _lane_of(self, rank: int) -> Iterator[str]:
        y = _TOP + self._lane * rank
        every = max(1, math.ceil(11 / self._lane))
        if rank % every == 0:
            middle = y + self._lane / 2 + 4
            yield f"<text x='{_LEFT - 8}' y='{middle:g}' text-anchor='end' fill='#222'>rank {rank}</text>"
        yield f"<line x1='{_LEFT}' y1='{y:g}' x2='{_WIDTH - _RIGHT}' y2='{y:g}' stroke='#d0d0d0'/>"

    # -- boxes and arrows --------------------------------------------------------------------------

    def _x(self, time: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * min(time, self._horizon) / self._horizon

    def _place(self, span: Span) -> tuple[float, float]:
        """Return the top and the height of the span's box."""
        top, pad = _TOP + self._lane * span.rank, min(2.0, self._lane / 8)
        inner = self._lane - 2 * pad
        program, port = inner * 0.62, inner * 0.38
        if span.kind != "communication":
            return top + pad, program - 1
        below = top + pad + program
        if span.op == "send":
            return below, port / 2
        if span.op == "recv":
            return below + port / 2, port / 2
        return below, port

    def _boxes(self) -> Iterator[str]:
        """Yield the boxes; narrow neighbours of one kind share a box, and a span without duration has none."""
        rows: dict[tuple[int, bool, bool, str], list[Span]] = {}
        for span in self._run.spans:
            if span.end_s > span.start_s:
                key = (span.rank, span.kind == "communication", span.kind == "wait", _colour_of(span))
                rows.setdefault(key, []).append(span)
        for row in rows.values():
            yield from self._row(row)

    def _row(self, spans: Sequence[Span]) -> Iterator[str]:
        run: list[Span] = []
        for span in spans:
            narrow = self._x(span.end_s) - self._x(span.start_s) < 1.0
            if run and not (narrow and self._x(span.start_s) - self._x(run[-1].end_s) < 1.0):
                yield self._box(run)
                run = []
            run.append(span)
            if not narrow:
                yield self._box(run)
                run = []
        if run:
            yield self._box(run)

    def _box(self, spans: Sequence[Span]) -> str:
        first, last = spans[0], spans[-1]
        y, height = self._place(first)
        x = self._x(first.start_s)
        width = max(self._x(last.end_s) - x, 0.4)
        solid, pale = _COLOURS[_colour_of(first)]
        fill = pale if first.kind == "wait" else solid
        edge = f" stroke='{_RED}' stroke-width='1.5'" if last.never_ends else ""
        rounded = 2 if width > 6 and height > 8 else 0
        text = self._label(first, x, y, width, height) if len(spans) == 1 else ""
        tell = self._tell(first) if len(spans) == 1 else f"{len(spans)} times {first.kind}: {first.op}"
        end = ""
        if last.never_ends:
            end = f"<rect x='{x + width - 5:.2f}' y='{y:.2f}' width='5' height='{height:.2f}' fill='{_RED}'/>"
        return (
            f"<g><title>{escape(tell)}</title><rect class='{first.kind}' x='{x:.2f}' y='{y:.2f}' width='{width:.2f}' "
            f"height='{height:.2f}' rx='{rounded}' fill='{fill}'{edge}/>{end}{text}</g>"
        )

    def _label(self, span: Span, x: float, y: float, width: float, height: float) -> str:
        if height < 11:
            return ""
        fits = int((width - 8) / _PIXEL_PER_LETTER)
        words = next((words for words in (_short(span.what), span.op) if len(words) <= fits), "")
        colour = "#ffffff" if span.kind != "wait" else "#333333"
        middle = f"x='{x + width / 2:.2f}' y='{y + height / 2 + 4:.2f}'"
        return f"<text {middle} text-anchor='middle' fill='{colour}'>{escape(words)}</text>" if words else ""

    def _tell(self, span: Span) -> str:
        unit, scale = ("steps", 1.0) if self._run.in_steps else _unit(self._last)
        end = "for ever" if span.never_ends else f"to {span.end_s / scale:.6g} {unit}"
        at = f"\nat {span.where}" if span.where else ""
        head = span.what if span.kind != "wait" else f"waits for {span.what}"
        return f"rank {span.rank}: {head}{at}\nfrom {span.start_s / scale:.6g} {end}"

    def _arrows(self) -> Iterator[str]:
        if len(self._run.messages) > _MOST_ARROWS:
            return
        for message in self._run.messages:
            send = Span(message.src, "communication", "send", 0, 0, "")
            recv = Span(message.dst, "communication", "recv", 0, 0, "")
            (top, height), (other, other_height) = self._place(send), self._place(recv)
            yield (
                f"<line class='message' x1='{self._x(message.start_s):.2f}' y1='{top + height / 2:.2f}' "
                f"x2='{self._x(message.end_s):.2f}' y2='{other + other_height / 2:.2f}' stroke='#333' "
                "stroke-width='0.9' stroke-opacity='0.75' marker-end='url(#tip)'/>"
            )


def _colour_of(span: Span) -> str:
    return span.op if span.op in _COLOURS else "collective"


def _short(what: str) -> str:
    return what.partition(" of ")[0]


def _nice(step: float) -> float:
    """Return the next larger of 1, 2, 5, 10, ..."""
    if step <= 0:
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def _unit(seconds: float) -> tuple[str, float]:
    if seconds >= 1 or seconds == 0:
        return "s", 1.0
    return ("ms", 1e-3) if seconds >= 1e-3 else ("µs", 1e-6)
