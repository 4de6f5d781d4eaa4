"""The state of a run as named tensors and JSON.

Names are logical: `model/0/` and the bare module's names; `optimizer/0/`, the parameter's name and the key. So another
world size, another wrapping, or another order of parameter groups finds the same tensors.

Tensors of which each rank has its own: in a checkpoint, beside the one for all, rows of a tensor that the ranks write together.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from headway.checkpoint.format.tensors import is_dense, refusal
from headway.checkpoint.format.values import encode, logical
from headway.checkpoint.optimizers import collect_optimizer
from headway.errors import CheckpointError
from headway.weights.export import untied
from headway.weights.pieces import ShardCutter, ShardPiece, TensorBox, TensorSplit, held, is_dtensor, is_spread

EXTRA = "_extra_state"
"""How torch calls the extra state of a module in its state dict."""


class Stateful(Protocol):
    """Anything with a state."""

    def state_dict(self) -> dict[str, Any]:
        """Its state: numbers, text, tensors, and containers of them."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Take a state up."""


@dataclass
class StatefulObjects:
    """The objects whose state a checkpoint holds.

    Attributes:
        models: bare modules.
        optimizers: torch's own optimizers.
        others: by kind (`scheduler`, `loader`, `custom` ...), objects with state_dict and load_state_dict.
        export: yields a model's (name, tensor) pairs.
        left_out: indices of models that are neither compared nor loaded.
        part_of: a parameter as it is spread here: itself, or a piece.
        exposed: a block in which an optimizer shows its state, where an engine keeps it elsewhere.
        settle: what was loaded is in place: engines go on from it.
    """

    models: Sequence[torch.nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    others: Mapping[str, Sequence[Stateful]]
    export: Callable[[torch.nn.Module], Iterable[tuple[str, Any]]]
    left_out: set[int] = field(default_factory=set)
    part_of: Callable[[torch.Tensor], Any] = lambda parameter: parameter
    exposed: Callable[[torch.optim.Optimizer], AbstractContextManager[Any]] = lambda optimizer: nullcontext()
    settle: Callable[[], None] = lambda: None

    def chosen(self) -> list[tuple[int, torch.nn.Module]]:
        """The models that are loaded, with their numbers."""
        return [(index, model) for index, model in enumerate(self.models) if index not in self.left_out]


@dataclass
class CollectedState:
    """A run's state, taken apart: tensors and tied names by logical name, the rest as JSON.

    Attributes:
        tensors: plain ones, DTensors or pieces; of what was read, those that are spread are placed as this run's own are.
        aliases: tied names, and the name that holds their values.
        state: the rest.
        owned: names of tensors that nothing else refers to, so that objects may keep them.
    """

    tensors: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    owned: set[str] = field(default_factory=set)


def collect(parts: StatefulObjects) -> CollectedState:
    """Take the state apart; tensors are not copied.

    Raises:
        CheckpointError: something in a state_dict can only be pickled, or could not be loaded.
    """
    out = CollectedState()
    extras = []
    for index, model in enumerate(parts.models):
        named = [(logical(f"model/{index}/{name}"), value) for name, value in parts.export(model)]
        for name, value in named:
            is_tensor = isinstance(value, torch.Tensor) or is_spread(value)
            problem = refusal(held(value)) if is_tensor else None
            if not is_tensor and not is_extra(name):
                problem = f"a {type(value).__qualname__} in the model's state dict, which holds tensors: save it in get_extra_state()"
            if problem is not None:
                raise CheckpointError(f"{name} is {problem}")
        kept, tied = untied((name, _plain(value)) for name, value in named if is_weight(name, value))
        out.tensors.update(kept)
        out.aliases.update(tied)
        rest = [(name.split("/", 2)[2], _plain(value)) for name, value in named if not is_weight(name, value)]
        extras.append({name: encode(value, f"extra/{index}/{name}", out.tensors) for name, value in rest})
    names = parameter_names(parts.models)
    out.state["extra"] = extras
    out.state["optimizer"] = []
    for index, optimizer in enumerate(parts.optimizers):
        with parts.exposed(optimizer):
            out.state["optimizer"].append(collect_optimizer(optimizer, names, index, out.tensors))
    for kind, objects in parts.others.items():
        out.state[kind] = [
            encode(obj.state_dict(), f"{kind}/{index}", out.tensors) for index, obj in enumerate(objects)
        ]
    return out


def in_pieces(collected: CollectedState) -> CollectedState:
    """The state with what is spread over ranks as this rank's pieces, cut alike on every rank.

    Raises:
        CheckpointError: values that were not reduced yet.
    """
    cutter, made = ShardCutter(), dict[str, Any]()
    for name, value in collected.tensors.items():
        try:
            made[name] = cutter.piece(value) if is_dtensor(value) else value
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from error
    return replace(collected, tensors=made)


def is_weight(name: str, value: Any) -> bool:
    """Is it a dense tensor of a model, which lies in a file as it is? Others are kept as what they are made of."""
    if isinstance(value, ShardPiece):
        return not is_extra(name)
    return isinstance(value, torch.Tensor) and is_dense(value) and not is_extra(name)


def is_extra(name: str) -> bool:
    """Is it what a module's `get_extra_state` returned?"""
    return name.rpartition(".")[2].rpartition("/")[2] == EXTRA


def _plain(value: Any) -> Any:
    """A model's own tensor, of whatever class, as a plain one: a load puts the values into the object that is there."""
    if not isinstance(value, torch.Tensor):
        return value
    plain = value.detach()
    if is_dtensor(plain):
        return plain
    return plain if type(plain) is torch.Tensor else plain.as_subclass(torch.Tensor)


def parameter_names(models: Iterable[torch.nn.Module]) -> dict[int, str]:
    """The logical name of each parameter, by its id."""
    return {
        id(parameter): logical(f"{index}/{name}")
        for index, model in enumerate(models)
        for name, parameter in model.named_parameters()
    }


ROWS = "rows/"
"""How the names of such tensors begin; what follows is the name of the one for all."""


def row_of(value: torch.Tensor, rank: int, count: int) -> ShardPiece:
    """This rank's row of the tensor that `count` ranks make up."""
    sizes = ((1,) * count, *((size,) for size in value.shape))
    row = TensorBox((rank, *(0 for _ in value.shape)), value.detach()[None], True)
    return ShardPiece((count, *value.shape), value.dtype, (row,), None, TensorSplit(sizes, tuple(range(count))))


def place_of(shape: tuple[int, ...], rank: int) -> ShardPiece:
    """Where a rank's row lies in a tensor of rows."""
    row = TensorBox((rank, *(0 for _ in shape[1:])), torch.empty((1, *shape[1:]), device="meta"), False)
    return ShardPiece(shape, torch.float32, (row,))
