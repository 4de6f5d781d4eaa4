"""Checkpoints of a Trainer: their paths, what the Trainer adds to them, and the weights of the best one."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headway.common.object_path import to_path
from headway.core.checkpoint.folders import list_committed
from headway.core.checkpoint.format.foreign import parse_number
from headway.core.checkpoint.loading.chunked import iterate_pairs
from headway.core.checkpoint.loading.files import open_tensors, verify_checkpoint
from headway.core.checkpoint.loading.restoring import copy_saved_values
from headway.core.weights.compiled import remove_compiled_levels, rename_bare_items
from headway.log import get_logger
from headway.trainer.arguments import TrainingArguments
from headway.trainer.callbacks import CallbackHandler, TrainerState
from headway.trainer.loss_book import LossBook
from headway.trainer.metrics import check_best_metric
from headway.trainer.results import Metrics

log = get_logger(__name__)

FOLDER = "checkpoints"
"""Subfolder of `output_dir` that contains the checkpoints."""
_IRRELEVANT_FOR_LEARNING = frozenset(
    """
    output_dir logging_dir run_name report_to log_level disable_tqdm use_cpu do_train do_eval do_predict
    resume_from_checkpoint ignore_data_skip skip_memory_metrics save_total_limit num_best keep_every eval_accumulation_steps
    per_device_eval_batch_size logging_strategy logging_steps logging_first_step dataloader_num_workers
    dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor eval_sanity_check
    include_num_input_tokens_seen predict_with_generate generation_max_length generation_num_beams
    generation_config
    """.split()  # noqa: SIM905
)
"""Arguments that may change when a run is resumed, because they do not affect what is learned."""
_MODEL_PREFIX = "model/0/"
"""Prefix of the names of the model's tensors in a checkpoint."""


@dataclass(frozen=True)
class TrainerRecord:
    """Object registered with the Accelerator, so that checkpoints contain the Trainer's state, losses and callbacks.

    Attributes:
        callback_handler: Handler of the callbacks, with state and control.
        losses: Losses of the training run.
        settings: Model and arguments as strings; see `list_settings`.
    """

    callback_handler: CallbackHandler
    losses: LossBook
    settings: dict[str, str]

    def state_dict(self) -> dict[str, Any]:
        """Return the Trainer's state, losses, callbacks, pending actions and settings, for a checkpoint."""
        handler = self.callback_handler
        return {
            "state": handler.state.state_dict(),
            "losses": self.losses.state_dict(),
            "callbacks": handler.state_dict(),
            # A flag is set if, for example, the run was preempted during an evaluation. The resumed run must repeat it.
            # The first two flags end training or an epoch, and are not saved.
            "owed": handler.control.flags()[2:],
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
        self.callback_handler.state.load_state_dict(state["state"])
        self.losses.load_state_dict(state["losses"])
        self.callback_handler.load_state_dict(state["callbacks"])
        self.callback_handler.control.set_flags([False, False, *state["owed"]])


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
