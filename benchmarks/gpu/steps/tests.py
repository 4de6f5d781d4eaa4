"""tests/gpu in this process: a row for each test that ran, and one for each reason why others did not."""

from collections import Counter
from time import perf_counter

import pytest

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.runner import ROOT

ELSEWHERE = (
    "test_memory.py::test_the_notebooks_rows",
    "test_compiled.py::test_losses_are_those_without_the_compiler[no",
    "test_compiled.py::test_losses_are_those_without_the_compiler[bf16-0.02-False",
)
"""For which the time is not enough: the first is the step `notebook`, of the others two cases of each mode are left."""


class Rows:
    """What pytest tells, as rows.

    Args:
        bench: the run.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of one test is over."""
        if report.skipped:
            self.outcomes["skipped"] += 1
            self.reasons[str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)] += 1
        elif report.failed or report.when == "call":
            self.outcomes[report.outcome] += 1
            crash = getattr(report.longrepr, "reprcrash", None)
            why = (
                (crash.message if crash else report.longreprtext.strip())
                .partition("\n")[0][:300]
                .replace(f"{ROOT}/", "")
            )
            if report.failed:  # at once: the step may be ended before its last test
                self._bench.say(report.longreprtext[-4000:])
            self._bench.row(Row(report.nodeid, report.duration, "s", wanted="passes", holds=report.passed, note=why))


def run(bench: Bench) -> None:
    """Run them; a failing test is a row, and the step goes on."""
    rows = Rows(bench)
    begun = perf_counter()
    folder = str(ROOT / "tests" / "gpu")
    chosen = [f"--deselect=tests/gpu/{test}" for test in ELSEWHERE]
    if bench.is_simulated:
        chosen += ["-m", "not card"]  # a card's own kernels or clock
    bench.row(Row("left out", note=f"{', '.join(ELSEWHERE)}: `pytest tests/gpu` runs them too"))
    code = pytest.main(
        ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-rN", "--tb=no", "--rootdir", str(ROOT), *chosen, folder],
        plugins=[rows],
    )
    for reason, count in rows.reasons.most_common():
        bench.row(Row("skipped", count, "tests", note=reason))
    found = ", ".join(f"{count} {outcome}" for outcome, count in sorted(rows.outcomes.items())) or "no test was found"
    bench.row(Row("all of tests/gpu", perf_counter() - begun, "s", note=found))
    bench.has_failed |= code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
