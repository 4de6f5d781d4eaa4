"""The schedules of a resumed run: do they go on with the learning rates, and count as they did?

A schedule's state holds its place, and of torch's own all settings too; not the function of a LambdaLR, which the script makes anew.
One that counts by the number of processes is another function on another number of them.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from headway.checkpoint.format.values import decode
from headway.checkpoint.resume.saved import SavedRun
from headway.checkpoint.state import CollectedState
from headway.training.prepared.objects import SchedulerEntry
from headway.training.prepared.prepare import Preparation
from headway.training.prepared.scheduler import StepsPerUpdate

_CALLS = "calls of step()"


class Schedules:
    """The prepared schedules of a run.

    Args:
        preparation: knows them, and how they tick.
    """

    def __init__(self, preparation: Preparation) -> None:
        self._preparation = preparation

    def units(self) -> list[str]:
        """For each schedule, what it counts."""
        return [_unit(each) for each in self._preparation.schedulers]

    def changed(self, saved: SavedRun, found: CollectedState, num_processes: int) -> tuple[list[str], list[str]]:
        """(what a run cannot go on with, what is only not as it was), a line each.

        Args:
            saved: the run.
            found: its state, which fits the schedules.
            num_processes: of this run; where they are as many as before, a function was changed on purpose.
        """
        refused, told = [], []
        for index, made in enumerate(self._preparation.schedulers):
            where = f"schedule {index} ({type(made.scheduler).__name__})"
            unit, former = _unit(made), saved.units[index] if index < len(saved.units) else None
            if former not in (None, unit) and not self._is_recounted(made, saved, index):
                refused.append(f"{where} ticked by the rule {former!r} when it was saved, and ticks by {unit!r} now")
                continue
            state = dict(decode(found.state["scheduler"][index], found.tensors))
            if self._is_recounted(made, saved, index):
                state["last_epoch"] = self._num_updates(made, saved)
            for before, now, tick in _jumps(made.scheduler, state):
                line = f"{where}: its learning rate at tick {tick} was {before:g}, and is {now:g}"
                if saved.world_size == num_processes:
                    told.append(line)
                    continue
                refused.append(
                    f"{line}: it is another function with another number of processes. If it counts by that number, let it count "
                    f"by {saved.world_size}, as the run's ticks are kept; or let it count updates, and give the Accelerator "
                    "scheduler_ticks='updates'"
                )
        return refused, told

    def recount(self, saved: SavedRun) -> None:
        """Let those that count updates from now on begin with the updates made; their states are loaded."""
        for index, made in enumerate(self._preparation.schedulers):
            if self._is_recounted(made, saved, index):
                made.seek(self._num_updates(made, saved))

    def _is_recounted(self, made: SchedulerEntry, saved: SavedRun, index: int) -> bool:
        """Does it count updates now, and something else when it was saved, and is its place all that its state says?"""
        is_other = index < len(saved.units) and saved.units[index] != _unit(made)
        return is_other and _unit(made) == StepsPerUpdate.name and type(made.scheduler) is LambdaLR

    def _num_updates(self, made: SchedulerEntry, saved: SavedRun) -> int:
        known = self._preparation.optimizers
        return max(
            count for each, count in zip(known, saved.optimizer_updates) if any(each is one for one in made.optimizers)
        )


def _unit(made: SchedulerEntry) -> str:
    return made.rule.name if made.follows_optimizer else _CALLS


def _jumps(scheduler: Any, state: Mapping[str, Any]) -> Iterator[tuple[float, float, int]]:
    """(the saved rate, what its function gives, at which tick) of each LambdaLR in a schedule that does not go on as it was."""
    for inner, inner_state in zip(getattr(scheduler, "_schedulers", ()), state.get("_schedulers", ())):
        yield from _jumps(inner, inner_state)
    tick = state.get("last_epoch")
    if not isinstance(scheduler, LambdaLR) or not isinstance(tick, int) or tick < 0:  # before its turn among several
        return
    functions = zip(scheduler.lr_lambdas, state["lr_lambdas"], state["base_lrs"], state["_last_lr"])
    for function, own, base, before in functions:
        if own or None in (base, before):  # an object takes its own state up
            continue
        now = float(base * function(tick))
        if not math.isclose(now, float(before), rel_tol=1e-6, abs_tol=1e-12):
            yield float(before), now, tick
            return
