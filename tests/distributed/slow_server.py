"""HTTP file server with range requests that can answer 429 or 503, stall, or close the connection early."""

import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Fault = Callable[["Handler", int], bool]
"""Function of (handler, request number) that may answer instead of the file server. Returns whether it has answered."""


class Handler(BaseHTTPRequestHandler):
    """Handler of one request."""

    protocol_version = "HTTP/1.1"
    server: "SlowServer"

    def log_message(self, *args: Any) -> None:  # type: ignore[override]
        """Print nothing."""

    def do_GET(self) -> None:
        """Answer with the file or a part of it, unless the server's fault answers."""
        with self.server.lock:
            self.server.num_requests += 1
            number = self.server.num_requests
        if self.server.fault(self, number):
            return
        path = self.server.folder / self.path.lstrip("/")
        if not path.is_file():
            self.answer(404)
            return
        data = path.read_bytes()
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if match is None or not self.server.has_ranges:
            self.answer(200, data, {"ETag": '"1"'})
            return
        begin, end = int(match[1]), int(match[2]) + 1
        part = data[begin:end]
        total = {"Content-Range": f"bytes {begin}-{begin + len(part) - 1}/{len(data)}", "ETag": '"1"'}
        self.answer(206, part, total)

    def answer(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
        """Send an HTTP response with the given status, body and headers, and close the connection."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = True

    @property
    def is_for_data(self) -> bool:
        """Whether the request is for data. The client requests only the first byte to find out the file's size."""
        return self.headers.get("Range") != "bytes=0-0"


class SlowServer(ThreadingHTTPServer):
    """HTTP server for the files in a folder, on a free port. Use it as a context manager.

    Args:
        folder: Folder of the files.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.fault: Fault = lambda handler, number: False
        self.has_ranges = True
        self.num_requests = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """URL of the folder."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnected."""

    def __enter__(self) -> "SlowServer":
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


def make_status_fault(status: int, headers: dict[str, str] | None = None, every: int = 2) -> Fault:
    """Return a fault that answers data requests with `status`, except those whose number is a multiple of `every`."""

    def fault(handler: Handler, number: int) -> bool:
        if not handler.is_for_data or number % every == 0:
            return False
        handler.answer(status, headers=headers)
        return True

    return fault


def break_off(handler: Handler, number: int) -> bool:
    """Announce 1 MB, send 4 bytes and close the connection, for data requests with odd numbers."""
    if not handler.is_for_data or number % 2:
        return False
    handler.send_response(206)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    handler.wfile.write(b"half")
    handler.close_connection = True
    return True


def make_delay_fault(seconds: float) -> Fault:
    """Return a fault that delays data requests with odd numbers by `seconds`."""

    def fault(handler: Handler, number: int) -> bool:
        if handler.is_for_data and number % 2:
            time.sleep(seconds)
        return False

    return fault
