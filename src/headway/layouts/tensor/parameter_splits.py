"""`ParameterSplit`: along which dimension each parameter is split, and the DTensors that replace the parameters."""

from collections.abc import Container
from typing import NamedTuple

import torch

from headway.common.optional import LazyModule
from headway.core.strategies.blocks import find_parameter_owners
from headway.core.strategies.fully_sharded import dtensors
from headway.errors import ConfigError, PrepareError
from headway.layouts.tensor import plans, styles
from headway.layouts.tensor.crossings import SplitAxis, take_packed_chunks
from headway.layouts.tensor.plans import ModelSplit
from headway.layouts.tensor.styles import SplitModule

tensor = LazyModule("torch.distributed.tensor")
placements = LazyModule("torch.distributed.tensor.placement_types")


class ParameterSplit(NamedTuple):
    """How a parameter is split across the ranks of tensor parallelism.

    Attributes:
        dim: Dimension along which the parameter is sharded.
        factor: Number of matrices that are packed along this dimension. Each of them is sharded.
    """

    dim: int
    factor: int = 1


SplitDimensions = dict[int, ParameterSplit]
"""How each parameter is split, by the parameter's `id`. Replicated parameters have no entry."""


def find_dimensions(model: torch.nn.Module, model_split: ModelSplit, axis: SplitAxis) -> SplitDimensions:
    """Return how each parameter is split. Parameters that stay replicated are left out.

    Modules that share a split parameter, but are not in the plan, are added to `model_split`.

    Args:
        model: Model to split.
        model_split: Modules that the plan splits.
        axis: Mesh axis of tensor parallelism.

    Raises:
        ConfigError: If the plan splits a shared parameter in two ways.
        PrepareError: If a parameter cannot be divided among the ranks, if a module that shares it cannot be split, or if
            a `ParallelStyle` of torch would untie it.
    """
    dimensions: SplitDimensions = {}
    for parameter, owners in find_parameter_owners(model).values():
        paths = [f"{name}.{key}" if name else key for name, _, key in owners]
        splits = [_find_split(model_split, name, key, parameter) for name, _, key in owners]
        with_torch_style = [
            name
            for name, *_ in owners
            if any(path in model_split.torch_styles for path in (name, *plans.list_ancestors(name)))
        ]
        if len(owners) > 1 and with_torch_style:
            raise PrepareError(
                f"{' and '.join(paths)} are one parameter, which a ParallelStyle object would untie; give {with_torch_style[0]!r} a "
                "style by name, such as 'colwise_gather_output'"
            )
        distinct_splits = {split for split in splits if split is not None}
        if len(distinct_splits) > 1:
            raise ConfigError(
                f"{' and '.join(paths)} are one parameter, but the tensor-parallel plan splits it in two ways"
            )
        if not distinct_splits:
            continue
        parameter_split = distinct_splits.pop()
        dimensions[id(parameter)] = parameter_split
        _check_size(paths[0], parameter, parameter_split, axis)
        for (name, _, key), split in zip(owners, splits):
            if split is None:  # the plan omits this module, which shares the parameter
                tied_module = _make_tied_module(model, name, key, parameter_split.dim, model_split, axis)
                model_split.split_modules[name] = tied_module
    return dimensions


def check_packed_rows(model: torch.nn.Module, dimensions: SplitDimensions) -> None:
    """Raise `PrepareError` if several matrices are packed along the first dimension, along which FSDP shards, too."""
    for name, parameter in model.named_parameters():
        split = dimensions.get(id(parameter))
        if split is not None and split.dim == 0 and split.factor > 1:
            raise PrepareError(
                f"{name!r} packs several matrices along its first dimension, along which the layout also shards it; use tensor "
                "parallelism alone or with ddp, or use 'colwise_gather_output' for it and for the next matrix 'rowwise_split_input'"
            )


def _find_split(model_split: ModelSplit, name: str, key: str, parameter: torch.Tensor) -> ParameterSplit | None:
    """Return how the plan splits a parameter of a module, or None if it is replicated.

    Args:
        model_split: Modules and parameters that the plan splits.
        name: Name of the module.
        key: Name of the parameter in the module.
        parameter: Parameter.
    """
    style = model_split.parameters.get(f"{name}.{key}" if name else key)
    if style is None and name in model_split.split_modules:
        style = model_split.split_modules[name].style
    dim = None if style is None else style.find_shard_dim(key, parameter)
    if style is None or dim is None:
        return None
    return ParameterSplit(dim, style.factor)


def _check_size(name: str, parameter: torch.Tensor, split: ParameterSplit, axis: SplitAxis) -> None:
    """Raise `PrepareError` if packed matrices cannot be divided evenly, or if the last rank would get an empty shard.

    Args:
        name: Name of the parameter, for the message.
        parameter: Full parameter.
        split: How the parameter will be split.
        axis: Mesh axis of tensor parallelism.
    """
    dim, factor = split
    size = parameter.shape[dim] if dim < parameter.dim() else 0
    if factor > 1 and size % (factor * axis.size):
        raise PrepareError(
            f"{name!r} packs {factor} matrices along dimension {dim} of {tuple(parameter.shape)}, which cannot be divided among "
            f"{axis.size} ranks; use another number of ranks, or leave it out of the plan"
        )
    largest_shard = -(-size // axis.size)  # the quotient, rounded up
    if size <= largest_shard * (axis.size - 1):  # the other ranks' shards leave nothing for the last rank
        raise PrepareError(
            f"{name!r} of shape {tuple(parameter.shape)} cannot be split along dimension {dim} across {axis.size} ranks; use fewer "
            "ranks, or leave it out of the plan"
        )


def _make_tied_module(
    model: torch.nn.Module, name: str, key: str, dim: int, model_split: ModelSplit, axis: SplitAxis
) -> SplitModule:
    """Return a `SplitModule` for a module that the plan omits but that shares a parameter with a split module.

    Args:
        model: Model that will be split.
        name: Name of the module.
        key: Name of the shared parameter in the module.
        dim: Dimension along which the parameter is split.
        model_split: Modules that the plan splits.
        axis: Mesh axis of tensor parallelism.

    Raises:
        PrepareError: If the module cannot be split along the dimension of the shared parameter.
    """
    module = model.get_submodule(name)
    style: styles.SplitStyle | None = None
    if key == "weight" and name not in model_split.split_modules:
        if isinstance(module, torch.nn.Embedding):
            style = styles.EmbeddingRowwise() if dim == 0 else styles.EmbeddingColwise()
        elif isinstance(getattr(module, "out_features", None), int):  # a linear layer
            style = styles.Colwise(gathers_output=True) if dim == 0 else styles.Rowwise(shards_input=True)
    reason = "the plan keeps it replicated" if style is None else style.describe_misfit(module, axis.size)
    if style is None or reason is not None:
        raise PrepareError(
            f"{name!r} shares its {key} with a module that is split, but cannot be split in the same way: {reason}; give both a "
            "style, or neither"
        )
    return SplitModule(module, name, axis, style)


def place_parameters(
    model: torch.nn.Module, dimensions: SplitDimensions, axis: SplitAxis, other_stage_ids: Container[int]
) -> None:
    """Replace the parameters of a model with DTensors. Shared parameters stay shared.

    Parameters that are DTensors already, or that only other pipeline stages hold, are not replaced.

    Args:
        model: Model to split.
        dimensions: How parameters are split. The others are replicated.
        axis: Mesh axis of tensor parallelism.
        other_stage_ids: IDs of parameters that only other pipeline stages hold.
    """
    for parameter, owners in find_parameter_owners(model).values():
        if isinstance(parameter, tensor.DTensor) or id(parameter) in other_stage_ids:
            continue  # converted by a torch style, or on another stage of a pipeline
        placed = place_parameter(parameter, dimensions.get(id(parameter)), axis)
        for _, module, key in owners:
            module._parameters[key] = placed


def place_parameter(parameter: torch.nn.Parameter, split: ParameterSplit | None, axis: SplitAxis) -> torch.nn.Parameter:
    """Return a DTensor parameter that replaces a full parameter, with the attributes of the full parameter.

    Args:
        parameter: Full parameter.
        split: How the parameter is split. None: it is replicated.
        axis: Mesh axis of tensor parallelism.
    """
    local, placement = parameter.detach(), tensor.Replicate()
    if split is not None:
        dim, factor = split
        local = take_packed_chunks(local, axis, dim, factor)
        placement = placements._StridedShard(dim, split_factor=factor) if factor > 1 else tensor.Shard(dim)
    stride = parameter.stride() if split is None else None
    dtensor = dtensors.wrap_shard(local, axis.mesh, [placement], parameter.shape, stride)
    placed = torch.nn.Parameter(dtensor, requires_grad=parameter.requires_grad)
    placed.__dict__.update(parameter.__dict__)
    return placed
