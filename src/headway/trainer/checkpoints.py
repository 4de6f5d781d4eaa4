"""Checkpoints of a Trainer: additional content, the best checkpoint, and the point from which a run resumes.

A preempted run saves, writes the marker file `<output_dir>/preempted.json` and exits with code 75. The marker remains
until training ends normally or another training run starts instead. A kill in between does not remove it, so a
job that is preempted and later killed resumes from its newest checkpoint.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from headway.accelerator import Accelerator
from headway.common import atomic, scope
from headway.common.object_path import to_path
from headway.common.untrusted import parse_json
from headway.core.checkpoint.folders import list_committed, read_run_id
from headway.core.checkpoint.format.foreign import parse_number
from headway.core.checkpoint.loading.files import iterate_pairs, open_tensors, verify_checkpoint
from headway.core.checkpoint.loading.restoring import copy_saved_values
from headway.core.weights.compiled import remove_compiled_levels, rename_bare_items
from headway.errors import CheckpointError, ObjectStoreError
from headway.log import get_logger
from headway.trainer.arguments import TrainingArguments
from headway.trainer.callbacks import Events, TrainerState
from headway.trainer.loss_book import LossBook
from headway.trainer.metrics import check_best_metric
from headway.trainer.results import Metrics

log = get_logger(__name__)

FOLDER = "checkpoints"
"""Subfolder of `output_dir` that contains the checkpoints."""
_IRRELEVANT_FOR_LEARNING = frozenset(
    """
    output_dir logging_dir run_name report_to log_level disable_tqdm use_cpu do_train do_eval do_predict
    resume_from_checkpoint ignore_data_skip skip_memory_metrics save_total_limit eval_accumulation_steps
    per_device_eval_batch_size logging_strategy logging_steps logging_first_step dataloader_num_workers
    dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor eval_sanity_check
    eval_rehearsal
    """.split()  # noqa: SIM905
)
"""Arguments that may change when a run is resumed, because they do not affect what is learned."""
_MODEL_PREFIX = "model/0/"
"""Prefix of the names of the model's tensors in a checkpoint."""
MARKER_FILE = "preempted.json"
"""Name of the marker file of a preempted run, in `output_dir`."""


@dataclass(frozen=True)
class TrainerRecord:
    """Object registered with the Accelerator, so that checkpoints contain the Trainer's state, losses and callbacks.

    Attributes:
        events: Dispatcher with the callbacks, the state and the control.
        losses: Losses of the training run.
        settings: Model and arguments as strings; see `list_settings`.
    """

    events: Events
    losses: LossBook
    settings: dict[str, str]

    def state_dict(self) -> dict[str, Any]:
        """Return the Trainer's state, losses, callbacks, pending actions and settings, for a checkpoint."""
        events = self.events
        return {
            "state": events.state.state_dict(),
            "losses": self.losses.state_dict(),
            "callbacks": events.state_dict(),
            # A flag is set if, for example, the run was preempted during an evaluation. The resumed run must repeat it.
            # The first two flags end training or an epoch, and are not saved.
            "owed": events.control.flags()[2:],
            "settings": self.settings,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state. Warn if the settings of the saved run differ from those of this run."""
        changes = list_differences(state.get("settings", {}), self.settings)
        if changes:
            log.warning(
                "the settings of this run differ from those of the run that it continues: %s. The present settings apply, but the "
                "weights, the optimizer's groups and rates, and the position of the schedule come from the checkpoint. "
                "resume_from_checkpoint=False starts from the beginning",
                ", ".join(changes),
            )
        self.events.state.load_state_dict(state["state"])
        self.losses.load_state_dict(state["losses"])
        self.events.load_state_dict(state["callbacks"])
        self.events.control.set_flags([False, False, *state["owed"]])


def list_settings(args: TrainingArguments, model: torch.nn.Module) -> dict[str, str]:
    """Return the settings that affect what a model learns, as strings by name: the model and some of the arguments.

    Args:
        args: Training arguments.
        model: The model before it is prepared.
    """
    settings = {
        name: _describe_value(value) for name, value in args.to_dict().items() if name not in _IRRELEVANT_FOR_LEARNING
    }
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"model": f"{type(model).__name__} ({num_parameters:,} parameters)", **settings}


def _describe_value(value: Any) -> str:
    """Return an argument's value as JSON text, in which other objects have no memory address, so that runs compare equal."""
    return re.sub(r" at 0x[0-9a-f]+", "", json.dumps(value, default=repr, sort_keys=True))


def list_differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a text such as "seed 1 -> 2" for each setting whose value differs between two runs.

    Settings that only one of the runs has are left out.

    Args:
        before: Settings of the earlier run, by name.
        now: Settings of the later run, by name.
    """
    changed = [name for name in now if name in before and before[name] != now[name]]
    return [f"{name} {before[name]} -> {now[name]}" for name in changed]


def find_next_number(output_dir: str | Path) -> int:
    """Return the number of the next checkpoint in an output folder: one more than the highest existing number, or 0."""
    folder = to_path(output_dir) / FOLDER
    numbers = [parse_number(path) for path in list_committed(folder)]
    return max((number for number in numbers if number is not None), default=-1) + 1


def make_checkpoint_path(output_dir: str | Path, number: int) -> Path:
    """Return the path of the checkpoint with the given number in the output folder."""
    return to_path(output_dir).absolute() / FOLDER / f"checkpoint_{number}"


def record_if_best(state: TrainerState, args: TrainingArguments, metrics: Metrics) -> bool:
    """Record an evaluation in the state if it is the best so far. Return whether it is.

    Return False if no metric for the best model is set, or if the metric is NaN.

    Args:
        state: Progress of the training run, which is changed.
        args: Training arguments that name the metric for the best model.
        metrics: Metrics of the evaluation.

    Raises:
        ConfigError: If the metric for the best model is missing or not a number.
    """
    name = args.wanted_metric
    if name is None:
        return False
    check_best_metric(name, args.metric_for_best_model or name, metrics)
    value, best = float(metrics[name]), state.best_metric
    if best is None:
        is_better = not math.isnan(value)
    else:
        is_better = value > best if args.greater_is_better else value < best  # False for NaN
    if not is_better:
        return False
    state.best_metric = value
    state.best_global_step = state.global_step
    return True


def load_weights(folder: str | Path, model: torch.nn.Module, is_average: bool = False) -> None:
    """Load the model's weights from a checkpoint after verifying its checksums.

    Every rank must call it. Each rank loads its own shards.

    Args:
        folder: Folder of the checkpoint.
        model: Model, prepared or not.
        is_average: Whether to load averaged weights where the checkpoint has them. Default: False.

    Raises:
        CheckpointError: If the checkpoint is missing or damaged.
        KeyError: If the checkpoint contains a tensor that the model does not have.
    """
    place = to_path(folder)
    manifest = verify_checkpoint(place)
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    targets = dict(rename_bare_items(named.items()))
    prefixes = [_MODEL_PREFIX]
    if is_average:
        # Averages come after the model's own weights and replace them. They do not include frozen weights.
        registered = enumerate(manifest.state.get("custom", ()))
        averages = [index for index, state in registered if isinstance(state, dict) and "average" in state]
        prefixes += [f"custom/{index}.average." for index in averages[:1]]
    with torch.no_grad():
        for prefix in prefixes:
            for name, tensor in open_tensors(place, manifest, prefix):
                target = targets[remove_compiled_levels(name.removeprefix(prefix))].detach()
                for part, values in iterate_pairs(target, tensor):
                    copy_saved_values(part, values)


class TrainingCounts(Counter[str]):
    """Registry of the number of training runs that this process has started, by output folder."""


@dataclass(frozen=True)
class PreemptionMarker:
    """Content of the marker file of a preempted training run, which the next start of the same command reads.

    Attributes:
        run: ID of the run, as in its checkpoints' manifests.
        training: Position of the training run among those that its process started with this output folder. The first
            one is 1.
        asked: Folder given as `resume_from_checkpoint`. None: the run started from the beginning, or from the
            newest checkpoint.
        update: Number of completed updates.
    """

    run: str
    training: int
    asked: str | None
    update: int

    def is_for_start(self, training: int, requested: str | Path | bool | None) -> bool:
        """Whether a starting training run should continue the preempted run that wrote this marker.

        This is the case if the positions are equal, and `resume_from_checkpoint` is None, True, or the folder from which
        the preempted run itself was resumed.

        Args:
            training: Position of the starting run among those that its process started with this output folder. The
                first one is 1.
            requested: `resume_from_checkpoint` of the starting run.
        """
        if requested is False or training != self.training:
            return False
        return requested in (None, True) or str(requested) == self.asked


def count_training(output_dir: str | Path) -> int:
    """Count a new training run of this process with an output folder, and return the number of such runs so far."""
    place = str(to_path(output_dir).resolve())
    counts = scope.get_or_create(TrainingCounts)
    counts[place] += 1
    return counts[place]


def read_marker(output_dir: str | Path) -> PreemptionMarker | None:
    """Return the preemption marker in an output folder, or None if there is no marker or it cannot be read."""
    path = to_path(output_dir) / MARKER_FILE
    try:
        return PreemptionMarker(**parse_json(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s cannot be read (%s), so no training is resumed automatically", path, error)
        return None


class ResumeDecision:
    """Decision about the checkpoint from which a training run starts.

    If the run is preempted, this object writes a marker file, which the next start of the command reads.

    Args:
        output_dir: Folder of the run.
        requested: `resume_from_checkpoint` of the call or of the arguments.
        changed: Differences from the checkpoint that are intended, such as "data"; see `Accelerator.resume`.

    Attributes:
        training: Position of this training run among those that its process started with this output folder. The first
            one is 1.
    """

    def __init__(
        self, output_dir: str | Path, requested: str | Path | bool | None, changed: str | tuple[str, ...] = ()
    ) -> None:
        self.training = count_training(output_dir)
        self._folder = output_dir
        self._requested = requested
        self._changed = changed

    def resume(self, accelerator: Accelerator) -> None:
        """Resume from the newest checkpoint of the preempted run, or else from the requested checkpoint.

        The preempted run is resumed if a marker file shows that this command was preempted. Otherwise the marker file
        is removed. Without a request, the run then starts from the beginning. Every rank must call it.

        Raises:
            CheckpointError: If the checkpoint is damaged or does not fit this run.
        """
        requested = self._requested
        markers = accelerator.collectives.gather_objects(read_marker(self._folder))
        marker = next(filter(None, markers), None)  # machines can have disks of their own
        if marker is not None and marker.is_for_start(self.training, requested):
            self._resume_from_marker(accelerator, marker)
            return
        self.remove_marker(accelerator)
        if requested:
            accelerator.resume("latest" if requested is True else requested, changed=self._changed)
        elif accelerator.save_iteration:
            log.info(
                "%s contains checkpoints of earlier runs, which are kept. The checkpoints of this run are numbered from %d on. "
                "resume_from_checkpoint=True resumes from the newest",
                self._folder,
                accelerator.save_iteration,
            )

    def _resume_from_marker(self, accelerator: Accelerator, marker: PreemptionMarker) -> None:
        log.warning(
            "the run in %s was preempted after update %d and resumes from its newest checkpoint; resume_from_checkpoint=False "
            "starts from the beginning",
            self._folder,
            marker.update,
        )
        try:
            accelerator.resume("latest", run=marker.run, changed=self._changed)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}\nThe same command was preempted and has to resume; resume_from_checkpoint=False starts from the beginning"
            ) from error

    def write_marker(self, accelerator: Accelerator, checkpoint: str | Path, update: int) -> None:
        """Write the marker file after a preempted run has saved a checkpoint.

        With `resume_from_checkpoint=False`, only log that the next start is from the beginning. If the file cannot be
        written, log a warning.

        Args:
            accelerator: Accelerator of the run. The first process on each machine writes.
            checkpoint: Checkpoint that was just committed.
            update: Number of completed updates.
        """
        if self._requested is False:
            log.warning("the next start is from the beginning, because of resume_from_checkpoint=False; True resumes")
        elif accelerator.is_local_main_process and (run := read_run_id(to_path(checkpoint))) is not None:
            # `read_run_id` returns None if this machine's disk does not have the checkpoint.
            is_folder = self._requested is not None and not isinstance(self._requested, bool)
            marker = PreemptionMarker(run, self.training, str(self._requested) if is_folder else None, update)
            path = to_path(self._folder) / MARKER_FILE
            try:
                atomic.write_text(path, json.dumps(asdict(marker)) + "\n", has_other_writers=True)
            except (OSError, ObjectStoreError) as error:
                log.warning(
                    "%s cannot be written (%s): give resume_from_checkpoint=%r to resume", path, error, str(checkpoint)
                )

    def remove_marker(self, accelerator: Accelerator) -> None:
        """Remove the marker file that this training run wrote when it was preempted at an earlier start of the command.

        This is called when the run has ended normally, or does not continue the preempted run. The first process on
        each machine removes the file. Markers of other training runs of the command are kept.
        """
        if accelerator.is_local_main_process:
            marker = read_marker(self._folder)
            if marker is not None and marker.training == self.training:
                (to_path(self._folder) / MARKER_FILE).unlink(missing_ok=True)


def check_folder(accelerator: Accelerator, requested: str | Path | bool | None, output_dir: str | Path) -> None:
    """Raise an error if no machine has the folder to resume from. Every rank must call this.

    Args:
        accelerator: Accelerator whose ranks take part.
        requested: Value of `resume_from_checkpoint`. Only a folder is checked.
        output_dir: Folder of the run, whose checkpoints the message lists.

    Raises:
        CheckpointError: If no machine has the folder.
    """
    if requested is not None and not isinstance(requested, bool):
        problems = accelerator.collectives.gather_objects(explain_missing_checkpoint(requested, output_dir))
        if all(problem is not None for problem in problems):
            raise CheckpointError(str(problems[0]))


def explain_missing_checkpoint(requested: str | Path, output_dir: str | Path) -> str | None:
    """Return the reason why a folder cannot be resumed from, or None if it looks like a checkpoint.

    Args:
        requested: Folder given as `resume_from_checkpoint`.
        output_dir: Folder of the run, whose checkpoints the message lists.
    """
    folder = to_path(requested)
    if folder.is_dir() and not list_committed(folder / FOLDER) and not (folder / "trainer_state.json").is_file():
        return None
    saved = list_committed(folder / FOLDER) or list_committed(to_path(output_dir) / FOLDER)
    if saved:
        existing = f"{saved[0].parent} holds {', '.join(path.name for path in saved[:5])}"
    else:
        existing = "this run has no checkpoint"
    if not folder.exists() and not folder.is_dir():
        problem = "does not exist"
    elif list_committed(folder / FOLDER):
        problem = "is a run's folder, not a checkpoint"
    elif folder.is_dir():
        problem = "is a checkpoint of transformers, which cannot be resumed; take its weights with from_pretrained"
    else:
        problem = "is a file; a checkpoint is a folder"
    return f"resume_from_checkpoint={str(requested)!r} {problem}; {existing}; True resumes from the newest"
