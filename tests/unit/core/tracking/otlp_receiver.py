"""OpenTelemetry collector on the loopback interface, which receives OTLP over HTTP and keeps the data."""

import gzip
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest


def to_python(value):
    """Return an AnyValue as a Python object."""
    return getattr(value, value.WhichOneof("value"))


def read_attributes(pairs):
    return {pair.key: to_python(pair.value) for pair in pairs}


class Collector:
    """Data that the collector received.

    Attributes:
        resources: Attributes of each request's resource.
        metrics: (name, value) pairs in the order received.
        records: (name of the event, attributes) pairs in the order received.
        headers: Headers of each request.
        status: HTTP status of the answers. Default: 200.
    """

    def __init__(self):
        self.resources, self.metrics, self.records, self.headers, self.status = [], [], [], [], 200

    def store_request(self, path, body):
        if path == "/v1/metrics":
            for each in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                self.resources.append(read_attributes(each.resource.attributes))
                for metric in (metric for scope in each.scope_metrics for metric in scope.metrics):
                    assert metric.WhichOneof("data") == "gauge"
                    self.metrics += [(metric.name, point.as_double) for point in metric.gauge.data_points]
        else:
            assert path == "/v1/logs"
            for each in ExportLogsServiceRequest.FromString(body).resource_logs:
                self.resources.append(read_attributes(each.resource.attributes))
                for record in (record for scope in each.scope_logs for record in scope.log_records):
                    assert (record.severity_text, record.body.string_value) == ("INFO", record.event_name)
                    self.records.append((record.event_name, read_attributes(record.attributes)))


@contextmanager
def run_collector():
    """Run a collector during the block. Yield it and its URL."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            collector.headers.append(dict(self.headers))
            if collector.status == 200:
                collector.store_request(self.path, body)
            self.send_response(collector.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
