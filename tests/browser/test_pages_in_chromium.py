"""The page of `rollcorr view` in headless Chromium. `make test-browser` installs the browser and runs this."""

import shutil

import pytest
from typer.testing import CliRunner

pytest.importorskip("playwright", reason="needs a browser: make test-browser")
pytest.importorskip("pyarrow", reason="the extra log is not installed")

from playwright import sync_api
from run_view import write_run

from rollcorr.cli import app

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs the package chromium: make test-browser")
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def view(tmp_path_factory):
    """A page of 200 sequences, of which two tokens carry most of k3; names and prompts are hostile."""
    folder = tmp_path_factory.mktemp("view")
    run = write_run(folder / "<img src=x onerror=alert(2)>", sequences=200, length=280, prompt=HOSTILE, metric=HOSTILE)
    shown = CliRunner().invoke(app, ["view", str(run), "-o", str(folder / "view.html")])
    assert shown.exit_code == 0, shown.output
    return folder / "view.html"


@pytest.fixture
def page(browser, view):
    """The open page; every line on its console and every dialog fails the test."""
    opened = browser.new_page(viewport={"width": 1400, "height": 1000})
    faults = []
    opened.on("console", lambda message: faults.append(message.text))
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("dialog", lambda dialog: (faults.append(dialog.message), dialog.dismiss()))
    opened.on(
        "request", lambda request: request.url.startswith(("file:", "blob:", "data:")) or faults.append(request.url)
    )
    opened.goto(view.as_uri())
    opened.wait_for_selector("html[data-ready]")
    yield opened
    assert faults == []
    opened.close()


def facts(page):
    return page.inner_text(".facts").replace("\n", " ")


def found(page):
    return page.inner_text("#viewer .tools .soft >> nth=0")


def test_both_worst_tokens_come_first(page):
    assert "log π -17.50" in facts(page)
    assert "token id 0 " in facts(page)
    page.keyboard.press("j")
    assert "log π -17.50" in facts(page)
    page.keyboard.press("j")
    assert "log π -17.50" not in facts(page)
    page.locator(".rows .row").nth(1).click()
    assert "log π -17.50" in facts(page)


def test_few_nodes_on_load(page):
    assert page.evaluate("document.querySelectorAll('*').length") <= 5000


def test_search_filters_and_modes(page):
    page.keyboard.press("/")
    page.keyboard.type("0")
    page.wait_for_timeout(100)
    assert found(page) == "2 tokens"
    page.fill("#viewer input[type=search]", "onerror")
    assert "of 56,000" in found(page), "each prompt contains it"
    page.fill("#viewer input[type=search]", "")
    page.select_option("select[title='Which tokens']", "rejected")
    assert found(page) == "0 tokens"
    page.select_option("select[title='Which tokens']", "all")
    page.keyboard.press("Escape")
    page.locator("#viewer button", has_text="sequences").click()
    assert found(page) == "200 sequences"


def test_curves_hover_zoom_and_export(page):
    plot = page.locator("#charts .u-over").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 60)
    assert any(character.isdigit() for character in page.locator("#charts .u-legend").first.inner_text())
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 60, steps=4)
    page.mouse.up()
    ends = page.eval_on_selector_all("#chart-tools input[type=number]", "ends => ends.map((end) => end.value)")
    assert all(ends)
    page.keyboard.press("0")
    with page.expect_download() as download:
        page.locator("#charts button", has_text="svg").first.click()
    text = download.value.path().read_text(encoding="utf-8")
    assert text.startswith("<svg")
    assert "<polyline" in text


def test_the_theme_switches_and_the_page_prints(page):
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("t")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert page.pdf().startswith(b"%PDF")


def test_hostile_text_runs_nothing(page):
    page.locator("#chart-tools input[type=search]").fill(HOSTILE)
    page.keyboard.press("Enter")
    page.wait_for_timeout(200)
    assert page.locator("figcaption b", has_text="onerror").count() == 1
    assert page.locator("img").count() == 0
