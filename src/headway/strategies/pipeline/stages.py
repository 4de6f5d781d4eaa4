"""How a model is cut into the stages of a pipeline, runs of its blocks, and what their state is for checkpoints.

A stage is a run of the model's repeated blocks. Modules outside of them (embeddings, norms, heads) are on the first stage if they
come before the blocks in the module tree, on the last if they come after. A parameter is held by every stage whose modules hold
it: a head that is tied to an embedding by two, and a parameter of a module around the blocks by all.

The state of a pipeline's stages for checkpoints: each tensor is whole on the ranks of its stage, and one of them writes it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from headway.config.mesh import Layout
from headway.config.parallelism import PipelineOptions
from headway.errors import ConfigError, PrepareError
from headway.runtime.collectives.checked import Collectives
from headway.strategies.fully_sharded import dtensors
from headway.strategies.parts import find_blocks
from headway.weights.pieces import ShardCutter, ShardPiece, TensorBox, TensorSplit, is_dtensor
from headway.weights.shards import TensorSpec


@dataclass(frozen=True)
class StageSplit:
    """A model's stages.

    Attributes:
        blocks: in the order they run.
        names: theirs.
        bounds: the number of each stage's first block, and at the end the number of blocks.
        sides: modules outside of the blocks that have parameters, by name, with the stages that they are on.
        loose: names of parameters and buffers of modules around the blocks, which all stages hold.
    """

    blocks: tuple[torch.nn.Module, ...]
    names: tuple[str, ...]
    bounds: tuple[int, ...]
    sides: dict[str, frozenset[int]]
    loose: tuple[str, ...]

    @property
    def num(self) -> int:
        """How many there are."""
        return len(self.bounds) - 1

    def stage_of(self, block: int) -> int:
        """The stage of a block."""
        return next(stage for stage in range(self.num) if block < self.bounds[stage + 1])

    def holders(self, model: torch.nn.Module) -> dict[int, frozenset[int]]:
        """By id of each parameter and buffer, the stages that hold it."""
        every = frozenset(range(self.num))
        found = {id(tensor): frozenset[int]() for tensor in (*model.parameters(), *model.buffers())}
        blocks = ((frozenset((self.stage_of(number),)), block) for number, block in enumerate(self.blocks))
        sides = ((stages, model.get_submodule(name)) for name, stages in self.sides.items())
        for stages, module in (*blocks, *sides):
            for tensor in (*module.parameters(), *module.buffers()):
                found[id(tensor)] |= stages
        loose = {id(_tensor(model, name)) for name in self.loose}
        return {key: every if key in loose or not stages else stages for key, stages in found.items()}

    def describe(self) -> str:
        """In words, for the log."""
        runs = [self.names[a : b or None] for a, b in zip(self.bounds, self.bounds[1:])]
        parts = []
        for stage, run in enumerate(runs):
            own = [name for name, stages in self.sides.items() if stage in stages]
            blocks = run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}"
            parts.append(f"{stage}: {', '.join([blocks, *own])}")
        return "; ".join(parts)


def find_stages(model: torch.nn.Module, num_stages: int, options: PipelineOptions) -> StageSplit:
    """Cut a model.

    Args:
        model: the user's.
        num_stages: of the whole pipeline.
        options: what was asked for.

    Raises:
        PrepareError: it has too few blocks.
        ConfigError: the options name what is not there.
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
    bounds = _named_bounds(names, num_stages, options.split) if options.split else _even(len(blocks), num_stages)
    sides, loose = _sides(model, set(map(id, blocks)), num_stages, options)
    return StageSplit(tuple(blocks), tuple(names), tuple(bounds), sides, tuple(loose))


def _even(num_blocks: int, num_stages: int) -> list[int]:
    """Equally many; what remains goes to the stages in the middle and at the front, since the last one has the head."""
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


def _sides(
    model: torch.nn.Module, blocks: set[int], num_stages: int, options: PipelineOptions
) -> tuple[dict[str, frozenset[int]], list[str]]:
    """Modules beside the blocks with their stages, and tensors that lie in modules around them."""
    around = {id(module) for module in model.modules() if any(id(each) in blocks for each in module.modules())} - blocks
    found: dict[str, frozenset[int]] = {}
    loose: list[str] = []
    has_met_blocks = False
    inside: set[str] = set()
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
        inside.add(name)
        if any(True for _ in module.parameters()):
            found[name] = frozenset((num_stages - 1 if has_met_blocks else 0,))
    for stage, wanted in ((0, options.first), (num_stages - 1, options.last)):
        for name in wanted:
            if name not in found:
                raise ConfigError(
                    f"PipelineOptions({'first' if stage == 0 else 'last'}=...) names {name!r}; the modules with parameters outside "
                    f"of the blocks of {type(model).__name__} are {', '.join(found) or 'none'}"
                )
    for name in found:
        stages = {stage for stage, wanted in ((0, options.first), (num_stages - 1, options.last)) if name in wanted}
        found[name] = frozenset(stages) or found[name]
    return found, loose


def _tensor(model: torch.nn.Module, name: str) -> torch.Tensor:
    path, _, key = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(path), key)
    return tensor


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
        self._place = layout.coordinates(rank)["pp"]
        self._everywhere = frozenset(range(layout.pp))
        self._is_spread = bool(layout.sizes.keys() - {"pp", "replicate"})

    def elsewhere(self) -> frozenset[int]:
        """The ids of tensors that only other ranks hold."""
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return frozenset(id(tensor) for name, tensor in named if self._place not in self.owners[name])

    # ---------------------------------------------------------------- pieces

    def _piece(
        self, shape: tuple[int, ...], dtype: torch.dtype, on: frozenset[int], held: torch.Tensor | None
    ) -> ShardPiece:
        if held is not None and is_dtensor(held):
            piece = ShardCutter().piece(held)
            boxes = (replace(box, is_written=box.is_written and self._place == min(on)) for box in piece.boxes)
            return replace(piece, boxes=tuple(boxes), split=None)
        writer = self._ranks[min(on)]
        # How a stage's parameters are spread, the ranks of other stages do not know.
        split = None if self._is_spread else TensorSplit(tuple((size,) for size in shape), (writer,))
        if held is None:
            return ShardPiece(shape, dtype, (), None, split)
        plain = held.detach()
        return ShardPiece(shape, dtype, (TensorBox((0,) * len(shape), plain, self._rank == writer),), plain, split)

    def _part(self, name: str, tensor: torch.Tensor) -> Any:
        on = self.owners[name]
        if on == self._everywhere and not is_dtensor(tensor):
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
        if on == self._everywhere and not is_dtensor(held):
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
                    state[key] = _joined(value, parameter)


def _joined(piece: ShardPiece, parameter: torch.Tensor) -> torch.Tensor:
    """A state that was loaded, as it lies beside its parameter."""
    if is_dtensor(parameter):
        return dtensors.join(((box.offsets, box.values) for box in piece.boxes), piece.dtype, parameter)
    whole = piece.boxes[0].values if piece.boxes else torch.empty(piece.shape, dtype=piece.dtype)
    return whole.to(parameter.device)


def _told(value: Any) -> Any:
    """Numbers go to all ranks; of tensors with dimensions, their shape."""
    if isinstance(value, torch.Tensor):
        return TensorSpec(tuple(value.shape), value.dtype) if value.ndim else value.detach().cpu()
    return value
