"""The page in a browser: every control clicked, pointed at and reached by keyboard. Needs playwright and a Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fourfold.cluster import cluster_named
from fourfold.oracle.cost_model import Setting
from fourfold.oracle.prices.prices import Prices
from fourfold.oracle.scaling import Study
from fourfold.planner import SearchTask, search
from fourfold.planner.what_if import what_if_grid
from fourfold.report.page.page import page as written
from fourfold.report.page.reproduction import reproduction_page
from fourfold.report.runs import Run
from fourfold.reproduce.study import Expectation, Reproduction, Table
from small import batch_of, graph_of

pytestmark = pytest.mark.browser
CLUSTER, DEVICES, NAME = "ethernet-10g", 4, "gpt2"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything a page can have."""
    settings = {n: Setting(prices=Prices(cluster=cluster_named(CLUSTER, devices=n))) for n in (1, 2, 4, 8)}
    ranking = search(SearchTask(graph=graph_of(NAME), batch=batch_of(NAME), setting=settings[DEVICES]))
    around = what_if_grid(ranking, lambda n: cluster_named(CLUSTER, devices=n), limit=60.0)
    study = Study(graph=graph_of(NAME), settings=settings, batch=batch_of(NAME))
    rows = [study.row(name, n) for n in settings for name in ("data", "filter", "pipeline")]
    runs = [Run(strategy="data", ranks=4, predicted=0.19, measured=0.2, predicted_peak=None, measured_peak=None, equal=None,
                losses=(2.0, 1.5))]  # fmt: skip
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(written(ranking, model="gpt2 <!--<script></script>", grid=around, scaling=rows, runs=runs))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium here")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        yield started
        started.close()


@contextmanager
def opened(browser: Any, file: Path) -> Iterator[Any]:
    """A tab that shows a file; afterwards, no error of a script and no request that leaves the machine."""
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    wrong: list[str] = []
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("request", lambda request: wrong.append(request.url) if not request.url.startswith("file:") else None)
    tab.goto(file.as_uri())
    yield tab
    assert not wrong, wrong
    tab.close()


@pytest.fixture
def page(browser: Any, file: Path) -> Iterator[Any]:
    with opened(browser, file) as tab:
        yield tab


def test_choosing_a_plan_shows_it(page: Any) -> None:
    names = page.locator("#plans button.name")
    assert names.count() >= 5
    for k in (2, 0, 1):
        name = names.nth(k).inner_text()
        names.nth(k).click()
        assert page.locator("#plan-head").inner_text().startswith(name)
        assert names.nth(k).get_attribute("aria-pressed") == "true"
        assert page.locator("#layers svg g").count() > 3 and page.locator("#memory .row").count() >= 1


def test_plans_are_chosen_by_keyboard_too(page: Any) -> None:
    page.locator("#plans button.name").nth(1).focus()
    page.keyboard.press("Enter")
    assert page.locator("#plan-head").inner_text().startswith(page.locator("#plans button.name").nth(1).inner_text())


def test_layers_say_what_they_are(page: Any) -> None:
    layer = page.locator("#layers svg g").nth(2)
    layer.hover()
    assert page.locator("#tip").is_visible() and "computing" in page.locator("#tip").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    layer.focus()
    assert page.locator("#tip").is_visible()


def test_the_timeline_zooms_and_moves(page: Any) -> None:
    def shown() -> str:
        return str(page.locator("#timeline").get_attribute("aria-label"))

    whole = shown()
    page.click("#zoom-in")
    near = shown()
    assert near != whole
    page.click("#zoom-right")
    assert shown() != near
    page.click("#zoom-left")
    page.click("#zoom-out")
    page.click("#zoom-all")
    assert shown() == whole
    page.locator("#timeline").focus()
    page.keyboard.press("+")
    assert shown() != whole
    page.keyboard.press("Home")
    assert shown() == whole
    page.locator("#timeline").hover()
    page.mouse.wheel(0, -200)
    page.wait_for_function("label => document.getElementById('timeline').getAttribute('aria-label') !== label", arg=whole)


def test_what_ifs_answer(page: Any) -> None:
    first = page.locator("#answer").inner_text()
    page.select_option("#if-links", "10")
    faster = page.locator("#answer").inner_text()
    assert faster != first
    page.select_option("#if-batch", index=2)
    page.select_option("#if-devices", index=0)
    assert page.locator("#answer").inner_text() not in (first, faster)


def test_curves_can_be_hidden(page: Any) -> None:
    lines = page.locator("#chart polyline")
    before = lines.count()
    page.locator("#curves button").first.click()
    assert lines.count() == before - 1
    page.locator("#curves button").first.click()
    assert lines.count() == before
    page.locator("#chart circle").last.hover()  # of several at one place the last lies above
    assert "samples/s" in page.locator("#tip").inner_text()


def test_light_and_dark(page: Any) -> None:
    def colour() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    light = colour()
    page.click("#theme")
    assert colour() != light
    page.click("#theme")
    assert colour() == light


def test_reasons_unfold_and_runs_are_shown(page: Any) -> None:
    if page.locator("#refused summary").count():
        page.click("#refused summary")
        assert page.locator("#refused li").first.is_visible()
    assert "prediction is -5 % from the measurement" in page.locator("#measured").inner_text()


def test_a_narrow_window_does_not_scroll_sideways(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_reproduction_is_shown_with_its_curves(browser: Any, tmp_path: Path) -> None:
    name = "<b>K = 1</b>"
    curves = {name: ((1.0, 10.0), (4.0, 300.0)), "K = 2": ((2.0, 20.0), (4.0, 40.0))}
    table = Table(title="one", head=("a", "b"), rows=(("<i>1</i>", "2"),), note="three", plot=curves)
    expected = Expectation(what="four", ours="5", paper="6", mark="read", holds=False)
    file = tmp_path / "reproduction.html"
    file.write_text(
        reproduction_page(Reproduction(name="p", title="SEVEN", tables=(table,), expectations=(expected,), notes=("eight",)))
    )
    with opened(browser, file) as tab:
        text = tab.locator("body").inner_text()
        assert all(word in text for word in (name, "<i>1</i>", "three", "four", "does not hold", "SEVEN", "eight"))
        assert tab.locator("polyline").count() == 2 and tab.locator("circle").count() == 4
        assert tab.locator("svg text").all_text_contents() == ["1", "2", "4", "10", "100", "1,000"], "300 is steeply above 10"
        tab.locator("circle").first.hover()
        assert tab.locator("#tip").inner_text() == f"{name} at 1: 10"
