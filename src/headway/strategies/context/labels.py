"""Labels among what a model is given: they are cut as its sequences are, and those that count are counted.

A mean over a part's labels becomes a term of the whole's mean by the share of labels that count, so what the model's loss ignores
must be known: from the options, or from the cross entropy that the model is seen to compute.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from headway.config.layout_request import TorchContextParallelConfig
from headway.errors import DataError, PrepareError
from headway.runtime.collectives.checked import Collectives
from headway.strategies.context import check as context_check
from headway.strategies.context import zigzag
from headway.strategies.tensor.crossings import SplitAxis

_DEFAULT = -100
_LOSSES = (functional.cross_entropy, functional.nll_loss)


@dataclass
class LabelledCall:
    """One call of the model.

    Attributes:
        args, kwargs: what the model is given: labels are cut, everything else is whole.
        num_labels: labels that count: of the whole sequences, and of this rank's part; None: none are cut.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_labels: tuple[torch.Tensor, torch.Tensor] | None = None


class SplitLabels:
    """The labels of one model.

    Args:
        model: whose.
        parameters: names of what may be given to its forward by place.
        options: which arguments are labels, and which label its loss ignores.
        axis: the ranks.
        everyone: all ranks of the run, which raise errors together.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: list[str],
        options: TorchContextParallelConfig,
        axis: SplitAxis,
        everyone: Collectives,
    ) -> None:
        self._model, self._parameters, self._options, self._axis = model, parameters, options, axis
        self._everyone = everyone
        self._of_loss: int | None = None
        self._name = type(model).__name__

    @property
    def ignored(self) -> int:
        """The label that does not count, and with which sequences are padded."""
        known = (self._options.ignore_index, self._of_loss, _DEFAULT)
        return next(value for value in known if value is not None)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A block in which the model computes its loss: which label does it ignore?

        Raises:
            PrepareError: another one than the options say.
        """
        with _IgnoredLabels() as watch:
            yield
        if len(watch.seen) != 1:
            return
        self._of_loss = next(iter(watch.seen))
        if self._options.ignore_index not in (None, self._of_loss):
            raise PrepareError(
                f"TorchContextParallelConfig(ignore_index={self._options.ignore_index}), but the cross entropy of "
                f"{self._name} has ignore_index={self._of_loss}; make them equal, or leave the option out"
            )

    def within(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Those of the shape (rows, tokens), by name."""
        given = {**dict(zip(self._parameters, args)), **kwargs}
        found = {name: given.get(name) for name in self._options.labels}
        return {name: label for name, label in found.items() if isinstance(label, torch.Tensor) and label.dim() > 1}

    def to_rehearse(self, labels: Mapping[str, torch.Tensor]) -> int:
        """A label that the model's loss takes, and ignores if that can be known."""
        if self._of_loss is not None:
            return self._of_loss
        if self._options.ignore_index is not None:
            return self._options.ignore_index
        known = [label for label in labels.values() if _is_class(label) and context_check.has_values(label)]
        return min((int(label.min()) for label in known), default=0)

    def cut(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LabelledCall:
        """Cut them among what the model is given.

        Raises:
            DataError: they would have to be padded, but not with what they say is ignored.
        """
        labels = self.within(args, kwargs)
        if not labels:
            return LabelledCall(args, dict(kwargs))
        self._check_padding(labels)
        if "labels" in labels and "shift_labels" not in labels and _shifts(self._model):
            labels["shift_labels"] = functional.pad(labels["labels"][:, 1:], (0, 1), value=self.ignored)
        parts = {
            name: zigzag.part_of(label, self._axis, 1, self.ignored if _is_class(label) else 0)
            for name, label in labels.items()
        }
        counted = "shift_labels" if "shift_labels" in labels else next(iter(labels))
        counts = self._count(labels[counted]), self._count(parts[counted])
        rest = args[len(self._parameters) :]
        args = tuple(parts.pop(name, value) for name, value in zip(self._parameters, args)) + rest
        return LabelledCall(args, {**kwargs, **parts}, counts)

    def _check_padding(self, labels: Mapping[str, torch.Tensor]) -> None:
        """Before ranks that alone have such a sequence raise, while the others wait for their share of the model.

        Raises:
            DataError: on all ranks.
        """
        classes = [label for label in labels.values() if _is_class(label)]
        if self._of_loss is not None or not classes:
            return
        problem = next(filter(None, map(self._padding_problem, classes)), "")
        refusing = [rank for rank, row in enumerate(self._everyone.gather_numbers([float(bool(problem))])) if row[0]]
        if problem:
            raise DataError(problem)
        if refusing:
            raise DataError(
                f"the batch of ranks {', '.join(map(str, refusing))} has labels that context parallelism cannot pad; the error there "
                "says what to do"
            )

    def _padding_problem(self, label: torch.Tensor) -> str:
        length = label.shape[1]
        if not context_check.has_values(label) or zigzag.padded(length, self._axis) == length:
            return ""
        least = int(label.masked_fill(label == self.ignored, 0).min())
        if least >= 0:
            return ""
        return (
            f"context parallelism must pad sequences of {length} tokens to {zigzag.padded(length, self._axis)}, and labels with "
            f"{self.ignored}, but they contain {least}; name the label that the loss of {self._name} ignores: "
            f"TorchContextParallelConfig(ignore_index={least}), or pad batches to a multiple of {2 * self._axis.size} tokens"
        )

    def _count(self, label: torch.Tensor) -> torch.Tensor:
        """Labels that count; no loss counts negative ones."""
        if label.is_floating_point():
            return torch.tensor(label.numel(), device=label.device)
        if label.dtype == torch.bool:
            return label.sum()
        return ((label >= 0) & (label != self.ignored)).sum()


class _IgnoredLabels(TorchFunctionMode):
    """Notes which labels cross entropies ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at calls; all pass."""
        kwargs = kwargs or {}
        if func in _LOSSES:
            target = kwargs["target"] if "target" in kwargs else args[1]
            if _is_class(target):
                # Both have it as their fifth argument.
                self.seen.add(int(kwargs.get("ignore_index", args[4] if len(args) > 4 else _DEFAULT)))
        return func(*args, **kwargs)


def _is_class(label: torch.Tensor) -> bool:
    return not label.is_floating_point() and label.dtype != torch.bool


def _shifts(model: torch.nn.Module) -> bool:
    """Does the model's own loss shift labels by one (transformers' causal language models)?"""
    return hasattr(model, "loss_function") and getattr(model, "loss_type", None) in (None, "ForCausalLM")
