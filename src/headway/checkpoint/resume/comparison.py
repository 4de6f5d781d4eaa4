"""What is not as it was between a checkpoint and the run that is to go on from it; nothing is changed here."""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from headway.checkpoint.loading.restoring import cast_lines, misfits
from headway.checkpoint.resume.batch import BatchPlan, GlobalBatch
from headway.checkpoint.resume.checks import unfit
from headway.checkpoint.resume.positions import LoaderPositions
from headway.checkpoint.resume.restored import Restored, layout_lines
from headway.checkpoint.resume.saved import SavedRun
from headway.checkpoint.resume.schedules import Schedules
from headway.checkpoint.state import CollectedState, StatefulObjects
from headway.errors import CheckpointError
from headway.log import get_logger
from headway.precision.base import Precision
from headway.runtime.collectives.checked import Collectives
from headway.runtime.process import ProcessRuntime
from headway.strategies.base import Strategy
from headway.version import __version__

log = get_logger(__name__)


@dataclass(frozen=True)
class RunComparison:
    """Compares checkpoints with one run.

    Attributes:
        runtime, collectives, strategy, precision: the run's.
        batch: its global batch.
        positions: where its loaders stand.
        schedules: its schedules.
    """

    runtime: ProcessRuntime
    collectives: Collectives
    strategy: Strategy
    precision: Precision
    batch: GlobalBatch
    positions: LoaderPositions
    schedules: Schedules

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
        data, unused = self.positions.changed(saved)
        schedules, jumps = self.schedules.changed(saved, found, self.runtime.world_size)
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
            lines.append(f"world {before} -> {now}; random streams are derived from (seed, update, rank)")
        elif len(saved.ranks) < now:
            lines.append(
                f"saved on rank {', '.join(map(str, saved.ranks))} alone, without the others' random streams: these are derived "
                "from (seed, update, rank)"
            )
        parts = self.strategy.data_shard.count
        if before == now and saved.num_shards != parts:
            lines.append(
                f"data in {saved.num_shards} -> {parts} parts; random streams are derived from (seed, update, part)"
            )
        lines += self.plan(saved).lines
        if saved.precision != self.precision.name:
            lines.append(f"mixed_precision {saved.precision} -> {self.precision.name}")
        for name, was in saved.versions.items():
            if was != (now_is := {"headway": __version__, "torch": torch.__version__}.get(name)):
                lines.append(f"{name} {was} -> {now_is}")
        if len(saved.loaders) != len(self.positions):
            lines.append(f"{len(saved.loaders)} loaders were saved, {len(self.positions)} are prepared")
        return lines

    def plan(self, saved: SavedRun) -> BatchPlan:
        """How the global batch is kept."""
        return self.batch.plan(saved.batch, saved.accumulation, saved.num_shards == self.strategy.data_shard.count)
