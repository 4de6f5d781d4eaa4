"""Find the modules whose activations sequence parallelism shards, and check that they can compute on sequence shards.

With sequence parallelism, each rank computes on its sequence shard between the split matrices of a stack of blocks.
The first block shards the sequence and the last one gathers it. Within a block, modules with split matrices get the
full sequence and return one term of a sum. Norms and dropouts between these modules compute on shards.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from headway.errors import PrepareError
from headway.layouts.tensor.plans import ModelSplit
from headway.layouts.tensor.styles import BoundaryLayout, Colwise, PartialGradients, Rowwise, SplitModule


@dataclass
class SequenceSplit:
    """Part of a model whose activations are sharded along the sequence.

    Attributes:
        stacks: For each stack of blocks, the names of its blocks in order. An encoder and a decoder are two stacks.
        gathered: Names of modules within the blocks that get the full sequence.
        partial: Names of modules whose parameters act only on a sequence shard.
    """

    stacks: list[list[str]]
    gathered: list[str] = field(default_factory=list)
    partial: set[str] = field(default_factory=set)


def arrange_sequences(model: torch.nn.Module, model_split: ModelSplit) -> SequenceSplit:
    """Return the part of a model whose activations sequence parallelism shards, and configure its split modules.

    The `boundary` of each split module in a block is set to the layout of the activations at its input and output.

    Args:
        model: Model to split.
        model_split: Modules that the plan splits.

    Raises:
        PrepareError: If the model has no stack of blocks with split matrices, or if a block contains a module that
            cannot compute on sequence shards. Also if the plan contains `ParallelStyle` objects.
    """
    if model_split.torch_styles:
        raise PrepareError(
            "sequence_parallel=True works only with styles that are given by name. In a plan of ParallelStyle objects, torch's "
            "SequenceParallel and PrepareModuleInput split the sequences. Leave the option out"
        )
    sequences = SequenceSplit(_find_stacks(model, model_split))
    for stack in sequences.stacks:
        for block_name in stack:
            _arrange_within(block_name, model.get_submodule(block_name), model_split, sequences)
            _check_rowwise_matrices(block_name, model_split, sequences)
    return sequences


def _find_stacks(model: torch.nn.Module, model_split: ModelSplit) -> list[list[str]]:
    """Return the names of the blocks in each outermost `ModuleList` whose modules all contain a rowwise matrix.

    Raises:
        PrepareError: If there is no such `ModuleList`.
    """
    rowwise = _list_rowwise(model_split)
    stacks: list[list[str]] = []
    outer_blocks: list[str] = []  # blocks of all stacks so far
    for name, module in model.named_modules():  # a module comes before its submodules
        if not isinstance(module, torch.nn.ModuleList) or len(module) == 0:
            continue
        if any(f"{name}.".startswith(f"{block}.") for block in outer_blocks):
            continue
        blocks = [f"{name}.{index}" for index in range(len(module))]
        if all(any(row.startswith(f"{block}.") for row in rowwise) for block in blocks):
            stacks.append(blocks)
            outer_blocks += blocks
    if not stacks:
        raise PrepareError(
            f"sequence_parallel=True needs a ModuleList of blocks that each have a rowwise matrix, but {type(model).__name__} "
            "has none with this plan; leave the option out, or give torch's ParallelStyle objects"
        )
    return stacks


def _arrange_within(name: str, module: torch.nn.Module, model_split: ModelSplit, sequences: SequenceSplit) -> None:
    """Add a module and its children to the part with sequence shards. The module's input must be a sequence shard.

    Args:
        name: Name of the module.
        module: Block, or module within a block, to add.
        model_split: Modules that the plan splits.
        sequences: Part with sequence shards, to which the module is added.

    Raises:
        PrepareError: If the module cannot compute on sequence shards.
    """
    sequences.partial.add(name)
    for child_name, child in module.named_children():
        _arrange_child(f"{name}.{child_name}", child, model_split, sequences)


def _arrange_child(name: str, child: torch.nn.Module, model_split: ModelSplit, sequences: SequenceSplit) -> None:
    """Add a module within a block to the part with sequence shards, and set the boundaries of the split modules in it.

    There are four cases:

    - A split matrix gathers its input (colwise), or scatters its output (rowwise).
    - A module without split matrices computes on sequence shards.
    - A module whose own colwise matrices get its input, such as an attention or MLP, gets the full sequence.
    - The children of any other module, such as a container, are added one by one.

    Args:
        name: Name of the module.
        child: Module to add. Its input is a sequence shard.
        model_split: Modules that the plan splits.
        sequences: Part with sequence shards, to which the module is added.

    Raises:
        PrepareError: If the plan gives a module or parameter a style that is not supported here. Also if parameters
            among split matrices are replicated.
    """
    split_within = {
        path: split_module
        for path, split_module in model_split.split_modules.items()
        if path == name or path.startswith(f"{name}.")
    }
    _check_sequence_styles(name, child, split_within, model_split)
    matrices = {
        path: split_module
        for path, split_module in split_within.items()
        if not isinstance(split_module.style, PartialGradients)
    }
    if name in matrices:
        matrices[name].boundary = BoundaryLayout.SEQUENCE
        return
    if not matrices:
        sequences.partial.update(f"{name}.{path}" if path else name for path, _ in child.named_modules())
        return
    replicated = _find_replicated(name, child, split_within, model_split)
    colwise = [path for path, split_module in matrices.items() if isinstance(split_module.style, Colwise)]
    has_own_colwise = any(path.rpartition(".")[0] == name for path in colwise)
    if not has_own_colwise and (replicated is not None or not colwise or isinstance(child, torch.nn.ModuleList)):
        _arrange_within(name, child, model_split, sequences)
        return
    if replicated is not None:
        raise PrepareError(
            f"sequence_parallel=True: {replicated.name!r} ({replicated.class_name}) stays replicated among sharded matrices "
            f"of {name!r}, where its gradient would be counted once for each rank; split it, or leave the option out"
        )
    sequences.gathered.append(name)
    for split_module in matrices.values():
        is_rowwise = isinstance(split_module.style, Rowwise)
        split_module.boundary = BoundaryLayout.SEQUENCE if is_rowwise else BoundaryLayout.GATHERED


def _check_sequence_styles(
    name: str, child: torch.nn.Module, split_within: Mapping[str, SplitModule], model_split: ModelSplit
) -> None:
    """Raise an error if the plan gives anything in a module a style that sequence parallelism does not support.

    Args:
        name: Name of `child` in the model.
        child: Module within a block.
        split_within: Split modules in `child`, by name in the model.
        model_split: Split parameters of the model.

    Raises:
        PrepareError: If the style of a split module is not supported. Also if the plan names a parameter directly, unless
            the parameter is that of an embedding.
    """
    unsupported = [path for path, split_module in split_within.items() if not _supports_sequences(split_module)]
    for path in model_split.parameters:
        if path.startswith(f"{name}."):
            owner_name = path.rpartition(".")[0]
            owner = child.get_submodule(owner_name.removeprefix(name).removeprefix("."))
            if not isinstance(owner, torch.nn.Embedding):  # an embedding is a table with a column per head
                unsupported.append(path)
    if unsupported:
        raise PrepareError(
            f"sequence_parallel=True supports the styles colwise, packed_colwise, rowwise and replicated_with_grad_allreduce within "
            f"blocks, but the plan gives {unsupported[0]!r} another; leave the option out"
        )


class _ReplicatedModule(NamedTuple):
    """Module with a parameter that the plan does not split.

    Attributes:
        name: Name of the module in the model.
        class_name: Name of its class.
    """

    name: str
    class_name: str


def _find_replicated(
    name: str, child: torch.nn.Module, split_within: Mapping[str, SplitModule], model_split: ModelSplit
) -> _ReplicatedModule | None:
    """Return the first module in `child` that has a replicated parameter of its own, or None if there is none.

    Args:
        name: Name of `child` in the model.
        child: Module to search.
        split_within: Split modules in `child`, by name.
        model_split: Split parameters of the model.
    """
    for path, module in child.named_modules():
        full_name = f"{name}.{path}" if path else name
        keys = [key for key, _ in module.named_parameters(recurse=False)]
        if full_name not in split_within and any(f"{full_name}.{key}" not in model_split.parameters for key in keys):
            return _ReplicatedModule(full_name, type(module).__name__)
    return None


def _supports_sequences(split_module: SplitModule) -> bool:
    """Whether sequence parallelism supports the style of a split module within a block."""
    style = split_module.style
    if isinstance(style, Colwise):
        return not style.gathers_output
    return isinstance(style, PartialGradients) or (isinstance(style, Rowwise) and not style.shards_input)


def _check_rowwise_matrices(block_name: str, model_split: ModelSplit, sequences: SequenceSplit) -> None:
    """Raise an error if a module in a block gets the full sequence, but no rowwise matrix scatters its output again.

    Args:
        block_name: Name of the block.
        model_split: Modules that the plan splits.
        sequences: Part with sequence shards, which contains the arranged block.

    Raises:
        PrepareError: If there is such a module.
    """
    rowwise = [name for name in _list_rowwise(model_split) if name.startswith(f"{block_name}.")]
    gathered = [name for name in sequences.gathered if name.startswith(f"{block_name}.")]
    without_rowwise = [name for name in gathered if not any(row.startswith(f"{name}.") for row in rowwise)]
    # A rowwise matrix outside of all gathered modules could follow the colwise matrices of a module without one.
    has_rowwise_outside = any(not any(row.startswith(f"{name}.") for name in gathered) for row in rowwise)
    if without_rowwise and not has_rowwise_outside:
        raise PrepareError(
            f"sequence_parallel=True: {without_rowwise[0]!r} has colwise matrices, but no rowwise matrix after them"
        )


def _list_rowwise(model_split: ModelSplit) -> list[str]:
    """Return the names of the modules that are split by rows."""
    return [name for name, split_module in model_split.split_modules.items() if isinstance(split_module.style, Rowwise)]
