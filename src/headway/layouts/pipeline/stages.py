"""Split a model's blocks into pipeline stages, and export the state of a split model for checkpoints.

A stage is a sequence of consecutive repeated blocks of the model. A module outside of the blocks (embedding, norm,
head) is on the first stage if it precedes the blocks in the module tree. If it follows them, it is on the last stage.
PEFT's prompt encoders are an exception: they follow the base model in the module tree, but run before its blocks.
A parameter is on every stage whose modules contain it. So a head that is tied to an embedding is on both the first and
the last stage. All stages hold the parameters that belong directly to modules that contain blocks.

If several pipeline ranks hold a tensor, the first of them writes it into checkpoints.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from headway.core.config.mesh import Layout
from headway.core.config.parallelism import PipelineOptions
from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.blocks import find_blocks, is_container
from headway.core.strategies.fully_sharded import dtensors
from headway.core.weights.pieces import ShardCutter, ShardPiece, TensorBox, TensorSplit, is_dtensor, split_wrappers
from headway.core.weights.shards import TensorSpec
from headway.errors import ConfigError, PrepareError
from headway.layouts.low_bit.states import export_state

_PROMPTS = "prompt_encoder"
"""Name of the container of prompt encoders in PEFT's models."""


@dataclass(frozen=True)
class StageSplit:
    """Assignment of a model's blocks and other modules to pipeline stages.

    Attributes:
        blocks: Repeated blocks in the order in which they run.
        names: Names of the blocks.
        bounds: Index of each stage's first block, followed by the number of blocks.
        sides: Stages that hold each module outside of the blocks, by the module's name. Modules without parameters are
            not included.
        loose: Names of parameters and buffers that belong directly to modules that contain blocks. All stages hold
            them.
    """

    blocks: tuple[torch.nn.Module, ...]
    names: tuple[str, ...]
    bounds: tuple[int, ...]
    sides: dict[str, frozenset[int]]
    loose: tuple[str, ...]

    @property
    def num(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    def find_stage(self, block: int) -> int:
        """Return the stage of a block, given the block's index."""
        return next(stage for stage in range(self.num) if block < self.bounds[stage + 1])

    def map_holders(self, model: torch.nn.Module) -> dict[int, frozenset[int]]:
        """Return the stages that hold each parameter and buffer, by the tensor's `id`.

        A tensor that belongs to no block and to no module in `sides` is held by all stages.

        Args:
            model: Model that was split.
        """
        every = frozenset(range(self.num))
        found = {id(tensor): frozenset[int]() for tensor in (*model.parameters(), *model.buffers())}
        blocks = ((frozenset((self.find_stage(number),)), block) for number, block in enumerate(self.blocks))
        sides = ((stages, model.get_submodule(name)) for name, stages in self.sides.items())
        for stages, module in (*blocks, *sides):
            for tensor in (*module.parameters(), *module.buffers()):
                found[id(tensor)] |= stages
        loose = {id(_get_tensor(model, name)) for name in self.loose}
        return {key: every if key in loose or not stages else stages for key, stages in found.items()}

    def describe(self) -> str:
        """Return a text for the log that names the blocks and other modules of each stage."""
        runs = [self.names[a : b or None] for a, b in zip(self.bounds, self.bounds[1:])]
        parts = []
        for stage, run in enumerate(runs):
            own = [name for name, stages in self.sides.items() if stage in stages]
            blocks = run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}"
            parts.append(f"{stage}: {', '.join([blocks, *own])}")
        return "; ".join(parts)


def find_stages(model: torch.nn.Module, num_stages: int, options: PipelineOptions) -> StageSplit:
    """Return an assignment of a model's blocks to pipeline stages.

    Args:
        model: User's model.
        num_stages: Number of stages of the whole pipeline.
        options: Options that can name the blocks, the first block of each stage, and the stages of other modules.

    Raises:
        PrepareError: If the model has fewer blocks than stages.
        ConfigError: If the options name modules that do not exist, or if their `split` does not name one first block
            for each later stage, in order.
    """
    blocks = find_blocks(model, options.blocks)
    by_id = {id(module): name for name, module in model.named_modules()}
    names = [by_id[id(block)] for block in blocks]
    kind = type(model).__name__
    if len(blocks) < num_stages:
        found = f"{len(blocks)} repeated blocks ({', '.join(names)})" if blocks else "no repeated blocks"
        raise PrepareError(
            f"{kind} has {found}, too few for {num_stages} stages of a pipeline; use fewer ranks along pp, or name its blocks: "
            'kwargs_handlers=[PipelineOptions(blocks=["Block"])]'
        )
    bounds = (
        _named_bounds(names, num_stages, options.split) if options.split else _split_evenly(len(blocks), num_stages)
    )
    sides, loose = _place_sides(model, set(map(id, blocks)), num_stages, options)
    return StageSplit(tuple(blocks), tuple(names), tuple(bounds), sides, tuple(loose))


def _split_evenly(num_blocks: int, num_stages: int) -> list[int]:
    """Return the index of each stage's first block, followed by the number of blocks, for stages of equal size.

    If the blocks cannot be divided evenly, the middle stages get an additional block first, and then the first stage.
    The last stage, which has the head, never gets one.
    """
    size, rest = divmod(num_blocks, num_stages)
    order = sorted(range(num_stages), key=lambda stage: (stage == num_stages - 1, stage == 0, stage))
    return [0, *accumulate(size + (stage in order[:rest]) for stage in range(num_stages))]


def _named_bounds(names: list[str], num_stages: int, split: tuple[str, ...]) -> list[int]:
    unknown = [name for name in split if name not in names]
    if unknown:
        raise ConfigError(f"PipelineOptions(split=...) names {unknown[0]!r}; the blocks are {', '.join(names)}")
    begins = [names.index(name) for name in split]
    if begins != sorted(set(begins)) or 0 in begins or len(begins) != num_stages - 1:
        raise ConfigError(
            f"PipelineOptions(split={list(split)}) must name the first block of each of stages 2 to {num_stages}, in order; the "
            f"blocks are {', '.join(names)}"
        )
    return [0, *begins, len(names)]


def _place_sides(
    model: torch.nn.Module, blocks: set[int], num_stages: int, options: PipelineOptions
) -> tuple[dict[str, frozenset[int]], list[str]]:
    """Return the stages of modules outside of the blocks, and the names of tensors that all stages hold.

    Args:
        model: User's model.
        blocks: IDs of the blocks.
        num_stages: Number of stages of the whole pipeline.
        options: Options with the names of modules for the first and for the last stage.

    Returns:
        Pair of (stages of each module outside of the blocks by name, names of tensors that belong directly to modules
        that contain blocks).

    Raises:
        ConfigError: If a module that the options name is within a block, contains blocks, has no parameters, or does
            not exist.
    """
    around = {id(module) for module in model.modules() if any(id(each) in blocks for each in module.modules())} - blocks
    found: dict[str, frozenset[int]] = {}
    loose: list[str] = []
    has_met_blocks = False
    inside: set[str] = set()
    containers: set[str] = set()
    for name, module in model.named_modules():
        if id(module) in blocks:
            has_met_blocks = True
        if any(name.startswith(f"{each}.") for each in inside) or id(module) in blocks:
            inside.add(name)
            continue
        if id(module) in around:
            own = {**module._parameters, **module._buffers}
            loose += [f"{name}.{key}".lstrip(".") for key, tensor in own.items() if tensor is not None]
            continue
        if _is_bare_container(module):  # its children are called, and it is not
            containers.add(name)
            continue
        inside.add(name)
        if any(True for _ in module.parameters()):
            if hasattr(model, "peft_config") and name.startswith(f"{_PROMPTS}."):
                found[name] = frozenset(range(num_stages))
            else:
                found[name] = frozenset((num_stages - 1 if has_met_blocks else 0,))
    first, last = (_name_children(names, containers, found) for names in (options.first, options.last))
    for stage, wanted in ((0, first), (num_stages - 1, last)):
        for name in wanted:
            if name not in found:
                raise ConfigError(
                    f"PipelineOptions({'first' if stage == 0 else 'last'}=...) names {name!r}; the modules with parameters outside "
                    f"of the blocks of {type(model).__name__} are {', '.join(found) or 'none'}"
                )
    for name in found:
        stages = {stage for stage, wanted in ((0, first), (num_stages - 1, last)) if name in wanted}
        found[name] = frozenset(stages) or found[name]
    return found, loose


def _is_bare_container(module: torch.nn.Module) -> bool:
    """Whether the module only contains other modules: it has neither a forward nor tensors of its own."""
    return is_container(module) and bool(module._modules) and not (module._parameters or module._buffers)


def _name_children(wanted: Iterable[str], containers: set[str], names: Iterable[str]) -> list[str]:
    """Return the wanted names, with the name of each container replaced by the names of the modules in it.

    Args:
        wanted: Names from the user's options.
        containers: Names of containers that have no forward.
        names: Names of the modules outside of the blocks.
    """
    made: list[str] = []
    for name in wanted:
        inner = [each for each in names if each.startswith(f"{name}.")] if name in containers else []
        made += inner or [name]
    return made


def _get_tensor(model: torch.nn.Module, name: str) -> torch.Tensor:
    path, _, key = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(path), key)
    return tensor


class PipelineState:
    """State of a model that is split into pipeline stages, as full tensors and `ShardPiece` objects for checkpoints.

    Args:
        model: User's model, which has been split.
        owners: Pipeline ranks that hold each parameter and buffer, by name.
        layout: Layout of the run.
        rank: Global rank of this process.

    Attributes:
        owners: Pipeline ranks that hold each parameter and buffer, by name.
    """

    def __init__(self, model: torch.nn.Module, owners: Mapping[str, frozenset[int]], layout: Layout, rank: int) -> None:
        self.owners = owners
        self._model = model
        self._rank = rank
        self._ranks = layout.list_groups("pp")[0]
        self._place = layout.find_coordinates(rank)["pp"]
        self._everywhere = frozenset(range(layout.pp))
        self._is_spread = bool(layout.sizes.keys() - {"pp", "replicate"})

    def list_elsewhere(self) -> frozenset[int]:
        """Return the IDs of the parameters and buffers that only other pipeline ranks hold."""
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return frozenset(id(tensor) for name, tensor in named if self._place not in self.owners[name])

    # ---------------------------------------------------------------- pieces

    def _make_piece(
        self, shape: tuple[int, ...], dtype: torch.dtype, on: frozenset[int], held: torch.Tensor | None
    ) -> ShardPiece:
        if held is not None and is_dtensor(held):
            piece = ShardCutter().cut_tensor(held)
            boxes = (replace(box, is_written=box.is_written and self._place == min(on)) for box in piece.boxes)
            return replace(piece, boxes=tuple(boxes), split=None)
        writer = self._ranks[min(on)]
        # Ranks of other stages do not know how a stage's parameters are sharded.
        split = None if self._is_spread else TensorSplit(tuple((size,) for size in shape), (writer,))
        if held is None:
            return ShardPiece(shape, dtype, (), None, split)
        plain = held.detach()
        return ShardPiece(shape, dtype, (TensorBox((0,) * len(shape), plain, self._rank == writer),), plain, split)

    def _export_tensor(self, name: str, tensor: torch.Tensor) -> Any:
        on = self.owners[name]
        if on == self._everywhere and not is_dtensor(tensor):
            return tensor.detach()
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return self._make_piece(tuple(tensor.shape), tensor.dtype, on, None if tensor.is_meta else tensor)

    def export_state(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, tensor) for each entry of the model's state dict.

        A tensor that not all pipeline ranks hold completely is yielded as a `ShardPiece`, with this rank's values only.
        """
        made: dict[int, Any] = {}
        for name, value in self._model.state_dict(keep_vars=True).items():
            for inner, each in split_wrappers([(name, value)]):
                if not isinstance(each, torch.Tensor) or name not in self.owners:
                    yield inner, each
                    continue
                if id(each) not in made:  # two names of a tied tensor must stay one object
                    made[id(each)] = self._export_tensor(name, each)
                yield inner, made[id(each)]

    def get_part(self, parameter: torch.Tensor) -> Any:
        """Return this rank's part of a parameter: a `ShardPiece`, or a tensor if all pipeline ranks hold all of it.

        A parameter that does not belong to the model is returned unchanged.
        """
        name = self._map_names().get(id(parameter))
        return parameter if name is None else self._export_tensor(name, parameter)

    def _map_names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self._model.named_parameters()}

    # ---------------------------------------------------------------- optimizers

    @contextmanager
    def expose_state(self, optimizer: torch.optim.Optimizer, group: Collectives) -> Iterator[None]:
        """Return a context in which the optimizer also holds entries for the states of parameters on other stages.

        These entries are `ShardPiece` objects without data. All ranks must enter the context, which runs a collective.

        Args:
            optimizer: Optimizer whose state is replaced until the context exits.
            group: Collectives over the ranks of one pipeline.
        """
        names = self._map_names()
        listed = [p for parameters in optimizer.param_groups for p in parameters["params"] if id(p) in names]
        before = dict(optimizer.state)
        values = {key: export_state(optimizer, entry) for key, entry in before.items()}
        own = {
            names[id(parameter)]: {key: _describe_value(value) for key, value in values[parameter].items()}
            for parameter in listed
            if parameter in values and isinstance(values[parameter], dict) and not parameter.is_meta
        }
        answers = group.gather_objects(own)
        shown: dict[Any, Any] = {}
        for parameter in listed:
            name = names[id(parameter)]
            on = self.owners[name]
            told = answers[min(on)].get(name)
            if told is not None:
                held = values.get(parameter, {}) if not parameter.is_meta else {}
                shown[parameter] = {key: self._describe_state(each, on, held.get(key)) for key, each in told.items()}
        rest = {key: value for key, value in before.items() if not any(key is parameter for parameter in listed)}
        try:
            optimizer.state.clear()
            optimizer.state.update({**shown, **rest})
            yield
        finally:
            optimizer.state.clear()
            optimizer.state.update(before)

    def _describe_state(self, told: Any, on: frozenset[int], held: Any) -> Any:
        if not isinstance(told, TensorSpec):
            return told if held is None else held
        if on == self._everywhere and not is_dtensor(held):
            return held
        if 0 in told.shape:
            return torch.empty(told.shape, dtype=told.dtype)
        return self._make_piece(told.shape, told.dtype, on, held)

    def convert_loaded_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Convert the `ShardPiece` objects in loaded optimizer states to tensors.

        States of parameters that only other ranks hold are deleted.
        """
        for parameter in list(optimizer.state):
            if not isinstance(parameter, torch.Tensor):
                continue
            if parameter.is_meta:
                del optimizer.state[parameter]
                continue
            state = optimizer.state[parameter]
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, ShardPiece):
                    state[key] = _join_state(value, parameter)


def _join_state(piece: ShardPiece, parameter: torch.Tensor) -> torch.Tensor:
    """Return a loaded optimizer state as a tensor that is sharded like the parameter to which it belongs.

    Args:
        piece: Loaded shard of the state.
        parameter: Parameter on this rank.
    """
    if is_dtensor(parameter):
        return dtensors.assemble_boxes(((box.offsets, box.values) for box in piece.boxes), piece.dtype, parameter)
    whole = piece.boxes[0].values if piece.boxes else torch.empty(piece.shape, dtype=piece.dtype)
    return whole.to(parameter.device)


def _describe_value(value: Any) -> Any:
    """Return a description of one value in an optimizer state, for ranks of other stages.

    For a tensor with dimensions, it contains only the shape and dtype. Scalars are returned as they are.
    """
    if isinstance(value, torch.Tensor):
        return TensorSpec(tuple(value.shape), value.dtype) if value.ndim else value.detach().cpu()
    return value
