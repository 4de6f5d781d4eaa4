"""A Trainer's checkpoints: what they hold beside the objects, which one is the best, and where a training begins.

A preempted run leaves a mark beside the checkpoints, `<output_dir>/preempted.json`, from the moment when it has saved and
ends with exit code 75 until the training ends well, or another is begun in its place. A kill in between leaves it, so a job
that is preempted and later killed goes on from its newest checkpoint.
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
from headway.checkpoint.folders import committed, run_of
from headway.checkpoint.format.foreign import number_of
from headway.checkpoint.loading.files import open_tensors, pairs, verify
from headway.checkpoint.loading.restoring import put_in
from headway.common import atomic, scope
from headway.common.object_path import to_path
from headway.common.untrusted import parse_json
from headway.errors import CheckpointError, ObjectStoreError
from headway.log import get_logger
from headway.trainer.arguments import TrainingArguments
from headway.trainer.callbacks import Events, TrainerState
from headway.trainer.loss import LossBook
from headway.trainer.metrics import check_wanted
from headway.trainer.results import Metrics

log = get_logger(__name__)

FOLDER = "checkpoints"
_OF_THE_PLACE = frozenset(
    """
    output_dir logging_dir run_name report_to log_level disable_tqdm use_cpu do_train do_eval do_predict
    resume_from_checkpoint ignore_data_skip skip_memory_metrics save_total_limit eval_accumulation_steps
    per_device_eval_batch_size logging_strategy logging_steps logging_first_step dataloader_num_workers
    dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor eval_sanity_check
    eval_rehearsal
    """.split()  # noqa: SIM905
)
"""Arguments that a run may be continued with other values of: they change nothing of what is learned."""
_MODEL = "model/0/"


@dataclass(frozen=True)
class TrainerRecord:
    """Registered with the Accelerator: the state, the losses and the callbacks' states.

    Attributes:
        events: the Trainer's, with the state and the control.
        losses: of the training.
        settings: the model and the arguments, as `settings_of` writes them.
    """

    events: Events
    losses: LossBook
    settings: dict[str, str]

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        events = self.events
        return {
            "state": events.state.state_dict(),
            "losses": self.losses.state_dict(),
            "callbacks": events.state_dict(),
            # Not empty where the run was asked to end in an evaluation, for example: the resumed one owes it.
            "owed": events.control.flags()[2:],
            "settings": self.settings,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from it; where the run that has saved it was another, that is said."""
        told = differences(state.get("settings", {}), self.settings)
        if told:
            log.warning(
                "this run is not the one that it continues: %s. It goes on with what is given now; what the checkpoint holds "
                "(weights, the optimizer's groups and rates, the schedule's place) is as it was saved. "
                "resume_from_checkpoint=False starts from the beginning",
                ", ".join(told),
            )
        self.events.state.load_state_dict(state["state"])
        self.losses.load_state_dict(state["losses"])
        self.events.load_state_dict(state["callbacks"])
        self.events.control.set_flags([False, False, *state["owed"]])


def settings_of(args: TrainingArguments, model: torch.nn.Module) -> dict[str, str]:
    """The model, and the arguments that shape what it learns, each in words.

    Args:
        args: all of them.
        model: before it is prepared.
    """
    found = {name: _in_words(value) for name, value in args.to_dict().items() if name not in _OF_THE_PLACE}
    count = sum(parameter.numel() for parameter in model.parameters())
    return {"model": f"{type(model).__name__} ({count:,} parameters)", **found}


def _in_words(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", json.dumps(value, default=repr, sort_keys=True))


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What is not as it was, of the settings that both runs know."""
    return [f"{name} {before[name]} -> {now[name]}" for name in now if before.get(name, now[name]) != now[name]]


def next_number(output_dir: str | Path) -> int:
    """The number of the next checkpoint in the folder: after those of earlier runs."""
    folder = to_path(output_dir) / FOLDER
    numbers = [number_of(path) for path in committed(folder)]
    return max((number for number in numbers if number is not None), default=-1) + 1


def checkpoint_path(output_dir: str | Path, number: int) -> Path:
    """Where the checkpoint of that number is."""
    return to_path(output_dir).absolute() / FOLDER / f"checkpoint_{number}"


def note_best(state: TrainerState, args: TrainingArguments, metrics: Metrics) -> bool:
    """Is this the best evaluation so far? Then note it.

    Raises:
        ConfigError: the metric to go by is not among them, or not a number.
    """
    name = args.wanted_metric
    if name is None:
        return False
    check_wanted(name, args.metric_for_best_model or name, metrics)
    value, best = float(metrics[name]), state.best_metric
    if math.isnan(value) or (best is not None and not (value > best if args.greater_is_better else value < best)):
        return False
    state.best_metric, state.best_global_step = value, state.global_step
    return True


def load_weights(folder: str | Path, model: torch.nn.Module) -> None:
    """Take the model's weights from a checkpoint, every byte verified; every rank calls it, and takes its part of what is sharded.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
    """
    place = to_path(folder)
    manifest = verify(place)
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for name, tensor in open_tensors(place, manifest, _MODEL):
            for part, values in pairs(own[name.removeprefix(_MODEL)].detach(), tensor):
                put_in(part, values)


FILE = "preempted.json"


class TrainingCounts(Counter[str]):
    """How many trainings this process has begun in each folder."""


@dataclass(frozen=True)
class PreemptionMarker:
    """What is known of the training that was asked to end.

    Attributes:
        run: its id, as its checkpoints' manifests have it.
        training: which training of its process in that folder it was, 1 for the first: a script may train several models.
        asked: the folder that it was told to go on from itself; None: it began at the start, or from the newest.
        update: updates made.
    """

    run: str
    training: int
    asked: str | None
    update: int

    def is_meant(self, training: int, asked: str | Path | bool | None) -> bool:
        """Does the same command, at its training number `training`, that asks for `asked`, go on from it?"""
        if asked is False or training != self.training:
            return False
        return asked in (None, True) or str(asked) == self.asked


def begin(output_dir: str | Path) -> int:
    """Count a training of this process in the folder; returns its number, 1 for the first."""
    place = str(to_path(output_dir).resolve())
    begun = scope.own(TrainingCounts)
    begun[place] += 1
    return begun[place]


def read_marker(output_dir: str | Path) -> PreemptionMarker | None:
    """The folder's mark; None where there is none, or it cannot be read."""
    path = to_path(output_dir) / FILE
    try:
        return PreemptionMarker(**parse_json(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s cannot be read (%s), so no training is resumed by itself", path, error)
        return None


class Continuation:
    """Where one training begins, and what it leaves for the next start of the same command.

    Args:
        output_dir: the run's folder.
        asked: `resume_from_checkpoint` of the call, or of the arguments.
        changed: as for `Accelerator.resume`.

    Attributes:
        training: which training of this process in that folder it is.
    """

    def __init__(
        self, output_dir: str | Path, asked: str | Path | bool | None, changed: str | tuple[str, ...] = ()
    ) -> None:
        self.training = begin(output_dir)
        self._folder = output_dir
        self._asked = asked
        self._changed = changed

    def resume(self, accelerator: Accelerator) -> None:
        """Go on from where the arguments say, or from where the same command was preempted; every rank calls it.

        Raises:
            CheckpointError: the checkpoint is damaged, or does not fit.
        """
        asked = self._asked
        mark = next(filter(None, accelerator.collectives.gather_objects(read_marker(self._folder))), None)
        if mark is not None and mark.is_meant(self.training, asked):
            self._resume_preempted(accelerator, mark)
            return
        self.end_well(accelerator)
        if asked:
            accelerator.resume("latest" if asked is True else asked, changed=self._changed)
        elif accelerator.save_iteration:
            log.info(
                "%s holds checkpoints of earlier runs, which stay; this one's are numbered from %d on. "
                "resume_from_checkpoint=True resumes from the newest",
                self._folder,
                accelerator.save_iteration,
            )

    def _resume_preempted(self, accelerator: Accelerator, mark: PreemptionMarker) -> None:
        log.warning(
            "the run in %s was preempted after update %d and resumes from its newest checkpoint; resume_from_checkpoint=False "
            "starts from the beginning",
            self._folder,
            mark.update,
        )
        try:
            accelerator.resume("latest", run=mark.run, changed=self._changed)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}\nThe same command was preempted and has to resume; resume_from_checkpoint=False starts from the beginning"
            ) from error

    def preempted(self, accelerator: Accelerator, checkpoint: str | Path, update: int) -> None:
        """The run was asked to end: note where the same command goes on.

        Args:
            accelerator: whose first process on each machine writes.
            checkpoint: just committed.
            update: updates made.
        """
        if self._asked is False:
            log.warning("the next start is from the beginning, as resume_from_checkpoint=False says; True resumes")
        elif accelerator.is_local_main_process and (run := run_of(to_path(checkpoint))) is not None:
            # Where it is None, this machine's disk does not hold the checkpoint.
            asked = None if self._asked is None or isinstance(self._asked, bool) else str(self._asked)
            mark, path = PreemptionMarker(run, self.training, asked, update), to_path(self._folder) / FILE
            try:
                atomic.write_text(path, json.dumps(asdict(mark)) + "\n", has_rivals=True)
            except (OSError, ObjectStoreError) as error:
                log.warning(
                    "%s cannot be written (%s): give resume_from_checkpoint=%r to resume", path, error, str(checkpoint)
                )

    def end_well(self, accelerator: Accelerator) -> None:
        """Nothing is left to go on with: a mark of an earlier start is taken away."""
        if accelerator.is_local_main_process:
            mark = read_marker(self._folder)
            if mark is not None and mark.training == self.training:
                (to_path(self._folder) / FILE).unlink(missing_ok=True)


def check_folder(accelerator: Accelerator, asked: str | Path | bool | None, output_dir: str | Path) -> None:
    """Is the folder to resume from there? One machine that has it is enough; every rank calls it.

    Raises:
        CheckpointError: saying what is there instead.
    """
    if asked is not None and not isinstance(asked, bool):
        told = accelerator.collectives.gather_objects(missing_checkpoint(asked, output_dir))
        if all(told):
            raise CheckpointError(str(told[0]))


def missing_checkpoint(asked: str | Path, output_dir: str | Path) -> str | None:
    """Why nothing can be resumed from there, in a sentence; None where it seems to be a checkpoint.

    Args:
        asked: `resume_from_checkpoint`, a folder.
        output_dir: the run's, whose checkpoints are named.
    """
    folder = to_path(asked)
    if folder.is_dir() and not committed(folder / FOLDER) and not (folder / "trainer_state.json").is_file():
        return None
    there = committed(folder / FOLDER) or committed(to_path(output_dir) / FOLDER)
    known = (
        f"{there[0].parent} holds {', '.join(path.name for path in there[:5])}"
        if there
        else "this run has no checkpoint"
    )
    if not folder.exists() and not folder.is_dir():
        what = "does not exist"
    elif committed(folder / FOLDER):
        what = "is a run's folder, not a checkpoint"
    elif folder.is_dir():
        what = "is a checkpoint of transformers, which cannot be resumed; take its weights with from_pretrained"
    else:
        what = "is a file; a checkpoint is a folder"
    return f"resume_from_checkpoint={str(asked)!r} {what}; {known}; True resumes from the newest"
