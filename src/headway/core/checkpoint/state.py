"""Convert the state of a run to named tensors and JSON. Optimizers are converted by `optimizer_state`.

Names are logical. A model's tensor is named `model/0/` plus its name in the model without wrappers. Therefore a run
with another world size or another wrapper finds the same tensors.

A tensor that differs between ranks is saved twice. The tensor under its own name has one value for all ranks, such
as the mean. The tensor under the prefix `ROWS` has one row per rank, with the values of that rank.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from headway.common.garbage import pause_garbage_collection
from headway.core.checkpoint.format.dense import explain_refusal, is_dense
from headway.core.checkpoint.format.text import to_logical_name
from headway.core.checkpoint.format.values import encode_value
from headway.core.checkpoint.optimizer_state import collect_optimizer, has_equal_groups, list_parameter_keys
from headway.core.weights.compiled import rename_bare_items
from headway.core.weights.export import split_ties
from headway.core.weights.files import EXTRA_STATE
from headway.core.weights.pieces import ShardPiece, TensorBox, TensorSplit, get_local_part, is_dtensor, is_sharded
from headway.core.weights.shard_splitter import ShardSplitter
from headway.errors import CheckpointError

ROWS = "rows/"
"""Name prefix of tensors with one row per rank.

The rest of the name is that of the tensor whose values differ between ranks.
"""


class Stateful(Protocol):
    """Object with `state_dict` and `load_state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers, text, tensors, and containers of them."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Restore the object from a state dict.

        Args:
            state: State dict that `state_dict` returned.
        """


@dataclass
class StatefulObjects:
    """Objects whose state a checkpoint holds, with the functions through which their state is accessed.

    Attributes:
        models: Models without wrappers.
        optimizers: torch's own optimizers, without wrappers.
        others: Objects with `state_dict` and `load_state_dict`, by kind (`scheduler`, `loader`, `custom` ...).
        export: Function that yields the (name, value) pairs of a model's state dict.
        excluded_models: Indices in `models` of models that are neither compared with a checkpoint nor loaded from it. Default:
            set(), all models are loaded.
        get_part: Function that returns this rank's part of a parameter: the parameter itself or a shard. Default: the
            parameter itself.
        expose_state: Function that returns a context manager for an optimizer. Within it, the optimizer holds its
            state, which some training backends otherwise keep elsewhere. Default: a context manager that does nothing.
        apply_loaded_values: Function called after a load, so that training backends continue from the loaded values.
            Default: a function that does nothing.
    """

    models: Sequence[torch.nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    others: Mapping[str, Sequence[Stateful]]
    export: Callable[[torch.nn.Module], Iterable[tuple[str, Any]]]
    excluded_models: set[int] = field(default_factory=set)
    get_part: Callable[[torch.Tensor], Any] = lambda parameter: parameter
    expose_state: Callable[[torch.optim.Optimizer], AbstractContextManager[Any]] = lambda optimizer: nullcontext()
    apply_loaded_values: Callable[[], None] = lambda: None

    def list_models_to_load(self) -> list[tuple[int, torch.nn.Module]]:
        """Return the models that are not in `excluded_models`, as pairs of (index, model)."""
        return [(index, model) for index, model in enumerate(self.models) if index not in self.excluded_models]


@dataclass
class CollectedState:
    """State of a run: tensors by logical name, and everything else as JSON.

    A logical name is independent of wrappers and layouts, such as `model/0/` plus the name in the bare model.

    Attributes:
        tensors: Plain tensors, DTensors or `ShardPiece` objects, by logical name. After a load, sharded tensors have
            this run's layout.
        aliases: Names of tied tensors, each mapped to the name of the tensor that holds their values.
        state: Everything else, as JSON values.
        owned: Names of tensors whose memory nothing else uses, so that objects may keep them without a copy.
        regrouped: One line per optimizer whose saved parameter groups were converted to those of this run.
    """

    tensors: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    owned: set[str] = field(default_factory=set)
    regrouped: list[str] = field(default_factory=list)


@pause_garbage_collection()
def collect_state(objects: StatefulObjects) -> CollectedState:
    """Collect the state of all objects as named tensors and JSON. Tensors are not copied.

    Args:
        objects: Objects whose state is collected.

    Raises:
        CheckpointError: If a state dict holds something that only pickle could store, or that could not be loaded.
    """
    collected = CollectedState()
    collected.state["extra"] = [
        _collect_model(objects.export(model), index, collected) for index, model in enumerate(objects.models)
    ]
    names = map_parameter_names(objects.models)
    collected.state["optimizer"] = []
    for index, optimizer in enumerate(objects.optimizers):
        with objects.expose_state(optimizer):
            collected.state["optimizer"].append(collect_optimizer(optimizer, names, index, collected.tensors))
    for kind, objects_of_kind in objects.others.items():
        collected.state[kind] = [
            encode_value(obj.state_dict(), f"{kind}/{index}", collected.tensors)
            for index, obj in enumerate(objects_of_kind)
        ]
    return collected


def _collect_model(state: Iterable[tuple[str, Any]], index: int, collected: CollectedState) -> dict[str, Any]:
    """Add a model's weights to `collected`, and return its extra states as JSON, by their keys in the state dict.

    Args:
        state: Pairs (name, value) of the model's state dict.
        index: Index of the model in the run.
        collected: State to which the weights are added, and the tensors of the extra states.

    Raises:
        CheckpointError: If a value cannot be saved.
    """
    weights: list[tuple[str, Any]] = []
    extras: dict[str, Any] = {}
    for name, value in state:
        logical_name = to_logical_name(f"model/{index}/{name}")
        is_tensor = isinstance(value, torch.Tensor) or is_sharded(value)
        problem = explain_refusal(get_local_part(value)) if is_tensor else None
        if not is_tensor and not is_extra(logical_name):
            problem = f"a {type(value).__qualname__} in the model's state dict, where only tensors fit: save it in get_extra_state()"
        if problem is not None:
            raise CheckpointError(f"{logical_name} is {problem}")
        if is_weight(logical_name, value):
            weights.append((logical_name, _to_plain(value)))
        else:
            extras[logical_name.split("/", 2)[2]] = _to_plain(value)
    kept, tied = split_ties(weights)
    collected.tensors.update(kept)
    collected.aliases.update(tied)
    return {key: encode_value(value, f"extra/{index}/{key}", collected.tensors) for key, value in extras.items()}


def is_weight(name: str, value: Any) -> bool:
    """Whether a value of a model's state dict is a dense tensor or a shard of one, which a file stores unchanged.

    Other values, such as sparse tensors and extra state, are encoded first.

    Args:
        name: Logical name of the value.
        value: Tensor, shard, or another object.
    """
    if isinstance(value, ShardPiece):
        return not is_extra(name)
    return isinstance(value, torch.Tensor) and is_dense(value) and not is_extra(name)


def is_extra(name: str) -> bool:
    """Whether a logical name belongs to a value that a module's `get_extra_state` returned."""
    return name.rpartition("/")[2].rpartition(".")[2] == EXTRA_STATE


def _to_plain(value: Any) -> Any:
    """Return a tensor subclass as a plain, detached tensor that shares its memory.

    DTensors are only detached. Values that are not tensors are returned unchanged. A load copies the values into the
    existing tensor, so its subclass need not be saved.
    """
    if not isinstance(value, torch.Tensor):
        return value
    plain = value.detach()
    if is_dtensor(plain):
        return plain
    return plain if type(plain) is torch.Tensor else plain.as_subclass(torch.Tensor)


def map_parameter_names(models: Iterable[torch.nn.Module]) -> dict[int, str]:
    """Return a dict from the `id` of each parameter to its logical name without the prefix `model/`.

    This name is the model's index, a slash, and the parameter's name in the model, such as `0/head.weight`. Optimizer
    state is saved under it.

    Args:
        models: Models without wrappers.
    """
    return {
        id(parameter): to_logical_name(f"{index}/{name}")
        for index, model in enumerate(models)
        for name, parameter in rename_bare_items(model.named_parameters())
    }


def has_saved_groups(objects: StatefulObjects, saved_state: CollectedState) -> bool:
    """Whether each parameter group of all optimizers contains the same parameters as the saved group.

    The order of the parameters in a group matters only if the optimizer's state was saved as one value.

    Args:
        objects: Objects that should load the state.
        saved_state: State of the checkpoint.
    """
    names, states = map_parameter_names(objects.models), zip(objects.optimizers, saved_state.state["optimizer"])
    return all(has_equal_groups(list_parameter_keys(optimizer, names), entry) for optimizer, entry in states)


def split_dtensors(collected: CollectedState) -> CollectedState:
    """Return a state in which each DTensor is replaced by a `ShardPiece`, which describes this rank's shard.

    All ranks compute the same split without communication.

    Args:
        collected: State to convert. It is not changed.

    Raises:
        CheckpointError: If a tensor holds partial values that have not been reduced yet.
    """
    splitter, tensors = ShardSplitter(), dict[str, Any]()
    for name, value in collected.tensors.items():
        try:
            tensors[name] = splitter.split_tensor(value) if is_dtensor(value) else value
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from error
    return replace(collected, tensors=tensors)


def make_own_row(value: torch.Tensor, rank: int, count: int) -> ShardPiece:
    """Return a `ShardPiece` with this rank's values as one row of a tensor that all ranks write together.

    Args:
        value: This rank's values.
        rank: Rank of this process, and index of the row.
        count: Number of ranks, and of rows.
    """
    sizes = ((1,) * count, *((size,) for size in value.shape))
    row = TensorBox((rank, *(0 for _ in value.shape)), value.detach()[None], True)
    return ShardPiece((count, *value.shape), value.dtype, (row,), None, TensorSplit(sizes, tuple(range(count))))


def describe_row(shape: tuple[int, ...], rank: int) -> ShardPiece:
    """Return a `ShardPiece` of meta tensors that describes one rank's row in a tensor with one row per rank.

    Its dtype, float32, is a placeholder.

    Args:
        shape: Global shape of the tensor, including the dim of the rows.
        rank: Index of the row.
    """
    row = TensorBox((rank, *(0 for _ in shape[1:])), torch.empty((1, *shape[1:]), device="meta"), False)
    return ShardPiece(shape, torch.float32, (row,))
