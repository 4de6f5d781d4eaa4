"""Attributes that count attention heads, which tensor parallelism divides by the number of ranks.

In attention, each rank computes some of the heads. So attributes that count heads must contain the number of heads on
one rank.
"""

import re

import torch

from headway.core.config.parallelism import TensorParallelOptions
from headway.errors import ConfigError, PrepareError
from headway.layouts.tensor import plans, styles
from headway.layouts.tensor.plans import ModelSplit
from headway.layouts.tensor.styles import Colwise

COUNTS = re.compile(r"(num|n)?_?(local_|attention_|key_value_|query_|kv_|q_|k_|v_)*n?heads?")
"""Regular expression for names of attributes that count attention heads."""
_HEAD_SIZES = ("head_dim", "head_size", "d_head", "dim_head", "attention_head_size")
"""Names of attributes that contain the number of features of one attention head."""


def check_heads(model: torch.nn.Module, model_split: ModelSplit, size: int, options: TensorParallelOptions) -> None:
    """Raise an error if a plan splits an attention head, or if the options omit an attribute that counts heads.

    Args:
        model: Model to split.
        model_split: Modules that the plan splits.
        size: Number of ranks.
        options: Options with the patterns `divide` and `keep`, which match names of attributes.

    Raises:
        PrepareError: If a head would be split, or if neither `divide` nor `keep` matches an attribute that counts
            heads.
        ConfigError: If a pattern of `divide` or `keep` matches nothing, or if the value of an attribute that `divide`
            matches is not a multiple of `size`.
    """
    _check_names(model, size, options)
    for split_module in model_split.split_modules.values():
        if not isinstance(split_module.style, Colwise) or split_module.style.gathers_output:
            continue
        name = split_module.name  # for a layer with adapters, the name of the wrapper
        parent_name = name.rpartition(".")[0]
        parent = model.get_submodule(parent_name)
        _check_whole_heads(name, parent, styles.num_outputs(split_module.module), size)
        if not type(parent).__module__.startswith("transformers."):
            _check_counts(parent_name, parent, size, options)


def divide_counts(model: torch.nn.Module, model_split: ModelSplit, size: int, options: TensorParallelOptions) -> None:
    """Divide the attributes that match `options.divide`, such as head counts, by the number of ranks.

    For each `Conv1D` that is split by columns, its stored number of outputs (`nf`) is divided, too.

    Args:
        model: Model to split.
        model_split: Modules that the plan splits.
        size: Number of ranks.
        options: Options with the patterns `divide`, which match names of attributes.
    """
    for split_module in model_split.split_modules.values():
        if isinstance(split_module.style, Colwise) and split_module.style.is_transposed:
            split_module.module.nf = styles.num_outputs(split_module.module) // size  # type: ignore[assignment]
    for _, module, key in find_named_integers(model, options.divide):
        setattr(module, key, int(getattr(module, key)) // size)


def _check_whole_heads(name: str, parent: torch.nn.Module, outputs: int, size: int) -> None:
    """Raise `PrepareError` if the heads that a colwise layer computes cannot be divided among the ranks.

    The number of heads is derived from a head size in the parent's attributes, or from its transformers config.

    Args:
        name: Name of the layer.
        parent: Module that contains the layer, such as an attention.
        outputs: Number of output features of the layer.
        size: Number of ranks.
    """
    for key in _HEAD_SIZES:
        head_size = getattr(parent, key, None)
        if not isinstance(head_size, int) or head_size <= 1 or outputs % head_size:
            continue
        num_heads = outputs // head_size
        if num_heads % size:
            raise PrepareError(
                f"{name!r} has {num_heads} heads, which cannot be divided among {size} ranks of tensor parallelism; use a "
                "number of ranks that divides them, or leave the attention out of the plan"
            )
    config = getattr(parent, "config", None)
    layer_name = name.rpartition(".")[2]
    config_keys = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"}
    count = getattr(config, config_keys.get(layer_name, ""), None)
    if isinstance(count, int) and count % size:
        raise PrepareError(
            f"{name!r} has {config_keys[layer_name]}={count}, which cannot be divided among {size} ranks of tensor parallelism; use "
            "a number of ranks that divides it, or leave the attention out of the plan"
        )


def _check_counts(name: str, parent: torch.nn.Module, size: int, options: TensorParallelOptions) -> None:
    """Raise `PrepareError` if a module has an attribute that counts heads and that the options do not mention.

    Args:
        name: Name of the module. "" for the model.
        parent: Module that contains a split layer.
        size: Number of ranks.
        options: Options with the patterns `divide` and `keep`.
    """
    for key, value in vars(parent).items():
        path = f"{name}.{key}" if name else key
        is_count = isinstance(value, int) and not isinstance(value, bool) and value > 1 and COUNTS.fullmatch(key)
        if is_count and not any(plans.is_match(pattern, path) for pattern in (*options.divide, *options.keep)):
            raise PrepareError(
                f"{name or type(parent).__name__!r} has {key}={value}, but each rank has {value}/{size} of them once its matrices "
                f"are split. If its forward uses this number (in view or reshape), pass divide=({path!r},), with '*' for the parts "
                f"of the name that differ between blocks. If not (view(..., -1, head_dim)), pass keep=({path!r},)"
            )


def _check_names(model: torch.nn.Module, size: int, options: TensorParallelOptions) -> None:
    """Raise `ConfigError` if a pattern of `divide` or `keep` matches no attribute, or if one cannot be divided."""
    for pattern in (*options.divide, *options.keep):
        attributes = find_named_integers(model, (pattern,))
        if not attributes:
            raise ConfigError(
                f"divide or keep names {pattern!r}, but {type(model).__name__} has no such integer attribute. If another model has "
                "it, pass both models to one prepare() call"
            )
        for name, module, key in attributes:
            if pattern in options.divide and getattr(module, key) % size:
                raise ConfigError(
                    f"{name!r} is {getattr(module, key)}, which cannot be divided among {size} ranks of tensor parallelism; use a "
                    "number of ranks that divides it"
                )


def find_named_integers(model: torch.nn.Module, patterns: tuple[str, ...]) -> list[tuple[str, torch.nn.Module, str]]:
    """Return the integer attributes of a model's modules whose name matches a pattern.

    Args:
        model: Model.
        patterns: Patterns of full names, such as "blocks.*.attn.num_heads".

    Returns:
        Tuples of (full name, module, name of the attribute in the module).
    """
    attributes = []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            path = f"{name}.{key}" if name else key
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            if is_integer and any(plans.is_match(pattern, path) for pattern in patterns):
                attributes.append((path, module, key))
    return attributes
