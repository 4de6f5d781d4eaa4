"""How a model is cut into the stages of a pipeline: runs of its blocks; what lies outside of these is on the first or the last.

A stage is a run of the model's repeated blocks. Modules outside of them (embeddings, norms, heads) are on the first stage if they
come before the blocks in the module tree, on the last if they come after. A parameter is held by every stage whose modules hold
it: a head that is tied to an embedding by two, and a parameter of a module around the blocks by all.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from headway.config.parallelism import PipelineOptions
from headway.errors import ConfigError, PrepareError
from headway.strategies.blocks import find_blocks


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
        found: dict[int, set[int]] = {}
        for stages, module in self._parts(model):
            for tensor in (*module.parameters(), *module.buffers()):
                found.setdefault(id(tensor), set()).update(stages)
        every = range(self.num)
        for tensor in (*model.parameters(), *model.buffers()):
            if id(tensor) not in found:
                found[id(tensor)] = set(every)
        for name in self.loose:
            found[id(_tensor(model, name))] = set(every)
        return {key: frozenset(stages) for key, stages in found.items()}

    def _parts(self, model: torch.nn.Module) -> Iterator[tuple[frozenset[int], torch.nn.Module]]:
        for number, block in enumerate(self.blocks):
            yield frozenset((self.stage_of(number),)), block
        for name, stages in self.sides.items():
            yield stages, model.get_submodule(name)

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
    sizes = [size + (stage in order[:rest]) for stage in range(num_stages)]
    bounds = [0]
    for each in sizes:
        bounds.append(bounds[-1] + each)
    return bounds


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
