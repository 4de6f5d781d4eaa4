"""A run's metrics: `headway launch --metrics_port N` serves them in Prometheus' text format on 127.0.0.1.

The agent answers, from the pulses of this machine's ranks (mapped memory), /proc, and the run's log, whose place rank 0 tells in
its pulse: the ranks do nothing for it. A scrape reads what the log has grown by since the last one. The format is Prometheus'
text exposition format 0.0.4. `/metrics` has the numbers; `/healthz` answers 200, or 503 where no rank of this machine has run for
a minute, or the others wait for one of them for longer than `LONGEST_COLLECTIVE`.
"""

import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from headway.errors import LaunchError
from headway.runtime.pulse import HeartbeatFile, PulseReading

LONGEST_COLLECTIVE = 120.0
"""Seconds in a collective, from which on /healthz says that the run does not go on."""
SILENCE = 60.0
"""Seconds without a heartbeat of any rank."""
_LEAST_WAIT = 1.0
"""Seconds in a collective, from which on somebody is awaited."""
_SKIPPING = {"skipped_update", "non_finite", "spike"}
_BLOCK = 1 << 20
_CURVES = {"loss": "loss", "tokens_per_second": "tokens_per_second", "headway/memory": "memory_bytes"}
"""Numbers of the log that have a family of their own, and what that is called."""

Rows = Iterable[tuple[Mapping[str, object], float]]


class LogTail:
    """Follows a run's log, which may be torn at its end, and grow, and be another one.

    Attributes:
        values: the latest number of each name.
        events: how often each happened.
        commit: (time, update) of the last checkpoint; None: none yet.
    """

    def __init__(self) -> None:
        self._start_over("")

    def _start_over(self, path: str) -> None:
        self._path, self._offset, self._rest = path, 0, b""
        self.values: dict[str, float] = {}
        self.events: Counter[str] = Counter()
        self.num_skipped = 0
        self.commit: tuple[float, int] | None = None

    def follow(self, path: str) -> None:
        """Read on; nothing where the log is not there."""
        try:
            size = os.stat(path).st_size if path else 0
            if path != self._path or size < self._offset:
                self._start_over(path)
            if size <= self._offset:
                return
            with open(path, "rb") as file:
                file.seek(self._offset)
                while block := file.read(_BLOCK):
                    self._offset += len(block)
                    *lines, self._rest = (self._rest + block).split(b"\n")
                    for line in lines:
                        self._take(line)
        except OSError:
            return

    def _take(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            kind, when, step = entry["kind"], float(entry["time"]), entry.get("step")
            if kind == "values":
                self.values.update(_numbers(entry["values"]))
            elif kind == "event":
                name, details = str(entry["event"]), entry.get("details") or {}
                self.events[name] += 1
                self.num_skipped += name in _SKIPPING and details.get("action") not in ("none", "raise")
                if name == "checkpoint":
                    self.commit = when, step if isinstance(step, int) else 0
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return  # a torn line, or another program's


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, int | float) or value in ("nan", "inf", "-inf"):
            yield name, float(value)


def awaited(readings: Mapping[int, PulseReading], now: float) -> int | None:
    """The rank of this machine that the others here wait for in a collective: the one that has entered the fewest."""
    entered = {rank: one.calls[-1].number for rank, one in readings.items() if one.calls}
    waiting = [rank for rank in entered if waited(readings[rank], now) > _LEAST_WAIT]
    late = {rank: number for rank, number in entered.items() if rank not in waiting or number < max(entered.values())}
    return min(late, key=lambda rank: (late[rank], rank)) if waiting and late else None


def waited(reading: PulseReading, now: float) -> float:
    """Seconds that a rank has been in its present collective; 0 outside of any."""
    call = reading.calls[-1] if reading.calls else None
    return 0.0 if call is None or call.left is not None else max(0.0, now - call.entered)


class RunMetrics:
    """Puts the numbers together.

    Args:
        pulses: (local rank's global rank, its pulse's file) of this machine's ranks now.
        restarts: how often the processes were started again.
    """

    def __init__(self, pulses: Callable[[], Mapping[int, Path]], restarts: Callable[[], int]) -> None:
        self._pulses, self._restarts = pulses, restarts
        self._tail, self._lock = LogTail(), threading.Lock()

    def _read(self) -> dict[int, PulseReading]:
        found = {}
        for rank, path in sorted(self._pulses().items()):
            try:
                found[rank] = HeartbeatFile(path, is_writer=False).read()
            except (OSError, ValueError):  # between two attempts
                continue
        return {rank: one for rank, one in found.items() if one.pid}

    def trouble(self) -> str:
        """Why the run does not go on here; "" where it does, or has not begun."""
        readings, now = self._read(), time.monotonic()
        if readings and all(one.beat and now - one.beat > SILENCE for one in readings.values()):
            return f"no rank on this machine has run for {SILENCE:g} s"
        longest = max((waited(one, now) for one in readings.values()), default=0.0)
        if longest > LONGEST_COLLECTIVE:
            rank = awaited(readings, now)
            return f"{longest:.0f} s in a collective{'' if rank is None else f'; waiting for rank {rank}'}"
        return ""

    def text(self) -> str:
        """All of them, in the text format."""
        readings, now = self._read(), time.monotonic()
        with self._lock:
            self._tail.follow(next((one.log for one in readings.values() if one.log), self._tail._path))
            return "".join(_lines(name, about, rows) for name, about, rows in self._families(readings, now))

    def _families(self, readings: Mapping[int, PulseReading], now: float) -> Iterator[tuple[str, str, Rows]]:
        tail, late = self._tail, awaited(readings, now)

        def each(value: Callable[[PulseReading], float]) -> Rows:
            return [({"rank": rank}, value(one)) for rank, one in readings.items()]

        yield "ranks", "Ranks running on this machine.", [({}, len(readings))]
        yield "restarts", "Restarts of the processes.", [({}, self._restarts())]
        yield "updates", "Updates made.", each(lambda one: one.update)
        yield "micro_step", "Micro-batches begun in the current accumulation window.", each(lambda one: one.micro_step)
        ages = each(lambda one: now - one.beat if one.beat else 0)
        yield "heartbeat_age_seconds", "Seconds since the last heartbeat.", ages
        yield "collective_seconds", "Seconds in the current collective; 0: in none.", each(lambda one: waited(one, now))
        about = "The rank that others on this machine wait for; -1: none."
        yield "awaited_rank", about, [({}, -1 if late is None else late)]
        yield "resident_memory_bytes", "Host memory of the process.", each(lambda one: _resident(one.pid))
        about = "Skipped updates: fp16's loss scale, non-finite values, spikes."
        yield "skipped_updates", about, [({}, tail.num_skipped)]
        yield "events", "Events, by name.", [({"event": name}, count) for name, count in tail.events.items()]
        for name, short in _CURVES.items():
            found = [value for key, value in tail.values.items() if key == name or key.rpartition("/")[2] == name]
            yield short, f"The latest {name.rpartition('/')[2]} that was logged.", [({}, value) for value in found[:1]]
        yield "logged", "The latest number logged under each name.", [({"name": k}, v) for k, v in tail.values.items()]
        commit = [] if tail.commit is None else [tail.commit]
        yield "last_commit_timestamp_seconds", "When the last checkpoint was committed.", [({}, at) for at, _ in commit]
        yield "last_commit_update", "The update of the last checkpoint.", [({}, update) for _, update in commit]


def _resident(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0.0


def _lines(name: str, about: str, rows: Rows) -> str:
    told = [f"headway_{name}{_labels(labels)} {_number(value)}\n" for labels, value in rows]
    return f"# HELP headway_{name} {about}\n# TYPE headway_{name} gauge\n{''.join(told)}" if told else ""


def _labels(labels: Mapping[str, object]) -> str:
    escaped = {k: str(v).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for k, v in labels.items()}
    told = ",".join(f'{key}="{value}"' for key, value in escaped.items())
    return f"{{{told}}}" if labels else ""


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value)) if value != int(value) else str(int(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


class MetricsServer:
    """Answers on a thread of the agent's.

    Args:
        port: on 127.0.0.1; 0: a free one.
        metrics: what is told.

    Attributes:
        port: that it listens on.

    Raises:
        LaunchError: the port is taken.
    """

    def __init__(self, port: int, metrics: RunMetrics) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                """/metrics, and /healthz."""
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(200, metrics.text())
                elif path == "/healthz":
                    trouble = metrics.trouble()
                    self._answer(503 if trouble else 200, f"{trouble or 'ok'}\n")
                else:
                    self._answer(404, "not found; try /metrics or /healthz\n")

            def _answer(self, status: int, text: str) -> None:
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                """Nothing: a scrape is no news."""

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            raise LaunchError(f"--metrics_port {port}: {error.strerror or error}; give a free port") from error
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="headway-metrics", daemon=True).start()

    def end(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
