"""`treadle report`: what it writes and serves, and what a browser shows of it."""

import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import browser
from tests.browser import Browser
from tests.cli_runs import treadle
from tests.report.test_report import EVIL, evil_run, long_run
from tests.report_directories import data_in, log_of, write_health, write_run
from tests.waiting import WATCHDOG
from treadle.errors import ConfigurationError
from treadle.report import server as serving
from treadle.report.page import write
from treadle.report.server import ReportServer

needs_browser = pytest.mark.skipif(browser.executable() is None, reason=browser.WHY)
WHOLE = "document.documentElement"
PLOT = (
    "(() => { const b = document.querySelector('.u-over').getBoundingClientRect();"
    "return [b.x, b.y, b.width] })()"
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serving._Handler, "timeout", WATCHDOG)  # for a client that is slow here


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
        (["runs/a", "--serve", "-o", "x"], "--serve writes no file: leave out --out"),
        (["runs/a", "--port", "80"], "--port is the port of --serve: add --serve"),
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


# The server


@contextmanager
def served(*roots):
    with ReportServer([Path(root) for root in roots]) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path="/", host=None, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=WATCHDOG)
    connection.request(method, path, headers={"Host": host or f"localhost:{server.server_port}"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.getheaders())


def test_only_the_page_and_its_data_are_served():
    write_run("runs/a")
    with served("runs") as server:
        status, text, headers = ask(server)
        assert status == 200 and data_in(text)["runs"][0]["name"] == "a"
        assert "connect-src 'self'" in text and 'data-live="yes"' in text
        assert headers["Cache-Control"] == "no-store" and headers["X-Frame-Options"] == "DENY"
        assert json.loads(ask(server, "/data.json?x=1")[1]) == data_in(text)
        for path in ("/run.json", "/runs/", "/../", "/a/run.json", "/data.json/"):
            status, text, _ = ask(server, path)
            assert (status, "there is nothing here" in text) == (404, True)
        assert ask(server, method="POST")[0] == ask(server, method="PUT")[0] == 501


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{}", "127.0.0.1", "localhost", ""])
def test_requests_for_another_host_are_rejected(host):
    write_run("runs/a")
    with served("runs") as server:
        status, text, _ = ask(server, "/data.json", host.format(server.server_port) or " ")
        assert status == 403 and text == f"open {server.url}: other hosts are rejected"
        assert server.server_address[0] == "127.0.0.1"


def test_odd_requests_print_nothing_and_change_nothing(capsys):
    path = write_run("runs/a")
    before = (path / "run.json").read_bytes()
    with served("runs") as server:
        host = f"Host: 127.0.0.1:{server.server_port}".encode()
        for request, answer in (
            (b"GET /../../etc/passwd HTTP/1.1\r\n" + host, b" 404 "),
            (b"GET http://evil.example/ HTTP/1.1\r\n" + host, b" 404 "),
            (b"GET / HTTP/1.1\r\nHost: evil.example\r\n" + host, b" 403 "),
            (b"GET / HTTP/1.0", b" 403 "),
            (b"POST / HTTP/1.1\r\n" + host + b"\r\nContent-Length: 999999999999", b" 501 "),
            (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n" + host, b" 414 "),
            (b"GET / HTTP/1.1\r\nA: " + b"b" * 100_000, b" 431 "),
            (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 500 + host, b" 431 "),
        ):
            with socket.create_connection(server.server_address, timeout=10) as link:
                link.sendall(request + b"\r\n\r\n")
                assert answer in link.recv(100), request[:50]
        for _ in range(20):  # clients that are gone before they have the answer
            with socket.create_connection(server.server_address, timeout=10) as link:
                link.sendall(b"GET / HTTP/1.1\r\n" + host + b"\r\n\r\n")
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert ask(server)[0] == 200
    assert capsys.readouterr() == ("", "")
    assert (path / "run.json").read_bytes() == before


def test_new_values_and_runs_appear(monkeypatch):
    monkeypatch.setattr(serving, "INTERVAL", 0.0)
    path = write_run("runs/a")
    with served("runs") as server:
        before = ask(server, "/data.json")[1]
        assert ask(server, "/data.json")[1] == before  # also the time of writing
        with (path / "log.jsonl").open("a") as file:
            file.write('{"step": 9, "loss": 0.25}\n')
        write_run("runs/b")
        runs = json.loads(ask(server, "/data.json")[1])["runs"]
        assert [run["name"] for run in runs] == ["a", "b"]
        assert runs[0]["curves"][0]["y"][-1] == 0.25
        for run in ("a", "b"):
            (Path("runs") / run / "run.json").unlink()
        status, text, _ = ask(server, "/data.json")
        assert status == 503 and text.startswith("runs holds no run")


def test_a_port_in_use_is_explained():
    write_run("runs/a")
    with served("runs") as server:
        port = server.server_port
        with pytest.raises(ConfigurationError, match=f"--port {port}: cannot serve there .*Choose"):
            ReportServer([Path("runs")], port)


def test_serve_ends_with_an_interrupt():
    write_run("runs/a")
    command = [sys.executable, "-c", "from treadle.cli import main; main()"]
    process = subprocess.Popen(
        [*command, "report", "runs", "--serve"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        line = process.stdout.readline()
        address = line.split()[1]
        assert urllib.request.urlopen(address, timeout=WATCHDOG).status == 200
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=WATCHDOG)
    finally:
        process.kill()
    assert process.returncode == 0 and "the server has ended" in errors


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


@pytest.mark.long
@needs_browser
def test_a_served_page_shows_new_values_and_keeps_the_zoom(page, monkeypatch):
    monkeypatch.setattr(serving, "INTERVAL", 0.0)
    path = write_run("runs/a", log_of([1.0] * 8))
    with served("runs") as server:
        page.open(server.url)
        drawn(page)
        page.evaluate("charts.zoom([2, 4])")
        with (path / "log.jsonl").open("a") as file:
            file.write('{"step": 9, "loss": 0.25}\n')
        page.evaluate("page.update()")
        page.wait_frames()
        assert page.evaluate("charts.drawn[0].curves[0].curve.y.at(-1)") == 0.25
        assert page.evaluate("charts.view.range") == [2, 4]
        assert page.messages == []
    page.evaluate("page.update()")
    assert "the server has ended" in page.evaluate("subtitle.textContent")
