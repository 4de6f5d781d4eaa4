"""What follows from a mistake: it is made on real ranks, and compared with what the table says."""

import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from headway.common import scope
from headway.common.callsite import find_users_line
from headway.common.tracebacks import ExceptionHook, format_short_traceback
from headway.errors import HeadwayError
from headway.launch.agent.endings import FailureReport
from headway.launch.agent.records import ExceptionRecord, RankExit
from tests.distributed.ranks import RankFailed, run_ranks
from tests.wrong_use.row import LAYOUTS, Cell
from tests.wrong_use.script import Script, numbers
from tests.wrong_use.table import ROWS

TIMEOUT = 60
"""Seconds after which a cell has hung. None takes two, except the first to import TorchDynamo on a busy machine."""

TOLERANCE = 1e-5


@dataclass
class Followed:
    """What followed on one rank.

    Attributes:
        error: what a launcher would have of it.
        is_ours: it is one of Headway's.
        said: warnings, each with the number of updates before it.
        unequal: the largest difference from the hand-written loop's numbers.
    """

    error: ExceptionRecord | None = None
    is_ours: bool = False
    said: list[tuple[int, str]] = field(default_factory=list)
    unequal: float = 0.0


@contextmanager
def listening() -> Iterator[list[tuple[int, str]]]:
    """Warnings, each with the number of updates that were made before it."""
    steps: dict[int, int] = {}
    said: list[tuple[int, str]] = []

    def hear(text: str) -> None:
        said.append((max(steps.values(), default=0), text))

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1

    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: hear(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("headway")
    logger.addHandler(listener)
    counting = register_optimizer_step_post_hook(count)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = lambda message, *_, **__: hear(str(message))
            yield said
    finally:
        counting.remove()
        logger.removeHandler(listener)


def play(name: str, layout: str, folder: str) -> Followed:
    """Make the mistake on this rank."""
    row, followed = ROWS[name], Followed()
    script = Script(layout, folder)
    os.dup2(os.open(f"{folder}/said{script.rank}", os.O_CREAT | os.O_WRONLY), sys.stderr.fileno())
    with listening() as followed.said:
        try:
            result = row.make(script)
        except Exception as error:
            trace = f"{format_short_traceback(error)[0]}{scope.own(ExceptionHook).format_notes(error)}"
            followed.error = ExceptionRecord(
                type(error).__name__, str(error), find_users_line(error.__traceback__), trace, time.time()
            )
            followed.is_ours = isinstance(error, HeadwayError)
    if row.cells[layout].kind == "equal" and followed.error is None:
        pairs = zip(numbers(script.model if result is None else result), numbers(row.by_hand(script)), strict=True)
        followed.unequal = max(float((a - b).abs().max()) for a, b in pairs)
    return followed


def judge(name: str, layout: str) -> str:
    """Make the mistake on all ranks of the layout; what is not as the table says, empty where all is."""
    cell, num_ranks = ROWS[name].cells[layout], LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as folder:
        try:
            ranks = run_ranks(play, num_ranks, name, layout, folder, timeout=TIMEOUT)
        except RankFailed as failed:
            told = "".join(path.read_text() for path in Path(folder).glob("said*"))
            # The hang watch or gloo has ended the processes.
            has_ended = "ended the run" in told or "terminate called" in told
            is_right = cell.kind == "error" and has_ended and cell.text in told
            return "" if is_right else f"{failed}\n{told}"
    return "" if is_as_told(cell, ranks) else "\n".join(f"rank {n}: {_shown(each)}" for n, each in enumerate(ranks))


def is_as_told(cell: Cell, ranks: list[Followed]) -> bool:
    """Is it what the cell says?"""
    deaths = [RankExit(n, "here", 0, 1, each.error) for n, each in enumerate(ranks) if each.error]
    if cell.kind == "error" and deaths:
        finished = tuple(n for n, each in enumerate(ranks) if each.error is None)
        report = FailureReport(tuple(deaths), len(ranks), finished=finished)
        return cell.text in report.format_text() and ranks[report.first.rank].is_ours == cell.is_ours
    if deaths or cell.kind == "error":
        return False
    said = [line for each in ranks for line in each.said]
    if cell.kind == "warning":
        return any(cell.text in text for _, text in said) and all(before < 2 for before, _ in said)
    return not said and all(each.unequal <= TOLERANCE for each in ranks)


def _shown(followed: Followed) -> str:
    outcome = f"off by {followed.unequal:.1e}"
    if followed.error:
        whose = "Headway's" if followed.is_ours else "another's"
        outcome = f"{whose} error: {followed.error.trace}"
    return "\n".join([outcome, *(f"  said after {before} updates: {text}" for before, text in followed.said)])
