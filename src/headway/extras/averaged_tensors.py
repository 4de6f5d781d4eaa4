"""Averages of a model's tensors on this rank: created from the weights, moved toward them, and adapted to the layout.

Each rank averages its own shards in place, so an update needs no communication.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from headway.core.strategies.base import Strategy
from headway.core.strategies.blocks import get_class_name
from headway.core.strategies.fully_sharded import dtensors
from headway.core.training._torch import is_fake
from headway.core.weights.compiled import rename_bare_items
from headway.core.weights.pieces import get_local_part
from headway.errors import StateError
from headway.extras._torch import foreach_copy_, foreach_lerp_
from headway.extras.average_exchange import WeightPair, split_pairs
from headway.extras.average_shards import choose_average_dtype, list_boxes, make_empty_piece, slice_box, wrap_like

_CREATED_TOO_EARLY = (
    "ExponentialMovingAverage was created before prepare(), and its weights have the layout of an unsharded model; create it after "
    "prepare(), or pass it to prepare() together with the model"
)


@dataclass(eq=False)
class _TensorAverage:
    """Average of one parameter or buffer.

    Attributes:
        read: Function that returns the current parameter or buffer.
        values: Averages of this rank's shard, or None for a tensor that only other ranks of a pipeline hold.
        copies_nonfinite: Whether infinite and NaN elements are copied instead of averaged. Only buffers, and parameters that
            have such elements when their average is created, pay for this.
    """

    read: Callable[[], torch.Tensor]
    values: torch.Tensor | None
    copies_nonfinite: bool = False


class AveragedTensors:
    """Averages of this rank's shards of a model's trainable parameters, and of its buffers if requested.

    It is empty until `adapt_to_model` is called.

    Args:
        model: Model without wrappers.
        dtype: Dtype of the averages. None: dtype of the parameters, but at least float32.
        device: Device of the averages. None: device of the parameters.
        has_buffers: Whether persistent buffers are averaged, too. Those that are not floating-point are copied.

    Attributes:
        parameter_ids: `id` of each averaged parameter, as of the last call of `adapt_to_model`.
    """

    def __init__(
        self, model: torch.nn.Module, dtype: torch.dtype | None, device: torch.device | None, has_buffers: bool
    ) -> None:
        self.parameter_ids: set[int] = set()
        self._model = model
        self._dtype = dtype
        self._device = device
        self._has_buffers = has_buffers
        self._averages: dict[str, _TensorAverage] = {}

    def list_values(self) -> list[torch.Tensor]:
        """Return the averages of this rank's shards, without their names."""
        return [average.values for average in self._averages.values() if average.values is not None]

    # ---------------------------------------------------------------- layout

    def adapt_to_model(self) -> None:
        """Create missing averages with the current weights as values, and adapt existing ones to the current layout.

        Parameters that have been frozen since their average was created stay averaged.

        Raises:
            StateError: If an existing average has neither the shape of this rank's shard nor that of the full tensor.
        """
        self.parameter_ids = set()
        for name, parameter in rename_bare_items(self._model.named_parameters()):
            if parameter.requires_grad or name in self._averages:
                self.parameter_ids.add(id(parameter))
                self._adapt_average(name, partial(_return_same, parameter))
        if self._has_buffers:
            # A buffer can be replaced by another tensor, so it is read from its module each time.
            for name, holder, key in _iterate_buffers(self._model):
                self._adapt_average(name, partial(holder.__getitem__, key), is_buffer=True)

    def add_parameters(self, names: Iterable[str]) -> None:
        """Start to average parameters with these names, which can be frozen, from their current values."""
        parameters = dict(rename_bare_items(self._model.named_parameters()))
        for name in names:
            self._adapt_average(name, partial(_return_same, parameters[name]))

    @torch.no_grad()
    def _adapt_average(self, name: str, read: Callable[[], torch.Tensor], is_buffer: bool = False) -> None:
        """Create the average of a tensor, or adapt the one that exists to the tensor's current layout.

        Args:
            name: Name of the tensor in the model.
            read: Function that returns the tensor.
            is_buffer: Whether the tensor is a buffer. Default: False.

        Raises:
            StateError: If the existing average has neither the shape of this rank's shard nor that of the full tensor.
        """
        tensor = read()
        existing = self._averages.get(name)
        if tensor.is_meta:  # only another rank of the pipeline has the values
            self._averages[name] = _TensorAverage(read, None)
            return
        weight = _get_local_weight(tensor)
        old_values = None if existing is None else existing.values
        if existing is not None and old_values is not None and old_values.shape == weight.shape:
            existing.read = read
            if self._device is None and old_values.device != weight.device:
                existing.values = old_values.to(weight.device)
            return
        dtype = choose_average_dtype(weight.dtype, self._dtype)
        values = torch.empty_like(weight, dtype=dtype, device=self._device or weight.device)
        values.requires_grad_(False)
        if old_values is None:
            values.copy_(weight)
        elif old_values.shape == tensor.shape:  # the average was created before the model was sharded
            for offsets, box in list_boxes(tensor, values):
                box.copy_(slice_box(old_values, offsets, box.shape))
        else:
            shapes = f"{name} had the shape {tuple(old_values.shape)}, now {tuple(tensor.shape)}"
            raise StateError(f"{_CREATED_TOO_EARLY} ({shapes})")
        copies_nonfinite = is_buffer or (not is_fake(values) and not bool(values.isfinite().all()))
        self._averages[name] = _TensorAverage(read, values, copies_nonfinite)

    # ---------------------------------------------------------------- values

    @torch.no_grad()
    def move_toward_weights(self, decay: float) -> None:
        """Replace each average by `decay` times itself plus `1 - decay` times the current weight.

        If an element of a buffer or of its average is not finite, the current element of the buffer is copied. The same
        applies to parameters that had such elements when their average was created.

        Args:
            decay: Weight of the old averages. 0 copies the weights, and so do tensors of integers for any value.
        """
        for copies_nonfinite, pairs in self._group_pairs():
            weights, averages = [pair.weight for pair in pairs], [pair.average for pair in pairs]
            first_average = averages[0]  # all pairs have the same dtypes and devices
            if not decay or not (first_average.is_floating_point() or first_average.is_complex()):
                foreach_copy_(averages, weights)
            elif copies_nonfinite:
                for weight, average in pairs:
                    _interpolate_finite(average, weight.to(average.device, average.dtype), 1.0 - decay)
            elif pairs[0].has_same_dtype_and_device:
                foreach_lerp_(averages, weights, 1.0 - decay)
            else:
                for bucket in split_pairs(pairs):
                    converted = [pair.weight.to(first_average.device, first_average.dtype) for pair in bucket]
                    foreach_lerp_([pair.average for pair in bucket], converted, 1.0 - decay)

    def iterate_pairs(self) -> Iterator[list[WeightPair]]:
        """Yield lists of pairs of this rank's weights and averages. All pairs of a list have equal dtypes and devices."""
        for _, pairs in self._group_pairs():
            yield pairs

    def _group_pairs(self) -> list[tuple[bool, list[WeightPair]]]:
        """Return the lists of `iterate_pairs`, each with `copies_nonfinite` of its averages."""
        groups: dict[tuple[Any, ...], list[WeightPair]] = {}
        for each in self._averages.values():
            if each.values is not None:
                weight, average = _get_local_weight(each.read()), each.values
                key = each.copies_nonfinite, weight.dtype, weight.device, average.dtype, average.device
                groups.setdefault(key, []).append(WeightPair(weight, average))
        return [(copies_nonfinite, pairs) for (copies_nonfinite, *_), pairs in groups.items()]

    # ---------------------------------------------------------------- checkpoints

    def export(self, strategy: Strategy | None) -> Iterator[tuple[str, Any]]:
        """Yield pairs of (name, average). Averages are sharded like the weights that the strategy exports.

        Args:
            strategy: Strategy that has prepared the model, or None.
        """
        if strategy is None:
            weights: Iterable[tuple[str, Any]] = ((name, each.read()) for name, each in self._averages.items())
        else:
            weights = rename_bare_items(strategy.export_state(self._model))
        for name, weight in weights:
            if name not in self._averages:
                continue
            values = self._averages[name].values
            if values is None:
                yield name, make_empty_piece(weight, self._dtype)
            else:
                yield name, wrap_like(weight, values)

    def list_frozen(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the names of saved averages whose parameters this run does not average, because they are frozen."""
        return sorted(saved.keys() - self._averages.keys())

    def check_saved(self, saved: Mapping[str, Any]) -> None:
        """Raise an error unless saved averages have the names and shapes of this model's tensors.

        Args:
            saved: Saved averages by name.

        Raises:
            StateError: If a name is missing or unknown, or if a shape differs.
        """
        known_names = {name for name, _ in rename_bare_items(self._model.named_parameters())} | self._averages.keys()
        missing, unknown = sorted(self._averages.keys() - saved.keys()), sorted(saved.keys() - known_names)
        if missing or unknown:
            lines = [f"not saved: {', '.join(missing[:3])}"] if missing else []
            lines += [f"only saved: {', '.join(unknown[:3])}"] if unknown else []
            raise StateError(
                f"the saved average is of other tensors than those of {get_class_name(self._model)} ({'; '.join(lines)}). Give the "
                "average the model and the buffers= that it was saved with"
            )
        for name, values in saved.items():
            average = self._averages.get(name)
            shape = None if average is None else tuple(average.read().shape)
            if shape is not None and shape != tuple(values.shape):
                raise StateError(f"the average of {name} has the shape {shape}, the saved one {tuple(values.shape)}")


def _interpolate_finite(average: torch.Tensor, weight: torch.Tensor, factor: float) -> None:
    """Move the finite elements of an average toward the weight in place, and copy the others from the weight.

    `lerp` computes the difference of the two, which is NaN if an element of a causal mask is -inf in both. An average that has
    become infinite or NaN could never become finite again.

    Args:
        average: Average that is changed.
        weight: Current weight, with the dtype and device of the average.
        factor: Fraction of the difference by which the average moves.
    """
    is_finite = average.isfinite() & weight.isfinite()
    average.copy_(torch.where(is_finite, average.lerp(weight, factor), weight))


def _return_same(tensor: torch.Tensor) -> torch.Tensor:
    """Return the argument unchanged. `partial(_return_same, tensor)` is the getter of a tensor that is never replaced."""
    return tensor


def _iterate_buffers(model: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield triples of (name, dict with the buffer, key in the dict) for a model's persistent buffers, each once."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                name = f"{path}.{key}".lstrip(".")
                [(bare_name, _)] = rename_bare_items([(name, buffer)])
                yield bare_name, module._buffers, key


def _get_local_weight(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor as a plain tensor that shares its memory."""
    local = dtensors.get_local_shard(tensor)
    # A tensor subclass that customizes FSDP2's all-gather, such as a float8 weight, wraps the plain shard.
    return get_local_part(tensor) if hasattr(local, "fsdp_pre_all_gather") else local
