"""What a Trainer's checkpoints hold beside the objects, which one is the best, and how its weights come back."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headway.checkpoint.folders import committed
from headway.checkpoint.layout import read_tensors, verify
from headway.trainer.callbacks import Callbacks, TrainerControl, TrainerState
from headway.trainer.losses import LossBook
from headway.trainer.rehearsal import check_wanted

if TYPE_CHECKING:
    from headway.trainer.arguments import TrainingArguments

FOLDER = "checkpoints"
_MODEL = "model/0/"


class Record:
    """Registered with the Accelerator: the state, the losses and the callbacks' states.

    Args:
        state, control, losses, callbacks: the Trainer's; control: asked for, because callbacks may exchange it.
    """

    def __init__(
        self, state: TrainerState, control: Callable[[], TrainerControl], losses: LossBook, callbacks: Callbacks
    ) -> None:
        self.state = state
        self.control = control
        self.losses = losses
        self.callbacks = callbacks

    def state_dict(self) -> dict[str, Any]:
        """Everything."""
        return {
            "state": self.state.state_dict(), "losses": self.losses.state_dict(), "callbacks": self.callbacks.state_dict(),
            # Not empty where the run was asked to end in an evaluation, say: the resumed one owes it.
            "owed": self.control().flags()[2:],
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from it."""
        self.state.load_state_dict(state["state"])
        self.losses.load_state_dict(state["losses"])
        self.callbacks.load_state_dict(state["callbacks"])
        self.control().set_flags([False, False, *state["owed"]])


def next_number(output_dir: str | Path) -> int:
    """The number of the next checkpoint in the folder: after those of earlier runs."""
    folder = Path(output_dir) / FOLDER
    numbers = [re.search(r"(\d+)$", path.name) for path in committed(folder)] if folder.is_dir() else []
    return max((int(found[1]) for found in numbers if found), default=-1) + 1


def checkpoint_path(output_dir: str | Path, number: int) -> Path:
    """Where the checkpoint of that number is."""
    return Path(output_dir).absolute() / FOLDER / f"checkpoint_{number}"


def note_best(state: TrainerState, args: "TrainingArguments", metrics: dict[str, Any]) -> bool:
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
    """Take the model's weights from a checkpoint, every byte verified; every rank calls it.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
    """
    manifest = verify(Path(folder))
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for name, tensor in read_tensors(Path(folder), manifest, _MODEL):
            own[name.removeprefix(_MODEL)].copy_(tensor)
