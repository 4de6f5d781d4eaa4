"""Runs tests/gpu in this process: a row for each test that ran, and one for each reason why tests were skipped.

`python -m benchmarks.gpu tests` runs only this step; with `--device cpu`, at a small size.
"""

from collections import Counter
from time import perf_counter

import pytest

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.runner import ROOT

LEFT_OUT = (
    "test_memory.py::test_checkpointing_lowers_the_peak_of_the_notebooks_trainings",
    "test_compiled.py::test_losses_are_those_without_the_compiler[no",
    "test_compiled.py::test_losses_are_those_without_the_compiler[bf16-0.02-False",
)
"""Tests that take too long. The step `notebook` covers the first; two cases of each compile mode still run."""


class RowReporter:
    """pytest plugin that turns test reports into rows.

    Args:
        bench: Run of the step.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Handle the report of one phase of a test."""
        if report.skipped:
            self.outcomes["skipped"] += 1
            self.reasons[str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)] += 1
        elif report.failed or report.when == "call":
            self.outcomes[report.outcome] += 1
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = (
                (crash.message if crash else report.longreprtext.strip())
                .partition("\n")[0][:300]
                .replace(f"{ROOT}/", "")
            )
            if report.failed:  # print at once, because the step may be ended before its last test
                self._bench.print_line(report.longreprtext[-4000:])
            self._bench.add_row(
                Row(report.nodeid, report.duration, "s", target="passes", is_met=report.passed, note=reason)
            )


def run(bench: Bench) -> None:
    """Run the tests. A failing test is a row, and the others still run."""
    reporter = RowReporter(bench)
    start = perf_counter()
    folder = str(ROOT / "tests" / "gpu")
    options = [f"--deselect=tests/gpu/{test}" for test in LEFT_OUT]
    if bench.is_simulated:
        options += ["-m", "not card"]  # these need a real GPU's kernels or clock
    bench.add_row(Row("left out", note=f"{', '.join(LEFT_OUT)}: `pytest tests/gpu` runs them too"))
    code = pytest.main(
        ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-rN", "--tb=no", "--rootdir", str(ROOT), *options, folder],
        plugins=[reporter],
    )
    for reason, count in reporter.reasons.most_common():
        bench.add_row(Row("skipped", count, "tests", note=reason))
    summary = (
        ", ".join(f"{count} {outcome}" for outcome, count in sorted(reporter.outcomes.items())) or "no test was found"
    )
    bench.add_row(Row("all of tests/gpu", perf_counter() - start, "s", note=summary))
    bench.has_failed |= code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
