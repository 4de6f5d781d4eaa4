"""Metrics of a run: `headway launch --metrics_port N` serves them in Prometheus' text format on 127.0.0.1.

The agent reads the heartbeat files of this machine's ranks, /proc, and the run's log. Rank 0 writes the log's path into
its heartbeat file. Serving metrics takes no time on the ranks. Each request for metrics reads only what was added to the
log since the previous request. The format is Prometheus' text exposition format 0.0.4.

`/metrics` returns the numbers. `/healthz` answers 200, or 503 in two cases: no rank of this machine has run for a
minute, or a rank has waited in a collective for longer than `LONGEST_COLLECTIVE`.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from headway.core.runtime import heartbeat_file
from headway.core.runtime.heartbeat_file import HeartbeatReading
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


class _Sample(NamedTuple):
    """One value of a metric, with the labels that distinguish it from the metric's other values, such as the rank."""

    labels: Mapping[str, object]
    value: float


class _Metric(NamedTuple):
    """Metric with its name (without the prefix "headway_"), its description, and its current values."""

    name: str
    description: str
    samples: Sequence[_Sample]


def find_awaited(readings: Mapping[int, HeartbeatReading], now: float) -> int | None:
    """Return the rank for which other ranks of this machine wait in a collective, or None if there is no such rank.

    This is the rank that has entered the fewest collectives.

    Args:
        readings: State of each rank of this machine by rank, as read from the rank's heartbeat file.
        now: Current time on the monotonic clock.
    """
    num_entered = {rank: reading.calls[-1].number for rank, reading in readings.items() if reading.calls}
    waiting = [rank for rank in num_entered if measure_wait(readings[rank], now) > _MIN_WAIT]
    if not waiting:
        return None
    newest = max(num_entered.values())
    # A rank that waits in an earlier collective than others keeps them waiting, too.
    late = [rank for rank, number in num_entered.items() if rank not in waiting or number < newest]
    return min(late, key=lambda rank: (num_entered[rank], rank), default=None)


def measure_wait(reading: HeartbeatReading, now: float) -> float:
    """Return the seconds that a rank has spent in its current collective, or 0 if it is in none."""
    call = reading.calls[-1] if reading.calls else None
    return 0.0 if call is None or call.exit_time is not None else max(0.0, now - call.entry_time)


class RunMetrics:
    """Metrics of the ranks on one machine.

    Args:
        list_paths: Function that returns, by global rank, the paths of the heartbeat files of this machine's current
            ranks.
        restarts: Function that returns how often the processes have been restarted.
    """

    def __init__(self, list_paths: Callable[[], Mapping[int, Path]], restarts: Callable[[], int]) -> None:
        self._list_paths = list_paths
        self._restarts = restarts
        self._tail = LogTail()
        self._lock = threading.Lock()

    def _read_heartbeats(self) -> dict[int, HeartbeatReading]:
        """Return the state of each rank that has started, by global rank in ascending order."""
        readings = {}
        for rank, path in sorted(self._list_paths().items()):
            try:
                reading = heartbeat_file.read_file(path)
            except (OSError, ValueError):  # a restart of the ranks replaces the file
                continue
            if reading.pid:  # the agent creates the file before it starts the rank
                readings[rank] = reading
        return readings

    def find_trouble(self) -> str:
        """Return the reason why the run makes no progress on this machine.

        Empty if it makes progress or has not started.
        """
        readings, now = self._read_heartbeats(), time.monotonic()
        if readings and all(reading.last_beat and now - reading.last_beat > SILENCE for reading in readings.values()):
            return f"no rank on this machine has run for {SILENCE:g} s"
        longest = max((measure_wait(reading, now) for reading in readings.values()), default=0.0)
        if longest > LONGEST_COLLECTIVE:
            rank = find_awaited(readings, now)
            return f"{longest:.0f} s in a collective{'' if rank is None else f'; waiting for rank {rank}'}"
        return ""

    def format_metrics(self) -> str:
        """Return all metrics in Prometheus' text format."""
        readings, now = self._read_heartbeats(), time.monotonic()
        with self._lock:
            # Until a rank has written the log's path to its heartbeat file, for example after a restart, keep the old path.
            paths = [reading.log for reading in readings.values() if reading.log]
            self._tail.read_new_lines(paths[0] if paths else self._tail.path)
            metrics = [
                _Metric("ranks", "Ranks running on this machine.", [_Sample({}, len(readings))]),
                _Metric("restarts", "Restarts of the processes.", [_Sample({}, self._restarts())]),
                *_measure_ranks(readings, now),
                *_collect_logged(self._tail),
            ]
            return "".join(map(_format_metric, metrics))


def _measure_ranks(readings: Mapping[int, HeartbeatReading], now: float) -> list[_Metric]:
    """Return the metrics that are read from heartbeat files and from the kernel.

    Args:
        readings: State of each rank of this machine by rank, as read from the rank's heartbeat file.
        now: Current time on the monotonic clock.
    """

    def list_by_rank(get_value: Callable[[HeartbeatReading], float]) -> list[_Sample]:
        return [_Sample({"rank": rank}, get_value(reading)) for rank, reading in readings.items()]

    awaited_rank = find_awaited(readings, now)
    return [
        _Metric("updates", "Updates made.", list_by_rank(lambda reading: reading.update)),
        _Metric(
            "micro_step",
            "Micro-batches begun in the current accumulation window.",
            list_by_rank(lambda reading: reading.micro_step),
        ),
        _Metric(
            "heartbeat_age_seconds",
            "Seconds since the last heartbeat.",
            list_by_rank(lambda reading: now - reading.last_beat if reading.last_beat else 0),
        ),
        _Metric(
            "collective_seconds",
            "Seconds in the current collective; 0: in none.",
            list_by_rank(lambda reading: measure_wait(reading, now)),
        ),
        _Metric(
            "awaited_rank",
            "The rank that others on this machine wait for; -1: none.",
            [_Sample({}, -1 if awaited_rank is None else awaited_rank)],
        ),
        _Metric(
            "resident_memory_bytes",
            "Host memory of the process.",
            list_by_rank(lambda reading: _read_resident_bytes(reading.pid)),
        ),
    ]


def _collect_logged(tail: LogTail) -> list[_Metric]:
    """Return the metrics that are read from the run's log. Values that have not been logged yet have no samples."""
    metrics = [
        _Metric(
            "skipped_updates",
            "Skipped updates: fp16's loss scale, non-finite values, spikes.",
            [_Sample({}, tail.num_skipped)],
        ),
        _Metric("events", "Events, by name.", [_Sample({"event": name}, n) for name, n in tail.events.items()]),
    ]
    for logged_name, metric_name in _CURVES.items():
        # A script may log the value under a prefix, as in "train/loss". The first such name is used.
        values = [
            value for key, value in tail.values.items() if key == logged_name or key.rpartition("/")[2] == logged_name
        ]
        description = f"The latest {logged_name.rpartition('/')[2]} that was logged."
        metrics.append(_Metric(metric_name, description, [_Sample({}, value) for value in values[:1]]))
    logged = [_Sample({"name": name}, value) for name, value in tail.values.items()]
    metrics.append(_Metric("logged", "The latest number logged under each name.", logged))
    if tail.commit is not None:
        commit_time, update = tail.commit
        metrics += [
            _Metric(
                "last_commit_timestamp_seconds",
                "When the last checkpoint was committed.",
                [_Sample({}, commit_time)],
            ),
            _Metric("last_commit_update", "The update of the last checkpoint.", [_Sample({}, update)]),
        ]
    return metrics


def _read_resident_bytes(pid: int) -> float:
    """Return the bytes of a process in host memory, or 0 if they cannot be read."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0.0


def _format_metric(metric: _Metric) -> str:
    """Return the lines of a metric. Empty if it has no samples."""
    if not metric.samples:
        return ""
    name = f"headway_{metric.name}"
    lines = [f"{name}{_format_labels(each.labels)} {_format_number(each.value)}\n" for each in metric.samples]
    return f"# HELP {name} {metric.description}\n# TYPE {name} gauge\n{''.join(lines)}"


def _format_labels(labels: Mapping[str, object]) -> str:
    """Return the labels of a sample in Prometheus' format, such as `{rank="0"}`. Empty if there are none."""
    if not labels:
        return ""
    escaped = {k: str(v).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for k, v in labels.items()}
    pairs = ",".join(f'{key}="{value}"' for key, value in escaped.items())
    return f"{{{pairs}}}"


def _format_number(value: float) -> str:
    """Return a number as text. Whole numbers have no decimal point."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))


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
                """Send an HTTP response with an HTTP status code and a text."""
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
