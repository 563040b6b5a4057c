"""The plots as Vega-Lite specifications, made by Altair."""

from __future__ import annotations

from typing import Any

from pdlcheck.bench.experiments import Plot
from pdlcheck.extras import extra

__all__ = ["script", "specification"]

_COLOURS = ["#4c8bc9", "#e8871e", "#4f9d52", "#b565c2", "#d1595f", "#8c7a5b", "#3aa7a3", "#999999"]
_CATEGORY_PX = 18  # pixels for each category
_HEIGHT_PX = 300
_CONFIG = {  # texts have the colour of the page, in light and dark mode
    "background": "transparent",
    "font": "inherit",
    "axis": {
        "labelColor": "currentColor",
        "titleColor": "currentColor",
        "tickColor": "currentColor",
        "domainColor": "currentColor",
        "gridColor": "currentColor",
        "gridOpacity": 0.15,
        "labelLimit": 340,
        "labelFontSize": 11,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
    },
    "legend": {
        "labelColor": "currentColor",
        "titleColor": "currentColor",
        "orient": "top",
        "columns": 2,
        "labelLimit": 300,
        "symbolLimit": 0,
        "title": None,
    },
    "view": {"stroke": None},
}


def script() -> str:
    """Return Vega, Vega-Lite and their embedding as one script, which defines ``vegaEmbed``.

    Raises:
        MissingExtra: altair or vl-convert-python is missing.
    """
    with extra("report", "a report as a page"):
        import vl_convert
        from altair import VEGALITE_VERSION
    version = ".".join(VEGALITE_VERSION.split(".")[:2])
    return vl_convert.javascript_bundle(vl_version=version)  # type: ignore[call-arg]  # its stub requires a snippet


def specification(plot: Plot, title: str) -> dict[str, Any]:
    """Return the specification of a plot. A click on a name in the legend shows only its series."""
    import altair as alt

    points = [
        {"name": name, "x": one.x, "y": one.y, "low": one.low, "high": one.high}
        for name, series in plot.points.items()
        for one in series
    ]
    lines = [{"name": name, "x": x, "y": y} for name, line in plot.lines.items() for x, y in line]
    levels = [{"name": name, "y": y} for name, y in plot.levels.items()]
    names = [*plot.points, *plot.lines, *plot.levels]
    by_category = any(isinstance(one["x"], str) for one in points)
    value, place = ("x", "y") if by_category else ("y", "x")

    chosen = alt.selection_point(fields=["name"], bind="legend")
    colour = alt.Color("name:N").scale(domain=names, range=_colours(names))
    if len(names) == 1:
        colour = colour.legend(None)
    shown = {"color": colour, "opacity": alt.when(chosen).then(alt.value(1)).otherwise(alt.value(0.08))}
    ticks = alt.Axis(tickCount=7, orient="top" if by_category else "left")
    value_axis = {"title": plot.y, "scale": _scale(plot.log_y), "axis": ticks}
    if by_category:
        categories = list(dict.fromkeys(str(one["x"]) for one in points))
        along: dict[str, Any] = {place: alt.Y("x:N", title=None, sort=categories)}
    else:
        along = {place: alt.X("x:Q", title=plot.x, scale=_scale(plot.log_x), axis=alt.Axis(tickCount=7))}
    axis = {"x": alt.X, "y": alt.Y}[value]
    where = "x:N" if by_category else "x:Q"
    tips = ["name:N", alt.Tooltip(where, title=plot.x or "function"), alt.Tooltip("y:Q", title=plot.y, format=".4~g")]
    span = [alt.Tooltip("low:Q", title="95 % from", format=".4~g"), alt.Tooltip("high:Q", title="to", format=".4~g")]

    def layer(data: list[dict[str, Any]]) -> Any:
        return alt.Chart(alt.InlineData(values=data))

    layers = []
    if levels:
        rule = layer(levels).mark_rule(strokeDash=[6, 4], strokeWidth=1.5)
        layers.append(rule.encode(**{value: axis("y:Q", **value_axis)}, tooltip=["name:N", "y:Q"], **shown))
    if lines and by_category:
        tick = layer(lines).mark_tick(thickness=3, size=_CATEGORY_PX)
        layers.append(tick.encode(**along, **{value: axis("y:Q", **value_axis)}, tooltip=tips, **shown))
    elif lines:
        line = layer(lines).mark_line(strokeDash=[6, 4], strokeWidth=1.5, tooltip=True)
        layers.append(line.encode(**along, **{value: axis("y:Q", **value_axis)}, tooltip=tips, **shown))
    spread = layer(points).mark_rule(strokeWidth=2)
    ends = {value: axis("low:Q", **value_axis), f"{value}2": {"x": alt.X2, "y": alt.Y2}[value]("high:Q")}
    layers.append(spread.encode(**along, **ends, tooltip=[*tips, *span], **shown))
    dots = layer(points).mark_point(filled=True, size=70)
    layers.append(dots.encode(**along, **{value: axis("y:Q", **value_axis)}, tooltip=[*tips, *span], **shown))
    layers[0] = layers[0].add_params(chosen)  # Vega-Lite takes the legend of all layers from the first one
    height: Any = alt.Step(_CATEGORY_PX) if by_category else _HEIGHT_PX
    chart = alt.layer(*layers).properties(width="container", height=height, description=title)
    made: dict[str, Any] = chart.to_dict()
    made |= {"config": _CONFIG, "autosize": {"type": "fit-x", "contains": "padding"}}
    return made


def _colours(names: list[str]) -> list[str]:
    """Return a colour for each name; the model of a series has the colour of the series."""
    own = [name for name in names if name.removeprefix("model of ") not in names or not name.startswith("model of ")]
    return [_COLOURS[own.index(name.removeprefix("model of ") if name not in own else name) % 8] for name in names]


def _scale(log: bool) -> Any:
    import altair as alt

    return alt.Scale(type="log", nice=False) if log else alt.Scale(zero=True)
