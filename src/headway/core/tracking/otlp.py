"""Subprocess that sends a run's values and events to an OpenTelemetry collector.

It is started as `python -m headway.core.tracking.otlp`, and reads JSON lines from standard input. It is separate
from rank 0's process for two reasons. OpenTelemetry's exporters draw from Python's global random generator before
each request, on their own thread, so random numbers in the training process would no longer be reproducible. The
forked worker processes of a data loader would also send all values again.

The first line contains the resource's attributes. Each later line has "values" (name to number) or an "event". The
subprocess ends at an empty object, or when the training process has ended. Errors are written to standard output.
"""

import contextlib
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from headway.version import __version__

EXPORT_TIMEOUT = 10.0
"""Maximum duration of the last export before the subprocess exits, in seconds."""


def serve(lines: Iterator[Mapping[str, Any]]) -> None:
    """Send values and events to the collector, until the lines end or a line with an empty JSON object is read.

    OpenTelemetry's SDK reads the collector's address and the interval from OTEL_* variables.

    Args:
        lines: Parsed JSON lines. The first one contains the attributes of the resource.
    """
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
    with contextlib.suppress(ValueError):  # A kill can cut off only the last line.
        for line in lines:
            if not line:
                break
            for name, value in line.get("values", {}).items():
                if name not in gauges:
                    gauges[name] = meter.create_gauge(_replace_forbidden(name))
                gauges[name].set(float(value))
            if "event" in line:
                record = LogRecord(
                    timestamp=int(line["time"] * 1e9),  # nanoseconds
                    event_name=line["event"],
                    body=line["event"],
                    attributes=line["attributes"],
                    severity_number=SeverityNumber.INFO,
                    severity_text="INFO",
                )
                logger.emit(record)
    logs.shutdown()
    meters.shutdown(timeout_millis=EXPORT_TIMEOUT * 1000)


def _replace_forbidden(name: str) -> str:
    """Return the name, with "_" in place of each character that OpenTelemetry rejects.

    A name that does not begin with a letter gets the prefix "value.". Long names are cut to 240 characters.
    """
    replaced = re.sub(r"[^\w\-./]", "_", name, flags=re.ASCII)[:240]
    return replaced if replaced[:1].isalpha() else f"value.{replaced}"


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.WARNING)
    serve(map(json.loads, sys.stdin))
