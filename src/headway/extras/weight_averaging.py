"""Average the weights of several checkpoints, such as the last ones of a run, one tensor at a time."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headway.common.text import join_names
from headway.core.weights.files import StoredTensor
from headway.errors import CheckpointError, ConfigError

_STATISTICS = ("running_mean", "running_var")
"""Last components of the names of batch-norm statistics."""

_ADAPTER = re.compile(r"(?:^|\.)lora_(?:A|B|embedding_A|embedding_B)(?:\.|$)")
"""Pattern for the names of the matrices in PEFT's LoRA, whose product changes a weight."""


@dataclass(frozen=True)
class SavedModel:
    """Weights of one checkpoint, which are read on request.

    Attributes:
        place: Folder or URL of the checkpoint, for messages.
        tensors: Tensors by name: views of mapped files, a `StoredTensor`, or other objects with `shape`, `dtype` and `assemble()`.
        ties: Name of the tensor with the values, for each tied name.
    """

    place: str
    tensors: Mapping[str, Any]
    ties: Mapping[str, str] = field(default_factory=dict)


class WeightAverage:
    """Average of the models in several checkpoints.

    Floating-point and complex tensors are averaged in float32 or complex64, or in their own precision if it is higher. The
    result has the dtype of the saved tensors, or their common dtype if they differ. Integers and booleans, such as a batch
    norm's `num_batches_tracked`, are those of the last checkpoint.

    Args:
        models: Saved models, at least two.
        coefficients: Weight of each model. They are divided by their sum. None: equal weights.

    Raises:
        ConfigError: If there are fewer than two models, or if the coefficients are not allowed.
        CheckpointError: If the names, shapes or kinds of dtypes of the models differ.
    """

    def __init__(self, models: Sequence[SavedModel], coefficients: Sequence[float] | None = None) -> None:
        if len(models) < 2:
            raise ConfigError(f"an average needs at least two checkpoints, not {len(models)}")
        if coefficients is None:
            coefficients = [1.0] * len(models)
        if len(coefficients) != len(models):
            raise ConfigError(
                f"{len(coefficients)} coefficients for {len(models)} checkpoints; give one per checkpoint"
            )
        if not all(math.isfinite(each) and each >= 0 for each in coefficients) or not sum(coefficients):
            raise ConfigError(f"coefficients {list(coefficients)}; give numbers from 0 whose sum is not 0")
        self._unaveraged: list[str] = []  # integers that differ between the checkpoints
        self._places = [model.place for model in models]
        self._coefficients = list(coefficients)
        self._tensors = [_resolve_ties(model, models) for model in models]
        self._check_names()

    def _check_names(self) -> None:
        """Raise `CheckpointError` unless all models have tensors with the same names.

        Raises:
            CheckpointError: If a model lacks a name. The message contains the names that only one of two models has.
        """
        first = self._tensors[0]
        for place, tensors in zip(self._places[1:], self._tensors[1:]):
            if tensors.keys() == first.keys():
                continue
            facts = [
                f"only in {owner}: {join_names([name for name in own if name not in other], 3)}"
                for owner, own, other in ((self._places[0], first, tensors), (place, tensors, first))
                if own.keys() - other.keys()
            ]
            raise CheckpointError(
                f"the checkpoints have different tensors, so they cannot be averaged; {'; '.join(facts)}"
            )

    def describe_exceptions(self) -> list[str]:
        """Return lines of text about tensors that were not averaged, and averages that need care. Most models have none.

        Call it when all tensors have been assembled.
        """
        lines = []
        if self._unaveraged:
            lines.append(
                f"not averaged, but taken from {self._places[-1]}, because they are integers: {join_names(self._unaveraged, 3)}"
            )
        adapters = [name for name in self._tensors[0] if _ADAPTER.search(name)]
        if adapters:
            lines.append(
                "the average of LoRA adapters is not the average of the models; merge each adapter into its base model first, and "
                f"average the merged models: {join_names(adapters, 3)}"
            )
        statistics = [name for name in self._tensors[0] if name.rpartition(".")[2] in _STATISTICS]
        if statistics:
            lines.append(
                "the averaged statistics of batch norms are not those of the averaged model; compute them again with "
                f"torch.optim.swa_utils.update_bn: {join_names(statistics, 3)}"
            )
        return lines

    def iterate_tensors(self) -> Iterator[tuple[str, "_AveragedTensor"]]:
        """Yield (name, average) for each tensor. The values are read and averaged when `assemble()` is called.

        Raises:
            CheckpointError: If the shapes of a tensor differ, or if only some of its dtypes are integers.
        """
        for name in self._tensors[0]:
            yield name, _AveragedTensor(self, name, [tensors[name] for tensors in self._tensors])

    def average_values(self, name: str, saved: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        """Read a floating-point or complex tensor from all checkpoints, and return the average.

        At most the average, one checkpoint's values, and two intermediate results are in memory. An infinite value makes the
        average infinite.

        Args:
            name: Name of the tensor.
            saved: The tensor in each checkpoint.
            dtype: Dtype of the result.

        Raises:
            CheckpointError: If a value is NaN, if an element is inf in one checkpoint and -inf in another, or if a file is
                damaged.
        """
        average = torch.empty(0)
        total = 0.0
        for place, each, coefficient in zip(self._places, saved, self._coefficients):
            if not coefficient:
                continue
            values = _read_values(each).to(_find_accumulation_dtype(dtype))
            if values.isnan().any():
                raise CheckpointError(f"{name} in {place} contains NaN; leave this checkpoint out of the average")
            if values.is_complex():
                # Real and imaginary parts are averaged separately, because only one of them may be infinite.
                values = torch.view_as_real(values.resolve_conj())
            total += coefficient
            if total == coefficient:
                average = values.clone()  # `values` can be a view of the file
                continue
            # The incremental mean of equal values is exactly this value, unlike a sum that is divided at the end.
            # It is computed for half of the values, because the difference of two large values can be infinite.
            half = average * 0.5
            change = (values * 0.5).sub_(half).mul_(coefficient / total)
            half += change
            half *= 2
            # Half of a subnormal number is rounded. The difference of equal infinities is NaN, and an infinite average
            # plus its difference from a finite value is NaN, too.
            is_unchanged = (values == average) | (average.isinf() & values.isfinite())
            average = torch.where(is_unchanged, average, half)
        if average.isnan().any():
            raise CheckpointError(
                f"{name} contains inf in one checkpoint and -inf in another in the same place, so it has no average; leave one of "
                "these checkpoints out"
            )
        return (torch.view_as_complex(average) if dtype.is_complex else average).to(dtype)

    def choose_last(self, name: str, saved: Sequence[Any]) -> torch.Tensor:
        """Return an integer or boolean tensor of the last checkpoint. Record the name if another checkpoint differs.

        Args:
            name: Name of the tensor.
            saved: The tensor in each checkpoint.

        Raises:
            CheckpointError: If a tensor with several dimensions differs, or a file is damaged.
        """
        last = _read_values(saved[-1])
        if any(not torch.equal(_read_values(each), last) for each in saved[:-1]):
            if last.ndim > 1:
                raise CheckpointError(
                    f"{name} has integers of shape {list(last.shape)} that differ between the checkpoints; if these are quantized "
                    "weights, average the checkpoints from before the quantization"
                )
            self._unaveraged.append(name)
        return last


class _AveragedTensor:
    """Average of one tensor over several checkpoints, computed when `assemble` is called.

    Args:
        average: Average of whole checkpoints, to which this tensor belongs.
        name: Name of the tensor.
        saved: The tensor in each checkpoint.

    Attributes:
        shape: Shape of the tensor.
        dtype: Dtype of the average.

    Raises:
        CheckpointError: If the shapes differ, or if integer and floating-point dtypes are mixed.
    """

    def __init__(self, average: WeightAverage, name: str, saved: Sequence[Any]) -> None:
        self._average = average
        self._name = name
        self._saved = saved
        shapes = {tuple(each.shape): None for each in saved}
        if len(shapes) > 1:
            raise CheckpointError(
                f"{name} has the shapes {' and '.join(str(list(shape)) for shape in shapes)} in the checkpoints, so they cannot "
                "be averaged"
            )
        self.shape = torch.Size(saved[0].shape)
        self.dtype = _find_common_dtype(name, [each.dtype for each in saved])

    def assemble(self) -> torch.Tensor:
        """Return the average.

        Raises:
            CheckpointError: If a value is NaN, if an element is inf in one checkpoint and -inf in another, if integers with
                several dimensions differ, or if a file is damaged.
        """
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return self._average.average_values(self._name, self._saved, self.dtype)
        return self._average.choose_last(self._name, self._saved)


def _resolve_ties(model: SavedModel, models: Sequence[SavedModel]) -> dict[str, Any]:
    """Return a model's tensors, with tied names that another model stores as a tensor of its own.

    Args:
        model: Saved model.
        models: All saved models.
    """
    stored_names = {name for each in models for name in each.tensors}
    tied = {name: model.tensors[target] for name, target in model.ties.items() if name in stored_names}
    return {**tied, **model.tensors}


def _find_common_dtype(name: str, dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Return the dtype of an average.

    Different floating-point dtypes have float32 in common, or float64 if one of them is float64.

    Args:
        name: Name of the tensor, for messages.
        dtypes: Dtype of the tensor in each checkpoint.

    Raises:
        CheckpointError: If the dtypes differ and are not all floating-point.
    """
    kinds = list(dict.fromkeys(dtypes))
    if len(kinds) == 1:
        return kinds[0]
    if not all(dtype.is_floating_point for dtype in kinds):
        raise CheckpointError(
            f"{name} has the dtypes {' and '.join(map(str, kinds))} in the checkpoints, so they cannot be averaged"
        )
    return torch.float64 if torch.float64 in kinds else torch.float32


def _find_accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values are averaged: float32 or complex64, unless the values are more precise."""
    if dtype.is_complex:
        return torch.complex128 if dtype == torch.complex128 else torch.complex64
    return torch.float64 if dtype == torch.float64 else torch.float32


def _read_values(saved: Any) -> torch.Tensor:
    """Return the values of a saved tensor. They can be a view of a mapped file."""
    if isinstance(saved, StoredTensor):
        return saved.tensor()
    values: torch.Tensor = saved if isinstance(saved, torch.Tensor) else saved.assemble()
    return values
