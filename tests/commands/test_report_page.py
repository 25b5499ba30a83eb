"""The page of `torchtitan report` in a real browser: it draws all runs, answers to the mouse and fetches nothing."""

import re

import pytest

from tests.support.browser import Page, find_browser, open_page
from tests.support.report_pages import write_run
from torchtitan import cli

RECTANGLE = "(element => {{const r = element.getBoundingClientRect(); return [r.x, r.y, r.width, r.height]}})({})"
BUTTON = "[...document.querySelectorAll('.updatemenu-button')].find(one => one.textContent == {!r})"
LOSS_PANEL = "document.querySelector('.draglayer .xy .nsewdrag')"
LEGEND = "document.querySelectorAll('.legend .traces')"
FIGURE = "document.querySelector('.plotly-graph-div')"
LAYOUT = f"{FIGURE}._fullLayout"
TWO_FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    find_browser()
    folder = tmp_path_factory.mktemp("page")
    runs = [str(write_run(folder / f"run_{letter}", rows=rows)) for letter, rows in (("a", 40), ("b", 30))]
    assert cli.main(["report", *runs, "--to", str(folder / "page.html")]) == 0
    with open_page(folder / "page.html", folder) as page:
        yield page


def rectangle(page: Page, element: str) -> list[float]:
    return page.evaluate(RECTANGLE.format(element))


def center(page: Page, element: str) -> tuple[float, float]:
    x, y, width, height = rectangle(page, element)
    return x + width / 2, y + height / 2


def click(page: Page, element: str) -> None:
    page.drag(center(page, element))
    page.evaluate(TWO_FRAMES)


def visible_runs(page: Page) -> list[bool]:
    """Return for both runs whether any of their curves is visible."""
    curves = page.evaluate(f"{FIGURE}._fullData.map(curve => [curve.name, curve.visible === true])")
    return [any(visible for name, visible in curves if f"run_{letter}" in name) for letter in "ab"]


def test_a_page_draws_all_runs_and_fetches_nothing(page, tmp_path):
    assert page.problems == [], "the console of a page is silent"
    assert len(page.requests) == 1 and page.requests[0].startswith("file:"), "only the page itself"
    curves = page.evaluate("document.querySelectorAll('.cartesianlayer .scatterlayer .trace').length")
    panels = page.evaluate("document.querySelectorAll('.cartesianlayer .subplot').length")
    assert (panels, visible_runs(page)) == (7, [True, True]) and curves >= 2 * 8
    page.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 50_000, "not an empty picture"


def test_what_is_above_the_curves_does_not_overlap(page):
    names = ("by step", "by hours", "linear scale", "log scale")
    _, legend_y, _, legend_height = rectangle(page, "document.querySelector('.legend .scrollbox')")
    boxes = [rectangle(page, BUTTON.format(name)) for name in names]
    assert all(y >= legend_y + legend_height - 1 for _, y, _, _ in boxes)
    assert all(y + height <= rectangle(page, LOSS_PANEL)[1] for _, y, _, height in boxes)
    assert all(x + width <= following[0] for (x, _, width, _), following in zip(boxes, boxes[1:], strict=False))


def test_the_pointer_shows_the_values_of_all_runs(page):
    x, y, width, height = rectangle(page, LOSS_PANEL)
    page.move(x + width / 4, y + height / 2)
    page.move(x + width / 4 + 2, y + height / 2)
    text = page.evaluate(f"{TWO_FRAMES}.then(() => document.querySelector('.hoverlayer').textContent)")
    step = int(re.match(r"\d+", text)[0])
    assert 9 <= step <= 13 and "run_a, as logged" in text and "run_b, as logged" in text
    assert re.search(rf"run_a, as logged : {3 / step:.4f}"[:-1], text), "the loss of that step"


def test_buttons_change_scale_and_axis(page):
    assert page.evaluate(f"{LAYOUT}.yaxis.type") == "linear"
    click(page, BUTTON.format("log scale"))
    kinds = page.evaluate(f"['yaxis', 'yaxis2', 'yaxis3'].map(name => {LAYOUT}[name].type)")
    assert kinds == ["log", "linear", "log"], "loss and gradient norm, not the learning rate"
    click(page, BUTTON.format("by tokens"))
    last, title = page.evaluate(f"[{LAYOUT}.xaxis.range[1], {LAYOUT}.xaxis7.title.text]")
    assert last >= 100 * 40 and title == "tokens"
    click(page, BUTTON.format("by step"))
    click(page, BUTTON.format("linear scale"))
    assert page.evaluate(f"{LAYOUT}.xaxis.range[1]") < 100 and page.problems == []


def test_a_drag_zooms_all_panels_and_a_click_hides_a_run(page):
    x, y, width, height = rectangle(page, LOSS_PANEL)
    middle = y + height / 2
    page.drag((x + width / 4, middle), (x + width / 3, middle), (x + width / 2, middle))
    page.evaluate(TWO_FRAMES)
    first, last = page.evaluate(f"{LAYOUT}.xaxis.range")
    assert first > 5 and last < 25
    assert page.evaluate(f"{LAYOUT}.xaxis6.range") == [first, last], "the panel of waits for data"
    page.drag(center(page, f"{LEGEND}[0].querySelector('.legendtoggle')"))
    page.evaluate("new Promise(done => setTimeout(done, 600))")  # plotly waits for a double click
    assert visible_runs(page) == [False, True] and page.problems == []
