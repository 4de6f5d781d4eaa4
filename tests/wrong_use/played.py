"""Makes a mistake of the table on real ranks, and compares the result with the table."""

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
from headway.common.callsite import find_user_line
from headway.common.tracebacks import ExceptionHook, format_short_traceback
from headway.errors import HeadwayError
from headway.launch.agent.endings import FailureReport
from headway.launch.agent.records import ExceptionRecord, RankExit
from tests.distributed.ranks import RankFailed, run_ranks
from tests.wrong_use.row import LAYOUTS, Cell
from tests.wrong_use.script import Script, collect_tensors
from tests.wrong_use.table import ROWS

TIMEOUT = 60
"""Timeout of a cell in seconds. Cells take less than two, except the first one that imports TorchDynamo on a busy machine."""

TOLERANCE = 1e-5


@dataclass
class Outcome:
    """Result of a mistake on one rank.

    Attributes:
        error: The error as a launcher would report it, or None.
        is_ours: Whether it is one of Headway's errors.
        warnings: Warnings, each with the number of updates before it.
        unequal: Largest difference from the results of the loop by hand.
    """

    error: ExceptionRecord | None = None
    is_ours: bool = False
    said: list[tuple[int, str]] = field(default_factory=list)
    unequal: float = 0.0


@contextmanager
def record_warnings() -> Iterator[list[tuple[int, str]]]:
    """Record warnings, each with the number of updates that were made before it."""
    steps: dict[int, int] = {}
    recorded: list[tuple[int, str]] = []

    def record(text: str) -> None:
        recorded.append((max(steps.values(), default=0), text))

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1

    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda entry: record(entry.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("headway")
    logger.addHandler(listener)
    counting = register_optimizer_step_post_hook(count)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = lambda message, *_, **__: record(str(message))
            yield recorded
    finally:
        counting.remove()
        logger.removeHandler(listener)


def make_mistake(name: str, layout: str, folder: str) -> Outcome:
    """Make the mistake on this rank."""
    row, outcome = ROWS[name], Outcome()
    script = Script(layout, folder)
    os.dup2(os.open(f"{folder}/said{script.rank}", os.O_CREAT | os.O_WRONLY), sys.stderr.fileno())
    with record_warnings() as outcome.warnings:
        try:
            result = row.make(script)
        except Exception as error:
            trace = f"{format_short_traceback(error)[0]}{scope.get_or_create(ExceptionHook).format_notes(error)}"
            outcome.error = ExceptionRecord(
                type(error).__name__, str(error), find_user_line(error.__traceback__), trace, time.time()
            )
            outcome.is_ours = isinstance(error, HeadwayError)
    if row.cells[layout].kind == "equal" and outcome.error is None:
        pairs = zip(
            collect_tensors(script.model if result is None else result),
            collect_tensors(row.by_hand(script)),
            strict=True,
        )
        outcome.unequal = max(float((a - b).abs().max()) for a, b in pairs)
    return outcome


def judge(name: str, layout: str) -> str:
    """Make the mistake on all ranks of the layout.

    Returns a description of the results that differ from the table, or an empty string.
    """
    cell, num_ranks = ROWS[name].cells[layout], LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as folder:
        try:
            ranks = run_ranks(make_mistake, num_ranks, name, layout, folder, timeout=TIMEOUT)
        except RankFailed as failed:
            told = "".join(path.read_text() for path in Path(folder).glob("said*"))
            # The hang watch or gloo has ended the processes.
            has_ended = "ended the run" in told or "terminate called" in told
            is_right = cell.kind == "error" and has_ended and cell.text in told
            return "" if is_right else f"{failed}\n{told}"
    if matches_cell(cell, ranks):
        return ""
    return "\n".join(f"rank {n}: {_describe(each)}" for n, each in enumerate(ranks))


def matches_cell(cell: Cell, ranks: list[Outcome]) -> bool:
    """Whether the results on the ranks match the cell of the table."""
    deaths = [RankExit(n, "here", 0, 1, each.error) for n, each in enumerate(ranks) if each.error]
    if cell.kind == "error" and deaths:
        finished = tuple(n for n, each in enumerate(ranks) if each.error is None)
        report = FailureReport(tuple(deaths), len(ranks), finished=finished)
        return cell.text in report.format_text() and ranks[report.first.rank].is_ours == cell.is_ours
    if deaths or cell.kind == "error":
        return False
    said = [line for each in ranks for line in each.warnings]
    if cell.kind == "warning":
        return any(cell.text in text for _, text in said) and all(before < 2 for before, _ in said)
    return not said and all(each.unequal <= TOLERANCE for each in ranks)


def _describe(outcome: Outcome) -> str:
    result = f"off by {outcome.unequal:.1e}"
    if outcome.error:
        whose = "Headway's" if outcome.is_ours else "another's"
        result = f"{whose} error: {outcome.error.trace}"
    return "\n".join([result, *(f"  said after {before} updates: {text}" for before, text in outcome.warnings)])
