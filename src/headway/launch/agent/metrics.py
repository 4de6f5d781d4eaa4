"""Metrics of a run: `headway launch --metrics_port N` serves them in Prometheus' text format on 127.0.0.1.

The agent reads the pulses of this machine's ranks (files in shared memory with each rank's state), /proc, and the run's
log. Rank 0 writes the log's path into its pulse. Serving metrics takes no time on the ranks. Each request for metrics
reads only what was added to the log since the previous request. The format is Prometheus' text exposition format 0.0.4.

`/metrics` returns the numbers. `/healthz` answers 200, or 503 in two cases: no rank of this machine has run for a
minute, or a rank has waited in a collective for longer than `LONGEST_COLLECTIVE`.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from headway.core.runtime.pulse import HeartbeatFile, PulseReading
from headway.errors import LaunchError
from headway.launch.agent.log_tail import LogTail

LONGEST_COLLECTIVE = 120.0
"""Seconds in one collective after which /healthz reports that the run makes no progress."""

SILENCE = 60.0
"""Seconds without a heartbeat of any rank after which /healthz reports that the run makes no progress."""

_MIN_WAIT = 1.0
"""Seconds in one collective after which a rank counts as waiting for another rank."""

_CURVES = {"loss": "loss", "tokens_per_second": "tokens_per_second", "headway/memory": "memory_bytes"}
"""Logged values that are served as separate metrics, each with the metric's name."""

Rows = Iterable[tuple[Mapping[str, object], float]]


def find_awaited(readings: Mapping[int, PulseReading], now: float) -> int | None:
    """Return the rank for which other ranks of this machine wait in a collective, or None if there is no such rank.

    This is the rank that has entered the fewest collectives.

    Args:
        readings: State of each rank of this machine by rank, as read from the rank's pulse file.
        now: Current time on the monotonic clock.
    """
    entered = {rank: reading.calls[-1].number for rank, reading in readings.items() if reading.calls}
    waiting = [rank for rank in entered if measure_wait(readings[rank], now) > _MIN_WAIT]
    late = {rank: number for rank, number in entered.items() if rank not in waiting or number < max(entered.values())}
    return min(late, key=lambda rank: (late[rank], rank)) if waiting and late else None


def measure_wait(reading: PulseReading, now: float) -> float:
    """Return the seconds that a rank has spent in its current collective, or 0 if it is in none."""
    call = reading.calls[-1] if reading.calls else None
    return 0.0 if call is None or call.exit_time is not None else max(0.0, now - call.entry_time)


class RunMetrics:
    """Metrics of the ranks on one machine.

    Args:
        pulses: Function that returns, by global rank, the pulse files of this machine's current ranks. A pulse file
            contains the state of a rank.
        restarts: Function that returns how often the processes have been restarted.
    """

    def __init__(self, pulses: Callable[[], Mapping[int, Path]], restarts: Callable[[], int]) -> None:
        self._pulses = pulses
        self._restarts = restarts
        self._tail = LogTail()
        self._lock = threading.Lock()

    def _read_pulses(self) -> dict[int, PulseReading]:
        found = {}
        for rank, path in sorted(self._pulses().items()):
            try:
                found[rank] = HeartbeatFile(path, is_writer=False).read()
            except (OSError, ValueError):  # the file is being replaced between two attempts
                continue
        return {rank: reading for rank, reading in found.items() if reading.pid}

    def find_trouble(self) -> str:
        """Return the reason why the run makes no progress on this machine.

        Empty if it makes progress or has not started.
        """
        readings, now = self._read_pulses(), time.monotonic()
        if readings and all(reading.last_beat and now - reading.last_beat > SILENCE for reading in readings.values()):
            return f"no rank on this machine has run for {SILENCE:g} s"
        longest = max((measure_wait(reading, now) for reading in readings.values()), default=0.0)
        if longest > LONGEST_COLLECTIVE:
            rank = find_awaited(readings, now)
            return f"{longest:.0f} s in a collective{'' if rank is None else f'; waiting for rank {rank}'}"
        return ""

    def format_metrics(self) -> str:
        """Return all metrics in Prometheus' text format."""
        readings, now = self._read_pulses(), time.monotonic()
        with self._lock:
            self._tail.read_new_lines(
                next((reading.log for reading in readings.values() if reading.log), self._tail._path)
            )
            return "".join(
                _format_metric(name, about, rows) for name, about, rows in self._iterate_families(readings, now)
            )

    def _iterate_families(self, readings: Mapping[int, PulseReading], now: float) -> Iterator[tuple[str, str, Rows]]:
        tail, late = self._tail, find_awaited(readings, now)

        def list_by_rank(value: Callable[[PulseReading], float]) -> Rows:
            return [({"rank": rank}, value(reading)) for rank, reading in readings.items()]

        yield "ranks", "Ranks running on this machine.", [({}, len(readings))]
        yield "restarts", "Restarts of the processes.", [({}, self._restarts())]
        yield "updates", "Updates made.", list_by_rank(lambda one: one.update)
        yield (
            "micro_step",
            "Micro-batches begun in the current accumulation window.",
            list_by_rank(lambda one: one.micro_step),
        )
        ages = list_by_rank(lambda one: now - one.last_beat if one.last_beat else 0)
        yield "heartbeat_age_seconds", "Seconds since the last heartbeat.", ages
        yield (
            "collective_seconds",
            "Seconds in the current collective; 0: in none.",
            list_by_rank(lambda one: measure_wait(one, now)),
        )
        about = "The rank that others on this machine wait for; -1: none."
        yield "awaited_rank", about, [({}, -1 if late is None else late)]
        yield "resident_memory_bytes", "Host memory of the process.", list_by_rank(lambda one: _read_resident(one.pid))
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


def _read_resident(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0.0


def _format_metric(name: str, about: str, rows: Rows) -> str:
    lines = [f"headway_{name}{_format_labels(labels)} {_format_number(value)}\n" for labels, value in rows]
    return f"# HELP headway_{name} {about}\n# TYPE headway_{name} gauge\n{''.join(lines)}" if lines else ""


def _format_labels(labels: Mapping[str, object]) -> str:
    escaped = {k: str(v).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for k, v in labels.items()}
    pairs = ",".join(f'{key}="{value}"' for key, value in escaped.items())
    return f"{{{pairs}}}" if labels else ""


def _format_number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value)) if value != int(value) else str(int(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


class MetricsServer:
    """HTTP server for the metrics, running on a thread of the agent.

    Args:
        port: Port on 127.0.0.1; 0 for any free port.
        metrics: Metrics to serve.

    Attributes:
        port: Port that the server listens on.

    Raises:
        LaunchError: If the port is in use or cannot be opened.
    """

    def __init__(self, port: int, metrics: RunMetrics) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                """Answer a request for /metrics or /healthz."""
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._send_answer(200, metrics.format_metrics())
                elif path == "/healthz":
                    trouble = metrics.find_trouble()
                    self._send_answer(503 if trouble else 200, f"{trouble or 'ok'}\n")
                else:
                    self._send_answer(404, "not found; try /metrics or /healthz\n")

            def _send_answer(self, status: int, text: str) -> None:
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                """Do nothing, so that the frequent requests for metrics are not logged."""

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            raise LaunchError(f"--metrics_port {port}: {error.strerror or error}; give a free port") from error
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="headway-metrics", daemon=True).start()

    def stop_server(self) -> None:
        """Stop the server and close its port."""
        self._server.shutdown()
        self._server.server_close()
