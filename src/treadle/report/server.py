"""Serving a report while runs train, to browsers on this machine only."""

import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic
from typing import Any

from ..errors import ConfigurationError, TreadleError
from .page import harmless_json, rendered, report_data, run_directories

ADDRESS = "127.0.0.1"
INTERVAL = 2.0  # seconds between two reads of the runs, however many pages ask
TIMEOUT = 10  # seconds for which a silent connection is kept


class ReportServer(ThreadingHTTPServer):
    """Serves the page at `/` and its data at `/data.json`, and nothing else.

    A page of another site could ask through a host name of its own that leads to this machine, so
    requests that name another host are rejected.

    Args:
        roots: Run directories, or folders that hold some. New runs in them appear in the page.
        port: The port; 0 for one that is free.

    Attributes:
        url: The address of the page.

    Raises:
        DirectoryError: If there is no run.
        ConfigurationError: If the port is in use.
    """

    daemon_threads = True

    def __init__(self, roots: Sequence[Path], port: int = 0) -> None:
        self._roots, self._lock = list(roots), threading.Lock()
        self._data: dict[str, Any] = report_data(run_directories(self._roots))
        self._read = monotonic()
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise ConfigurationError(
                f"--port {port}: cannot serve there ({error.strerror}). Choose another port, or "
                "leave the option out for one that is free"
            ) from error
        self.url = f"http://{ADDRESS}:{self.server_port}/"

    @property
    def hosts(self) -> tuple[str, str]:
        """The names of this server in requests that are accepted."""
        return f"{ADDRESS}:{self.server_port}", f"localhost:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing if a client ends the connection before it has the answer."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def data(self) -> dict[str, Any]:
        """Return the data of the report, read again after `INTERVAL` seconds.

        Raises:
            TreadleError: If no run can be read.
        """
        with self._lock:
            if monotonic() - self._read > INTERVAL:
                new = report_data(run_directories(self._roots))
                if {**new, "written": self._data["written"]} != self._data:  # else pages stay
                    self._data = new
                self._read = monotonic()
            return self._data


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = TIMEOUT
    server_version = "treadle"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with the page or its data."""
        if self.headers.get("Host", "") not in self.server.hosts:
            self._answer(403, "text/plain", f"open {self.server.url}: other hosts are rejected")
            return
        path = self.path.partition("?")[0]
        if path not in ("/", "/data.json"):
            self._answer(404, "text/plain", f"there is nothing here: open {self.server.url}")
            return
        try:
            data = self.server.data()
        except TreadleError as error:
            self._answer(503, "text/plain", str(error))
            return
        if path == "/":
            self._answer(200, "text/html", rendered(data, live=True))
        else:
            self._answer(200, "application/json", harmless_json(data))

    def _answer(self, code: int, kind: str, text: str) -> None:
        content = text.encode(errors="backslashreplace")
        self.send_response(code)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(content))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for a request."""
