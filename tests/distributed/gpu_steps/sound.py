"""Benchmark step that succeeds. It imports a module from a wheel that the test provides."""

from importlib import import_module

from benchmarks.gpu.bench import Bench, Row


def run(bench: Bench) -> None:
    carried = import_module("headway_test_carried")
    bench.add_row(Row("carried", carried.VALUE, "s", 4.0, "reference", "at least 1", False))
