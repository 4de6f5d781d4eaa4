"""Find the best checkpoint of a run, by the metrics that were passed to `save_state`."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headway.core.checkpoint.folders import list_committed, list_originals, read_about
from headway.core.checkpoint.format.foreign import parse_number
from headway.core.checkpoint.loading.reader import CheckpointReader
from headway.core.checkpoint.saving.checkpoint_folder import CheckpointFolder
from headway.errors import CheckpointError, ConfigError
from headway.log import get_logger

log = get_logger(__name__)


class SavedMetric(NamedTuple):
    """Metric of a committed checkpoint.

    Attributes:
        folder: Folder of the checkpoint.
        metric: Metric that was passed to `save_state`, or None.
        run: ID of the run that saved the checkpoint.
    """

    folder: Path
    metric: float | None
    run: str


def list_best_to_keep(place: CheckpointFolder, folder: Path, metric: float | None, run: str | None) -> tuple[Path, ...]:
    """Return a tuple with the best checkpoint of a run, which rotation must not delete.

    The checkpoint that is about to be saved counts too. The tuple is empty if no checkpoint has a metric.

    Args:
        place: Folder of the checkpoints. Its `project` configuration contains `keep_best`.
        folder: Folder of the checkpoint that is about to be saved.
        metric: Metric of the checkpoint in `folder`, or None if it has none.
        run: ID of the run.
    """
    metrics: dict[Path, float | None] = {} if metric is None else {folder: metric}
    metrics |= {each.folder: each.metric for each in read_metrics(folder.parent) if each.run == run}
    return tuple(_sort_best_first(place, metrics)[:1])


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
    saved = read_metrics(place.get_parent())
    has_own = any(each.run == own_run for each in saved)
    wanted_run = run or (own_run if has_own else None)
    return _sort_best_first(place, {each.folder: each.metric for each in saved if wanted_run in (None, each.run)})


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


def read_metrics(parent: Path) -> list[SavedMetric]:
    """Return the metrics of the committed checkpoints in a folder, read from their manifests.

    Copies of checkpoints, and checkpoints with damaged manifests, are left out.
    """
    saved_metrics = []
    for path in list_committed(parent):
        about = read_about(path)  # empty if the manifest is damaged, so that it never counts as the best one
        # A copy has been renamed, so its folder has another name than its manifest.
        if about and about.get("name", path.name) == path.name:
            metric = about.get("metric")
            saved_metrics.append(
                SavedMetric(path, metric if isinstance(metric, float) else None, str(about.get("run", "")))
            )
    return saved_metrics


def _sort_best_first(place: CheckpointFolder, metrics: Mapping[Path, float | None]) -> list[Path]:
    """Return the checkpoints that have a metric, best first.

    Of checkpoints with equal metrics, the earliest comes first.
    """
    sign = -1 if place.project.keep_best == "max" else 1
    known_metrics = {path: value for path, value in metrics.items() if value is not None}
    return sorted(known_metrics, key=lambda path: (sign * known_metrics[path], parse_number(path) or 0))
