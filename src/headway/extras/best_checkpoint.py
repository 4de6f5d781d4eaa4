"""Find the best checkpoints of a run, by the metrics that were passed to `save_state`, and those that rotation keeps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from headway.core.checkpoint.folders import list_committed, list_originals, read_about
from headway.core.checkpoint.format.foreign import parse_number
from headway.core.checkpoint.loading.reader import CheckpointReader
from headway.core.checkpoint.saving.checkpoint_folder import CheckpointFolder
from headway.errors import CheckpointError, ConfigError
from headway.log import get_logger

log = get_logger(__name__)


class SavedCheckpoint(NamedTuple):
    """Metric, update and run of a committed checkpoint, as read from its manifest.

    Attributes:
        folder: Folder of the checkpoint.
        metric: Metric that was passed to `save_state`. None if none was passed.
        num_updates: Number of updates before the save. 0 if unknown.
        run: ID of the run that saved the checkpoint. Empty if unknown.
    """

    folder: Path
    metric: float | None
    num_updates: int
    run: str | None


class Retention(NamedTuple):
    """Checkpoints of a run that rotation keeps.

    Attributes:
        num_newest: Number of newest checkpoints to keep. None: all.
        protected: Folders of other checkpoints to keep: the best ones, and those of `keep_every`.
    """

    num_newest: int | None
    protected: tuple[Path, ...]


def choose_retention(place: CheckpointFolder, new: SavedCheckpoint) -> Retention:
    """Return the checkpoints of a run that rotation keeps after a save.

    Protected are the `num_best` best ones, if `keep_best` is set, and the first one of every `keep_every` updates. The
    checkpoint that is about to be saved counts too.

    Args:
        place: Folder of the checkpoints, with the `project` configuration.
        new: Checkpoint that is about to be saved.
    """
    project = place.project
    saved = [each for each in read_saved(new.folder.parent) if each.run == new.run and each.folder != new.folder]
    saved.append(new)
    best: list[Path] = []
    if project.keep_best is not None:
        best = _sort_best_first(place, {each.folder: each.metric for each in saved})[: project.num_best]
    num_newest = project.total_limit
    if num_newest is not None and project.total_limit_counts_best:
        newest_first = sorted(saved, key=lambda each: parse_number(each.folder) or 0, reverse=True)
        num_newest = _count_newest([each.folder for each in newest_first], best, num_newest)
    milestones = [] if project.keep_every is None else _list_milestones(saved, project.keep_every)
    return Retention(num_newest, tuple(dict.fromkeys([*best, *milestones])))


def _count_newest(newest_first: Sequence[Path], best: Sequence[Path], limit: int) -> int:
    """Return how many of the newest checkpoints may be kept so that at most `limit` are kept with the best ones.

    It is at least 1, because a run must be able to resume from its newest checkpoint.
    """
    for num_newest in range(limit, 1, -1):
        if len({*newest_first[:num_newest], *best}) <= limit:
            return num_newest
    return 1


def _list_milestones(saved: Sequence[SavedCheckpoint], every: int) -> list[Path]:
    """Return, for each multiple of `every` updates, the first checkpoint that was saved at or after it.

    Saves need not be made at multiples. With saves after 300, 600, ... updates and `every=1000`, the checkpoints of
    1,200, 2,100 and 3,000 updates are returned. A checkpoint that is returned once is returned at all later saves, as
    long as it exists.
    """
    first_by_interval: dict[int, Path] = {}
    for each in sorted(saved, key=lambda checkpoint: parse_number(checkpoint.folder) or 0):
        interval = each.num_updates // every
        if interval > 0:
            first_by_interval.setdefault(interval, each.folder)
    return list(first_by_interval.values())


def list_best_first(place: CheckpointFolder, run: str | None, own_run: str | None) -> list[Path]:
    """Return the committed checkpoints that were saved with a metric, best first.

    Args:
        place: Folder of the checkpoints.
        run: ID of the run whose checkpoints are considered. None: those of `own_run`, or of all runs if `own_run` has
            no checkpoint.
        own_run: ID of this run. None before its first save or load.

    Raises:
        ConfigError: If checkpoints are not named automatically, or `keep_best` is not set.
    """
    if not place.is_automatic or place.project.keep_best is None:
        raise ConfigError(
            "the best checkpoint can be determined only with ProjectConfiguration(folder, automatic_checkpoint_naming=True, "
            "keep_best='min') or keep_best='max', and save_state(metric=...)"
        )
    saved = read_saved(place.get_parent())
    if run is None and any(each.run == own_run for each in saved):
        run = own_run
    metrics = {each.folder: each.metric for each in saved if run is None or each.run == run}
    return _sort_best_first(place, metrics)


def find_best(place: CheckpointFolder, reader: CheckpointReader, run: str | None, own_run: str | None) -> Path | None:
    """Return the best checkpoint that is complete on every machine, or None if the folder contains no checkpoints.

    Every rank must call it.

    Args:
        place: Folder of the checkpoints.
        reader: Reader that finds a complete checkpoint on all ranks together. Hashes are compared later, at the load.
        run: ID of the run whose checkpoints are considered. None: those of `own_run`, or of all runs if `own_run` has
            no checkpoint.
        own_run: ID of this run. None before its first save or load.

    Raises:
        CheckpointError: If the folder contains checkpoints, but each of them has no metric or is damaged.
        ConfigError: If checkpoints are not named automatically, or `keep_best` is not set.
    """
    folder, skipped = reader.find_first_complete(place.get_parent(), list_best_first(place, run, own_run))
    for line in skipped:
        log.warning_once("skipping a checkpoint: %s", line)
    if folder is None and skipped:
        raise CheckpointError(
            f"all checkpoints with a metric in {place.get_parent()} are damaged:\n  " + "\n  ".join(skipped)
        )
    if folder is None and reader.find_largest(len(list_originals(place.get_parent()))):  # on any machine's disk
        raise CheckpointError(
            f"no checkpoint in {place.get_parent()} was saved with a metric, so none is the best; give each save one: "
            "accelerator.save_state(metric=value)"
        )
    return folder


def read_saved(parent: Path) -> list[SavedCheckpoint]:
    """Return the committed checkpoints in a folder, with their metrics, read from their manifests.

    Copies of checkpoints, and checkpoints with damaged manifests, are left out.
    """
    saved = []
    for path in list_committed(parent):
        about = read_about(path)  # empty if the manifest is damaged, so that it never counts as the best one
        # A copy has been renamed, so its folder has another name than its manifest.
        if about and about.get("name", path.name) == path.name:
            metric, num_updates = about.get("metric"), about.get("num_updates")
            saved.append(
                SavedCheckpoint(
                    folder=path,
                    metric=metric if isinstance(metric, float) else None,
                    num_updates=num_updates if isinstance(num_updates, int) else 0,
                    run=str(about.get("run", "")),
                )
            )
    return saved


def _sort_best_first(place: CheckpointFolder, metrics: Mapping[Path, float | None]) -> list[Path]:
    """Return the checkpoints that have a metric, best first.

    Of checkpoints with equal metrics, the earliest comes first.
    """
    sign = -1 if place.project.keep_best == "max" else 1
    known_metrics = {path: value for path, value in metrics.items() if value is not None}
    return sorted(known_metrics, key=lambda path: (sign * known_metrics[path], parse_number(path) or 0))
