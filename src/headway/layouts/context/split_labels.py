"""`SplitLabels`: labels among a model's arguments, which are sharded like its sequences.

A mean over a shard's labels becomes a term of the overall mean, weighted by the shard's fraction of labels that are not
ignored. The ignored label must therefore be known. It comes from the options, or from the cross entropy that the model
is observed to compute.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from headway.core.config.parallelism import TorchContextParallelConfig
from headway.core.runtime.collectives.checked import Collectives
from headway.errors import DataError, PrepareError
from headway.layouts.context._torch import is_fake
from headway.layouts.context.sequences import pad_length, split_sequence
from headway.layouts.tensor.crossings import (
    SplitAxis,
)

_DEFAULT_IGNORED_LABEL = -100
"""Label that torch's losses ignore by default."""
_LOSSES = (functional.cross_entropy, functional.nll_loss)


@dataclass
class LabeledCall:
    """Arguments of one call of the model, with sharded labels.

    Attributes:
        args: Positional arguments. Only labels are sharded.
        kwargs: Keyword arguments. Only labels are sharded.
        num_labels: Pair of (number of labels in the full sequences, number of labels in this rank's shard), without
            ignored labels. None: no labels are sharded.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_labels: tuple[torch.Tensor, torch.Tensor] | None = None


class SplitLabels:
    """Labels among a model's arguments. The methods find the labels of a call, and shard them like its sequences.

    Args:
        model: Model that gets the labels.
        parameters: Argument names of the model's forward that can be positional.
        options: Options with the names of arguments that are labels, and the label that the loss ignores.
        axis: Mesh axis of context parallelism.
        everyone: Collectives over all ranks of the run, so that all of them raise errors together.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: list[str],
        options: TorchContextParallelConfig,
        axis: SplitAxis,
        everyone: Collectives,
    ) -> None:
        self._model = model
        self._parameters = parameters
        self._options = options
        self._axis = axis
        self._everyone = everyone
        self._observed_label: int | None = None  # `ignore_index` of the model's cross entropy, once it was observed
        self._name = type(model).__name__

    @property
    def ignored_label(self) -> int:
        """Label that the loss ignores: from the options, else from the model's cross entropy, else -100.

        Labels are padded with it.
        """
        labels = (self._options.ignore_index, self._observed_label, _DEFAULT_IGNORED_LABEL)
        return next(label for label in labels if label is not None)

    @contextmanager
    def observe_ignored_label(self) -> Iterator[None]:
        """Return a context in which the `ignore_index` of the model's cross entropy is recorded.

        Nothing is recorded if the ranks together observe no value or several ones. Every rank must enter the context.

        Raises:
            PrepareError: If the recorded label differs from the label in the options.
        """
        with _IgnoredLabels() as recorder:
            yield
        # From all ranks, because in a pipeline only the last stage computes the loss.
        observed_labels = set().union(*self._everyone.gather_objects(recorder.observed_labels))
        if len(observed_labels) != 1:
            return
        (self._observed_label,) = observed_labels
        if self._options.ignore_index not in (None, self._observed_label):
            raise PrepareError(
                f"TorchContextParallelConfig(ignore_index={self._options.ignore_index}), but the cross entropy of "
                f"{self._name} has ignore_index={self._observed_label}; make them equal, or leave the option out"
            )

    def find_labels(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the labels of a call by argument name.

        Labels are tensors of at least two dimensions, (rows, tokens), among the arguments that the options name.
        """
        arguments = {**dict(zip(self._parameters, args)), **kwargs}
        candidates = {name: arguments.get(name) for name in self._options.labels}
        return {
            name: label for name, label in candidates.items() if isinstance(label, torch.Tensor) and label.dim() > 1
        }

    def choose_dry_run_label(self, labels: Mapping[str, torch.Tensor]) -> int:
        """Return a label for dry runs: the ignored label if known, else the smallest of the given labels.

        The ignored label is known if the loss or the options determine it.

        Args:
            labels: Labels of the call by argument name.
        """
        if self._observed_label is not None:
            return self._observed_label
        if self._options.ignore_index is not None:
            return self._options.ignore_index
        class_labels = [label for label in labels.values() if is_class(label) and not is_fake(label)]
        return min((int(label.min()) for label in class_labels), default=0)

    def split_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_alone: bool = False) -> LabeledCall:
        """Return the call with each tensor of labels replaced by this rank's shard of the tensor.

        If the model's own loss shifts labels by one, the keyword argument `shift_labels` is added, because a shard
        lacks the label after its end. Without labels, the arguments do not change.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            is_alone: Whether the other ranks might not make this call. Labels are then checked without a collective,
                and an error is raised on this rank only. Default: False.

        Raises:
            DataError: If labels must be padded but contain a negative label other than `ignored_label`, unless the
                model's cross entropy has shown which label it ignores. Unless `is_alone`, it is raised on all ranks.
        """
        labels = self.find_labels(args, kwargs)
        if not labels:
            return LabeledCall(args, dict(kwargs))
        self._check_padding(labels, is_alone)
        if "labels" in labels and "shift_labels" not in labels and _has_shifted_loss(self._model):
            labels["shift_labels"] = functional.pad(labels["labels"][:, 1:], (0, 1), value=self.ignored_label)
        shards = {
            name: split_sequence(label, self._axis, 1, self.ignored_label if is_class(label) else 0)
            for name, label in labels.items()
        }
        counted_name = "shift_labels" if "shift_labels" in labels else next(iter(labels))
        counts = self._count_labels(labels[counted_name]), self._count_labels(shards[counted_name])
        # Shards of positional labels are removed from `shards`, and the others replace keyword arguments.
        positional = tuple(shards.pop(name, value) for name, value in zip(self._parameters, args))
        variadic = args[len(self._parameters) :]
        return LabeledCall(positional + variadic, {**kwargs, **shards}, counts)

    def _check_padding(self, labels: Mapping[str, torch.Tensor], is_alone: bool) -> None:
        """Raise an error on all ranks if any rank's labels cannot be padded.

        If only some ranks raised it, the others would wait in a collective of the model. Do nothing if the model's
        cross entropy has shown which label it ignores, or if no labels are class indices.

        Args:
            labels: Labels by name.
            is_alone: Whether to check this rank only, without a collective.

        Raises:
            DataError: If this rank's labels cannot be padded or, unless `is_alone`, another rank's.
        """
        classes = [label for label in labels.values() if is_class(label)]
        if self._observed_label is not None or not classes:
            return
        problem = next(filter(None, map(self._find_padding_problem, classes)), "")
        has_problem_by_rank = [] if is_alone else self._everyone.gather_numbers([float(bool(problem))])
        ranks = [rank for rank, (has_problem,) in enumerate(has_problem_by_rank) if has_problem]
        if problem:
            raise DataError(problem)
        if ranks:
            raise DataError(
                f"the batch of ranks {', '.join(map(str, ranks))} has labels that cannot be padded; see the error on those ranks"
            )

    def _find_padding_problem(self, label: torch.Tensor) -> str:
        """Return the message of the error if labels cannot be padded, or "" if they can or need not be.

        Labels can be padded with `ignored_label` unless they contain another negative label, which the loss might
        ignore instead.
        """
        length = label.shape[1]
        if is_fake(label) or pad_length(length, self._axis) == length:
            return ""
        least = int(label.masked_fill(label == self.ignored_label, 0).min())
        if least >= 0:
            return ""
        return (
            f"context parallelism must pad sequences of {length} tokens to {pad_length(length, self._axis)}, and labels with "
            f"{self.ignored_label}, but they contain {least}; name the label that the loss of {self._name} ignores: "
            f"TorchContextParallelConfig(ignore_index={least}), or pad batches to a multiple of {2 * self._axis.size} tokens"
        )

    def _count_labels(self, label: torch.Tensor) -> torch.Tensor:
        """Return the number of labels that count in a loss, as a 0-d tensor.

        Class labels count unless they are negative or ignored, and bool labels if they are True. All floating-point
        labels count.
        """
        if label.is_floating_point():
            return torch.tensor(label.numel(), device=label.device)
        if label.dtype == torch.bool:
            return label.sum()
        return ((label >= 0) & (label != self.ignored_label)).sum()


class _IgnoredLabels(TorchFunctionMode):
    """Torch function mode that records the `ignore_index` of cross entropies and NLL losses of class indices."""

    def __init__(self) -> None:
        super().__init__()
        self.observed_labels: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the `ignore_index` of a loss whose targets are class indices. Run all functions unchanged."""
        kwargs = kwargs or {}
        if func in _LOSSES:
            target = kwargs["target"] if "target" in kwargs else args[1]
            if is_class(target):
                # `ignore_index` is the fifth argument of both losses.
                default = args[4] if len(args) > 4 else _DEFAULT_IGNORED_LABEL
                self.observed_labels.add(int(kwargs.get("ignore_index", default)))
        return func(*args, **kwargs)


def is_class(label: torch.Tensor) -> bool:
    """Whether labels are class indices, which are integers."""
    return not label.is_floating_point() and label.dtype != torch.bool


def _has_shifted_loss(model: torch.nn.Module) -> bool:
    """Whether the model's own loss shifts labels by one, as in transformers' causal language models."""
    return hasattr(model, "loss_function") and getattr(model, "loss_type", None) in (None, "ForCausalLM")
