"""Sharded models and their optimizers in Accelerate's folders: torch.distributed.checkpoint's files, a part from each rank.

A library that keeps checkpoints of its own (transformers' Trainer) calls these; `save_state` needs none of them.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from headway.errors import CheckpointError

FSDP_AUTO_WRAP_POLICY = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
FSDP_SHARDING_STRATEGY = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]

_PARTIAL = StateDictOptions(strict=False)


def _folder(root: Any, word: str, index: int) -> Path:
    return Path(root) / f"{word}_{index}"


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: torch.nn.Module,
    output_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write a prepared model's weights into `pytorch_model_fsdp_N` below `output_dir`; called on all ranks.

    Args:
        fsdp_plugin: ignored: the files are sharded whatever it says.
        accelerator: that prepared the model.
        model: prepared, with its parameters sharded.
        output_dir: the checkpoint's folder.
        model_index: the N.
        adapter_only: only the parameters that learn.
        use_dcp: ignored, as the files are torch.distributed.checkpoint's.
    """
    weights = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=adapter_only))
    folder = _folder(output_dir, "pytorch_model_fsdp", model_index)
    save({"model": weights}, checkpoint_id=folder)


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: torch.nn.Module,
    input_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Read what `save_fsdp_model` wrote into the prepared model, on any number of ranks; called on all.

    Returns:
        The missing and unexpected keys, as `load_state_dict` gives them.

    Raises:
        CheckpointError: there is no such folder.
    """
    folder = _folder(input_dir, "pytorch_model_fsdp", model_index)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder} with a sharded model; save_fsdp_model writes it")
    options = StateDictOptions(ignore_frozen_params=adapter_only, strict=not adapter_only)
    weights = get_model_state_dict(model, options=options)
    load({"model": weights}, checkpoint_id=folder)
    return set_model_state_dict(model, weights, options=options)


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: torch.nn.Module,
    output_dir: Any,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write a prepared optimizer's state into `optimizer_N` below `output_dir`; called on all ranks."""
    state = get_optimizer_state_dict(model, _torch_optimizer(optimizer))
    save({"optimizer": state}, checkpoint_id=_folder(output_dir, "optimizer", optimizer_index))


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: torch.nn.Module,
    input_dir: Any,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Read what `save_fsdp_optimizer` wrote, on any number of ranks; called on all.

    Raises:
        CheckpointError: there is no such folder.
    """
    folder = _folder(input_dir, "optimizer", optimizer_index)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder} with an optimizer's state; save_fsdp_optimizer writes it")
    inner = _torch_optimizer(optimizer)
    state = get_optimizer_state_dict(model, inner)
    load({"optimizer": state}, checkpoint_id=folder)
    set_optimizer_state_dict(model, inner, state, options=_PARTIAL)


def _torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    inner = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(inner, torch.optim.Optimizer)
    return inner


def get_parameters_from_modules(
    modules: Iterable[torch.nn.Module] | str | None, model: torch.nn.Module, device: Any
) -> set[torch.nn.Parameter]:
    """The parameters of some modules, moved to `device`; for `ignored_modules`.

    Args:
        modules: the modules, a regular expression that their full names match, or None for none.
        model: that they are a part of.
        device: where they go.
    """
    import re

    if modules is None:
        return set()
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    return {parameter for module in modules for parameter in module.to(device).parameters()}
