"""A step that ends well; what it imports came in a wheel."""

from importlib import import_module

from benchmarks.gpu.bench import Bench, Row


def run(bench: Bench) -> None:
    carried = import_module("headway_test_carried")
    bench.row(Row("carried", carried.VALUE, "s", 4.0, "what was wanted", "at least 1", False))
