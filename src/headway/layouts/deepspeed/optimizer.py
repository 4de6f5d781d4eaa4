"""The user's optimizer under DeepSpeed, and the shards of parameters and optimizer state for checkpoints.

DeepSpeed replaces an optimizer's parameters with flat partitions. The user's own optimizer keeps the model's
parameters, so that schedulers, clipping, checks and checkpoints can use it. Its settings, such as learning rates, are
copied to DeepSpeed's optimizer before each step, and changes made by the step are copied back.

Under ZeRO, a rank saves its shards of parameters and optimizer state as `ShardPiece` objects, which are views of the
flat partitions. No full tensor is created. ZeRO flattens each parameter, and a rank has a contiguous range of the
parameter's elements. For a matrix, such a range consists of up to three boxes: the rest of a row, full rows, and the
beginning of a row.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from headway.core.weights.pieces import ShardPiece, TensorBox
from headway.errors import ConfigError, PrepareError, UnsupportedError
from headway.layouts.deepspeed.engine import ZeroEngine

_ELEMENTWISE = frozenset(
    ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
"""torch's optimizers that update each element independently."""
_REFUSED = {
    "Adafactor": "it factors matrices",
    "LBFGS": "it runs the loss again",
    "Lamb": "it needs norms of whole tensors",
    "Muon": "it orthogonalizes matrices",
    "SparseAdam": "its gradients are sparse",
}
"""Reasons why certain optimizers cannot step on flat partitions, by the class name of the optimizer."""
_CPU_ADAM_SETTINGS = {"params", "lr", "betas", "eps", "weight_decay", "initial_lr"}
"""Settings of a parameter group that DeepSpeed's CPU Adam supports."""


class PartitionedOptimizer:
    """The user's optimizer, paired with a copy on flat partitions that DeepSpeed steps.

    Args:
        user_optimizer: User's optimizer.
        allows_untested: Whether to allow optimizers that are not known to be elementwise
            (`zero_allow_untested_optimizer`).
        uses_cpu_adam: Whether DeepSpeed's CPU kernel computes Adam. If False, the copy has the class of the user's
            optimizer.

    Attributes:
        user_optimizer: User's optimizer, which keeps the model's parameters.
        stepped_copy: Optimizer with the trainable parameters of the user's optimizer. DeepSpeed's engine replaces its
            parameters with flat partitions, and steps it.

    Raises:
        UnsupportedError: If the optimizer needs unflattened tensors, which ZeRO does not keep. Also if it is not known
            to be elementwise and `allows_untested` is False, or if it is Adagrad with several parameter groups.
        PrepareError: If none of the optimizer's parameters is trainable.
        ConfigError: If DeepSpeed's CPU kernel does not support an option of the optimizer.
    """

    def __init__(self, user_optimizer: torch.optim.Optimizer, allows_untested: bool, uses_cpu_adam: bool) -> None:
        _check_kind(user_optimizer, allows_untested)
        self.user_optimizer = user_optimizer
        # DeepSpeed omits frozen parameters and empty groups.
        self._group_indices = [
            index
            for index, group in enumerate(user_optimizer.param_groups)
            if any(p.requires_grad for p in group["params"])
        ]
        if not self._group_indices:
            raise PrepareError(
                f"{type(user_optimizer).__name__} has no trainable parameter; unfreeze some before prepare()"
            )
        if type(user_optimizer).__name__ == "Adagrad" and len(self._group_indices) > 1:
            raise UnsupportedError(
                "DeepSpeed merges Adagrad's parameter groups into one; use one group, or another optimizer"
            )
        groups = [_keep_trainable(group) for group in self._get_trained_groups()]
        create_copy = _create_cpu_adam if uses_cpu_adam else _copy_optimizer
        self.stepped_copy = create_copy(user_optimizer, groups)
        self._last_settings = [_select_settings(group) for group in self._get_trained_groups()]

    def _get_trained_groups(self) -> list[dict[str, Any]]:
        """Return the groups of the user's optimizer that have trainable parameters, in the order of DeepSpeed's."""
        return [self.user_optimizer.param_groups[index] for index in self._group_indices]

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the optimizer's trainable parameters in DeepSpeed's order: group by group."""
        return [p for group in self._get_trained_groups() for p in group["params"] if p.requires_grad]

    def push_settings(self, groups: list[dict[str, Any]]) -> None:
        """Update DeepSpeed's optimizer with the settings of the user's optimizer that have changed since the last step.

        Args:
            groups: Parameter groups of DeepSpeed's optimizer.
        """
        for user_group, last_settings, group in zip(self._get_trained_groups(), self._last_settings, groups):
            for key, value in _select_settings(user_group).items():
                if key not in last_settings or not _is_same(value, last_settings[key]):
                    group[key] = value

    def pull_settings(self, groups: list[dict[str, Any]]) -> None:
        """Update the user's optimizer with the settings of DeepSpeed's optimizer, which a step may have changed.

        Settings that only DeepSpeed's optimizer has are not copied.

        Args:
            groups: Parameter groups of DeepSpeed's optimizer.
        """
        for user_group, group in zip(self._get_trained_groups(), groups):
            user_group.update({key: value for key, value in _select_settings(group).items() if key in user_group})
        self._last_settings = [_select_settings(group) for group in self._get_trained_groups()]


def _select_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _is_same(one: Any, other: Any) -> bool:
    """Whether two settings are the same object, or equal values of the same type.

    Tensors are compared by identity, because comparing their values would wait for the device.
    """
    return one is other or (not isinstance(one, torch.Tensor) and type(one) is type(other) and bool(one == other))


def _check_kind(optimizer: torch.optim.Optimizer, allows_untested: bool) -> None:
    """Raise `UnsupportedError` if an optimizer is not elementwise, or if this is unknown and not allowed."""
    name = type(optimizer).__name__
    if name in _REFUSED:
        raise UnsupportedError(
            f"{name} does not work with DeepSpeed's flattened parameters: {_REFUSED[name]}. Use AdamW, or strategy='fsdp'"
        )
    module = type(optimizer).__module__
    is_known = module.startswith("deepspeed.ops") or (module.startswith("torch.optim") and name in _ELEMENTWISE)
    if not is_known and not allows_untested:
        raise UnsupportedError(
            f"{name}: DeepSpeed flattens and partitions parameters, which is correct only for an optimizer that updates each element "
            "independently. If it does, set 'zero_allow_untested_optimizer': true in the JSON; otherwise use strategy='fsdp'"
        )


def _keep_trainable(group: Mapping[str, Any]) -> dict[str, Any]:
    return {**group, "params": [p for p in group["params"] if p.requires_grad]}


def _copy_optimizer(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return a copy of an optimizer with the same class and attributes, but with other parameter groups and no state.

    Args:
        optimizer: Optimizer to copy.
        groups: Parameter groups of the copy.
    """
    # The constructor is not called, because its arguments are not known.
    duplicate = type(optimizer).__new__(type(optimizer))
    # A scheduler created before has replaced `step` with a method bound to the user's optimizer.
    duplicate.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    duplicate.param_groups, duplicate.state = groups, defaultdict(dict)
    return duplicate


def _create_cpu_adam(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return DeepSpeed's CPU Adam with the settings of an Adam or AdamW of torch.

    Args:
        optimizer: Optimizer that CPU Adam replaces.
        groups: Parameter groups with their settings.

    Raises:
        ConfigError: If a group enables a setting that CPU Adam does not have, such as `amsgrad`.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    enabled = {key for group in groups for key, value in group.items() if value}
    # `foreach` and `fused` do not change the result, and `adamw_mode` below replaces `decoupled_weight_decay`.
    unsupported = sorted(enabled - _CPU_ADAM_SETTINGS - {"foreach", "fused", "decoupled_weight_decay"})
    if unsupported:
        raise ConfigError(
            f"DeepSpeed's CPU Adam does not support {', '.join(unsupported)}; leave that out of {type(optimizer).__name__}, or set "
            "'zero_force_ds_cpu_optimizer': false in the JSON to use torch's own"
        )
    kept_groups = [{key: value for key, value in group.items() if key in _CPU_ADAM_SETTINGS} for group in groups]
    is_decoupled = isinstance(optimizer, torch.optim.AdamW) or any(
        group.get("decoupled_weight_decay") for group in groups
    )
    cpu_adam: torch.optim.Optimizer = DeepSpeedCPUAdam(kept_groups, adamw_mode=is_decoupled)
    return cpu_adam


def find_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divide a range of a tensor's flattened elements into boxes, in the order of the elements.

    A box is a slice along each dimension. There are at most two boxes per dimension.

    Args:
        shape: Shape of the tensor.
        start: Index of the range's first element.
        stop: Index after the range's last element.

    Yields:
        Offsets and shape of each box.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row_size = prod(shape[1:])  # a row is one index of the first dimension, with all elements of the others
    first_row, end_row = (
        -(-start // row_size),
        stop // row_size,
    )  # full rows: from `first_row` up to, without, `end_row`
    if first_row > end_row:  # the range lies within one row
        yield from _find_boxes_in_row(shape, end_row, start - end_row * row_size, stop - end_row * row_size)
        return
    if start < first_row * row_size:
        yield from _find_boxes_in_row(shape, first_row - 1, start - (first_row - 1) * row_size, row_size)
    if first_row < end_row:
        yield (first_row, *(0 for _ in shape[1:])), (end_row - first_row, *shape[1:])
    if end_row * row_size < stop:
        yield from _find_boxes_in_row(shape, end_row, 0, stop - end_row * row_size)


def _find_boxes_in_row(
    shape: Sequence[int], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divide a range of elements within one row of a tensor into boxes.

    Args:
        shape: Shape of the tensor.
        row: Index of the row, along the first dimension.
        start: Index of the range's first element in the flattened row.
        stop: Index after the range's last element.
    """
    for offsets, size in find_boxes(shape[1:], start, stop):
        yield (row, *offsets), (1, *size)


def make_piece(shape: Sequence[int], flat: torch.Tensor, start: int, is_written: bool) -> ShardPiece:
    """Return a rank's shard of a tensor for checkpoints, given a range of the tensor's flattened elements.

    Args:
        shape: Shape of the tensor.
        flat: Contiguous one-dimensional memory of the range. Loading a checkpoint writes into it.
        start: Index of the range's first element in the flattened tensor.
        is_written: Whether this rank writes the shard into checkpoints.
    """
    boxes, position = [], 0
    for offsets, size in find_boxes(shape, start, start + flat.numel()):
        count = prod(size)
        boxes.append(TensorBox(offsets, flat[position : position + count].view(size), is_written))
        position += count
    return ShardPiece(tuple(shape), flat.dtype, tuple(boxes))


@dataclass(frozen=True)
class FlatSlice:
    """Range of a parameter's flattened elements: the shard that a rank holds under ZeRO.

    Attributes:
        shape: Shape of the full parameter.
        start: Index of the range's first element in the parameter.
        values: One-dimensional view of the range.
        flat: Flat tensor that contains the range and that DeepSpeed's optimizer steps. None: the optimizer on this rank
            does not step this parameter.
        flat_start: Index of the range's first element in `flat`.
    """

    shape: tuple[int, ...]
    start: int
    values: torch.Tensor
    flat: torch.Tensor | None = None
    flat_start: int = 0

    def view_range(self, other: torch.Tensor) -> torch.Tensor:
        """Return this range of another tensor, such as an optimizer state, as a one-dimensional view.

        Args:
            other: Tensor with the layout of `flat`.
        """
        return other.view(-1).narrow(0, self.flat_start, self.values.numel())

    def make_piece(self, values: torch.Tensor, is_written: bool = True) -> ShardPiece:
        """Return the given values of this range as a `ShardPiece` of a tensor with the parameter's shape.

        Args:
            values: Elements of this range, one-dimensional.
            is_written: Whether this rank writes the shard into checkpoints. Default: True.
        """
        return make_piece(self.shape, values, self.start, is_written)


class ZeroState:
    """Reader and writer of a DeepSpeed engine's model and optimizer state, for checkpoints.

    Args:
        engine: Wrapper of DeepSpeed's engine.
        partitioned: User's optimizer and the copy that the engine steps.
        model: User's model.
    """

    def __init__(self, engine: ZeroEngine, partitioned: PartitionedOptimizer, model: torch.nn.Module) -> None:
        self._stage = engine.stage
        self._zero_optimizer = engine.zero_optimizer
        self._partitioned = partitioned
        self._model = model
        self._trainable_ids = {id(p) for p in partitioned.parameters()}

    # ---------------------------------------------------------------- shards

    def find_slice(self, parameter: torch.Tensor) -> FlatSlice | None:
        """Return this rank's range of a parameter's float32 master weights, or None if the parameter is not partitioned.

        Below stage 3, frozen parameters are not partitioned. At stage 3, the range of a frozen parameter is in the
        model's precision. The range is empty if only other ranks hold elements of the parameter.
        """
        if self._stage == 3:
            return self._find_stage_3_slice(parameter)
        if id(parameter) not in self._trainable_ids:
            return None
        # DeepSpeed's attribute: where this rank's range is in the flat low-precision (lp) and float32 (hp) tensors.
        mapping, shape = parameter._hp_mapping, tuple(parameter.shape)  # type: ignore[attr-defined]
        if mapping is None:  # this rank has no element of the parameter
            first_partition = self._zero_optimizer.single_partition_of_fp32_groups[0]
            return FlatSlice(shape, 0, first_partition.detach().narrow(0, 0, 0))
        address = mapping.get_hp_fragment_address()
        flat = self._zero_optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        values = flat.detach().narrow(0, address.start, address.numel)
        return FlatSlice(shape, mapping.lp_fragment_address.start, values, flat, address.start)

    def _find_stage_3_slice(self, parameter: Any) -> FlatSlice | None:
        """Return this rank's range of a parameter at stage 3, or None if DeepSpeed has not partitioned the parameter."""
        if not hasattr(parameter, "ds_tensor"):
            return None
        shape, length = tuple(parameter.ds_shape), parameter.partition_numel()
        start = min(length * self._zero_optimizer._get_param_partition_rank(parameter), parameter.ds_numel)
        count = min(length, parameter.ds_numel - start)  # the last partition is padded
        if id(parameter) not in self._trainable_ids:
            return FlatSlice(shape, start, parameter.ds_tensor.detach().view(-1).narrow(0, 0, count))
        group, flat_start, _ = self._zero_optimizer.grad_position[self._zero_optimizer.get_param_id(parameter)]
        flat = self._zero_optimizer.fp32_partitioned_groups_flat[group]
        return FlatSlice(shape, start, flat.detach().narrow(0, flat_start, count), flat, flat_start)

    def get_part(self, parameter: torch.Tensor) -> Any:
        """Return this rank's shard of a parameter as a `ShardPiece`.

        Return the parameter itself if it is not partitioned.
        """
        flat_slice = self.find_slice(parameter)
        return parameter if flat_slice is None else flat_slice.make_piece(flat_slice.values)

    # ---------------------------------------------------------------- saving

    def export_state(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, tensor) for each entry of the model's state dict.

        Partitioned tensors are yielded as `ShardPiece` objects in float32, the precision of the engine's master
        weights.

        Raises:
            UnsupportedError: If DeepSpeed has swapped parameters or optimizer state to NVMe.
        """
        if any(getattr(self._zero_optimizer, name, False) for name in ("swap_optimizer", "params_in_nvme_and_cpu")):
            raise UnsupportedError(
                "checkpoints of state that DeepSpeed swapped to NVMe are not supported; offload to 'cpu', or save with DeepSpeed"
            )
        shards: dict[int, Any] = {}  # by the parameter's id, so that tied parameters share one shard
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for name, value in self._model.state_dict(keep_vars=True).items():
            parameter = parameters.get(name)
            if parameter is None:
                yield name, value.detach() if isinstance(value, torch.Tensor) else value
                continue
            if id(parameter) not in shards:
                shards[id(parameter)] = self.get_part(parameter)
            shard = shards[id(parameter)]
            yield name, shard.detach() if isinstance(shard, torch.Tensor) else shard

    @contextmanager
    def expose_state(self) -> Iterator[None]:
        """Return a context in which the user's optimizer holds the engine's state, as `ShardPiece` objects.

        Values of the state that are not as large as a flat partition, such as step counts, are included as they are. On
        exit, the state of the user's optimizer is cleared.
        """
        user_optimizer, stepped_copy = self._partitioned.user_optimizer, self._zero_optimizer.optimizer
        for parameter in self._partitioned.parameters():
            flat_slice = self.find_slice(parameter)
            if flat_slice is None:
                continue
            flat = flat_slice.flat
            if flat is None:  # another rank has all of the parameter; state names must be equal on all ranks
                flat = next(iter(self._zero_optimizer.single_partition_of_fp32_groups), None)
            if flat is not None and (state := stepped_copy.state.get(flat)):
                user_optimizer.state[parameter] = {
                    key: self._view_state(flat_slice, flat, value) for key, value in state.items()
                }
        try:
            yield
        finally:
            user_optimizer.state.clear()

    @staticmethod
    def _view_state(flat_slice: FlatSlice, flat: torch.Tensor, value: Any) -> Any:
        """Return one value of a flat tensor's optimizer state, cut to a parameter's range.

        Args:
            flat_slice: This rank's range of the parameter.
            flat: Flat tensor to which the state belongs. If `flat_slice.flat` is None, it is another parameter's, and
                the returned shard is empty.
            value: Value of the state. If it has the size of `flat`, the range is returned as a `ShardPiece`. An int is
                returned as a tensor.
        """
        if isinstance(value, torch.Tensor) and value.numel() == flat.numel() and value.ndim:
            if flat_slice.flat is None:
                elements = value.detach().view(-1).narrow(0, 0, 0)
            else:
                elements = flat_slice.view_range(value).detach()
            return flat_slice.make_piece(elements)
        if isinstance(value, int):  # DeepSpeed's CPU Adam counts steps in an int, torch's in a tensor
            return torch.tensor(float(value))
        return value

    # ---------------------------------------------------------------- loading

    def apply_loaded_values(self) -> None:
        """Copy loaded parameters and optimizer states into the engine.

        The checkpoint must already have been loaded into the exported shards and into the user's optimizer. Afterwards
        the state of the user's optimizer is cleared.
        """
        zero_optimizer, user_optimizer = self._zero_optimizer, self._partitioned.user_optimizer
        stepped_copy = zero_optimizer.optimizer
        counts_in_ints = type(stepped_copy).__name__ == "DeepSpeedCPUAdam"
        with torch.no_grad():
            for parameter in self._partitioned.parameters():
                state, flat_slice = user_optimizer.state.get(parameter), self.find_slice(parameter)
                if state and flat_slice is not None and flat_slice.flat is not None:
                    self._copy_state(flat_slice, stepped_copy.state[flat_slice.flat], state, counts_in_ints)
            user_optimizer.state.clear()
            # The model's low-precision parameters are updated from the float32 master weights.
            if self._stage < 3:
                zero_optimizer.update_lp_params()
                return
            zero_optimizer._partition_all_parameters()
            for group in range(len(zero_optimizer.fp16_groups)):
                zero_optimizer._reassign_or_swap_out_partitioned_parameters(group)
            # DeepSpeed keeps small parameters gathered all the time, so their full tensors are updated, too.
            if zero_optimizer.persistent_parameters:
                zero_optimizer.persistent_parameters[0].all_gather(zero_optimizer.persistent_parameters)

    @staticmethod
    def _copy_state(
        flat_slice: FlatSlice, flat_state: dict[str, Any], state: Mapping[str, Any], counts_in_ints: bool
    ) -> None:
        """Copy a parameter's loaded optimizer state into the state of the flat tensor that contains the parameter.

        Args:
            flat_slice: This rank's range of the parameter. Its `flat` must not be None.
            flat_state: State of the flat tensor. Missing entries are created.
            state: Loaded state of the parameter: shards or full tensors, and values such as step counts.
            counts_in_ints: Whether scalar tensors become ints, as DeepSpeed's CPU Adam expects.
        """
        assert flat_slice.flat is not None
        for key, value in state.items():
            is_piece = isinstance(value, ShardPiece)
            is_full = isinstance(value, torch.Tensor) and tuple(value.shape) == flat_slice.shape and bool(value.ndim)
            if (is_piece or is_full) and key not in flat_state:
                flat_state[key] = torch.zeros_like(flat_slice.flat, dtype=value.dtype, requires_grad=False)
            if is_piece:
                target = flat_slice.make_piece(flat_slice.view_range(flat_state[key]))
                for target_box, loaded_box in zip(target.boxes, value.boxes):
                    target_box.values.copy_(loaded_box.values)
            elif is_full:
                elements = value.reshape(-1).narrow(0, flat_slice.start, flat_slice.values.numel())
                flat_slice.view_range(flat_state[key]).copy_(elements)
            elif isinstance(value, torch.Tensor):
                flat_state[key] = int(value) if counts_in_ints else value.clone()
            else:
                flat_state[key] = value
