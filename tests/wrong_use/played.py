"""What follows from a mistake: it is made on real ranks, and compared with what the table says."""

import logging
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from headway import scope, traces
from headway.errors import HeadwayError
from headway.launch.records import Record
from tests.distributed.ranks import RankFailed, run_ranks
from tests.wrong_use.row import LAYOUTS
from tests.wrong_use.script import Script, numbers
from tests.wrong_use.table import ROWS

TIMEOUT = 20
"""Seconds after which a cell has hung; none takes two."""

TOLERANCE = 1e-5


@dataclass
class Followed:
    """What followed on one rank.

    Attributes:
        error: the error's text, and whether it is one of Headway's.
        said: warnings, each with the number of updates before it.
        unequal: the largest difference from the hand-written loop's numbers.
    """

    error: tuple[str, bool] | None = None
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
    with listening() as followed.said:
        script = Script(layout, folder)
        try:
            result = row.make(script)
        except Exception as raised:
            is_ours = isinstance(raised, HeadwayError)
            told = traceback.format_exc(limit=-1) + scope.own(traces.Hook).says(raised)
            followed.error = str(raised) if is_ours else told, is_ours
            return followed
    got = numbers(script.model if result is None else result)
    wanted = numbers(row.by_hand(script))
    followed.unequal = max(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True))
    return followed


def judge(name: str, layout: str) -> str:
    """Make the mistake on all ranks of the layout; what is not as the table says, empty where all is."""
    cell = ROWS[name].cells[layout]
    with tempfile.TemporaryDirectory() as folder:
        try:
            ranks = run_ranks(play, LAYOUTS[layout], name, layout, folder, timeout=TIMEOUT)
        except RankFailed as failed:
            return str(failed)
    errors = [followed.error for followed in ranks]
    if cell.kind == "error":
        is_right = all(e and (e[1] == cell.is_ours or Record("", e[0], "", "", 0).is_lost_connection) for e in errors)
        is_right = is_right and any(e and e[1] == cell.is_ours and cell.text in e[0] for e in errors)
    elif cell.kind == "warning":
        said = {line for followed in ranks for line in followed.said}
        is_right = (
            not any(errors) and any(cell.text in text for _, text in said) and all(before < 2 for before, _ in said)
        )
    else:
        is_right = all(f.error is None and f.unequal <= TOLERANCE and not f.said for f in ranks)
    return "" if is_right else "\n".join(f"rank {rank}: {_shown(followed)}" for rank, followed in enumerate(ranks))


def _shown(followed: Followed) -> str:
    outcome = f"off by {followed.unequal:.1e}"
    if followed.error:
        outcome = ("Headway's" if followed.error[1] else "another's") + f" error: {followed.error[0]}"
    return "\n".join([outcome, *(f"  said after {before} updates: {text}" for before, text in followed.said)])
