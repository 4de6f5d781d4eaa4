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
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from headway.common.garbage import pause_garbage_collection
from headway.common.untrusted import escape_text
from headway.core import extensions
from headway.core.checkpoint.format.typed_reader import TypedReader
from headway.core.checkpoint.format.values import decode_value
from headway.core.checkpoint.loading.restoring import describe_casts, find_misfits, match_models
from headway.core.checkpoint.resume.batch import BatchPlan, GlobalBatch
from headway.core.checkpoint.resume.positions import find_changed_loaders
from headway.core.checkpoint.resume.saved import SavedRun
from headway.core.checkpoint.resume.saved_objects import find_unfit
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


def list_schedule_units(preparation: Preparation) -> list[str]:
    """Return, for each prepared learning rate scheduler, the unit that its steps count, such as "updates"."""
    return [_get_tick_unit(each) for each in preparation.schedulers]


def find_changed_schedules(
    preparation: Preparation, saved: SavedRun, found: CollectedState, num_processes: int
) -> tuple[list[str], list[str]]:
    """Compare the learning rate schedulers with the saved ones.

    Args:
        preparation: Prepared objects with the schedulers, and the rule by which each scheduler advances.
        saved: Counters and settings of the saved run.
        found: Saved state. The caller must have checked that it fits the schedulers.
        num_processes: Number of processes of this run. If it equals that of the saved run, changed learning rates are
            only reported.

    Returns:
        Pair of (differences that prevent a resume, differences that are only reported), one line each.
    """
    refused, reported = [], []
    for index, made in enumerate(preparation.schedulers):
        where = f"schedule {index} ({type(made.scheduler).__name__})"
        unit, former, is_recounted = _get_tick_unit(made), saved.units[index], _is_recounted(made, saved.units[index])
        if former != unit and not is_recounted:
            refused.append(
                f"{where} counted ticks by the rule {former!r} when it was saved, and counts them by {unit!r} now"
            )
            continue
        state = dict(decode_value(found.state["scheduler"][index], found.tensors))
        if is_recounted:
            state["last_epoch"] = _num_updates(preparation, made, saved)
        for before, now, tick in _find_jumps(made.scheduler, state):
            line = f"{where}: its learning rate at tick {tick} was {before:g}, and is {now:g}"
            if saved.world_size == num_processes:
                reported.append(line)
                continue
            refused.append(
                f"{line}. Its function depends on the number of processes, which has changed, but a resumed run keeps counting the "
                f"former ticks. Compute it with the former number, {saved.world_size}. Or let it count updates, and pass "
                "scheduler_ticks='updates' to the Accelerator"
            )
    return refused, reported


def recount_schedules(preparation: Preparation, saved: SavedRun) -> None:
    """Correct the position of each `LambdaLR` scheduler that counts updates now but did not in the saved run.

    Its position becomes the number of updates made. Other schedulers are left unchanged. This function must be called
    after the schedulers' states are loaded.

    Args:
        preparation: Prepared objects with the schedulers.
        saved: Counters and settings of the saved run.
    """
    for made, former in zip(preparation.schedulers, saved.units):
        if _is_recounted(made, former):
            made.seek(_num_updates(preparation, made, saved))


def _is_recounted(made: SchedulerEntry, former: str) -> bool:
    """Whether a LambdaLR, whose only state is its position, counts updates now but counted another unit before.

    Args:
        made: Prepared scheduler.
        former: Unit that the scheduler counted in the saved run.
    """
    return former != _get_tick_unit(made) == StepsPerUpdate.name and type(made.scheduler) is LambdaLR


def _num_updates(preparation: Preparation, made: SchedulerEntry, saved: SavedRun) -> int:
    counts = zip(preparation.optimizers, saved.optimizer_updates)
    return max(count for each, count in counts if any(each is one for one in made.optimizers))


def _get_tick_unit(made: SchedulerEntry) -> str:
    return made.rule.name if made.follows_optimizer else _CALLS


def _find_jumps(scheduler: Any, state: Mapping[str, Any]) -> Iterator[tuple[float, float, int]]:
    """Yield, for each LambdaLR in a scheduler, the first learning rate that differs from the saved one.

    The learning rates are computed for the saved scheduler step. Callable objects are left out, because they continue
    from their saved attributes.

    Args:
        scheduler: Scheduler of this run, which can contain others.
        state: Saved state of the scheduler.

    Yields:
        Triples of (saved learning rate, new learning rate, scheduler step).
    """
    for inner, inner_state in zip(getattr(scheduler, "_schedulers", ()), state.get("_schedulers", ())):
        yield from _find_jumps(inner, inner_state)
    tick = state.get("last_epoch")
    # The step is negative if this scheduler is part of a sequence that has not reached it yet.
    if not isinstance(scheduler, LambdaLR) or not isinstance(tick, int) or tick < 0:
        return
    functions = zip(scheduler.lr_lambdas, state["lr_lambdas"], state["base_lrs"], state["_last_lr"])
    for function, own, base, before in functions:
        if own or None in (base, before):  # a callable object continues from its saved attributes
            continue
        now = float(base * function(tick))
        if not math.isclose(now, float(before), rel_tol=1e-6, abs_tol=1e-12):
            yield float(before), now, tick
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
    tables = [each.read_table() for each in TypedReader(about, "about").find_given("layout")]
    before = {axis: size.read_integer(1) for table in tables for axis, size in table.items()}
    now = get_layout_sizes(strategy)
    return (
        []
        if before == now
        else [f"layout {_describe_sizes(before)} -> {_describe_sizes(now)}; every rank has read its part"]
    )


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
        parts: StatefulObjects,
        found: CollectedState,
        saved: SavedRun,
        is_strict: bool,
        changed: Collection[str] | None,
    ) -> BatchPlan:
        """Raise `CheckpointError` if a saved state does not fit this run. Every rank must call it.

        Other differences are recorded in `restored`. If parameter groups have changed and may be converted, their saved
        states in `found` are converted.

        Args:
            restored: Result of the load, to which the differences are added.
            parts: Objects that should load the state.
            found: Saved state. It can be changed.
            saved: Counters and settings of the saved run.
            is_strict: Whether to refuse any difference.
            changed: Which of "data", "schedule" and "groups" were replaced on purpose. Differences in the others are
                refused. None: only warn about differences in data and schedules.

        Returns:
            Settings of loaders and gradient accumulation with which this run continues.

        Raises:
            CheckpointError: On every rank, if the state does not fit, or with `is_strict` if anything differs.
        """
        if not has_saved_groups(parts, found):
            extensions.load("feature", "changed_groups").convert_groups(parts, found, self.preparation, changed)
        matches = match_models(parts, found)
        problems = self._gather_problems(find_misfits(parts, found, matches) or find_unfit(parts, found))
        reported: list[str] = []
        if not problems:
            refused, reported = self._compare_intended(saved, found, changed)
            problems = self._gather_problems(refused)
        if problems:
            raise CheckpointError(
                f"{restored.folder} does not fit what is prepared; nothing was changed:\n  " + "\n  ".join(problems)
            )
        plan = self._plan_batch(saved)
        lines = describe_layout_change(restored.about, self.strategy)
        restored.differences = (
            lines + self._list_differences(saved, plan) + found.regrouped + reported + describe_casts(matches)
        )
        if is_strict and restored.differences:
            raise CheckpointError(
                f"{restored.folder} differs from this run; nothing was changed:\n  " + "\n  ".join(restored.differences)
            )
        return plan

    def _gather_problems(self, problems: list[str]) -> list[str]:
        """Return all ranks' messages about values that do not fit, without duplicates. Every rank must call it."""
        return list(dict.fromkeys(line for each in self.collectives.gather_objects(problems) for line in each))

    def _compare_intended(
        self, saved: SavedRun, found: CollectedState, changed: Collection[str] | None
    ) -> tuple[list[str], list[str]]:
        """Compare the data and the learning rate schedulers with the saved ones.

        Both can have been replaced on purpose. A warning is logged for each learning rate that jumps without being
        refused. If `changed` is None, one is logged for every difference.

        Args:
            saved: Counters and settings of the saved run.
            found: Saved state.
            changed: Which of "data" and "schedule" were replaced on purpose. None: only warn about such differences.

        Returns:
            Pair of (messages for differences that are refused, all differences), one line each.
        """
        data, unused = find_changed_loaders(self.preparation.loaders, saved, self.collectives)
        schedules, jumps = find_changed_schedules(self.preparation, saved, found, self.runtime.world_size)
        problems, reported = [], [*unused, *jumps, *data, *schedules]
        for what, consequence, lines in (
            ("data", "begins the epoch at its first batch", data),
            ("schedule", "continues anyway", schedules),
        ):
            if changed is not None and what not in changed:
                problems += [
                    f"{line}. If this change is intended, resume(..., changed={what!r}) {consequence}" for line in lines
                ]
        for line in reported if changed is None else [] if "schedule" in changed else jumps:
            log.warning_once(line)
        return problems, reported

    def _list_differences(self, saved: SavedRun, plan: BatchPlan) -> list[str]:
        """Return one line per difference in world size, global batch, precision, versions and number of loaders.

        Args:
            saved: Counters and settings of the saved run.
            plan: Settings with which this run continues.
        """
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
        lines += plan.lines
        if saved.precision != self.precision.name:
            lines.append(f"mixed_precision {saved.precision} -> {self.precision.name}")
        for name, was in saved.versions.items():
            if was != (now_is := {"headway": __version__, "torch": torch.__version__}.get(name)):
                lines.append(f"{name} {was} -> {now_is}")
        if len(saved.loaders) != (num_loaders := len(self.preparation.loaders)):
            lines.append(f"{len(saved.loaders)} loaders were saved, {num_loaders} are prepared")
        return lines

    def _plan_batch(self, saved: SavedRun) -> BatchPlan:
        return self.batch.plan(saved.batch, saved.accumulation, saved.num_shards == self.strategy.data_shard.count)
