"""Training runs that are interrupted at random times and restarted until they end must equal uninterrupted runs bit for bit.

`python -m tests.sweep.runs --seed 7 --count 200` makes 200 runs; `--only 31` makes one of them. The seed and the run's
number determine the times of the interruptions. `--sharded` uses models that are sharded over two and four ranks, each
of which saves its part.
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.sweep import jobs
from tests.sweep.jobs import Ended, Mark, Strike
from tests.sweep.modes import MODES, SHARDED, Mode
from tests.sweep.tables import format_columns

PREEMPTED = 75
PHASES = ("import", "set-up", "resume", "first batch", "batch", "batch", "last batch", "between epochs", "evaluation",
          "saving", "saving", "the end")  # fmt: skip
PHASES_OF_EVERY_START = ("import", "set-up", "resume", "first batch")
"""Phases that occur in every start. Marks of other phases occur once in a run."""

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
WEIGHTS = (4, 3, 2, 2)
PREEMPTING = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Plan:
    """Plan of one run.

    Attributes:
        number: Number of the run in the sweep.
        mode: Name of the mode.
        num_ranks: Number of processes.
        strikes: One interruption for each start except the last.
    """

    number: int
    mode: str
    num_ranks: int
    strikes: tuple[Strike, ...]


@dataclass
class Outcome:
    """Result of one run.

    Attributes:
        plan: Plan of the run.
        problems: Violated promises; empty if the run was equal.
        codes: Exit codes of all starts.
        struck: Mark of the interruption of each start, or None.
    """

    plan: Plan
    problems: list[str] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    struck: list[Mark | None] = field(default_factory=list)


def make_plan(seed: int, number: int, modes: Mapping[str, Mode] = MODES) -> Plan:
    """Return the plan of the run with this number.

    Successive runs use all modes in turn, each with its numbers of processes in turn.
    """
    draw = random.Random(f"{seed}/{number}")
    mode = list(modes)[number % len(modes)]
    counts = modes[mode].num_ranks
    num_ranks = counts[number // len(modes) % len(counts)]
    targets = ["rank 0", "launcher", "all", *(f"rank {rank}" for rank in range(1, num_ranks))]
    strikes = tuple(
        Strike(draw.choice(PHASES), draw.random(), draw.uniform(0, 1.2) if draw.random() < 0.8 else 0.0,
               draw.choices(SIGNALS, WEIGHTS)[0], draw.choice(targets))
        for _ in range(draw.choice((1, 2, 2, 3)))
    )  # fmt: skip
    return Plan(number, mode, num_ranks, strikes)


class Sweep:
    """Makes runs, and compares each with the uninterrupted run of its kind, which is made once.

    Args:
        folder: Folder for all runs. Folders of equal runs are removed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._undisturbed_runs: dict[tuple[str, int], Ended] = {}

    def get_undisturbed_run(self, mode: str, num_ranks: int) -> Ended:
        """Return the uninterrupted run of this kind, which is made on first use."""
        if (mode, num_ranks) not in self._undisturbed_runs:
            folder = self.folder / f"whole {mode} {num_ranks}"
            folder.mkdir()
            ended = jobs.run(folder, mode, num_ranks, 0)
            if ended.code != 0 or not all(lines and "weights" in lines[-1] for lines in ended.lines):
                raise RuntimeError(f"the undisturbed run failed ({mode}, {num_ranks} ranks):\n{ended.errors}")
            self._undisturbed_runs[mode, num_ranks] = ended
            shutil.rmtree(folder)
        return self._undisturbed_runs[mode, num_ranks]

    def run(self, plan: Plan) -> Outcome:
        """Make one run: start it again until it ends, and return its outcome."""
        whole, outcome = self.get_undisturbed_run(plan.mode, plan.num_ranks), Outcome(plan)
        folder = self.folder / f"run {plan.number}"
        folder.mkdir()
        reached = [0] * plan.num_ranks
        former = None
        for attempt, strike in enumerate((*plan.strikes, None)):
            ended = jobs.run(
                folder, plan.mode, plan.num_ranks, attempt, strike, partial(_choose_moment, whole, max(reached))
            )
            outcome.codes.append(ended.code)
            outcome.struck.append(ended.struck)
            problems = _find_problems(ended, whole, reached, former, strike and strike.number)
            outcome.problems += [f"start {attempt}: {each}" for each in problems]
            if problems:
                return outcome
            if ended.code == 0:
                break
            former = ended
        else:
            outcome.problems.append(
                f"the last start, which nothing struck, ended with {ended.code}: {ended.errors[-1500:]}"
            )
        if any(mark[0] == "saving" for mark, _ in ended.marks):  # the next save removes the files that a kill has left
            outcome.problems += _find_stray_files(folder)
        if not outcome.problems:
            shutil.rmtree(folder)
        return outcome


def _choose_moment(whole: Ended, reached: int, strike: Strike) -> tuple[Mark, float] | None:
    """Return the mark at which a strike happens and the delay in seconds, based on the uninterrupted run's marks."""
    marks = whole.marks
    last = _find_first_mark(whole, reached)
    known = [at for at, (mark, _) in enumerate(marks[:-1])
             if mark[0] == strike.phase and (at >= last or strike.phase in PHASES_OF_EVERY_START)]  # fmt: skip
    if not known:
        return None
    at = known[int(strike.which * len(known))]
    return marks[at][0], strike.delay * (marks[at + 1][1] - marks[at][1])


def _find_first_mark(whole: Ended, reached: int) -> int:
    """Return the index of the first mark after this number of log lines."""
    num_lines = len(whole.lines[0])
    return int(len(whole.marks) * reached / num_lines)


def _is_checked_after(struck: Mark | None, whole: Ended) -> bool:
    """Whether the run certainly checks for preemption after the mark at which the signal was sent."""
    if struck is None or struck[0] in ("import", "set-up", "resume", "the end"):
        return False
    marks = [mark for mark, _ in whole.marks]
    checks = [at for at, mark in enumerate(marks) if "batch" in mark[0] or mark[0] == "evaluation"]
    return struck[0] == "first batch" or marks.index(struck) < checks[-3]


def _find_problems(ended: Ended, whole: Ended, reached: list[int], former: Ended | None,
              struck_by: signal.Signals | None = None) -> list[str]:  # fmt: skip
    """Return the violated promises of one start, and update `reached`, the number of log lines that each rank has reached."""
    found = []
    if ended.has_hung:
        found.append(f"it did not end within {jobs.PATIENCE:g} s of {ended.struck}: {ended.errors}")
    if ended.left:
        found.append(f"processes outlive it: {ended.left}")
    for rank, (lines, expected) in enumerate(zip(ended.lines, whole.lines)):
        if not lines:
            continue
        begin = next((at for at, line in enumerate(expected) if line == lines[0]), None)
        if begin is None or begin > reached[rank]:
            nearest = [line for line in expected if line.get("place") == lines[0].get("place")][:1]
            found.append(f"rank {rank} begins with {lines[0]} after {reached[rank]} lines, of which there is only {nearest}"
                         f" (line {begin}); next is {expected[reached[rank] : reached[rank] + 1]}")  # fmt: skip
            continue
        if begin + len(lines) > len(expected):
            found.append(f"rank {rank} has more lines than the undisturbed run: {lines[len(expected) - begin :]}")
            continue
        differs = next((at for at, pair in enumerate(zip(lines, expected[begin:])) if pair[0] != pair[1]), None)
        if differs is not None:
            found.append(
                f"rank {rank} says {lines[differs]} instead of {expected[begin + differs]} (line {begin + differs})"
            )
        saved = _find_preempted_line(former, rank, expected)
        if _count_updates(expected[begin:saved]):
            found.append(f"rank {rank} trains {saved - begin} lines again, though the start before was preempted")
        reached[rank] = max(reached[rank], begin + len(lines))
    if ended.code == 0 and reached != [len(lines) for lines in whole.lines]:
        found.append(f"it ended with 0 after {reached} lines of {[len(lines) for lines in whole.lines]}")
    if struck_by in PREEMPTING and _is_checked_after(ended.struck, whole) and ended.code != PREEMPTED:
        found.append(f"{struck_by.name} at {ended.struck} ends it with {ended.code}: {ended.errors[-1500:]}")
    if ended.code == PREEMPTED and "Traceback" in ended.errors:
        found.append(f"preempted, and a traceback: {ended.errors[-1500:]}")
    if "internal" in ended.errors:
        found.append(f"an internal error: {ended.errors[-1500:]}")
    return found


def _find_preempted_line(former: Ended | None, rank: int, expected: list[dict]) -> int:
    """Return the number of the line after which the previous start was preempted, or 0 if it was not preempted.

    An earlier start that was killed may have reached a later line.
    """
    if former is None or former.code != PREEMPTED or not former.lines[rank]:
        return 0
    return next((at + 1 for at, line in enumerate(expected) if line == former.lines[rank][-1]), 0)


def _find_stray_files(folder: Path) -> list[str]:
    """Return a description of files that should not exist next to the two newest checkpoints."""
    for checkpoints in folder.glob("*/checkpoints"):
        left = sorted(path.name for path in checkpoints.iterdir())
        if len(left) != 3 or any(name.startswith(".") for name in left):
            return [f"there should be two checkpoints and `latest`, and there is {left}"]
    return []


def _count_updates(lines: list[dict]) -> int:
    return sum("loss" in line for line in lines)


def format_table(outcomes: list[Outcome]) -> str:
    """Return the results per mode: strikes by signal, runs, resumes, and equal runs."""
    rows = [["", *(number.name for number in SIGNALS), "runs", "resumes", "equal"]]
    for mode in (*dict.fromkeys(each.plan.mode for each in outcomes), "all"):
        own = [each for each in outcomes if mode in (each.plan.mode, "all")]
        fell = Counter(
            strike.number for each in own for strike, at in zip(each.plan.strikes, each.struck) if at is not None
        )
        equal = sum(not each.problems for each in own)
        resumes = sum(len(each.codes) - 1 for each in own)
        rows.append([mode, *(str(fell[number]) for number in SIGNALS), str(len(own)), str(resumes), str(equal)])
    return format_columns(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--count", type=int, default=200, help="number of runs")
    parser.add_argument("--begin", type=int, default=0, help="number of the first run")
    parser.add_argument("--only", type=int, nargs="*", help="make only the runs with these numbers")
    parser.add_argument("--sharded", action="store_true", help="use sharded models")
    parser.add_argument("--minutes", type=float, default=60, help="start no more runs after this time")
    parser.add_argument("--folder", type=Path, help="parent folder for runs that were not equal")
    args = parser.parse_args()
    # sys.exit runs the `finally` blocks, which end the processes of the current case.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    numbers = args.only or range(args.begin, args.begin + args.count)
    folder = Path(tempfile.mkdtemp(prefix="headway-sweep-", dir=args.folder))
    sweep, outcomes, began = Sweep(folder), [], time.monotonic()
    for number in numbers:
        if time.monotonic() - began > 60 * args.minutes:
            print(f"{args.minutes:g} minutes are over", flush=True)
            break
        planned = make_plan(args.seed, number, SHARDED if args.sharded else MODES)
        outcome = sweep.run(planned)
        outcomes.append(outcome)
        strikes = "; ".join(
            f"{strike} at {' '.join(at)}" if at else "-" for strike, at in zip(planned.strikes, outcome.struck)
        )
        verdict = "NOT EQUAL" if outcome.problems else "equal"
        print(
            f"{number:4} {planned.mode}, {planned.num_ranks}: {strikes}; codes {outcome.codes}: {verdict}", flush=True
        )
        for problem in outcome.problems:
            print(f"     {problem}", flush=True)
    print(
        f"\nseed {args.seed}, {time.monotonic() - began:.0f} s; strikes that fell, by signal:\n{format_table(outcomes)}"
    )
    failed = [each.plan.number for each in outcomes if each.problems]
    if failed:
        print(f"not equal: {failed}; their folders are in {folder}")
    else:
        shutil.rmtree(folder)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
