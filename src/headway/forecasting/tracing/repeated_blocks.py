"""Find the blocks that a model repeats, so that a trace of a few of them can be extrapolated to all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

MIN_REPETITIONS = 16
"""Minimum number of repetitions of a sequence of blocks for which extrapolation saves time.

Extrapolation needs traces of the model with 3, 4 and 5 repetitions, which together cost as much as one with 12.
"""


@dataclass(frozen=True)
class RepeatedBlocks:
    """Location of a model's repeated blocks: a ModuleList or Sequential that is periodic from index `start` to its end.

    A repetition is one occurrence of the sequence of `period` blocks.

    Attributes:
        path: Path of the ModuleList or Sequential in the model.
        length: Number of blocks in the ModuleList or Sequential.
        period: Number of blocks after which the same sequence of blocks starts again.
        start: Index of the first block that is part of the repetition.
    """

    path: str
    length: int
    period: int
    start: int

    @property
    def count(self) -> int:
        """Number of times that the sequence of `period` blocks is repeated."""
        return (self.length - self.start) // self.period

    def shorten(self, model: nn.Module, count: int) -> None:
        """Delete blocks at the end of the list in place until the sequence of blocks occurs `count` times.

        Args:
            model: Model with the repeated blocks.
            count: Number of occurrences to keep.
        """
        blocks: Any = model.get_submodule(self.path)
        del blocks[self.length - (self.count - count) * self.period :]

    def name_in_first(self, name: str) -> str:
        """Return the name of the parameter that corresponds to the given one in the first sequence of repeated blocks.

        The name of a parameter outside of the repeated blocks is returned unchanged.

        Args:
            name: Name of a parameter in the model.
        """
        prefix = f"{self.path}." if self.path else ""
        index, dot, rest = name.removeprefix(prefix).partition(".")
        if not name.startswith(prefix) or not index.isdecimal() or int(index) < self.start:
            return name
        return f"{prefix}{self.start + (int(index) - self.start) % self.period}{dot}{rest}"


def find_blocks(model: nn.Module) -> RepeatedBlocks | None:
    """Return the location of the model's repeated blocks, or None if no sequence repeats at least `MIN_REPETITIONS` times.

    If there are several lists of repeated blocks, the one with the most modules is used.
    """
    candidates: list[tuple[int, RepeatedBlocks]] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < MIN_REPETITIONS:
            continue
        blocks = list(module)
        descriptions = _describe_blocks(blocks)
        for period in range(1, len(blocks) // MIN_REPETITIONS + 1):
            start = len(blocks) - period
            while start > 0 and descriptions[start - 1] == descriptions[start - 1 + period]:
                start -= 1
            repeated = RepeatedBlocks(path, len(blocks), period, start)
            if repeated.count >= MIN_REPETITIONS:
                num_modules = sum(1 for block in blocks[start:] for _ in block.modules())
                candidates.append((num_modules, repeated))
                break
    return max(candidates, key=lambda pair: pair[0])[1] if candidates else None


def _describe_blocks(blocks: Sequence[nn.Module]) -> list[dict[str, "_ModuleDescription"]]:
    """Return the descriptions of each block's modules, by name. Blocks with equal descriptions are treated as equal.

    An attribute that equals the block's index in every block is left out.
    """
    all_parts = [{name: _describe_module(module) for name, module in block.named_modules()} for block in blocks]
    # Pairs of (name of a submodule, attribute) that contain the block's index, such as `layer_idx` in transformers.
    indices = {
        (name, key)
        for name, first_module in all_parts[0].items()
        for key in first_module.attributes
        if all(name in parts and parts[name].attributes.get(key, -1) == index for index, parts in enumerate(all_parts))
    }
    for parts in all_parts:
        for name, key in indices:
            del parts[name].attributes[key]
    return all_parts


class _ModuleDescription(NamedTuple):
    """Properties of a module that must be equal in blocks that count as repetitions of each other.

    Attributes:
        module_type: Class of the module.
        attributes: Values of attributes with simple types, types of all other attributes, and numbers of hooks.
        tensors: Pairs of (name, description) of the parameters and buffers. A description is a tuple of shape, dtype
            and `requires_grad`, or None for a parameter or buffer that is None.
    """

    module_type: type
    attributes: dict[str, Any]
    tensors: list[tuple[str, Any]]


def _describe_module(module: nn.Module) -> _ModuleDescription:
    """Return a description of a module that is equal for modules that differ only in the values of their tensors."""
    own_tensors = {**module._parameters, **module._buffers}
    tensors = [
        (name, None if each is None else (each.shape, each.dtype, each.requires_grad))
        for name, each in own_tensors.items()
    ]
    values = {
        key: value if isinstance(value, bool | int | float | str | tuple | torch.dtype) else type(value)
        for key, value in vars(module).items()
    }
    hooks = {f"{key}()": len(value) for key, value in vars(module).items() if key.endswith("_hooks")}
    return _ModuleDescription(type(module), values | hooks, tensors)
