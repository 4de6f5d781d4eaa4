"""Computation of a batch's loss: calls the model, finds the loss in its outputs, and splits labels from inputs."""

import inspect
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F

from headway.core.runtime.collectives.tree import Tree
from headway.errors import ConfigError, LossError
from headway.trainer.collation import IGNORED, NUM_ITEMS, LabelCount, is_shifted
from headway.trainer.columns import list_forward_parameters
from headway.trainer.data import Batch
from headway.trainer.source_losses import SourceBook

LossFunction = Callable[..., torch.Tensor]
"""Function `f(outputs, labels)` that returns the mean loss of a batch. It may also accept `num_items_in_batch`."""


class BatchLoss:
    """Callable that computes the loss of a batch for one model.

    A batch that is a dict is passed to the model as keyword arguments, a tuple or list as positional arguments. With
    a loss function, the labels (in a tuple, the last item) are first removed from the batch, and the function is called
    with the model's outputs and the labels. Otherwise the model's own loss is used: `outputs["loss"]`,
    `outputs.loss`, a tuple's first item, or the outputs themselves if they are a scalar tensor.

    Args:
        model: Model to train.
        function: `function(outputs, labels)`, which returns a mean. It may also accept `num_items_in_batch`. None: the
            model's own loss.
        smoothing: Label smoothing, the fraction of the target that is spread over all classes. The loss is then
            computed from `outputs.logits` and `labels`.
        label_names: Keys of the batch that are labels.

    Attributes:
        source_book: Recorder of the loss of each dataset in a mixture. None: no training run on a mixture is in progress.

    Raises:
        ConfigError: If there are both a loss function and label smoothing.
    """

    def __init__(
        self, model: torch.nn.Module, function: LossFunction | None, smoothing: float, label_names: list[str]
    ) -> None:
        if function is not None and smoothing:
            raise ConfigError(
                "label_smoothing_factor changes the model's own loss, but there is a loss function; smooth in that"
            )
        self.function = function
        self.smoothing = smoothing
        self.label_names = label_names
        self.count_labels = LabelCount(is_shifted(model))
        self._accepts_num_items = function is not None and "num_items_in_batch" in _list_parameters(function)
        self._forward_names = list_forward_parameters(model)
        self._is_checked = False  # whether `check_call` has accepted a batch
        self.source_book: SourceBook | None = None

    def __call__(
        self, model: torch.nn.Module, inputs: Batch, num_items: int | None = None
    ) -> tuple[torch.Tensor, Tree]:
        """Return the mean loss of a batch, and the outputs of the model.

        Args:
            model: Model to call.
            inputs: Batch, including its labels.
            num_items: Number of labels that are not ignored, which a loss function gets if it accepts
                `num_items_in_batch`. None: unknown.

        Raises:
            LossError: If the model's own loss is used, and its outputs contain none, or its forward does not accept the
                batch. With smoothing, if there are no `logits` or no labels.
        """
        if self.function is None and not self.smoothing:
            if not self._is_checked:
                check_call(model, inputs)
                self._is_checked = True
            outputs = call_model(model, inputs)
            if self.source_book is not None:
                self.source_book.add_outputs(self.split_labels(inputs)[1], outputs, inputs)
            return find_loss(outputs, model), outputs
        inputs, labels = self.split_labels(inputs)
        if self.smoothing:
            return self._compute_smoothed_loss(model, inputs, labels)
        outputs = call_model(model, inputs)
        assert self.function is not None
        if self._accepts_num_items:
            return self.function(outputs, labels, num_items_in_batch=num_items), outputs
        return self.function(outputs, labels), outputs

    def split_labels(self, inputs: Batch) -> tuple[Batch, Tree]:
        """Split a batch into the inputs of the model and the labels. The labels are None if the batch has none.

        In a dict, the labels are the entries in `label_names`, or a tuple of them if there are several. In a tuple or
        list of at least two items, they are the last item. With smoothing, a dict keeps its labels if the model's
        forward accepts `labels`.
        """
        if isinstance(inputs, Mapping):
            names = [name for name in self.label_names if name in inputs]
            if not names:
                names = [name for name in ("labels", "label") if name in inputs]
            labels = unpack_single(tuple(inputs[name] for name in names))
            # With smoothing the model may need the labels to create its decoder's inputs.
            keeps_labels = self.smoothing and "labels" in (self._forward_names or ())
            if keeps_labels:
                return inputs, labels
            return {name: value for name, value in inputs.items() if name not in names}, labels
        if isinstance(inputs, tuple | list) and len(inputs) > 1:
            *model_inputs, labels = inputs
            return unpack_single(tuple(model_inputs)), labels
        return inputs, None

    def _compute_smoothed_loss(self, model: torch.nn.Module, inputs: Batch, labels: Tree) -> tuple[torch.Tensor, Tree]:
        """Return the mean cross entropy of the logits with label smoothing, and the outputs of the model.

        Ignored labels do not count. Outputs that are a tensor are the logits themselves.

        Raises:
            LossError: If the outputs are not a tensor and have no `logits`, or the labels are not one tensor.
        """
        outputs = call_model(model, inputs)
        if self.source_book is not None:
            self.source_book.add_outputs(labels, outputs, inputs)
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
        if not isinstance(logits, torch.Tensor) or not isinstance(labels, torch.Tensor):
            raise LossError(
                "label_smoothing_factor needs outputs with `logits` and a batch with `labels`; give a loss function that smooths"
            )
        if self.count_labels.is_shifted:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        loss = F.cross_entropy(
            logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, label_smoothing=self.smoothing
        )
        return loss, outputs


def split_label_count(batch: Batch) -> tuple[Batch, int | None]:
    """Remove the label count from a batch. Return the remaining batch and the number of labels that are not ignored.

    The number is computed from the entry `NUM_ITEMS`, which `LoaderCollator` has added; None if there is no such entry.
    The given batch is not modified, because its entry is needed again if the batch is repeated after an out-of-memory
    error.
    """
    if isinstance(batch, Mapping) and NUM_ITEMS in batch:
        remaining = copy(batch)
        counts = remaining.pop(NUM_ITEMS)  # type: ignore[attr-defined]
        return remaining, int(counts.sum())
    return batch, None


def call_model(model: torch.nn.Module, inputs: Batch) -> Tree:
    """Call the model with a batch and return its outputs.

    A dict is passed as keyword arguments, a tuple or list as positional arguments, and anything else as one argument.
    """
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def check_call(model: torch.nn.Module, inputs: Batch) -> None:
    """Raise an error if the model's forward does not accept a batch that includes labels.

    Without labels, the model cannot compute its own loss. A batch that is a single tensor is not checked, nor is a
    forward without a signature.

    Raises:
        LossError: If the forward does not accept the contents of the batch.
    """
    try:
        signature = inspect.signature(model.forward)
        if isinstance(inputs, Mapping):
            signature.bind(**inputs)
        elif isinstance(inputs, tuple | list):
            signature.bind(*inputs)
    except ValueError:  # the forward has no signature to check
        return
    except TypeError as error:
        values = ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else f"{len(inputs)} values"
        raise LossError(
            f"{type(model).__name__}.forward{signature} cannot be called with a batch of {values} ({error}). Without a loss function "
            "the model gets the whole batch and must return its loss; give the Trainer a loss_function(outputs, labels), or let "
            "forward take the labels"
        ) from None


def find_named_loss(outputs: Tree) -> torch.Tensor | None:
    """Return the loss among a model's outputs as a 0-d tensor, or None if there is none.

    It is `outputs["loss"]`, `outputs.loss`, a tuple's first item, or the outputs themselves. It must be a
    floating-point tensor with one element.
    """
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif isinstance(outputs, tuple | list):
        loss = outputs[0] if outputs else None
    else:
        loss = getattr(outputs, "loss", outputs)
    is_loss = isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point()
    return loss.reshape(()) if is_loss else None  # type: ignore[union-attr]


def find_loss(outputs: Tree, model: torch.nn.Module) -> torch.Tensor:
    """Return the loss among a model's outputs as a 0-d tensor.

    It is `outputs["loss"]`, `outputs.loss`, a tuple's first item, or the outputs themselves. It must be a
    floating-point tensor with one element.

    Args:
        outputs: Outputs of the model.
        model: Model, named in the error.

    Raises:
        LossError: If there is no loss.
    """
    loss = find_named_loss(outputs)
    if loss is None:
        got = f"keys {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"
        raise LossError(
            f"{type(model).__name__} returned no loss ({got}); let its forward return a dict with 'loss' (a transformers model does "
            "where the batch has 'labels'), or give the Trainer a loss_function(outputs, labels)"
        )
    return loss


def drop_loss(outputs: Tree, has_loss: bool, ignore_keys: list[str]) -> Tree:
    """Return the model's outputs without the loss, as predictions.

    Several outputs are returned as a tuple, and a single output without a tuple. Return None if there is only the loss.

    Args:
        outputs: Outputs of the model.
        has_loss: Whether the loss is among the outputs: a tuple's first item, or outputs that are a single object. For
            a dict, the entry "loss" is always omitted.
        ignore_keys: Names of outputs to omit from a dict.
    """
    if isinstance(outputs, Mapping):
        values = tuple(
            value for name, value in outputs.items() if name not in (*ignore_keys, "loss") and value is not None
        )
    elif isinstance(outputs, tuple | list):
        values = tuple(outputs[1:] if has_loss else outputs)
    else:
        values = () if has_loss else (outputs,)
    return unpack_single(values)


def unpack_single(values: tuple[Tree, ...]) -> Tree:
    """Return the only value of a tuple, a tuple of several values unchanged, and None for an empty tuple."""
    if not values:
        return None
    return values[0] if len(values) == 1 else values


def _list_parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's parameters. Empty if they are not known."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # the function is written in C
        return []
