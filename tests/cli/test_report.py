"""`treadle report`: what it writes, and what a browser shows of it."""

from pathlib import Path

import pytest

from tests import browser
from tests.browser import Browser
from tests.cli_runs import treadle
from tests.report.test_report import EVIL, evil_run, long_run
from tests.report_directories import data_in, log_of, write_health, write_run
from treadle.report.page import write

needs_browser = pytest.mark.skipif(browser.executable() is None, reason=browser.WHY)
WHOLE = "document.documentElement"
PLOT = (
    "(() => { const b = document.querySelector('.u-over').getBoundingClientRect();"
    "return [b.x, b.y, b.width] })()"
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# The command


def test_report_writes_a_page_and_names_it():
    write_run("runs/a")
    assert treadle("report", "runs/a").stdout == "report: runs/a/report.html\n"
    assert treadle("report", "runs", "-o", "one.html").stdout == "report: one.html\n"
    assert data_in(Path("one.html"))["runs"][0]["directory"] == "runs/a"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "there is no folder none: name a run directory, or a folder that holds some"),
        (["runs/a", "--open"], "no browser could be started: open file://"),
    ],
)
def test_wrong_usage_is_explained(arguments, message, monkeypatch):
    write_run("runs/a")
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    assert message in " ".join(treadle("report", *arguments, code=2).stderr.split())


def test_open_shows_the_file(monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    write_run("runs/a")
    treadle("report", "runs/a", "--open")
    assert opened == [Path("runs/a/report.html").absolute().as_uri()]


# In a browser


@pytest.fixture(scope="module")
def page():
    with Browser() as opened:
        yield opened


def drawn(page):
    """Wait until the charts that can be seen are drawn."""
    page.wait("charts.drawn.some((chart) => chart.plot)")
    page.wait_frames()


@needs_browser
def test_a_page_draws_its_curves_and_asks_no_host(page):
    write_run("run", images=["a-2.png"])
    page.open(write("run"))
    drawn(page)
    assert page.messages == []
    assert [address for address in page.requests if not address.startswith("data:")] == [
        Path("run/report.html").absolute().as_uri()
    ]
    assert page.evaluate("document.title") == "run"
    titles = page.evaluate("[...document.querySelectorAll('.chart h3')].map(e => e.textContent)")
    assert titles == ["loss", "accuracy", "steps per second"]
    inked = page.evaluate(
        "(() => { const c = document.querySelector('.plot canvas');"
        "return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(x => x) })()"
    )
    assert inked


@needs_browser
def test_no_script_of_a_directory_runs(page):
    evil_run("runs/a")
    evil_run("runs/b")
    for path in (write("runs/a"), write("runs")):
        page.open(path)
        drawn(page)
        for index in range(page.evaluate("document.querySelectorAll('.plot').length")):
            page.evaluate(f"document.querySelectorAll('.plot')[{index}].scrollIntoView()")
            page.wait_frames()
        for selector in ("select", "input[type=checkbox]", ".legend button", "#runs button"):
            page.evaluate(f"document.querySelectorAll('{selector}').forEach(e => e.click())")
        page.wait_frames()
        assert (page.dialogs, page.messages) == ([], [])
        assert page.evaluate("document.querySelectorAll('script').length") == 4
        assert page.evaluate("document.querySelectorAll('[onerror], [onload]').length") == 0
        assert page.evaluate("document.body.textContent.split('alert(1)').length") > 10
        shown = page.evaluate("[...document.querySelectorAll('td')].map(e => e.textContent)")
        assert any(text.startswith(EVIL[:60]) for text in shown)


@needs_browser
def test_the_policy_blocks_a_script_and_html_even_if_they_were_injected(page):
    write_run("run")
    page.open(write("run"))
    page.evaluate(
        "(() => { const s = document.createElement('script'); s.id = 'injected';"
        "try { s.text = 'window.ran = 1' } catch (e) { window.why = e.message }"
        "document.body.append(s) })()"
    )
    assert page.evaluate("window.ran === undefined && window.why.includes('TrustedScript')")
    assert "TrustedHTML" in page.evaluate(
        "(() => { try { document.body.innerHTML = '<b>' } catch (e) { return e.message } })()"
    )
    failed = "fetch('https://example.com').then(() => 'sent', () => 'blocked')"
    assert page.evaluate(failed) == "blocked"


@needs_browser
def test_zoom_axis_smoothing_and_legend(page):
    write_run("run", log_of([5.0 - 0.01 * i for i in range(400)], (200, 400)), progress={
        "step": 400, "epoch": 2, "batch": 0, "examples": 400, "seconds": 4.0})  # fmt: skip
    page.open(write("run"))
    drawn(page)
    x, y, width = page.evaluate(PLOT)
    page.mouse("mousePressed", x + width / 4, y + 40)
    page.mouse("mouseMoved", x + width / 3, y + 40)
    page.mouse("mouseMoved", x + width / 2, y + 40)
    page.mouse("mouseReleased", x + width / 2, y + 40)
    page.wait_frames()
    ranges = page.evaluate(
        "charts.drawn.filter(c => c.plot).map(c => [c.plot.scales.x.min, c.plot.scales.x.max])"
    )
    assert len(ranges) > 1 and ranges.count(ranges[0]) == len(ranges)  # all charts together
    assert [round(end, -1) for end in ranges[0]] == [100, 200]
    page.mouse("mouseMoved", x + width / 2, y + 60)
    page.wait_frames()
    assert page.evaluate("charts.drawn[0].at.textContent") == "step 150"
    assert page.evaluate("document.querySelector('.legend .value').textContent").startswith("3.5")
    page.evaluate("document.querySelector('.plot').focus()")
    page.key("ArrowRight")
    page.wait_frames()
    assert [round(end, -1) for end in page.evaluate("charts.view.range")] == [120, 220]
    page.key("0")
    page.wait_frames()
    assert page.evaluate("charts.view.range") is None
    page.evaluate("document.querySelector('#axis [value=time]').click()")
    page.wait_frames()
    assert page.evaluate("charts.drawn[0].plot.scales.x.max") == 4.0
    page.evaluate("document.querySelector('#axis [value=epoch]').click()")
    page.wait_frames()
    assert page.evaluate("charts.drawn[0].plot.scales.x.max") == 2.0
    lines = "charts.drawn[0].plot.series.length"
    assert page.evaluate(lines) == 4  # the place, the raw and the smoothed line, validation
    page.evaluate("smooth.value = 0; smooth.dispatchEvent(new Event('input'))")
    page.wait_frames()
    assert page.evaluate(lines) == 3
    page.evaluate("document.querySelector('.legend button').click()")
    page.wait_frames()
    assert page.evaluate(lines) == 2
    pressed = "document.querySelector('.legend button').getAttribute('aria-pressed')"
    assert page.evaluate(pressed) == "false"


@needs_browser
@pytest.mark.parametrize("mobile", [False, True])
@pytest.mark.parametrize("dark", [False, True])
def test_a_page_fits_a_laptop_and_a_phone_in_light_and_dark(page, mobile, dark):
    for name in "ab":
        run = write_run(f"runs/{name}", settings={"units": name, "x" * 80: "y" * 200})
        write_health(run)
    width, height = (390, 844) if mobile else (1366, 768)
    page.open(write("runs"), width, height, dark, mobile)
    drawn(page)
    assert page.evaluate(f"{WHOLE}.scrollWidth") == width
    assert page.evaluate(f"{WHOLE}.classList.contains('dark')") is dark
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, color[4:-1].split(","))) < 200) is dark
    page.evaluate("theme.click()")
    assert page.evaluate(f"{WHOLE}.classList.contains('dark')") is not dark
    page.evaluate("localStorage.clear()")


@needs_browser
def test_hovering_moves_nothing(page):
    write_run("run", log_of([5.0 - 0.1 * i for i in range(40)], (20, 40)))
    page.open(write("run"))
    drawn(page)
    places = (
        "JSON.stringify([...document.querySelectorAll('figure, section')]"
        ".map(e => e.getBoundingClientRect().top))"
    )
    before = page.evaluate(places)
    x, y, _ = page.evaluate(PLOT)
    for offset in (20, 100, 200):
        page.mouse("mouseMoved", x + offset, y + 50)
        page.wait_frames()
        assert page.evaluate(places) == before


@pytest.mark.long
@needs_browser
def test_a_long_run_opens_and_pans_with_few_points(page):
    """What takes time in a browser is the number of points, which is counted."""
    long_run("run")  # of 100,000 steps
    page.open(write("run"))
    drawn(page)
    points = "Math.max(...charts.drawn.filter(c => c.plot).map(c => c.plot.data[0].length))"
    assert page.evaluate(points) < 10_000
    page.evaluate("charts.zoom([20000, 40000])")
    page.wait_frames()
    for _ in range(20):
        page.evaluate("charts.move(0.05)")
        page.wait_frames()
    assert page.evaluate("charts.view.range") == pytest.approx([40_000, 60_000])
    assert page.evaluate(points) < 10_000
    assert page.messages == []
