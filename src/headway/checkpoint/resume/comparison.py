"""What is not as it was between a checkpoint and the run that goes on from it, its schedules too; nothing is changed here.

The schedules of a resumed run: do they go on with the learning rates, and count as they did?

A schedule's state holds its place, and of torch's own all settings too; not the function of a LambdaLR, which the script makes anew.
One that counts by the number of processes is another function on another number of them.

What `load_state` and `resume` return.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from headway.checkpoint.format.manifest import TypedReader
from headway.checkpoint.format.values import decode
from headway.checkpoint.loading.restoring import cast_lines, misfits
from headway.checkpoint.resume.batch import BatchPlan, GlobalBatch
from headway.checkpoint.resume.positions import changed_loaders
from headway.checkpoint.resume.saved import SavedRun, unfit
from headway.checkpoint.state import CollectedState, StatefulObjects
from headway.common.untrusted import printable
from headway.config.mesh import Layout
from headway.errors import CheckpointError
from headway.log import get_logger
from headway.precision.mixed import Precision
from headway.runtime.collectives.checked import Collectives
from headway.runtime.process import ProcessRuntime
from headway.strategies.base import Strategy
from headway.training.prepared.objects import SchedulerEntry
from headway.training.prepared.prepare import Preparation
from headway.training.prepared.scheduler import StepsPerUpdate
from headway.version import __version__

_CALLS = "calls of step()"


def schedule_units(preparation: Preparation) -> list[str]:
    """For each prepared schedule, what it counts."""
    return [_unit(each) for each in preparation.schedulers]


def changed_schedules(
    preparation: Preparation, saved: SavedRun, found: CollectedState, num_processes: int
) -> tuple[list[str], list[str]]:
    """(what a run cannot go on with, what is only not as it was), a line each.

    Args:
        preparation: knows the schedules, and how they tick.
        saved: the run.
        found: its state, which fits the schedules.
        num_processes: of this run; where they are as many as before, a function was changed on purpose.
    """
    refused, told = [], []
    for index, made in enumerate(preparation.schedulers):
        where = f"schedule {index} ({type(made.scheduler).__name__})"
        unit, former, is_recounted = _unit(made), saved.units[index], _is_recounted(made, saved.units[index])
        if former != unit and not is_recounted:
            refused.append(f"{where} ticked by the rule {former!r} when it was saved, and ticks by {unit!r} now")
            continue
        state = dict(decode(found.state["scheduler"][index], found.tensors))
        if is_recounted:
            state["last_epoch"] = _num_updates(preparation, made, saved)
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


def recount_schedules(preparation: Preparation, saved: SavedRun) -> None:
    """Let those that count updates from now on begin with the updates made; their states are loaded."""
    for made, former in zip(preparation.schedulers, saved.units):
        if _is_recounted(made, former):
            made.seek(_num_updates(preparation, made, saved))


def _is_recounted(made: SchedulerEntry, former: str) -> bool:
    """Does it count updates now, and something else when it was saved, and is its place all that its state says?"""
    return former != _unit(made) == StepsPerUpdate.name and type(made.scheduler) is LambdaLR


def _num_updates(preparation: Preparation, made: SchedulerEntry, saved: SavedRun) -> int:
    counts = zip(preparation.optimizers, saved.optimizer_updates)
    return max(count for each, count in counts if any(each is one for one in made.optimizers))


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


@dataclass
class Restored:
    """What a load took up, and what is not as it was saved.

    Attributes:
        folder: the checkpoint.
        about: its counters, world and versions.
        differences: one line each.
    """

    folder: Path
    about: Mapping[str, Any]
    differences: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = f"resumed from {self.folder} after {self.about['num_updates']} updates, epoch {self.about['epoch']}"
        return "\n  ".join([head, *self.differences])


def layout_of(strategy: object) -> dict[str, int]:
    """The sizes of the axes along which a strategy cuts models; none where each rank holds whole ones."""
    layout = getattr(strategy, "layout", None)
    return dict(layout.sizes) if isinstance(layout, Layout) and not layout.is_replicas_only else {}


def layout_lines(about: Mapping[str, Any], strategy: object) -> list[str]:
    """What differs between the layout that a checkpoint was saved under and this run's.

    Raises:
        CheckpointError: the manifest has something else there.
    """
    told = [each.table() for each in TypedReader(about, "about").given("layout")]
    before = {axis: size.whole(1) for table in told for axis, size in table.items()}
    now = layout_of(strategy)
    return [] if before == now else [f"layout {_words(before)} -> {_words(now)}; every rank has read its part"]


def _words(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{printable(axis)} {size}" for axis, size in sizes.items()) or "whole models"


log = get_logger(__name__)


@dataclass(frozen=True)
class RunComparison:
    """Compares checkpoints with one run.

    Attributes:
        runtime, collectives, strategy, precision: the run's.
        batch: its global batch.
        preparation: knows its loaders and schedules.
    """

    runtime: ProcessRuntime
    collectives: Collectives
    strategy: Strategy
    precision: Precision
    batch: GlobalBatch
    preparation: Preparation

    def check(
        self,
        restored: Restored,
        parts: StatefulObjects,
        found: CollectedState,
        saved: SavedRun,
        is_strict: bool,
        changed: Collection[str] | None,
    ) -> None:
        """Does a saved state fit? What differs all the same is noted in `restored`; every rank calls it.

        Args:
            restored: of the load.
            parts: the objects that it is for.
            found: the saved state.
            saved: what it says of the run.
            is_strict: refuse what differs in anything.
            changed: which of "data" and "schedule" are other ones on purpose; None: warn of such, and go on.

        Raises:
            CheckpointError: on every rank: it does not fit; or `is_strict`, and something differs.
        """
        problems = self._of_all(misfits(parts, found) or unfit(parts, found))
        told: list[str] = []
        if not problems:
            refused, told = self._compare_meant(saved, found, changed)
            problems = self._of_all(refused)
        if problems:
            raise CheckpointError(
                f"{restored.folder} does not fit what is prepared; nothing was changed:\n  " + "\n  ".join(problems)
            )
        lines = layout_lines(restored.about, self.strategy)
        restored.differences = lines + self._compare(saved) + told + cast_lines(parts, found)
        if is_strict and restored.differences:
            raise CheckpointError(
                f"{restored.folder} differs from this run; nothing was changed:\n  " + "\n  ".join(restored.differences)
            )

    def _of_all(self, problems: list[str]) -> list[str]:
        """Those of all ranks: of what is sharded each sees its part."""
        return list(dict.fromkeys(line for each in self.collectives.gather_objects(problems) for line in each))

    def _compare_meant(
        self, saved: SavedRun, found: CollectedState, changed: Collection[str] | None
    ) -> tuple[list[str], list[str]]:
        """(what cannot be gone on with unless it is meant, what is only told) of the data and the schedules."""
        data, unused = changed_loaders(self.preparation.loaders, saved, self.collectives)
        schedules, jumps = changed_schedules(self.preparation, saved, found, self.runtime.world_size)
        problems, told = [], [*unused, *jumps, *data, *schedules]
        for what, consequence, lines in (
            ("data", "begins the epoch at its first batch", data),
            ("schedule", "goes on all the same", schedules),
        ):
            if changed is not None and what not in changed:
                problems += [f"{line}. If that is meant, resume(..., changed={what!r}) {consequence}" for line in lines]
        for line in told if changed is None else [] if "schedule" in changed else jumps:
            log.warning_once(line)
        return problems, told

    def _compare(self, saved: SavedRun) -> list[str]:
        """What is not as it was; nothing is changed."""
        lines = []
        before, now = saved.world_size, self.runtime.world_size
        if before != now:
            lines.append(f"world {before} -> {now}; RNG states are derived from (seed, update, rank)")
        elif len(saved.ranks) < now:
            lines.append(
                f"saved on rank {', '.join(map(str, saved.ranks))} alone, so others' RNG states are derived from (seed, update, rank)"
            )
        parts = self.strategy.data_shard.count
        if before == now and saved.num_shards != parts:
            lines.append(
                f"data in {saved.num_shards} -> {parts} parts; RNG states are derived from (seed, update, part)"
            )
        lines += self.plan(saved).lines
        if saved.precision != self.precision.name:
            lines.append(f"mixed_precision {saved.precision} -> {self.precision.name}")
        for name, was in saved.versions.items():
            if was != (now_is := {"headway": __version__, "torch": torch.__version__}.get(name)):
                lines.append(f"{name} {was} -> {now_is}")
        if len(saved.loaders) != (num_loaders := len(self.preparation.loaders)):
            lines.append(f"{len(saved.loaders)} loaders were saved, {num_loaders} are prepared")
        return lines

    def plan(self, saved: SavedRun) -> BatchPlan:
        """How the global batch is kept."""
        return self.batch.plan(saved.batch, saved.accumulation, saved.num_shards == self.strategy.data_shard.count)
