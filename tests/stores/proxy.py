"""A proxy in front of the S3 server that counts requests and bytes, and makes chosen requests fail in chosen ways."""

import contextlib
import os
import signal
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

FAULTS = (
    "503",
    "reset",
    "timeout",
    "slow",
    "torn upload",
    "torn download",
    "lost answer",
    "lost listing",
    "skewed clock",
)
KILLS = ("kill before", "kill within", "kill after")
_REFUSALS = {
    "503": (503, "SlowDown"), "lost listing": (500, "InternalError"), "skewed clock": (403, "RequestTimeTooSkewed"),
    "expired": (400, "ExpiredToken"), "forbidden": (403, "AccessDenied"),
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A request as the proxy received it: number from 1, HTTP method, target, and size of its body in bytes."""

    number: int
    method: str
    target: str
    num_bytes: int

    @property
    def is_listing(self) -> bool:
        return "list-type=2" in self.target


class Proxy:
    """A proxy that listens on a free port while its context is active.

    Attributes:
        judge: Function that returns the fault for a request, or None to forward it.
        requests: All requests that were received.
        delivered: Total bytes of response bodies that GET requests returned.
        victim: ID of the process that the "kill" faults kill.
    """

    def __init__(self, upstream: int, hang: float = 3.0) -> None:
        self.upstream, self.hang = upstream, hang
        self.judge: Callable[[Request], str | None] = lambda request: None
        self.requests: list[Request] = []
        self.met: list[tuple[Request, str]] = []
        self.delivered = self.victim = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, ValueError):
                    outer.serve(self.request)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads, request_queue_size, allow_reuse_address = True, 64, True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def reset(self) -> None:
        with self._lock:
            self.requests, self.met, self.delivered = [], [], 0
            self.judge = lambda request: None

    def serve(self, client: socket.socket) -> None:
        client.settimeout(30)
        data = b""
        while b"\r\n\r\n" not in data:
            piece = client.recv(65536)
            if not piece:
                return
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        method, target, _ = head.split(b"\r\n")[0].decode().split(" ", 2)
        length = _read_content_length(head)
        with self._lock:
            request = Request(len(self.requests) + 1, method, target, length)
            self.requests.append(request)
            fault = self.judge(request)
            if fault is not None:
                self.met.append((request, fault))
        if fault == "kill before":
            os.kill(self.victim, signal.SIGKILL)
            return
        if fault == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            return
        while len(body) < length:
            piece = client.recv(min(1 << 20, length - len(body)))
            if not piece:
                return
            body += piece
        self._answer(client, request, fault, head, body)

    def _answer(self, client: socket.socket, request: Request, fault: str | None, head: bytes, body: bytes) -> None:
        if fault in _REFUSALS:
            status, code = _REFUSALS[fault]
            text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
            client.sendall(b"HTTP/1.1 %d Error\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
                           % (status, len(text)) + (b"" if request.method == "HEAD" else text))  # fmt: skip
            return
        if fault == "timeout":
            time.sleep(self.hang)
            return
        if fault == "slow":
            time.sleep(min(1.0, self.hang / 4))
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
        with socket.create_connection(("127.0.0.1", self.upstream), 30) as server:
            server.sendall(b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n")
            if fault in ("torn upload", "kill within"):
                server.sendall(body[: len(body) // 2])
                if fault == "kill within":
                    os.kill(self.victim, signal.SIGKILL)
                return
            server.sendall(body)
            answer = b""
            while piece := server.recv(1 << 20):
                answer += piece
        if fault == "kill after":
            os.kill(self.victim, signal.SIGKILL)
            return
        if fault == "lost answer":
            return
        if fault == "torn download":
            client.sendall(answer[: len(answer) - max(1, (len(answer) - answer.find(b"\r\n\r\n")) // 2)])
            return
        if request.method == "GET":
            with self._lock:
                self.delivered += len(answer) - answer.find(b"\r\n\r\n") - 4
        client.sendall(answer)


def _read_content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0
