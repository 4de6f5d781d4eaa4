"""Trainings that are ended at random moments and started again until they end: each must be the undisturbed one, bit for bit.

`python -m tests.sweep.runs --seed 7 --count 200` runs them, `--only 31` one of them; the moments follow from the seed and the number.
`--sharded` runs models that are spread over two and four ranks, each of which saves its part.
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
from tests.sweep.tables import laid_out

PREEMPTED = 75
PHASES = ("import", "set-up", "resume", "first batch", "batch", "batch", "last batch", "between epochs", "evaluation",
          "saving", "saving", "the end")  # fmt: skip
AFRESH = ("import", "set-up", "resume", "first batch")
"""Phases of every start; the others' marks come once in a run."""

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
WEIGHTS = (4, 3, 2, 2)
PREEMPTING = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Plan:
    """A run of the sweep.

    Attributes:
        number: in the sweep.
        mode: its name.
        num_ranks: processes.
        strikes: one for each start but the last.
    """

    number: int
    mode: str
    num_ranks: int
    strikes: tuple[Strike, ...]


@dataclass
class Outcome:
    """What came of one.

    Attributes:
        plan: the run.
        problems: what was not as promised; none: it was equal.
        codes: of all starts.
        struck: where it was.
    """

    plan: Plan
    problems: list[str] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    struck: list[Mark | None] = field(default_factory=list)


def plan(seed: int, number: int, modes: Mapping[str, Mode] = MODES) -> Plan:
    """The run of that number: modes in turn, each on its numbers of processes in turn."""
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
    """Runs plans, and compares each with the undisturbed run of its kind, which is made once.

    Args:
        folder: for all runs; those that were equal are removed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._whole: dict[tuple[str, int], Ended] = {}

    def whole(self, mode: str, num_ranks: int) -> Ended:
        """The undisturbed run."""
        if (mode, num_ranks) not in self._whole:
            folder = self.folder / f"whole {mode} {num_ranks}"
            folder.mkdir()
            ended = jobs.run(folder, mode, num_ranks, 0)
            if ended.code != 0 or not all(lines and "weights" in lines[-1] for lines in ended.lines):
                raise RuntimeError(f"the undisturbed run failed ({mode}, {num_ranks} ranks):\n{ended.errors}")
            self._whole[mode, num_ranks] = ended
            shutil.rmtree(folder)
        return self._whole[mode, num_ranks]

    def run(self, plan: Plan) -> Outcome:
        """One run, started again until it ends."""
        whole, outcome = self.whole(plan.mode, plan.num_ranks), Outcome(plan)
        folder = self.folder / f"run {plan.number}"
        folder.mkdir()
        reached = [0] * plan.num_ranks
        former = None
        for attempt, strike in enumerate((*plan.strikes, None)):
            ended = jobs.run(folder, plan.mode, plan.num_ranks, attempt, strike, partial(_moment, whole, max(reached)))
            outcome.codes.append(ended.code)
            outcome.struck.append(ended.struck)
            problems = _problems(ended, whole, reached, former, strike and strike.number)
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
        if any(mark[0] == "saving" for mark, _ in ended.marks):  # what a kill has left is swept by the next save
            outcome.problems += _litter(folder)
        if not outcome.problems:
            shutil.rmtree(folder)
        return outcome


def _moment(whole: Ended, reached: int, strike: Strike) -> tuple[Mark, float] | None:
    """The mark at which a strike falls, and the seconds after it, by the marks of the undisturbed run."""
    marks = whole.marks
    last = _first_after(whole, reached)
    known = [at for at, (mark, _) in enumerate(marks[:-1])
             if mark[0] == strike.phase and (at >= last or strike.phase in AFRESH)]  # fmt: skip
    if not known:
        return None
    at = known[int(strike.which * len(known))]
    return marks[at][0], strike.delay * (marks[at + 1][1] - marks[at][1])


def _first_after(whole: Ended, reached: int) -> int:
    """Which of the marks comes after so many lines."""
    num_lines = len(whole.lines[0])
    return int(len(whole.marks) * reached / num_lines)


def _is_checked_after(struck: Mark | None, whole: Ended) -> bool:
    """Is there a check for certain, after what a rank was about to do, at which the run can be asked to end?"""
    if struck is None or struck[0] in ("import", "set-up", "resume", "the end"):
        return False
    marks = [mark for mark, _ in whole.marks]
    checks = [at for at, mark in enumerate(marks) if "batch" in mark[0] or mark[0] == "evaluation"]
    return struck[0] == "first batch" or marks.index(struck) < checks[-3]


def _problems(ended: Ended, whole: Ended, reached: list[int], former: Ended | None,
              struck_by: signal.Signals | None = None) -> list[str]:  # fmt: skip
    """What is not as promised in one start; `reached`, the lines that each rank has come to, is moved on."""
    found = []
    if ended.has_hung:
        found.append(f"it did not end within {jobs.PATIENCE:g} s of {ended.struck}: {ended.errors}")
    if ended.left:
        found.append(f"processes outlive it: {ended.left}")
    for rank, (lines, wanted) in enumerate(zip(ended.lines, whole.lines)):
        if not lines:
            continue
        begin = next((at for at, line in enumerate(wanted) if line == lines[0]), None)
        if begin is None or begin > reached[rank]:
            nearest = [line for line in wanted if line.get("place") == lines[0].get("place")][:1]
            found.append(f"rank {rank} begins with {lines[0]} after {reached[rank]} lines, of which there is only {nearest}"
                         f" (line {begin}); next is {wanted[reached[rank] : reached[rank] + 1]}")  # fmt: skip
            continue
        if begin + len(lines) > len(wanted):
            found.append(f"rank {rank} has more lines than the undisturbed run: {lines[len(wanted) - begin :]}")
            continue
        differs = next((at for at, pair in enumerate(zip(lines, wanted[begin:])) if pair[0] != pair[1]), None)
        if differs is not None:
            found.append(
                f"rank {rank} says {lines[differs]} instead of {wanted[begin + differs]} (line {begin + differs})"
            )
        saved = _end_of(former, rank, wanted)
        if _num_trained(wanted[begin:saved]):
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


def _end_of(former: Ended | None, rank: int, wanted: list[dict]) -> int:
    """After which line the start before was preempted; 0 where it was not. One killed earlier may have come further."""
    if former is None or former.code != PREEMPTED or not former.lines[rank]:
        return 0
    return next((at + 1 for at, line in enumerate(wanted) if line == former.lines[rank][-1]), 0)


def _litter(folder: Path) -> list[str]:
    """What lies beside the two checkpoints that are to stay."""
    for checkpoints in folder.glob("*/checkpoints"):
        left = sorted(path.name for path in checkpoints.iterdir())
        if len(left) != 3 or any(name.startswith(".") for name in left):
            return [f"there should be two checkpoints and `latest`, and there is {left}"]
    return []


def _num_trained(lines: list[dict]) -> int:
    return sum("loss" in line for line in lines)


def table(outcomes: list[Outcome]) -> str:
    """Mode by kind of disturbance: strikes that fell; then runs, resumes, and how many were equal."""
    rows = [["", *(number.name for number in SIGNALS), "runs", "resumes", "equal"]]
    for mode in (*dict.fromkeys(each.plan.mode for each in outcomes), "all"):
        own = [each for each in outcomes if mode in (each.plan.mode, "all")]
        fell = Counter(
            strike.number for each in own for strike, at in zip(each.plan.strikes, each.struck) if at is not None
        )
        equal = sum(not each.problems for each in own)
        resumes = sum(len(each.codes) - 1 for each in own)
        rows.append([mode, *(str(fell[number]) for number in SIGNALS), str(len(own)), str(resumes), str(equal)])
    return laid_out(rows)


def main() -> int:
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--seed", type=int, default=7)
    reader.add_argument("--count", type=int, default=200, help="how many runs")
    reader.add_argument("--begin", type=int, default=0, help="the first one's number")
    reader.add_argument("--only", type=int, nargs="*", help="these numbers alone")
    reader.add_argument("--sharded", action="store_true", help="models that are spread over the ranks")
    reader.add_argument("--minutes", type=float, default=60, help="begin no run after that")
    reader.add_argument("--folder", type=Path, help="keeps what was not equal")
    asked = reader.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what ends the processes of the case in hand
    numbers = asked.only or range(asked.begin, asked.begin + asked.count)
    folder = Path(tempfile.mkdtemp(prefix="headway-sweep-", dir=asked.folder))
    sweep, outcomes, began = Sweep(folder), [], time.monotonic()
    for number in numbers:
        if time.monotonic() - began > 60 * asked.minutes:
            print(f"{asked.minutes:g} minutes are over", flush=True)
            break
        planned = plan(asked.seed, number, SHARDED if asked.sharded else MODES)
        outcome = sweep.run(planned)
        outcomes.append(outcome)
        said = "; ".join(
            f"{strike} at {' '.join(at)}" if at else "-" for strike, at in zip(planned.strikes, outcome.struck)
        )
        verdict = "NOT EQUAL" if outcome.problems else "equal"
        print(f"{number:4} {planned.mode}, {planned.num_ranks}: {said}; codes {outcome.codes}: {verdict}", flush=True)
        for problem in outcome.problems:
            print(f"     {problem}", flush=True)
    print(f"\nseed {asked.seed}, {time.monotonic() - began:.0f} s; strikes that fell, by signal:\n{table(outcomes)}")
    failed = [each.plan.number for each in outcomes if each.problems]
    if failed:
        print(f"not equal: {failed}; their folders are in {folder}")
    else:
        shutil.rmtree(folder)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
