"""Pages and the site in headless Chromium. `make test-browser` installs the browser, builds the site, and runs this."""

import functools
import http.server
import json
import shutil
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("playwright", reason="needs a browser: make test-browser")
pytest.importorskip("pyarrow", reason="the extra log is not installed")

from playwright import sync_api
from run_view import write_run

from rollcorr.cli import app
from rollcorr.cli.live_page import LivePage
from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs the package chromium: make test-browser")
SITE = Path(__file__).parents[2] / "site"
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
    run = write_run(
        folder / "<script>alert(2)<img src=x onerror=alert(2)>",
        sequences=200,
        length=280,
        prompt=HOSTILE,
        metric=HOSTILE,
    )
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


def test_the_verdict_leads_to_both_tokens(page):
    """Two clicks reach each of them: the link in the verdict, then the row of the list."""
    note = page.inner_text("#heavy")
    assert note.startswith("2 of 56,000 tokens carry ")
    assert note.count("of step 7, position 140: log μ -0.2000, log π -17.50") == 2
    page.select_option("select[title='Which tokens']", "masked")
    page.locator("#heavy a").nth(1).click()
    assert "log π -17.50" in facts(page)
    second = facts(page)
    assert page.input_value("select[title='Which tokens']") == "all"
    page.locator("#heavy a").first.click()
    assert "log π -17.50" in facts(page)
    assert facts(page) != second, "one link for each token"


def test_the_heavy_tokens_are_a_warning_of_their_own(page):
    assert page.locator("#heavy.verdict.warning").count() == 1
    assert page.evaluate("document.querySelector('#heavy').previousElementSibling.matches('.unhealthy')")
    color = "getComputedStyle(document.querySelector('{}')).color"
    assert page.evaluate(color.format("#heavy strong")) != page.evaluate(color.format(".verdict:not(#heavy) strong"))


def test_the_heavy_tokens_outlive_a_live_update(browser, tmp_path):
    run = write_run(tmp_path / "run", sequences=10, length=20)
    with LivePage([run], port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        page.wait_for_selector("html[data-ready]")
        page.wait_for_function("document.getElementById('live').textContent === 'live · 10 steps'")
        page.evaluate("document.getElementById('verdict').dataset.old = true")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 11, "rollout_corr/token_count": 20.0, "rollout_corr/k3_kl": 0.1}\n')
        page.wait_for_selector("#verdict:not([data-old])", timeout=20_000)
        page.wait_for_function("document.getElementById('live').textContent === 'live · 11 steps'")
        assert "of 200 tokens carries" in page.inner_text("#verdict #heavy")
        page.close()
        server.shutdown()


def test_the_table_filters_while_typing_and_sorts(page):
    page.locator("#viewer input[type=number]").press_sequentially("10")
    assert found(page) == "2 tokens"
    page.locator("#viewer input[type=number]").fill("")
    heads = page.locator(".row.head > *")
    assert heads.count() == page.locator(".row.head > button").count(), "each heading sorts"
    for index in range(heads.count()):
        heads.nth(index).click()
        assert heads.nth(index).inner_text().startswith("▾")
    assert "weight" not in page.inner_text(".row.head"), "no weights are configured"
    assert "Weights are not applied" in page.inner_text(".legend")


def test_metrics_are_found_by_a_part(page):
    search = page.locator("#chart-tools input[type=search]")
    search.fill("nowhere to be found")
    search.press("Enter")
    assert page.inner_text(".said") == "no match for nowhere to be found"
    search.fill("ONERROR=alert")
    search.press("Enter")
    page.wait_for_selector("figcaption b:text('onerror')")
    assert page.inner_text(".said") == ""


def test_a_hover_shifts_no_chart(page):
    plot = page.locator("#charts .u-over").first
    plot.scroll_into_view_if_needed()
    height = page.evaluate("document.documentElement.scrollHeight")
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 60)
    page.wait_for_timeout(100)
    assert page.evaluate("document.documentElement.scrollHeight") == height


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


def test_a_log_axis_begins_between_powers_of_ten(browser, tmp_path):
    """The ticks of uPlot never ended for these values; the page shows the curves and their ticks."""
    values = [0.0014571831561625, 0.0022781335283, 0.0146504063159, 0.0705566257238]
    run = tmp_path / "run"
    run.mkdir()
    metrics = [{"step": step, "rollout_corr/k3_kl": value} for step, value in enumerate(values)]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, metrics)) + "\n")
    assert CliRunner().invoke(app, ["view", str(run), "-o", str(tmp_path / "view.html")]).exit_code == 0
    page, faults = browser.new_page(), []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto((tmp_path / "view.html").as_uri())
    page.wait_for_selector("html[data-ready]", timeout=60_000)
    assert faults == []
    assert page.evaluate("rc.charts.get('kl').plot.axes[1]._values") == ["0.001", "0.01", "0.1"]
    assert page.evaluate("rc.logTicks(0, 3, 1)") == [0, 1, 2]
    assert page.evaluate("rc.logTicks(-30, 300, 1)") == [-10, -1, 0, 1, 10, 100]
    assert page.evaluate("rc.ticks([1.5e-4, 1e-4, null, 0.25])") == ["1.5e-4", "1e-4", "", "0.25"]
    assert page.evaluate("rc.ticks([0.99998, 0.99999, 1])") == ["0.99998", "0.99999", "1"]
    page.close()


def test_bins_keep_their_signs_and_edges(page):
    """Of the distributions and breakdowns: no tick is outside of the plot, where it hid the signs below."""
    axes = page.evaluate("rc.bars.map((bar) => bar.plot.axes.map((axis) => axis._values))")
    assert axes[0][0][:3] == ["-10", "-0.1", "-0.001"]
    assert [bins for bins, _ in axes if "128" in bins], "the edge of a bin is exact"
    assert all(not text.startswith("-") for _, sums in axes for text in sums)


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


def test_hostile_tokens_run_nothing(browser, tmp_path, monkeypatch):
    monkeypatch.setattr("rollcorr.diagnostics.report.view_page.token_decoder", lambda directory: lambda token: HOSTILE)
    run = write_run(tmp_path / "run", sequences=10, length=20)
    shown = CliRunner().invoke(app, ["view", str(run), "--tokenizer", ".", "-o", str(tmp_path / "view.html")])
    assert shown.exit_code == 0, shown.output
    page, faults = browser.new_page(), []
    page.on("dialog", lambda dialog: (faults.append(dialog.message), dialog.dismiss()))
    page.on("console", lambda message: faults.append(message.text))
    page.goto((tmp_path / "view.html").as_uri())
    page.wait_for_selector("html[data-ready]")
    assert HOSTILE in page.inner_text(".text")
    assert HOSTILE in page.inner_text("#heavy")
    assert faults == []
    page.close()


@pytest.fixture(scope="module")
def flow(tmp_path_factory):
    """A page of denoising steps, of which one picture has decoded predictions; its prompts are hostile."""
    picture = "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAEBAQ=="
    steps = {"dimensions": 10, "timestep": [900.0, 500.0], "exact_kl": [0.25, 4.0], "prompt": HOSTILE}
    rows = [
        {"step": 1, "rollout_log_prob": [-1.0, -1.0], "old_log_prob": [-0.9, -1.1], "predictions": text, **steps}
        for text in (picture, HOSTILE)
    ]
    folder = tmp_path_factory.mktemp("flow")
    with RolloutLogWriter(folder / "flow.parquet") as log:
        log.write(RolloutBatch.from_rows(rows))
    shown = CliRunner().invoke(app, ["view", str(folder / "flow.parquet"), "-o", str(folder / "view.html")])
    assert shown.exit_code == 0, shown.output
    return folder / "view.html"


def test_the_step_viewer_draws_predictions_worst_first(browser, flow):
    page = browser.new_page()
    page.goto(flow.as_uri())
    page.wait_for_selector("html[data-ready]")
    assert "timestep 500.0" in facts(page)
    assert page.locator(".tile").count() == 4, "two steps, of the sampler and of the trainer"
    assert page.locator(".tile").first.evaluate("node => node.style.backgroundImage").startswith('url("data:image/jpeg')
    assert found(page) == "4 steps"
    page.keyboard.press("s")
    assert found(page) == "2 pictures"
    page.locator(".rows .row").nth(1).click()
    assert page.locator(".tile").count() == 0, "the text of the other picture is no base64"
    page.close()


@pytest.fixture(scope="module")
def site():
    """The address of the built site."""
    if not (SITE / "index.html").is_file():
        pytest.skip("the site is not built: make docs-site")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_a_search_on_the_site_leads_to_a_page(browser, site):
    faults = []
    page = browser.new_page()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: request.url.startswith((site, "data:", "blob:")) or faults.append(request.url))
    page.goto(site)
    page.keyboard.press("/")
    page.keyboard.type("importance sampling")
    result = page.locator(".md-search-result__link").first
    result.wait_for()
    page.wait_for_timeout(300)
    address = page.url
    result.click()
    page.wait_for_load_state()
    assert page.url != address
    assert "importance" in page.inner_text("main").lower()
    assert faults == []
    page.close()


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_screen(browser, view, flow, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    for path in (view, flow):
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()
