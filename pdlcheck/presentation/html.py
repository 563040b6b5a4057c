"""The report as one HTML page that needs no network: sentences and tables are text, and the browser draws the plots."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any
from xml.sax.saxutils import quoteattr

from pdlcheck import __version__
from pdlcheck.extras import extra
from pdlcheck.presentation.charts import script, specification
from pdlcheck.presentation.document import Chart, Document, Finding, Picture
from pdlcheck.presentation.text import plot_table

__all__ = ["as_html"]

_SVG_START = re.compile(r"<svg xmlns='[^']*' width='\d+' height='[\d.]+'")


def as_html(document: Document) -> str:
    """Return the page.

    Raises:
        MissingExtra: altair, vl-convert-python or jinja2 is missing.
    """
    vega = script()
    with extra("report", "a report as a page"):
        from jinja2 import Environment
    page = files("pdlcheck.presentation") / "page"
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((page / "page.html.jinja").read_text())
    return template.render(
        document=document,
        sections=[(f"section-{number}", section) for number, section in enumerate(document.sections, 1)],
        kind=lambda block: type(block).__name__,
        plot_of=_plot_of,
        table_of=plot_table,
        specification=specification,
        drawing=_drawing,
        version=__version__,
        css=(page / "page.css").read_text(),
        js=(page / "page.js").read_text(),
        vega=vega.replace("</script", "<\\/script"),
    )


def _plot_of(block: Any) -> Any:
    return block.plot if isinstance(block, Chart | Finding) else None


def _drawing(picture: Picture) -> str:
    """Return the SVG as a part of the page: as wide as the page allows, with a name for screen readers.

    The code that draws it escapes its texts.
    """
    start = f"<svg role='img' aria-label={quoteattr(picture.words)} style='width:100%;height:auto'"
    return _SVG_START.sub(lambda _: start, picture.svg, count=1)
