"""How a batch becomes a loss: how the model is called, where its loss is, what it is a mean over, and what of it is logged."""

import inspect
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F

from headway.accelerator import Accelerator
from headway.errors import ConfigError, LossError
from headway.runtime.collectives.tree import Tree
from headway.trainer.data import IGNORED, NUM_ITEMS, Batch, LabelCount, forward_parameters, is_shifted

LossFunction = Callable[..., torch.Tensor]

_MOST_WAITING = 512
"""Windows whose losses wait on the device; then they are read, which waits for it."""


class LossOf:
    """Computes the loss of batches with one model.

    A batch that is a dict goes to the model by name, a tuple or list by position. Where there is a loss function, the labels are
    taken out of the batch first (a tuple's last item), and it is called with the model's outputs and them; else
    the model's own loss is used: `outputs["loss"]`, `outputs.loss`, a tuple's first item, or a scalar.

    Args:
        model: the model.
        function: `function(outputs, labels)`, a mean; it may also take `num_items_in_batch`. None: the model's own loss.
        smoothing: share of the target that is spread over all classes; computed from `outputs.logits` and `labels`.
        label_names: the batch's keys that are labels.
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
        self.count = LabelCount(is_shifted(model))
        self._takes_count = function is not None and "num_items_in_batch" in _parameters(function)
        self._forward_names = forward_parameters(model)
        self._is_called = False

    def __call__(
        self, model: torch.nn.Module, inputs: Batch, num_items: int | None = None
    ) -> tuple[torch.Tensor, Tree]:
        """(loss, outputs): the loss is a mean.

        Raises:
            LossError: the model gives none.
        """
        if self.function is None and not self.smoothing:
            if not self._is_called:
                check_call(model, inputs)
                self._is_called = True
            outputs = call(model, inputs)
            return find_loss(outputs, model), outputs
        inputs, labels = self.split(inputs)
        if self.smoothing:
            return self._smoothed(model, inputs, labels)
        outputs = call(model, inputs)
        more = {"num_items_in_batch": num_items} if self._takes_count else {}
        assert self.function is not None
        return self.function(outputs, labels, **more), outputs

    def split(self, inputs: Batch) -> tuple[Batch, Tree]:
        """(what the model is called with, labels): labels that are not there are None."""
        if isinstance(inputs, Mapping):
            names = [name for name in self.label_names if name in inputs] or [
                n for n in ("labels", "label") if n in inputs
            ]
            found = [inputs[name] for name in names]
            labels = None if not found else found[0] if len(found) == 1 else tuple(found)
            # Under smoothing the model may need the labels to make its decoder's inputs.
            keeps = self.smoothing and "labels" in (self._forward_names or ())
            return (inputs if keeps else {k: v for k, v in inputs.items() if k not in names}), labels
        if isinstance(inputs, tuple | list) and len(inputs) > 1:
            return (inputs[0] if len(inputs) == 2 else tuple(inputs[:-1])), inputs[-1]
        return inputs, None

    def _smoothed(self, model: torch.nn.Module, inputs: Batch, labels: Tree) -> tuple[torch.Tensor, Tree]:
        outputs = call(model, inputs)
        logits = outputs["logits"] if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
        if not isinstance(logits, torch.Tensor) or not isinstance(labels, torch.Tensor):
            raise LossError(
                "label_smoothing_factor needs outputs with `logits` and a batch with `labels`; give a loss function that smooths"
            )
        if self.count.is_shifted:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        loss = F.cross_entropy(
            logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, label_smoothing=self.smoothing
        )
        return loss, outputs


def take_count(batch: Batch) -> tuple[Batch, int | None]:
    """(the batch or piece without what `Collating` put into it, the number of labels that this counts).

    What is given stays as it is: a batch that is run again has its count still.
    """
    if isinstance(batch, Mapping) and NUM_ITEMS in batch:
        rest = copy(batch)
        counts = rest.pop(NUM_ITEMS)  # type: ignore[attr-defined]
        return rest, int(counts.sum())
    return batch, None


def call(model: torch.nn.Module, inputs: Batch) -> Tree:
    """The model's outputs: a dict goes in by name, a tuple or list by position."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def check_call(model: torch.nn.Module, inputs: Batch) -> None:
    """Can the model be called with a whole batch, labels included, so that it may return a loss?

    Raises:
        LossError: its forward does not take what is in the batch.
    """
    try:
        signature = inspect.signature(model.forward)
        if isinstance(inputs, Mapping):
            signature.bind(**inputs)
        elif isinstance(inputs, tuple | list):
            signature.bind(*inputs)
    except ValueError:  # it has no signature to look at
        return
    except TypeError as error:
        what = ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else f"{len(inputs)} values"
        raise LossError(
            f"{type(model).__name__}.forward{signature} cannot be called with a batch of {what} ({error}). Without a loss function "
            "the model gets the whole batch and must return its loss; give the Trainer a loss_function(outputs, labels), or let "
            "forward take the labels"
        ) from None


def loss_among(outputs: Tree) -> torch.Tensor | None:
    """The loss among a model's outputs: `outputs["loss"]`, `outputs.loss`, a tuple's first item, or a scalar."""
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif isinstance(outputs, tuple | list):
        loss = outputs[0] if outputs else None
    else:
        loss = getattr(outputs, "loss", outputs)
    is_loss = isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point()
    return loss.reshape(()) if is_loss else None  # type: ignore[union-attr]


def find_loss(outputs: Tree, model: torch.nn.Module) -> torch.Tensor:
    """The same, where there must be one.

    Raises:
        LossError: there is none.
    """
    loss = loss_among(outputs)
    if loss is None:
        got = f"keys {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"
        raise LossError(
            f"{type(model).__name__} returned no loss ({got}); let its forward return a dict with 'loss' (a transformers model does "
            "where the batch has 'labels'), or give the Trainer a loss_function(outputs, labels)"
        )
    return loss


def without_loss(outputs: Tree, has_loss: bool, ignored: list[str]) -> Tree:
    """The model's outputs as predictions: one value alone, several as a tuple; None where only the loss is left.

    Args:
        outputs: what the model returned.
        has_loss: a tuple's first item is the loss.
        ignored: names of outputs to leave out.
    """
    if isinstance(outputs, Mapping):
        values = tuple(value for name, value in outputs.items() if name not in (*ignored, "loss") and value is not None)
    elif isinstance(outputs, tuple | list):
        values = tuple(outputs[1:] if has_loss else outputs)
    else:
        values = () if has_loss else (outputs,)
    return None if not values else values[0] if len(values) == 1 else values


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # written in C
        return []


# ---------------------------------------------------------------- the losses of a training


class LossBook:
    """The losses of a training as they are logged: the exact mean of each window, over its pieces and all ranks.

    Nothing waits for the device before a value is asked for.

    Args:
        accelerator: whose ranks compute the windows.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._pieces: list[tuple[torch.Tensor, float, int]] = []
        self._window: list[tuple[torch.Tensor, float]] = []
        self._windows: list[list[tuple[torch.Tensor, float]]] = []
        self._recent: list[float] = []
        self._total = 0.0
        self._num_windows = 0

    def add(self, loss: torch.Tensor, weight: float, num_rows: int) -> None:
        """A piece of a batch went through.

        Args:
            loss: its mean.
            weight: over how many items.
            num_rows: the piece's rows.
        """
        self._pieces.append((loss.detach(), weight, num_rows))

    def end_batch(self, num_rows: int) -> None:
        """The batch stands. Where it was run again, the last pieces that have its rows are those that count."""
        kept, rows = [], 0
        for piece in reversed(self._pieces):
            kept.append(piece[:2])
            rows += piece[2]
            if rows >= num_rows:
                break
        self._window += reversed(kept)
        self._pieces.clear()

    def end_window(self) -> None:
        """The window of these batches is over."""
        if self._window:
            self._windows.append(self._window)
            self._window = []
        if len(self._windows) >= _MOST_WAITING:
            self._read()

    def _read(self) -> None:
        """Exchange and read what waits; every rank calls it at the same window."""
        if not self._windows:
            return
        pieces = [(loss, weight, number) for number, window in enumerate(self._windows) for loss, weight in window]
        # The one wait for the device; the rest is the host's.
        losses = torch.stack([loss.float() for loss, _, _ in pieces]).cpu()
        weights = torch.tensor([float(weight) for _, weight, _ in pieces])
        places = torch.tensor([number for _, _, number in pieces])
        # A mean over nothing is not a number; it must not get into the sum.
        shares = torch.stack([torch.where(weights > 0, losses * weights, 0.0), weights])
        both = shares.new_zeros(2, len(self._windows)).index_add_(1, places, shares)
        self._windows.clear()
        sums = both.flatten().tolist()
        if self._accelerator.num_processes > 1:
            sums = self._accelerator.collectives.reduce_numbers(sums)
        means = [total / weight for total, weight in zip(sums[: len(sums) // 2], sums[len(sums) // 2 :]) if weight]
        self._recent += means
        self._total += sum(means)
        self._num_windows += len(means)

    def take(self) -> float | None:
        """The mean over the windows since the last call; None where there were none. Every rank calls it."""
        self._read()
        found = sum(self._recent) / len(self._recent) if self._recent else None
        self._recent = []
        return found

    def mean(self) -> float:
        """The mean over all windows of the run; every rank calls it."""
        self._read()
        return self._total / self._num_windows if self._num_windows else float("nan")

    def state_dict(self) -> dict[str, Any]:
        """What was read so far and is not logged yet, and the total; every rank calls it."""
        self._read()
        return {"recent": list(self._recent), "total": self._total, "num_windows": self._num_windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._recent, self._total, self._num_windows = list(state["recent"]), state["total"], state["num_windows"]
