"""Shards of parameters and optimizer state under ZeRO: `ZeroState` reads and writes them for checkpoints.

A rank saves its shards as `ShardPiece` objects, which are views of DeepSpeed's flat partitions. No full tensor is
created. ZeRO flattens each parameter, and a rank has a contiguous range of the parameter's elements. For a matrix, such a
range consists of up to three boxes: the rest of a row, full rows, and the beginning of a row.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from headway.core.weights.pieces import ShardPiece, TensorBox
from headway.errors import UnsupportedError
from headway.layouts.deepspeed.engine import ZeroEngine
from headway.layouts.deepspeed.optimizer import PartitionedOptimizer


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
    # Full rows: from `first_row` up to, but without, `end_row`.
    first_row = -(-start // row_size)
    end_row = stop // row_size
    if first_row > end_row:  # the range is within one row
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
