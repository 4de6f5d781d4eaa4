"""The parameters and optimizer state that a rank holds under ZeRO, as pieces for checkpoints: views, never a whole tensor.

ZeRO cuts a parameter as if it were one row: a rank holds a run of it, from one element to another. A run is a few boxes: the rest
of the row it begins in, whole rows, the beginning of the row it ends in.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from headway.errors import UnsupportedError
from headway.strategies.deepspeed.engine import ZeroEngine
from headway.strategies.deepspeed.optimizer import PartitionedOptimizer
from headway.weights.partitions import piece_of_range
from headway.weights.pieces import ShardPiece


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

    def check(self) -> None:
        """Can its parts be read where they lie?

        Raises:
            UnsupportedError: they were swapped to a disk.
        """
        if getattr(self._optimizer, "swap_optimizer", False) or getattr(
            self._optimizer, "params_in_nvme_and_cpu", False
        ):
            raise UnsupportedError(
                "checkpoints of state that DeepSpeed swapped to NVMe are not supported; offload to 'cpu', or save with DeepSpeed"
            )

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
        """The model's tensors by name; what is parted as pieces, in the engine's full precision."""
        self.check()
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
            if run.flat is None:  # another rank has all of it: the names must be alike
                flat = next(iter(self._optimizer.single_partition_of_fp32_groups), None)
                state = inner.state.get(flat, {}) if flat is not None else {}
            else:
                flat, state = run.flat, inner.state.get(run.flat, {})
            if state and flat is not None:
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
            if isinstance(value, ShardPiece):
                if key not in own:
                    own[key] = torch.zeros_like(run.flat, dtype=value.dtype, requires_grad=False)
                for mine, saved in zip(run.piece(run.beside(own[key])).boxes, value.boxes):
                    mine.values.copy_(saved.values)
            elif isinstance(value, torch.Tensor) and tuple(value.shape) == run.shape and value.ndim:
                if key not in own:
                    own[key] = torch.zeros_like(run.flat, dtype=value.dtype, requires_grad=False)
                part = value.reshape(-1).narrow(0, run.start, run.values.numel())
                run.beside(own[key]).copy_(part)
            elif isinstance(value, torch.Tensor):
                own[key] = int(value) if counts_in_ints else value.clone()
            else:
                own[key] = value
