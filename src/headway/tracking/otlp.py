"""Sends a run's values and events to an OpenTelemetry collector: `python -m headway.tracking.otlp`, fed with lines of JSON.

A process of its own beside rank 0, because OpenTelemetry's exporters draw from Python's global random numbers before each request,
on a thread of theirs, so that no two runs in one process would draw alike; and a loader's forked workers would send everything, too.
The first line has the resource's attributes. Each later one has "values" (name to number) or an "event", until one has neither, or
the training process is gone. What goes wrong is written to stdout.
"""

import contextlib
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from headway.version import __version__

LONGEST = 10.0
"""Seconds that the last request may take."""


def serve(lines: Iterator[Mapping[str, Any]]) -> None:
    """Send what the lines say; the official SDK reads where to, and how often, from its OTEL_* variables."""
    from opentelemetry._logs import LogRecord, SeverityNumber
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    resource = Resource.create(dict(next(lines))).merge(OTELResourceDetector().detect())
    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    meters = MeterProvider([reader], resource, shutdown_on_exit=False)
    logs = LoggerProvider(resource, shutdown_on_exit=False)
    logs.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter()))
    meter, logger = meters.get_meter("headway", __version__), logs.get_logger("headway", __version__)
    gauges: dict[str, Any] = {}
    with contextlib.suppress(ValueError):  # a line that was torn by a kill is the last
        for line in lines:
            if not line:
                break
            for name, value in line.get("values", {}).items():
                gauges[name] = gauges.get(name) or meter.create_gauge(_allowed(name))
                gauges[name].set(float(value))
            if "event" in line:
                name, told, now = line["event"], line["attributes"], int(line["time"] * 1e9)
                level: dict[str, Any] = {"severity_number": SeverityNumber.INFO, "severity_text": "INFO"}
                logger.emit(LogRecord(timestamp=now, event_name=name, body=name, attributes=told, **level))
    logs.shutdown()
    meters.shutdown(timeout_millis=LONGEST * 1000)


def _allowed(name: str) -> str:
    """The name as an instrument may have it."""
    plain = re.sub(r"[^\w\-./]", "_", name, flags=re.ASCII)[:240]
    return plain if plain[:1].isalpha() else f"value.{plain}"


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.WARNING)
    serve(map(json.loads, sys.stdin))
