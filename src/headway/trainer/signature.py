"""Inputs and loss function of a model for a Trainer, derived from the signature of the model's forward."""

from dataclasses import dataclass

import torch

from headway.errors import ConfigError
from headway.trainer.arguments import TrainingArguments
from headway.trainer.columns import find_label_names, select_columns
from headway.trainer.loss import BatchLoss, LossFunction


@dataclass(frozen=True)
class ForwardSignature:
    """Inputs and loss function of a model, derived from the signature of its forward.

    Attributes:
        label_names: Keys of the batch that are labels.
        kept_columns: Columns of the dataset that a batch contains. None: all.
        batch_loss: Function that computes the loss of a batch.
    """

    label_names: list[str]
    kept_columns: set[str] | None
    batch_loss: BatchLoss


def read_signature(model: torch.nn.Module, args: TrainingArguments, function: LossFunction | None) -> ForwardSignature:
    """Derive label names, columns and loss function from the signature of the model's forward.

    Args:
        model: The user's model.
        args: Training arguments with label names and label smoothing.
        function: Loss function. None: the model's own loss.

    Raises:
        ConfigError: If there are both a loss function and label smoothing, or a loss function and a chunked loss.
    """
    if args.chunk_loss and function is not None:
        raise ConfigError(
            "chunk_loss=True computes the model's own loss in chunks, but the Trainer has a loss function, which needs the logits; "
            "leave one of them out"
        )
    names = list(args.label_names or find_label_names(model))
    kept_columns = select_columns(model, names) if args.remove_unused_columns else None
    return ForwardSignature(names, kept_columns, BatchLoss(model, function, args.label_smoothing_factor, names))
