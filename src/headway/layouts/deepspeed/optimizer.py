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
_BY_SHAPE = {
    "Adafactor": "it factors matrices",
    "LBFGS": "it runs the loss again",
    "Lamb": "it needs norms of whole tensors",
    "Muon": "it orthogonalizes matrices",
    "SparseAdam": "its gradients are sparse",
}
"""Reasons why certain optimizers cannot step on flat partitions, by the class name of the optimizer."""
_CPU_ADAM_TAKES = {"params", "lr", "betas", "eps", "weight_decay", "initial_lr"}
"""Settings of a parameter group that DeepSpeed's CPU Adam supports."""


class PartitionedOptimizer:
    """The user's optimizer, paired with a copy on flat partitions that DeepSpeed steps.

    Args:
        given: User's optimizer.
        untested: Whether to allow optimizers that are not known to be elementwise (`zero_allow_untested_optimizer`).
        uses_cpu_adam: Whether DeepSpeed's CPU kernel computes Adam. If False, the copy has the class of the user's
            optimizer.

    Attributes:
        given: User's optimizer.
        inner: Copy that DeepSpeed gets.

    Raises:
        UnsupportedError: If the optimizer needs unflattened tensors, which ZeRO does not keep. Also if it is not known
            to be elementwise and `untested` is False, or if it is Adagrad with several parameter groups.
        PrepareError: If none of the optimizer's parameters is trainable.
        ConfigError: If DeepSpeed's CPU kernel does not support an option of the optimizer.
    """

    def __init__(self, given: torch.optim.Optimizer, untested: bool, uses_cpu_adam: bool) -> None:
        _check_kind(given, untested)
        self.given = given
        # DeepSpeed omits frozen parameters and empty groups.
        self._numbers = [
            n for n, group in enumerate(given.param_groups) if any(p.requires_grad for p in group["params"])
        ]
        if not self._numbers:
            raise PrepareError(f"{type(given).__name__} has no trainable parameter; unfreeze some before prepare()")
        if type(given).__name__ == "Adagrad" and len(self._numbers) > 1:
            raise UnsupportedError(
                "DeepSpeed merges Adagrad's parameter groups into one; use one group, or another optimizer"
            )
        groups = [_keep_trainable(given.param_groups[n]) for n in self._numbers]
        self.inner = _create_cpu_adam(given, groups) if uses_cpu_adam else _copy_kind(given, groups)
        self._last = [self._select_settings(given.param_groups[n]) for n in self._numbers]

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the optimizer's trainable parameters in DeepSpeed's order: group by group."""
        groups = (self.given.param_groups[n] for n in self._numbers)
        return [p for group in groups for p in group["params"] if p.requires_grad]

    def push_settings(self, groups: list[dict[str, Any]]) -> None:
        """Update DeepSpeed's optimizer with the settings of the user's optimizer that have changed since the last step.

        Args:
            groups: Parameter groups of DeepSpeed's optimizer.
        """
        for n, last, group in zip(self._numbers, self._last, groups):
            for key, value in self._select_settings(self.given.param_groups[n]).items():
                if key not in last or not _is_same(value, last[key]):
                    group[key] = value

    def pull_settings(self, groups: list[dict[str, Any]]) -> None:
        """Update the user's optimizer with the settings of DeepSpeed's optimizer, which a step may have changed.

        Args:
            groups: Parameter groups of DeepSpeed's optimizer.
        """
        for n, group in zip(self._numbers, groups):
            mine = self.given.param_groups[n]
            mine.update({key: value for key, value in self._select_settings(group).items() if key in mine})
        self._last = [self._select_settings(self.given.param_groups[n]) for n in self._numbers]

    @staticmethod
    def _select_settings(group: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in group.items() if key != "params"}


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, torch.Tensor) and type(one) is type(other) and bool(one == other))


def _check_kind(given: torch.optim.Optimizer, untested: bool) -> None:
    name = type(given).__name__
    if name in _BY_SHAPE:
        raise UnsupportedError(
            f"{name} does not work with DeepSpeed's flattened parameters: {_BY_SHAPE[name]}. Use AdamW, or strategy='fsdp'"
        )
    home = type(given).__module__
    is_known = home.startswith("deepspeed.ops") or (home.startswith("torch.optim") and name in _ELEMENTWISE)
    if not is_known and not untested:
        raise UnsupportedError(
            f"{name}: DeepSpeed flattens and partitions parameters, which is correct only for an optimizer that updates each element "
            "independently. If it does, set 'zero_allow_untested_optimizer': true in the JSON; otherwise use strategy='fsdp'"
        )


def _keep_trainable(group: Mapping[str, Any]) -> dict[str, Any]:
    return {**group, "params": [p for p in group["params"] if p.requires_grad]}


def _copy_kind(given: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return a copy of an optimizer with the same class and attributes, but with other parameter groups and no state.

    Args:
        given: Optimizer to copy.
        groups: Parameter groups of the copy.
    """
    made = type(given).__new__(type(given))
    # A scheduler created before has replaced `step` with a method bound to the user's optimizer.
    made.__dict__.update({key: value for key, value in vars(given).items() if key != "step"})
    made.param_groups, made.state = groups, defaultdict(dict)
    return made


def _create_cpu_adam(given: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    odd = sorted({key for group in groups for key, value in group.items() if key not in _CPU_ADAM_TAKES and value})
    odd = [key for key in odd if key not in ("foreach", "fused", "decoupled_weight_decay")]
    if odd:
        raise ConfigError(
            f"DeepSpeed's CPU Adam does not support {', '.join(odd)}; leave that out of {type(given).__name__}, or set "
            "'zero_force_ds_cpu_optimizer': false in the JSON to use torch's own"
        )
    kept = [{key: value for key, value in group.items() if key in _CPU_ADAM_TAKES} for group in groups]
    is_decoupled = isinstance(given, torch.optim.AdamW) or any(group.get("decoupled_weight_decay") for group in groups)
    made: torch.optim.Optimizer = DeepSpeedCPUAdam(kept, adamw_mode=is_decoupled)
    return made


def find_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divide a range of a tensor's flattened elements into boxes (slices along each dimension), in order.

    There are at most two boxes per dimension.

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
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _find_boxes_in_row(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _find_boxes_in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < stop:
        yield from _find_boxes_in_row(shape, last, 0, stop - last * row)


def _find_boxes_in_row(
    shape: Sequence[int], index: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, size in find_boxes(shape[1:], start, stop):
        yield (index, *offsets), (1, *size)


def make_piece(shape: Sequence[int], flat: torch.Tensor, start: int, is_written: bool) -> ShardPiece:
    """Return a rank's shard of a tensor for checkpoints, given a range of the tensor's flattened elements.

    Args:
        shape: Shape of the tensor.
        flat: Contiguous one-dimensional memory of the range. Loading a checkpoint writes into it.
        start: Index of the range's first element in the flattened tensor.
        is_written: Whether this rank writes the shard into checkpoints.
    """
    boxes, place = [], 0
    for offsets, size in find_boxes(shape, start, start + flat.numel()):
        count = prod(size)
        boxes.append(TensorBox(offsets, flat[place : place + count].view(size), is_written))
        place += count
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
        place: Index of the range's first element in `flat`.
    """

    shape: tuple[int, ...]
    start: int
    values: torch.Tensor
    flat: torch.Tensor | None = None
    place: int = 0

    def view_range(self, other: torch.Tensor) -> torch.Tensor:
        """Return this range of another tensor, such as an optimizer state, as a one-dimensional view.

        Args:
            other: Tensor with the layout of `flat`.
        """
        return other.view(-1).narrow(0, self.place, self.values.numel())

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
        zero: DeepSpeed's engine.
        partitioned: User's optimizer and the copy that the engine steps.
        model: User's model.
    """

    def __init__(self, zero: ZeroEngine, partitioned: PartitionedOptimizer, model: torch.nn.Module) -> None:
        self._zero = zero
        self._optimizer = zero.inner
        self._partitioned = partitioned
        self._model = model
        self._learns = {id(p) for p in partitioned.parameters()}

    # ---------------------------------------------------------------- parts

    def find_slice(self, parameter: torch.Tensor) -> FlatSlice | None:
        """Return this rank's range of a parameter, or None if every rank holds the full parameter.

        The range is empty if only other ranks hold elements of the parameter.
        """
        if self._zero.stage == 3:
            return self._find_stage_3_slice(parameter)
        if id(parameter) not in self._learns:
            return None
        found: Any = parameter
        mapping, shape = found._hp_mapping, tuple(parameter.shape)
        if mapping is None:
            first = self._optimizer.single_partition_of_fp32_groups[0]
            return FlatSlice(shape, 0, first.detach().narrow(0, 0, 0))
        address = mapping.get_hp_fragment_address()
        flat = self._optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        values = flat.detach().narrow(0, address.start, address.numel)
        return FlatSlice(shape, mapping.lp_fragment_address.start, values, flat, address.start)

    def _find_stage_3_slice(self, parameter: Any) -> FlatSlice | None:
        if not hasattr(parameter, "ds_tensor"):
            return None
        shape, length = tuple(parameter.ds_shape), parameter.partition_numel()
        start = min(length * self._optimizer._get_param_partition_rank(parameter), parameter.ds_numel)
        count = min(length, parameter.ds_numel - start)  # the last partition is padded
        if id(parameter) not in self._learns:
            return FlatSlice(shape, start, parameter.ds_tensor.detach().view(-1).narrow(0, 0, count))
        group, place, _ = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
        flat = self._optimizer.fp32_partitioned_groups_flat[group]
        return FlatSlice(shape, start, flat.detach().narrow(0, place, count), flat, place)

    def get_part(self, parameter: torch.Tensor) -> Any:
        """Return this rank's shard of a parameter as a `ShardPiece`.

        Return the parameter itself if it is not partitioned.
        """
        run = self.find_slice(parameter)
        return parameter if run is None else run.make_piece(run.values)

    # ---------------------------------------------------------------- out

    def export_state(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, tensor) for each entry of the model's state dict.

        Partitioned tensors are yielded as `ShardPiece` objects in float32, the precision of the engine's master
        weights.

        Raises:
            UnsupportedError: If DeepSpeed has swapped parameters or optimizer state to NVMe.
        """
        if any(getattr(self._optimizer, name, False) for name in ("swap_optimizer", "params_in_nvme_and_cpu")):
            raise UnsupportedError(
                "checkpoints of state that DeepSpeed swapped to NVMe are not supported; offload to 'cpu', or save with DeepSpeed"
            )
        made: dict[int, Any] = {}
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for name, value in self._model.state_dict(keep_vars=True).items():
            parameter = parameters.get(name)
            if parameter is None:
                yield name, value.detach() if isinstance(value, torch.Tensor) else value
                continue
            if id(parameter) not in made:
                made[id(parameter)] = self.get_part(parameter)
            part = made[id(parameter)]
            yield name, part.detach() if isinstance(part, torch.Tensor) else part

    @contextmanager
    def expose_state(self) -> Iterator[None]:
        """Return a context in which the user's optimizer holds the engine's state, as `ShardPiece` objects.

        Values of the state that are not as large as a flat partition, such as step counts, are included as they are. On
        exit, the state of the user's optimizer is cleared.
        """
        given, inner = self._partitioned.given, self._optimizer.optimizer
        for parameter in self._partitioned.parameters():
            run = self.find_slice(parameter)
            if run is None:
                continue
            flat = run.flat
            if flat is None:  # another rank has all of the parameter; state names must be equal on all ranks
                flat = next(iter(self._optimizer.single_partition_of_fp32_groups), None)
            if flat is not None and (state := inner.state.get(flat)):
                given.state[parameter] = {key: self._view_state(run, flat, value) for key, value in state.items()}
        try:
            yield
        finally:
            given.state.clear()

    @staticmethod
    def _view_state(run: FlatSlice, flat: torch.Tensor, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.numel() == flat.numel() and value.ndim:
            part = run.view_range(value) if run.flat is not None else value.detach().view(-1).narrow(0, 0, 0)
            return run.make_piece(part.detach())
        if isinstance(value, int):  # DeepSpeed's CPU Adam counts steps in an int, torch's in a tensor
            return torch.tensor(float(value))
        return value

    # ---------------------------------------------------------------- in

    def apply_loaded_values(self) -> None:
        """Copy loaded parameters and optimizer states into the engine.

        The checkpoint must already have been loaded into the exported shards and into the user's optimizer. Afterwards
        the state of the user's optimizer is cleared.
        """
        given, inner, optimizer = self._partitioned.given, self._optimizer.optimizer, self._optimizer
        with torch.no_grad():
            for parameter in self._partitioned.parameters():
                state, run = given.state.get(parameter), self.find_slice(parameter)
                if state and run is not None and run.flat is not None:
                    self._copy_state(run, inner.state[run.flat], state, type(inner).__name__ == "DeepSpeedCPUAdam")
            given.state.clear()
            if self._zero.stage < 3:
                optimizer.update_lp_params()
                return
            optimizer._partition_all_parameters()
            for number in range(len(optimizer.fp16_groups)):
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
            if optimizer.persistent_parameters:
                optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    @staticmethod
    def _copy_state(run: FlatSlice, own: dict[str, Any], state: Mapping[str, Any], counts_in_ints: bool) -> None:
        assert run.flat is not None
        for key, value in state.items():
            is_piece = isinstance(value, ShardPiece)
            is_whole = isinstance(value, torch.Tensor) and tuple(value.shape) == run.shape and bool(value.ndim)
            if (is_piece or is_whole) and key not in own:
                own[key] = torch.zeros_like(run.flat, dtype=value.dtype, requires_grad=False)
            if is_piece:
                for mine, saved in zip(run.make_piece(run.view_range(own[key])).boxes, value.boxes):
                    mine.values.copy_(saved.values)
            elif is_whole:
                part = value.reshape(-1).narrow(0, run.start, run.values.numel())
                run.view_range(own[key]).copy_(part)
            elif isinstance(value, torch.Tensor):
                own[key] = int(value) if counts_in_ints else value.clone()
            else:
                own[key] = value
