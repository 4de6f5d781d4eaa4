"""What a Trainer's checkpoints hold beside the objects, which one is the best, and how its weights come back."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headway.checkpoint.folders import committed
from headway.checkpoint.format.foreign import number_of
from headway.checkpoint.loading.files import open_tensors, pairs, verify
from headway.checkpoint.loading.model import put_in
from headway.log import get_logger
from headway.trainer.callbacks import Events, TrainerState
from headway.trainer.evaluation.metrics import check_wanted
from headway.trainer.loss import LossBook
from headway.trainer.results import Metrics
from headway.trainer.settings.arguments import TrainingArguments

log = get_logger(__name__)

FOLDER = "checkpoints"
_OF_THE_PLACE = frozenset(
    """
    output_dir logging_dir run_name report_to log_level disable_tqdm use_cpu do_train do_eval do_predict
    resume_from_checkpoint ignore_data_skip skip_memory_metrics save_total_limit eval_accumulation_steps
    per_device_eval_batch_size logging_strategy logging_steps logging_first_step dataloader_num_workers
    dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor eval_rehearsal
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
    folder = Path(output_dir) / FOLDER
    numbers = [number_of(path) for path in committed(folder)]
    return max((number for number in numbers if number is not None), default=-1) + 1


def checkpoint_path(output_dir: str | Path, number: int) -> Path:
    """Where the checkpoint of that number is."""
    return Path(output_dir).absolute() / FOLDER / f"checkpoint_{number}"


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
    manifest = verify(Path(folder))
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for name, tensor in open_tensors(Path(folder), manifest, _MODEL):
            for part, values in pairs(own[name.removeprefix(_MODEL)].detach(), tensor):
                put_in(part, values)
