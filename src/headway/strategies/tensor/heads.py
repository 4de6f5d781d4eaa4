"""Attention heads under tensor parallelism: whole heads on each rank, and forwards that count what a rank has."""

import re

import torch

from headway.config.parallelism import TensorParallelOptions
from headway.errors import ConfigError, PrepareError
from headway.strategies.tensor import plans
from headway.strategies.tensor.plans import ModelSplit
from headway.strategies.tensor.styles import Colwise

_COUNTS = re.compile(r"(num|n)?_?(local_|attention_|key_value_|query_|kv_|q_|k_|v_)*n?heads?")
_SIZES = ("head_dim", "head_size", "d_head", "dim_head", "attention_head_size")


def check(model: torch.nn.Module, cuts: ModelSplit, size: int, options: TensorParallelOptions) -> None:
    """Each rank must get whole heads, and the module's own count of them must be one that forward may use.

    Raises:
        PrepareError: heads that would be cut in two, or a count that would be that of all ranks.
        ConfigError: a pattern of `divide` or `keep` that names nothing, or a count that does not divide.
    """
    _check_names(model, size, options)
    for site in cuts.sites.values():
        if not isinstance(site.style, Colwise) or site.style.is_gathered:
            continue
        name = site.name  # of the layer, if it has adapters
        parent_name = name.rpartition(".")[0]
        parent = model.get_submodule(parent_name)
        _check_whole(name, parent, int(site.module.out_features), size)  # type: ignore[arg-type]
        if not type(parent).__module__.startswith("transformers."):
            _check_counts(parent_name, parent, size, options)


def divide(model: torch.nn.Module, size: int, options: TensorParallelOptions) -> None:
    """Make the counts that `divide` names those of a rank."""
    for _name, module, key in _named(model, options.divide):
        setattr(module, key, int(getattr(module, key)) // size)


def _check_whole(name: str, parent: torch.nn.Module, outputs: int, size: int) -> None:
    for key in _SIZES:
        width = getattr(parent, key, None)
        if isinstance(width, int) and width > 1 and outputs % width == 0 and outputs // width % size:
            raise PrepareError(
                f"{name!r} has {outputs // width} heads, which cannot be divided among {size} ranks of tensor parallelism; use a "
                "number of ranks that divides them, or leave the attention out of the plan"
            )
    config = getattr(parent, "config", None)
    leaf = name.rpartition(".")[2]
    counts = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"}
    count = getattr(config, counts.get(leaf, ""), None)
    if isinstance(count, int) and count % size:
        raise PrepareError(
            f"{name!r} has {counts[leaf]}={count}, which cannot be divided among {size} ranks of tensor parallelism; use a number of "
            "ranks that divides it, or leave the attention out of the plan"
        )


def _check_counts(name: str, parent: torch.nn.Module, size: int, options: TensorParallelOptions) -> None:
    for key, value in vars(parent).items():
        path = f"{name}.{key}" if name else key
        is_count = isinstance(value, int) and not isinstance(value, bool) and value > 1 and _COUNTS.fullmatch(key)
        if is_count and not any(plans.fits(pattern, path) for pattern in (*options.divide, *options.keep)):
            raise PrepareError(
                f"{name or type(parent).__name__!r} has {key}={value}, but each rank has {value}/{size} of them once its matrices "
                f"are split. If its forward uses this number (in view or reshape), have it divided: divide=({path!r},), with '*' for "
                f"the parts that differ between blocks; if not (view(..., -1, head_dim)), say so: keep=({path!r},)"
            )


def _check_names(model: torch.nn.Module, size: int, options: TensorParallelOptions) -> None:
    for pattern in (*options.divide, *options.keep):
        found = list(_named(model, (pattern,)))
        if not found:
            raise ConfigError(
                f"divide or keep names {pattern!r}, but {type(model).__name__} has no such integer attribute"
            )
        for name, module, key in found:
            if pattern in options.divide and getattr(module, key) % size:
                raise ConfigError(
                    f"{name!r} is {getattr(module, key)}, which cannot be divided among {size} ranks of tensor parallelism; use a "
                    "number of ranks that divides it"
                )


def _named(model: torch.nn.Module, patterns: tuple[str, ...]) -> list[tuple[str, torch.nn.Module, str]]:
    return [
        (path, module, key)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, int) and not isinstance(value, bool)
        for path in [f"{name}.{key}" if name else key]
        if any(plans.fits(pattern, path) for pattern in patterns)
    ]
