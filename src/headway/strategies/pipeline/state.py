"""The state of a pipeline's stages for checkpoints: each tensor is whole on the ranks of its stage, and one of them writes it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from headway.config.mesh import Layout
from headway.runtime.collectives.checked import Collectives
from headway.weights.pieces import ShardPiece, TensorBox, TensorSplit
from headway.weights.shards import TensorSpec


class PipelineState:
    """Of one model.

    Args:
        model: the user's, cut.
        owners: by name of each parameter and buffer, the ranks along the pipeline that hold it.
        layout: of the run.
        rank: this rank, of all.

    Attributes:
        owners: as given.
    """

    def __init__(self, model: torch.nn.Module, owners: Mapping[str, frozenset[int]], layout: Layout, rank: int) -> None:
        self.owners = owners
        self._model = model
        self._rank = rank
        self._ranks = layout.groups("pp")[0]
        self._everywhere = frozenset(range(layout.pp))

    # ---------------------------------------------------------------- pieces

    def _piece(
        self, shape: tuple[int, ...], dtype: torch.dtype, on: frozenset[int], held: torch.Tensor | None
    ) -> ShardPiece:
        writer = self._ranks[min(on)]
        split = TensorSplit(tuple((size,) for size in shape), (writer,))
        if held is None:
            return ShardPiece(shape, dtype, (), None, split)
        plain = held.detach()
        return ShardPiece(shape, dtype, (TensorBox((0,) * len(shape), plain, self._rank == writer),), plain, split)

    def _part(self, name: str, tensor: torch.Tensor) -> Any:
        on = self.owners[name]
        if on == self._everywhere:
            return tensor.detach()
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return self._piece(tuple(tensor.shape), tensor.dtype, on, None if tensor.is_meta else tensor)

    def export(self) -> Iterator[tuple[str, Any]]:
        """The model's tensors by name."""
        made: dict[int, Any] = {}
        for name, value in self._model.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor) or name not in self.owners:
                yield name, value
                continue
            if id(value) not in made:  # two names of one tensor are one object, which tells that they are tied
                made[id(value)] = self._part(name, value)
            yield name, made[id(value)]

    def part_of(self, parameter: torch.Tensor) -> Any:
        """A parameter as the piece that is here."""
        name = self._names().get(id(parameter))
        return parameter if name is None else self._part(name, parameter)

    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self._model.named_parameters()}

    # ---------------------------------------------------------------- optimizers

    @contextmanager
    def exposed(self, optimizer: torch.optim.Optimizer, group: Collectives) -> Iterator[None]:
        """A block in which the optimizer's state is that of all stages: pieces of what is elsewhere, numbers as they are.

        Every rank calls it.
        """
        names = self._names()
        listed = [p for parameters in optimizer.param_groups for p in parameters["params"] if id(p) in names]
        before = dict(optimizer.state)
        own = {
            names[id(parameter)]: {key: _told(value) for key, value in before[parameter].items()}
            for parameter in listed
            if parameter in before and isinstance(before[parameter], dict) and not parameter.is_meta
        }
        answers = group.gather_objects(own)
        shown: dict[Any, Any] = {}
        for parameter in listed:
            name = names[id(parameter)]
            on = self.owners[name]
            told = answers[min(on)].get(name)
            if told is not None:
                held = before.get(parameter, {}) if not parameter.is_meta else {}
                shown[parameter] = {key: self._shown(each, on, held.get(key)) for key, each in told.items()}
        rest = {key: value for key, value in before.items() if not any(key is parameter for parameter in listed)}
        try:
            optimizer.state.clear()
            optimizer.state.update({**shown, **rest})
            yield
        finally:
            optimizer.state.clear()
            optimizer.state.update(before)

    def _shown(self, told: Any, on: frozenset[int], held: Any) -> Any:
        if not isinstance(told, TensorSpec):
            return told if held is None else held
        if on == self._everywhere:
            return held
        if 0 in told.shape:
            return torch.empty(told.shape, dtype=told.dtype)
        return self._piece(told.shape, told.dtype, on, held)

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """After a load: the state of what is here, as tensors; none of the rest."""
        for parameter in list(optimizer.state):
            if not isinstance(parameter, torch.Tensor):
                continue
            if parameter.is_meta:
                del optimizer.state[parameter]
                continue
            state = optimizer.state[parameter]
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, ShardPiece):
                    whole = value.boxes[0].values if value.boxes else torch.empty(value.shape, dtype=value.dtype)
                    state[key] = whole.to(parameter.device)


def _told(value: Any) -> Any:
    """Numbers go to all ranks; of tensors with dimensions, their shape."""
    if isinstance(value, torch.Tensor):
        return TensorSpec(tuple(value.shape), value.dtype) if value.ndim else value.detach().cpu()
    return value
