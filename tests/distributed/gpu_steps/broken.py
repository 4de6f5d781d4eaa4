"""Benchmark step that records one row, fails in one attempt, and then fails as a whole."""

from benchmarks.gpu.bench import Bench, Row


def run(bench: Bench) -> None:
    bench.add_row(Row("before", 1.0, "s"))
    with bench.attempt("a part"):
        raise ValueError("no luck")
    raise RuntimeError("all is lost")
