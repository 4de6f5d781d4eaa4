"""The optimizer that DeepSpeed steps, over flat partitions of the parameters, and its state as pieces for checkpoints.

DeepSpeed puts flat pieces in the place of an optimizer's parameters. The user's own optimizer keeps the model's parameters, so
that schedules, clipping, checks and checkpoints find what they know; its settings (learning rates, above all) go to the other one
before each step, and what its step changes comes back.

The parameters and optimizer state that a rank holds under ZeRO, as pieces for checkpoints: views, never a whole tensor.

ZeRO cuts a parameter as if it were one row: a rank holds a run of it, from one element to another. A run is a few boxes: the rest
of the row it begins in, whole rows, the beginning of the row it ends in.

Flat partitions, as DeepSpeed's ZeRO cuts parameters: a range of a tensor's values in order, as boxes of the tensor.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from headway.errors import ConfigError, PrepareError, UnsupportedError
from headway.strategies.deepspeed.engine import ZeroEngine
from headway.weights.pieces import ShardPiece, TensorBox

_ELEMENTWISE = frozenset(
    ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
_BY_SHAPE = {
    "Adafactor": "it factors matrices",
    "LBFGS": "it runs the loss again",
    "Lamb": "it needs norms of whole tensors",
    "Muon": "it orthogonalises matrices",
    "SparseAdam": "its gradients are sparse",
}
_CPU_ADAM_TAKES = {"params", "lr", "betas", "eps", "weight_decay", "initial_lr"}


class PartitionedOptimizer:
    """The user's optimizer beside the one that DeepSpeed gets.

    Args:
        given: the user's.
        untested: optimizers that nobody knows may be taken (`zero_allow_untested_optimizer`).
        uses_cpu_adam: let DeepSpeed compute Adam on the host, by its own kernel; else in the optimizer's own class.

    Attributes:
        given: as above.
        inner: what DeepSpeed gets.

    Raises:
        UnsupportedError: an optimizer that needs whole tensors, which ZeRO flattens.
        PrepareError: none of its parameters learns.
    """

    def __init__(self, given: torch.optim.Optimizer, untested: bool, uses_cpu_adam: bool) -> None:
        _check_kind(given, untested)
        self.given = given
        # DeepSpeed leaves frozen parameters and empty groups out.
        self._numbers = [
            n for n, group in enumerate(given.param_groups) if any(p.requires_grad for p in group["params"])
        ]
        if not self._numbers:
            raise PrepareError(f"{type(given).__name__} has no trainable parameter; unfreeze some before prepare()")
        if type(given).__name__ == "Adagrad" and len(self._numbers) > 1:
            raise UnsupportedError(
                "DeepSpeed merges Adagrad's parameter groups into one; use one group, or another optimizer"
            )
        groups = [_learning(given.param_groups[n]) for n in self._numbers]
        self.inner = _cpu_adam(given, groups) if uses_cpu_adam else _copy_kind(given, groups)
        self._last = [self._settings(given.param_groups[n]) for n in self._numbers]

    def parameters(self) -> list[torch.nn.Parameter]:
        """Those that learn, in DeepSpeed's order."""
        groups = (self.given.param_groups[n] for n in self._numbers)
        return [p for group in groups for p in group["params"] if p.requires_grad]

    def push(self, groups: list[dict[str, Any]]) -> None:
        """Settings that were changed since the last step go to the groups that DeepSpeed steps."""
        for n, last, group in zip(self._numbers, self._last, groups):
            for key, value in self._settings(self.given.param_groups[n]).items():
                if key not in last or not _is_same(value, last[key]):
                    group[key] = value

    def pull(self, groups: list[dict[str, Any]]) -> None:
        """What the step changed of its settings comes back."""
        for n, group in zip(self._numbers, groups):
            mine = self.given.param_groups[n]
            mine.update({key: value for key, value in self._settings(group).items() if key in mine})
        self._last = [self._settings(self.given.param_groups[n]) for n in self._numbers]

    @staticmethod
    def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
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


def _learning(group: Mapping[str, Any]) -> dict[str, Any]:
    return {**group, "params": [p for p in group["params"] if p.requires_grad]}


def _copy_kind(given: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The same class with the same attributes, but with groups and state of its own."""
    made = type(given).__new__(type(given))
    # A schedule that was made before has put a bound `step` of the user's optimizer there.
    made.__dict__.update({key: value for key, value in vars(given).items() if key != "step"})
    made.param_groups, made.state = groups, defaultdict(dict)
    return made


def _cpu_adam(given: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
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


def boxes_of(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(where it begins, its shape) of boxes that hold the values `start` to `stop` of a tensor in order: two a dim at the most."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _within(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _within(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < stop:
        yield from _within(shape, last, 0, stop - last * row)


def _within(
    shape: Sequence[int], index: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, size in boxes_of(shape[1:], start, stop):
        yield (index, *offsets), (1, *size)


def piece_of_range(shape: Sequence[int], flat: torch.Tensor, start: int, is_written: bool) -> ShardPiece:
    """What a rank holds whose memory `flat` is a range of a tensor's values, from `start` on.

    Args:
        shape: of the tensor.
        flat: contiguous, of one dim; written to where a checkpoint is loaded.
        start: where it begins among the values.
        is_written: does this rank write it into checkpoints?
    """
    boxes, place = [], 0
    for offsets, size in boxes_of(shape, start, start + flat.numel()):
        count = prod(size)
        boxes.append(TensorBox(offsets, flat[place : place + count].view(size), is_written))
        place += count
    return ShardPiece(tuple(shape), flat.dtype, tuple(boxes))


@dataclass(frozen=True)
class FlatSlice:
    """A rank's part of a parameter.

    Attributes:
        shape: of the whole parameter.
        start: where its first element is in the parameter, as one row.
        values: as one row: a view.
        flat: the tensor that the engine's optimizer steps, of which they are a part.
        place: where they begin in it.
    """

    shape: tuple[int, ...]
    start: int
    values: torch.Tensor
    flat: torch.Tensor | None = None
    place: int = 0

    def beside(self, other: torch.Tensor) -> torch.Tensor:
        """The same part of a tensor that lies beside `flat`."""
        return other.view(-1).narrow(0, self.place, self.values.numel())

    def piece(self, values: torch.Tensor, is_written: bool = True) -> ShardPiece:
        """The part of a tensor of the parameter's shape, as boxes."""
        return piece_of_range(self.shape, values, self.start, is_written)


class ZeroState:
    """The state of one engine.

    Args:
        zero: the engine.
        partitioned: its optimizer.
        model: the user's.
    """

    def __init__(self, zero: ZeroEngine, partitioned: PartitionedOptimizer, model: torch.nn.Module) -> None:
        self._zero = zero
        self._optimizer = zero.inner
        self._partitioned = partitioned
        self._model = model
        self._learns = {id(p) for p in partitioned.parameters()}

    # ---------------------------------------------------------------- parts

    def run(self, parameter: torch.Tensor) -> FlatSlice | None:
        """This rank's part of a parameter; None: every rank holds all of it."""
        if self._zero.stage == 3:
            return self._run_3(parameter)
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

    def _run_3(self, parameter: Any) -> FlatSlice | None:
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

    def part_of(self, parameter: torch.Tensor) -> Any:
        """A parameter as the piece that this rank holds of it."""
        run = self.run(parameter)
        return parameter if run is None else run.piece(run.values)

    # ---------------------------------------------------------------- out

    def export(self) -> Iterator[tuple[str, Any]]:
        """The model's tensors by name; what is parted as pieces, in the engine's full precision.

        Raises:
            UnsupportedError: they were swapped to a disk, where they cannot be read.
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
                made[id(parameter)] = self.part_of(parameter)
            part = made[id(parameter)]
            yield name, part.detach() if isinstance(part, torch.Tensor) else part

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """A block in which the user's optimizer shows what the engine keeps of its parameters, as pieces."""
        given, inner = self._partitioned.given, self._optimizer.optimizer
        for parameter in self._partitioned.parameters():
            run = self.run(parameter)
            if run is None:
                continue
            flat = run.flat
            if flat is None:  # another rank has all of it: the names must be alike
                flat = next(iter(self._optimizer.single_partition_of_fp32_groups), None)
            if flat is not None and (state := inner.state.get(flat)):
                given.state[parameter] = {key: self._shown(run, flat, value) for key, value in state.items()}
        try:
            yield
        finally:
            given.state.clear()

    @staticmethod
    def _shown(run: FlatSlice, flat: torch.Tensor, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.numel() == flat.numel() and value.ndim:
            part = run.beside(value) if run.flat is not None else value.detach().view(-1).narrow(0, 0, 0)
            return run.piece(part.detach())
        if isinstance(value, int):  # DeepSpeed's Adam on the host counts steps so, torch's in a tensor
            return torch.tensor(float(value))
        return value

    # ---------------------------------------------------------------- in

    def settle(self) -> None:
        """Values were put into the pieces, and states into the user's optimizer: the engine goes on from them."""
        given, inner, optimizer = self._partitioned.given, self._optimizer.optimizer, self._optimizer
        with torch.no_grad():
            for parameter in self._partitioned.parameters():
                state, run = given.state.get(parameter), self.run(parameter)
                if state and run is not None and run.flat is not None:
                    self._take(run, inner.state[run.flat], state, type(inner).__name__ == "DeepSpeedCPUAdam")
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
    def _take(run: FlatSlice, own: dict[str, Any], state: Mapping[str, Any], counts_in_ints: bool) -> None:
        assert run.flat is not None
        for key, value in state.items():
            is_piece = isinstance(value, ShardPiece)
            is_whole = isinstance(value, torch.Tensor) and tuple(value.shape) == run.shape and bool(value.ndim)
            if (is_piece or is_whole) and key not in own:
                own[key] = torch.zeros_like(run.flat, dtype=value.dtype, requires_grad=False)
            if is_piece:
                for mine, saved in zip(run.piece(run.beside(own[key])).boxes, value.boxes):
                    mine.values.copy_(saved.values)
            elif is_whole:
                part = value.reshape(-1).narrow(0, run.start, run.values.numel())
                run.beside(own[key]).copy_(part)
            elif isinstance(value, torch.Tensor):
                own[key] = int(value) if counts_in_ints else value.clone()
            else:
                own[key] = value
