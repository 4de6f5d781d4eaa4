"""Compare a checkpoint with the run that resumes from it, including its learning rate schedulers.

A resumed scheduler must continue with its learning rate and its count. The state of torch's own schedulers holds their
position and all settings, except the function of a LambdaLR, which the script creates anew. If that function uses the
number of processes, it returns different values when this number changes.

`RestoreResult` is the result of `load_state` and `resume`.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LambdaLR

from headway.common.garbage import pause_garbage_collection
from headway.common.untrusted import escape_text
from headway.core import extensions
from headway.core.checkpoint.format.typed_reader import TypedReader
from headway.core.checkpoint.format.values import decode_value
from headway.core.checkpoint.loading.restoring import describe_casts, find_misfits, match_models
from headway.core.checkpoint.resume.batch import BatchPlan, GlobalBatch
from headway.core.checkpoint.resume.positions import Differences, find_changed_loaders
from headway.core.checkpoint.resume.saved import SavedRun
from headway.core.checkpoint.resume.saved_objects import find_later_failures
from headway.core.checkpoint.state import CollectedState, StatefulObjects, has_saved_groups
from headway.core.config.mesh import Layout
from headway.core.precision.mixed import Precision
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.process import ProcessRuntime
from headway.core.strategies.base import Strategy
from headway.core.training.prepared.objects import SchedulerEntry
from headway.core.training.prepared.prepare import Preparation
from headway.core.training.prepared.scheduler import StepsPerUpdate
from headway.errors import CheckpointError
from headway.log import get_logger
from headway.version import __version__

_CALLS = "calls of step()"
"""Unit of schedulers that every call of `step` advances, instead of every update."""


def list_schedule_units(preparation: Preparation) -> list[str]:
    """Return, for each prepared learning rate scheduler, the unit that its steps count, such as "updates"."""
    return [_get_tick_unit(each) for each in preparation.schedulers]


def find_changed_schedules(
    preparation: Preparation, saved_run: SavedRun, saved_state: CollectedState, num_processes: int
) -> Differences:
    """Compare the learning rate schedulers with the saved ones.

    Args:
        preparation: Prepared objects with the schedulers, and the rule by which each scheduler advances.
        saved_run: Counters and settings of the saved run.
        saved_state: State of the checkpoint. The caller must have checked that it fits the schedulers.
        num_processes: Number of processes of this run. If it equals that of the saved run, changed learning rates are
            only reported.
    """
    refused: list[str] = []
    reported: list[str] = []
    for index, entry in enumerate(preparation.schedulers):
        where = f"schedule {index} ({type(entry.scheduler).__name__})"
        unit, former = _get_tick_unit(entry), saved_run.units[index]
        is_recounted = _is_recounted(entry, former)
        if former != unit and not is_recounted:
            refused.append(
                f"{where} counted ticks by the rule {former!r} when it was saved, and counts them by {unit!r} now"
            )
            continue
        state = dict(decode_value(saved_state.state["scheduler"][index], saved_state.tensors))
        if is_recounted:
            state["last_epoch"] = _count_updates(preparation, entry, saved_run)
        for jump in _find_jumps(entry.scheduler, state):
            line = f"{where}: its learning rate at tick {jump.tick} was {jump.saved_lr:g}, and is {jump.own_lr:g}"
            if saved_run.world_size == num_processes:
                reported.append(line)
                continue
            refused.append(
                f"{line}. Its function depends on the number of processes, which has changed, but a resumed run keeps counting the "
                f"former ticks. Compute it with the former number, {saved_run.world_size}. Or let it count updates, and pass "
                "scheduler_ticks='updates' to the Accelerator"
            )
    return Differences(refused, reported)


def recount_schedules(preparation: Preparation, saved_run: SavedRun) -> None:
    """Correct the position of each `LambdaLR` scheduler that counts updates now but did not in the saved run.

    Its position becomes the number of updates made. Other schedulers are left unchanged. This function must be called
    after the schedulers' states are loaded.

    Args:
        preparation: Prepared objects with the schedulers.
        saved_run: Counters and settings of the saved run.
    """
    for entry, former in zip(preparation.schedulers, saved_run.units):
        if _is_recounted(entry, former):
            entry.seek(_count_updates(preparation, entry, saved_run))


def _is_recounted(entry: SchedulerEntry, former: str) -> bool:
    """Whether a LambdaLR, whose only state is its position, counts updates now but counted another unit before.

    Args:
        entry: Prepared scheduler.
        former: Unit that the scheduler counted in the saved run.
    """
    counts_updates = _get_tick_unit(entry) == StepsPerUpdate.name
    return counts_updates and former != StepsPerUpdate.name and type(entry.scheduler) is LambdaLR


def _count_updates(preparation: Preparation, entry: SchedulerEntry, saved_run: SavedRun) -> int:
    """Return the number of updates that a scheduler's optimizers had made in the saved run, the largest one."""
    counts = zip(preparation.optimizers, saved_run.optimizer_updates)
    return max(count for optimizer, count in counts if any(optimizer is each for each in entry.optimizers))


def _get_tick_unit(entry: SchedulerEntry) -> str:
    return entry.rule.name if entry.follows_optimizer else _CALLS


class LearningRateJump(NamedTuple):
    """Learning rate of a scheduler that differs from the saved one at the same scheduler step.

    Attributes:
        saved_lr: Learning rate in the saved run.
        own_lr: Learning rate of this run's scheduler.
        tick: Scheduler step, 0-based.
    """

    saved_lr: float
    own_lr: float
    tick: int


def _find_jumps(scheduler: Any, state: Mapping[str, Any]) -> Iterator[LearningRateJump]:
    """Yield, for each LambdaLR in a scheduler, the first learning rate that differs from the saved one.

    The learning rates are computed for the saved scheduler step. Callable objects are left out, because they continue
    from their saved attributes.

    Args:
        scheduler: Scheduler of this run, which can contain others.
        state: Saved state of the scheduler.
    """
    for inner, inner_state in zip(getattr(scheduler, "_schedulers", ()), state.get("_schedulers", ())):
        yield from _find_jumps(inner, inner_state)
    tick = state.get("last_epoch")
    # The step is negative if this scheduler is part of a sequence that has not reached it yet.
    if not isinstance(scheduler, LambdaLR) or not isinstance(tick, int) or tick < 0:
        return
    functions = zip(scheduler.lr_lambdas, state["lr_lambdas"], state["base_lrs"], state["_last_lr"])
    for function, attributes, base_lr, saved_lr in functions:
        if attributes or None in (base_lr, saved_lr):  # a callable object continues from its saved attributes
            continue
        own_lr = float(base_lr * function(tick))
        if not math.isclose(own_lr, float(saved_lr), rel_tol=1e-6, abs_tol=1e-12):
            yield LearningRateJump(float(saved_lr), own_lr, tick)
            return


@dataclass
class RestoreResult:
    """Result of a load: the checkpoint that was loaded, and its differences from this run.

    Attributes:
        folder: Folder of the checkpoint.
        about: The manifest's counters, world size and versions.
        differences: One line per difference.
    """

    folder: Path
    about: Mapping[str, Any]
    differences: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = f"resumed from {self.folder} after {self.about['num_updates']} updates, epoch {self.about['epoch']}"
        return "\n  ".join([head, *self.differences])


def get_layout_sizes(strategy: object) -> dict[str, int]:
    """Return a dict from the name to the size of each mesh axis along which a strategy shards models.

    The result is empty if models are replicated.
    """
    layout = getattr(strategy, "layout", None)
    return dict(layout.sizes) if isinstance(layout, Layout) and not layout.is_replicas_only else {}


def describe_layout_change(about: Mapping[str, Any], strategy: object) -> list[str]:
    """Return a list with one message if the layout of a checkpoint differs from this run's, else an empty list.

    Args:
        about: The manifest's `about` section.
        strategy: Strategy of this run.

    Raises:
        CheckpointError: If the manifest's layout is not valid.
    """
    tables = [each.read_table() for each in TypedReader(about, "about").find_present("layout")]
    before = {axis: size.read_integer(1) for table in tables for axis, size in table.items()}
    now = get_layout_sizes(strategy)
    if before == now:
        return []
    return [f"layout {_describe_sizes(before)} -> {_describe_sizes(now)}; each rank has read its shards"]


def _describe_sizes(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{escape_text(axis)} {size}" for axis, size in sizes.items()) or "whole models"


log = get_logger(__name__)


@dataclass(frozen=True)
class RunComparison:
    """Comparison of checkpoints with a run that is about to load them.

    Attributes:
        runtime: Runtime of this process.
        collectives: Collectives over all ranks.
        strategy: Strategy of the run.
        precision: Precision of the run.
        batch: Global batch of the run.
        preparation: Prepared objects, with the loaders and learning rate schedulers.
    """

    runtime: ProcessRuntime
    collectives: Collectives
    strategy: Strategy
    precision: Precision
    batch: GlobalBatch
    preparation: Preparation

    @pause_garbage_collection()
    def check(
        self,
        restored: RestoreResult,
        objects: StatefulObjects,
        saved_state: CollectedState,
        saved_run: SavedRun,
        is_strict: bool,
        changed: Collection[str] | None,
    ) -> BatchPlan:
        """Raise `CheckpointError` if a saved state does not fit this run. Every rank must call it.

        Other differences are recorded in `restored`. If parameter groups have changed and may be converted, their saved
        states in `saved_state` are converted.

        Args:
            restored: Result of the load, to which the differences are added.
            objects: Objects that should load the state.
            saved_state: State of the checkpoint. It can be changed.
            saved_run: Counters and settings of the saved run.
            is_strict: Whether to refuse any difference.
            changed: Which of "data", "schedule" and "groups" were replaced on purpose. Differences in the others are
                refused. None: only warn about differences in data and schedules.

        Returns:
            Settings of loaders and gradient accumulation with which this run continues.

        Raises:
            CheckpointError: On every rank, if the state does not fit, or with `is_strict` if anything differs.
        """
        if not has_saved_groups(objects, saved_state):
            extensions.load("feature", "changed_groups").convert_groups(objects, saved_state, self.preparation, changed)
        matches = match_models(objects, saved_state)
        problems = self._gather_problems(
            find_misfits(objects, saved_state, matches) or find_later_failures(objects, saved_state)
        )
        reported: list[str] = []
        if not problems:
            differences = self._compare_data_and_schedules(saved_run, saved_state, changed)
            reported = differences.reported
            problems = self._gather_problems(differences.refused)
        if problems:
            raise CheckpointError(
                f"{restored.folder} does not fit what is prepared; nothing was changed:\n  " + "\n  ".join(problems)
            )
        plan = self._plan_batch(saved_run)
        restored.differences = [
            *describe_layout_change(restored.about, self.strategy),
            *self._list_differences(saved_run, plan),
            *saved_state.regrouped,
            *reported,
            *describe_casts(matches),
        ]
        if is_strict and restored.differences:
            raise CheckpointError(
                f"{restored.folder} differs from this run; nothing was changed:\n  " + "\n  ".join(restored.differences)
            )
        return plan

    def _gather_problems(self, problems: list[str]) -> list[str]:
        """Return all ranks' messages about values that do not fit, without duplicates. Every rank must call it."""
        return list(dict.fromkeys(line for each in self.collectives.gather_objects(problems) for line in each))

    def _compare_data_and_schedules(
        self, saved_run: SavedRun, saved_state: CollectedState, changed: Collection[str] | None
    ) -> Differences:
        """Compare the data and the learning rate schedulers with the saved ones. Every rank must call it.

        Both can have been replaced on purpose. If `changed` is None, a warning is logged for every difference.
        Otherwise, unless it contains "schedule", one is logged for each learning rate that jumps without being refused.

        Args:
            saved_run: Counters and settings of the saved run.
            saved_state: State of the checkpoint.
            changed: Which of "data" and "schedule" were replaced on purpose. None: only warn about such differences.

        Returns:
            Messages for the differences that are refused, and all differences, including the refused ones.
        """
        data = find_changed_loaders(self.preparation.loaders, saved_run, self.collectives)
        schedules = find_changed_schedules(self.preparation, saved_run, saved_state, self.runtime.world_size)
        reported = [*data.reported, *schedules.reported, *data.refused, *schedules.refused]
        refused: list[str] = []
        for what, consequence, lines in (
            ("data", "begins the epoch at its first batch", data.refused),
            ("schedule", "continues anyway", schedules.refused),
        ):
            if changed is not None and what not in changed:
                refused += [
                    f"{line}. If this change is intended, resume(..., changed={what!r}) {consequence}" for line in lines
                ]
        warnings: list[str] = []
        if changed is None:
            warnings = reported
        elif "schedule" not in changed:
            warnings = schedules.reported
        for line in warnings:
            log.warning_once(line)
        return Differences(refused, reported)

    def _list_differences(self, saved_run: SavedRun, plan: BatchPlan) -> list[str]:
        """Return one line per difference in world size, global batch, precision, versions and number of loaders.

        Args:
            saved_run: Counters and settings of the saved run.
            plan: Settings with which this run continues.
        """
        lines = []
        before, now = saved_run.world_size, self.runtime.world_size
        if before != now:
            lines.append(f"world size {before} -> {now}; RNG states are derived from (seed, update, rank)")
        elif len(saved_run.ranks) < now:
            ranks = ", ".join(map(str, saved_run.ranks))
            lines.append(f"saved on rank {ranks} alone, so others' RNG states are derived from (seed, update, rank)")
        num_shards = self.strategy.data_shard.count
        if before == now and saved_run.num_shards != num_shards:
            lines.append(
                f"data in {saved_run.num_shards} -> {num_shards} parts; RNG states are derived from (seed, update, part)"
            )
        lines += plan.differences
        if saved_run.precision != self.precision.name:
            lines.append(f"mixed_precision {saved_run.precision} -> {self.precision.name}")
        own_versions = {"headway": __version__, "torch": torch.__version__}
        for name, version in saved_run.versions.items():
            if version != own_versions.get(name):
                lines.append(f"{name} {version} -> {own_versions.get(name)}")
        num_loaders = len(self.preparation.loaders)
        if len(saved_run.loaders) != num_loaders:
            lines.append(f"{len(saved_run.loaders)} loaders were saved, {num_loaders} are prepared")
        return lines

    def _plan_batch(self, saved_run: SavedRun) -> BatchPlan:
        return self.batch.make_plan(
            saved_run.batch, saved_run.accumulation, saved_run.num_shards == self.strategy.data_shard.count
        )
