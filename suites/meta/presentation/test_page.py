"""The page in a real browser: sorted, filtered, hovered, driven by the keyboard, in light, dark, narrow and print."""

from __future__ import annotations

import itertools
import re
import shutil

import pytest

from pdlcheck.cli import main

from .material import FAILURE, write_run, write_verification

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[dev]'")
BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium-headless-shell")

MOST_BYTES = 2_000_000
CONTRAST = """([ink, paper]) => {
  const light = (colour) => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((one) => one / 255);
    const [r, g, b] = parts.map((one) => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const [a, b] = [light(ink), light(paper)].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    files = [write_run(folder / "a.json"), write_run(folder / "b.json", slower=1.5)]
    files.append(write_verification(folder / "v.json", held=False))
    assert main(["report", *map(str, files), "--output", str(folder / "report.html")]) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield launched
        launched.close()


@pytest.fixture
def page_of(browser, path):
    """Open the page; at the end, check that it requested only itself and that no script failed."""
    opened = []

    def open_page(**settings):
        page = browser.new_page(**settings)
        asked, failed = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: failed.append(str(error)))
        page.on("console", lambda message: message.type == "error" and failed.append(message.text))
        page.goto(path.as_uri())
        page.wait_for_function(
            "document.querySelectorAll('.chart').length === document.querySelectorAll('.chart svg').length"
        )
        opened.append((page, asked, failed))
        return page

    yield open_page
    for page, asked, failed in opened:
        assert asked == [path.as_uri()]
        assert failed == []
        page.close()


def column(page, table, number):
    return page.locator(f"{table} tbody tr:not([hidden]) > :nth-child({number})").all_inner_texts()


def table_of(page, title):
    """Return a selector of the table in the section with this title."""
    return f"section:has(> h2:text-is('{title}')) table.sortable"


def test_the_page_is_one_small_file_that_may_not_ask_for_anything(path):
    text = path.read_text()
    assert len(text.encode()) < MOST_BYTES
    assert "default-src 'none'" in text
    assert not re.search(r"""(src|href)=["'](?!#)""", text.split("<script>", 1)[0])


def test_a_press_on_a_title_sorts_and_a_second_one_turns_the_order(page_of):
    page = page_of()
    table = table_of(page, "all rows: a")
    before = column(page, table, 1)
    title = page.locator(f"{table} thead button", has_text="time")
    for state, turned in (("ascending", False), ("descending", True)):
        title.click()
        assert page.locator(f"{table} th[aria-sort]").get_attribute("aria-sort") == state
        values = [float(cell.get_attribute("data-value")) for cell in page.locator(f"{table} td:nth-child(2)").all()]
        assert values == sorted(values, reverse=turned)
        assert len(values) == len(before)
    title = page.locator(f"{table} thead button", has_text="busbw")
    title.click()
    assert column(page, table, 6)[-1] == "", "rows without a value come last"
    assert column(page, table, 6)[0] != "", "rows without a value come last"


def test_rows_are_filtered_and_counterparts_hidden(page_of):
    page = page_of()
    table = table_of(page, "all rows: a")
    grid = page.locator(table).locator("xpath=ancestor::div[@class='grid']")
    grid.locator(".filter").fill("ALL_REDUCE")
    assert {name.partition("[")[0] for name in column(page, table, 1)} == {"test_all_reduce"}
    assert grid.locator(".count").inner_text() == "6 of 21 rows"
    grid.locator("input.minor").uncheck()
    assert grid.locator(".count").inner_text() == "3 of 21 rows"
    assert not any(name.endswith("[torch]") for name in column(page, table, 1))


def test_the_keyboard_reaches_all_of_it(page_of):
    page = page_of()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "to the content"
    table = table_of(page, "all rows: a")
    page.locator(f"{table} thead button").nth(1).focus()
    page.keyboard.press("Enter")
    assert page.locator(f"{table} th[aria-sort]").get_attribute("aria-sort") == "ascending"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    summary = page.locator("article details > summary").first
    summary.focus()
    page.keyboard.press("Space")
    assert page.locator("article details").first.get_attribute("open") is not None


def test_a_pointer_on_a_point_reads_its_values(page_of):
    page = page_of()
    chart = page.locator("article:has(h3:has-text('every k-th step')) .chart").first
    chart.scroll_into_view_if_needed()
    chart.locator("g.mark-symbol.role-mark path").nth(2).hover(force=True)
    tip = page.locator("#vg-tooltip-element")
    tip.wait_for(state="visible")
    assert "measured" in tip.inner_text()
    assert "milliseconds of an epoch" in tip.inner_text()
    assert "95 % from" in tip.inner_text()


def test_a_click_on_the_legend_shows_one_series_alone(page_of):
    page = page_of()
    chart = page.locator("article:has(h3:has-text('all_reduce')) .chart").first
    points = chart.locator("g.mark-symbol.role-mark path")
    assert {one.get_attribute("opacity") for one in points.all()} == {"1"}
    chart.locator("g.role-legend-label text", has_text="torch").first.click(force=True)
    page.wait_for_timeout(100)
    assert {one.get_attribute("opacity") for one in points.all()} == {"1", "0.08"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(page_of, scheme):
    page = page_of(color_scheme=scheme)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    for place in ("main p", ".verdict.good", "p.bad", "td", "caption", "summary", ".chart .role-axis-label text"):
        ink = page.evaluate(
            "(place) => { const style = getComputedStyle(document.querySelector(place));"
            " return style.fill && document.querySelector(place).ownerSVGElement ? style.fill : style.color; }",
            place,
        )
        assert page.evaluate(CONTRAST, [ink, paper]) >= 4.5, (place, ink, paper)
    other = {"light": "dark", "dark": "light"}[scheme]
    assert page.locator("#theme").inner_text() == other
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != paper
    assert page.locator("#theme").inner_text() == scheme


def test_a_phone_scrolls_in_one_direction_only(page_of):
    page = page_of(viewport={"width": 360, "height": 740}, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    widths = [one.bounding_box()["width"] for one in page.locator(".chart svg").all()]
    assert widths
    assert all(0 < width <= 340 for width in widths), widths


def test_a_screen_reader_finds_names(page_of):
    page = page_of()
    assert page.locator("html").get_attribute("lang") == "en"
    for place in ("button", "input", "a", "summary"):
        for one in page.locator(place).all():
            assert one.evaluate("(e) => (e.labels?.[0] ?? e).textContent.trim()"), one.evaluate("(e) => e.outerHTML")
    for one in page.locator(".chart svg").all():
        assert one.locator("xpath=ancestor-or-self::*[@aria-label]").count()
    assert "the bubble is 20% of it" in page.locator(".drawing svg[role=img]").first.get_attribute("aria-label")
    levels = [int(one.evaluate("(e) => e.tagName[1]")) for one in page.locator("h1, h2, h3").all()]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_failures_are_open_and_their_text_runs_nothing(page_of):
    page = page_of()
    failure = page.locator("details.failure")
    assert failure.get_attribute("open") is not None
    assert FAILURE in failure.inner_text()
    assert "Run it again: pytest -k x" in failure.inner_text()


def test_print_is_light_and_leaves_the_tools_out(page_of, tmp_path):
    page = page_of(color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator(".tools").first.is_visible()
    assert not page.locator("#theme").is_visible()
    assert page.locator("details.failure pre").is_visible()
    assert page.pdf(path=tmp_path / "a.pdf", format="A4")[:5] == b"%PDF-"


def test_plots_fit_on_paper(page_of):
    page = page_of(viewport={"width": 1200, "height": 900})
    page.emulate_media(media="print")
    overhang = page.evaluate(
        """() => {
          document.body.style.width = '600px'; // as paper is narrower than the screen that plots were drawn for
          const right = (one) => one.getBoundingClientRect().right;
          const overhang = (plot) => right(plot) - right(plot.closest('.chart'));
          return Math.max(...[...document.querySelectorAll('.chart svg')].map(overhang));
        }"""
    )
    assert overhang < 1
