"""Compare a checkpoint with the run that resumes from it.

`RestoreResult` is the result of `load_state` and `resume`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headway.common.garbage import pause_garbage_collection
from headway.common.untrusted import escape_text
from headway.core import extensions
from headway.core.checkpoint.format.typed_reader import TypedReader
from headway.core.checkpoint.loading.misfits import describe_casts, find_misfits, match_models
from headway.core.checkpoint.resume.batch import BatchPlan, GlobalBatch
from headway.core.checkpoint.resume.loader_positions import Differences, find_changed_loaders
from headway.core.checkpoint.resume.saved import SavedRun
from headway.core.checkpoint.resume.saved_objects import find_later_failures
from headway.core.checkpoint.resume.schedules import find_changed_schedules
from headway.core.checkpoint.state import CollectedState, StatefulObjects, has_saved_groups
from headway.core.config.mesh import Layout
from headway.core.precision.mixed import Precision
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.process import ProcessRuntime
from headway.core.strategies.base import Strategy
from headway.core.training.prepared.prepare import Preparation
from headway.errors import CheckpointError
from headway.log import get_logger
from headway.version import __version__

log = get_logger(__name__)


@dataclass
class RestoreResult:
    """Result of a load: the checkpoint that was loaded, and its differences from this run. `print` shows both.

    Attributes:
        folder: Directory of the checkpoint.
        about: Facts about the saved run from the checkpoint's manifest, by name, such as "world_size" and "versions".
        differences: One line of text per difference, such as another world size. Empty if there is none.
    """

    folder: Path
    about: Mapping[str, Any]
    differences: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = f"resumed from {self.folder} after {self.about['num_updates']} updates, epoch {self.about['epoch']}"
        return "\n  ".join([head, *self.differences])


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
        saved_size, world_size = saved_run.world_size, self.runtime.world_size
        if saved_size != world_size:
            lines.append(f"world size {saved_size} -> {world_size}; RNG states are derived from (seed, update, rank)")
        elif len(saved_run.ranks) < world_size:
            ranks = ", ".join(map(str, saved_run.ranks))
            lines.append(f"saved on rank {ranks} alone, so others' RNG states are derived from (seed, update, rank)")
        num_shards = self.strategy.data_shard.count
        if saved_size == world_size and saved_run.num_shards != num_shards:
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
        """Return the batch settings with which this run would continue the saved one."""
        return self.batch.make_plan(
            saved_run.batch, saved_run.accumulation, saved_run.num_shards == self.strategy.data_shard.count
        )


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
    saved_layout = TypedReader(about, "about").get("layout")
    saved_sizes = {} if saved_layout is None else saved_layout.read_table()
    before = {axis: size.read_integer(1) for axis, size in saved_sizes.items()}
    now = get_layout_sizes(strategy)
    if before == now:
        return []
    return [f"layout {_describe_sizes(before)} -> {_describe_sizes(now)}; each rank has read its shards"]


def _describe_sizes(sizes: Mapping[str, int]) -> str:
    """Return the axis sizes of a layout as text, such as "shard 4 x tp 2"."""
    return " x ".join(f"{escape_text(axis)} {size}" for axis, size in sizes.items()) or "whole models"
