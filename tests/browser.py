"""A headless Chromium, controlled through a pipe with the DevTools protocol, without a package."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from tests.waiting import WATCHDOG

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WHY = f"needs a browser: none of {', '.join(NAMES)} is installed"


def executable():
    """Return the path of a browser; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A browser with one page, as a context manager.

    Attributes:
        requests: The addresses that pages requested.
        messages: What pages wrote to the console, and the exceptions of their scripts.
        dialogs: The texts of dialogs that scripts opened.
    """

    def __init__(self):
        self._profile = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        command = [
            *(executable(), "--headless=new", "--no-sandbox", "--remote-debugging-pipe"),
            *("--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions"),
            *(f"--user-data-dir={self._profile.name}", "--disable-dev-shm-usage", "about:blank"),
        ]
        # The protocol reads from descriptor 3 and writes to 4.
        shell = ["bash", "-c", f'exec 3<&{to_read} 4>&{to_write}; exec "$@"', "bash", *command]
        self._process = subprocess.Popen(
            shell,
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._data, self._number = b"", 0
        self.requests, self.messages, self.dialogs = [], [], []
        self._session = None
        pages = self.call("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self._write)  # ends the browser
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        self._profile.cleanup()

    def call(self, method, **parameters):
        """Call a method of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(WATCHDOG)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def open(self, address, width=1366, height=768, dark=False, mobile=False):
        """Open a page and wait until it is loaded and drawn."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.requests.clear()
        self.messages.clear()
        self.call("Page.navigate", url=Path(address).resolve().as_uri() if "://" not in str(address)
                  else address)  # fmt: skip
        self.wait("document.readyState === 'complete'")
        self.wait_frames()

    def wait_frames(self):
        """Wait until the page has drawn what scripts changed."""
        twice = "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 60)))"
        self.evaluate(f"new Promise(done => {twice})")

    def wait(self, condition, seconds=WATCHDOG):
        """Wait until a JavaScript expression holds."""
        end = time.monotonic() + seconds
        while not self.evaluate(condition):
            if time.monotonic() > end:
                raise TimeoutError(f"{condition} did not hold within {seconds} s")
            time.sleep(0.05)

    def evaluate(self, expression):
        """Return the value of a JavaScript expression, which may be a promise."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description"))
        return found["result"].get("value")

    def mouse(self, kind, x, y, **more):
        """Send a mouse event: mousePressed, mouseMoved, mouseReleased or mouseWheel."""
        more = {"button": "left", "clickCount": 1, **more} if kind != "mouseMoved" else more
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def key(self, key):
        """Press a key."""
        text = key if len(key) == 1 else ""
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, path=None, full=False):
        """Return a screenshot as PNG, and write it to a file if a path is given."""
        options = {"captureBeyondViewport": full}
        if full:
            content = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {
                "x": 0,
                "y": 0,
                "scale": 1,
                **{k: content[k] for k in ("width", "height")},
            }
        data = base64.b64decode(
            self.call("Page.captureScreenshot", format="png", **options)["data"]
        )
        if path:
            Path(path).write_bytes(data)
        return data

    def _next(self, seconds):
        end = time.monotonic() + seconds
        while b"\0" not in self._data:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise TimeoutError(f"the browser has not answered within {seconds} s")
            piece = os.read(self._read, 1 << 20)
            if not piece:
                raise RuntimeError("the browser has ended")
            self._data += piece
        text, _, self._data = self._data.partition(b"\0")
        return json.loads(text)

    def _note(self, event):
        method, found = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])
        elif method == "Runtime.consoleAPICalled":
            self.messages.append(
                " ".join(str(a.get("value", a.get("description"))) for a in found["args"])
            )
        elif method == "Runtime.exceptionThrown":
            details = found["exceptionDetails"]
            self.messages.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded":
            self.messages.append(found["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(found["message"])
