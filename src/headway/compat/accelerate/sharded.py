"""Checkpoint functions for sharded models and optimizers in Accelerate's file formats.

There are two formats: a directory with one file per rank, and one file with full tensors. The FSDP plugin's
`state_dict_type` selects the format to save, and the format to load is detected. Libraries that write their own
checkpoints, such as transformers' Trainer, call these functions. `save_state` does not use them.
"""

from collections.abc import Iterable
from dataclasses import replace
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

from headway.compat.accelerate.modules.models import is_peft_model, model_has_dtensor
from headway.errors import CheckpointError

FSDP_AUTO_WRAP_POLICY = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
FSDP_SHARDING_STRATEGY = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]

_MODEL_STEM, _OPTIMIZER_STEM = "pytorch_model_fsdp", "optimizer"
_FULL_STATE_OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True)


def fsdp2_prepare_model(accelerator: Any, model: torch.nn.Module) -> Any:
    """Shard a model in place by preparing it, and return the model. A sharded model is returned unchanged.

    Args:
        accelerator: Accelerator of a run with a sharded layout.
        model: Model to shard.
    """
    return model if model_has_dtensor(model) else accelerator.prepare_model(model)


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: torch.nn.Module,
    output_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write a prepared model's weights into `output_dir`. All ranks must call it.

    Args:
        fsdp_plugin: Plugin whose `state_dict_type` selects the format. With "FULL_STATE_DICT", rank 0 writes full
            tensors into `pytorch_model_fsdp.bin`, or `pytorch_model_fsdp_N.bin` if N > 0. Otherwise each rank writes
            its shards into the directory `pytorch_model_fsdp_N`.
        accelerator: Accelerator that prepared the model.
        model: Prepared model with sharded parameters.
        output_dir: Directory of the checkpoint.
        model_index: Number N in the name of the file or directory. Default: 0.
        adapter_only: Whether to write only the trained weights of a PEFT model. In the sharded format, these are the
            weights of the active adapter under PEFT's names. Default: False.
        use_dcp: Ignored. Shards are always written by torch.distributed.checkpoint.
    """
    is_full = _uses_full_state(fsdp_plugin)
    is_adapter = adapter_only and is_peft_model(model)
    if is_full:
        weights = get_model_state_dict(model, options=replace(_FULL_STATE_OPTIONS, ignore_frozen_params=is_adapter))
    else:
        weights = _read_adapter_state(model) if is_adapter else get_model_state_dict(model)
    _write_state("model", weights, output_dir, _MODEL_STEM, model_index, is_full, accelerator)


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: torch.nn.Module,
    input_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Load a prepared model's weights that `save_fsdp_model` of Headway or Accelerate wrote. All ranks must call it.

    The number of ranks can be different from when the weights were saved.

    Args:
        fsdp_plugin: Ignored. The format is detected.
        accelerator: Accelerator that prepared the model.
        model: Prepared model.
        input_dir: Directory of the checkpoint.
        model_index: Number in the name of the file or directory. Default: 0.
        adapter_only: Whether the file contains only the trained weights of a PEFT model. Default: False.
        use_dcp: Ignored.

    Returns:
        The missing and unexpected keys, as from `load_state_dict`.

    Raises:
        CheckpointError: If `input_dir` contains neither a file nor a directory with the weights.
    """
    accelerator.wait_for_everyone()
    is_adapter = adapter_only and is_peft_model(model)
    path, is_full = _find_saved_state(input_dir, _MODEL_STEM, model_index)
    if is_full:
        options = replace(_make_load_options(accelerator), strict=not is_adapter)
        return set_model_state_dict(model, _read_on_rank_0(path, accelerator), options=options)
    weights = _read_adapter_state(model) if is_adapter else get_model_state_dict(model)
    load({"model": weights}, checkpoint_id=path)
    if is_adapter:
        from peft import set_peft_model_state_dict

        return set_peft_model_state_dict(model, weights, adapter_name=model.active_adapter)
    return set_model_state_dict(model, weights)


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: torch.nn.Module,
    output_dir: Any,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write a prepared optimizer's state into `output_dir`. All ranks must call it.

    Args:
        fsdp_plugin: Plugin whose `state_dict_type` selects the format. With "FULL_STATE_DICT", rank 0 writes full
            tensors into `optimizer.bin`, or `optimizer_N.bin` if N > 0. Otherwise each rank writes its shards into the
            directory `optimizer_N`.
        accelerator: Accelerator that prepared the optimizer.
        optimizer: Prepared optimizer.
        model: Prepared model whose parameters the optimizer updates.
        output_dir: Directory of the checkpoint.
        optimizer_index: Number N in the name of the file or directory. Default: 0.
        use_dcp: Ignored. Shards are always written by torch.distributed.checkpoint.
    """
    is_full = _uses_full_state(fsdp_plugin)
    state = get_optimizer_state_dict(
        model, _unwrap_optimizer(optimizer), options=_FULL_STATE_OPTIONS if is_full else None
    )
    _write_state("optimizer", state, output_dir, _OPTIMIZER_STEM, optimizer_index, is_full, accelerator)


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
    """Load optimizer state that `save_fsdp_optimizer` of Headway or Accelerate wrote. All ranks must call it.

    The number of ranks can be different from when the state was saved.

    Args:
        fsdp_plugin: Ignored. The format is detected.
        accelerator: Accelerator that prepared the optimizer.
        optimizer: Prepared optimizer.
        model: Prepared model whose parameters the optimizer updates.
        input_dir: Directory of the checkpoint.
        optimizer_index: Number in the name of the file or directory. Default: 0.
        adapter_only, use_dcp: Ignored.

    Raises:
        CheckpointError: If `input_dir` contains neither a file nor a directory with the state.
    """
    accelerator.wait_for_everyone()
    inner = _unwrap_optimizer(optimizer)
    path, is_full = _find_saved_state(input_dir, _OPTIMIZER_STEM, optimizer_index)
    if is_full:
        state = _read_on_rank_0(path, accelerator)
        set_optimizer_state_dict(model, inner, state, options=_make_load_options(accelerator))
        return
    state = get_optimizer_state_dict(model, inner)
    load({"optimizer": state}, checkpoint_id=path)
    set_optimizer_state_dict(model, inner, state)


def _uses_full_state(fsdp_plugin: Any) -> bool:
    return "FULL_STATE_DICT" in str(getattr(fsdp_plugin, "state_dict_type", ""))


def _make_path(root: Any, stem: str, index: int) -> Path:
    return Path(root) / (f"{stem}_{index}.bin" if index else f"{stem}.bin")


def _find_saved_state(root: Any, stem: str, index: int) -> tuple[Path, bool]:
    """Return the path of a saved state, and whether it is one file of full tensors.

    A directory of shards takes precedence over a file.

    Args:
        root: Directory of the checkpoint. It can also be the directory of shards itself, as in Accelerate.
        stem: Name of the file or directory without number and suffix, such as "optimizer".
        index: Number in the name.

    Raises:
        CheckpointError: If neither a directory nor a file exists.
    """
    folder, file = Path(root) / f"{stem}_{index}", _make_path(root, stem, index)
    if folder.is_dir():
        return folder, False
    if Path(root).name == folder.name and Path(root).is_dir():
        return Path(root), False
    if file.is_file():
        return file, True
    raise CheckpointError(
        f"{root} contains neither a folder {folder.name} nor a file {file.name}; give a folder that save_fsdp_model and "
        "save_fsdp_optimizer wrote into"
    )


def _write_state(key: str, state: Any, root: Any, stem: str, index: int, is_full: bool, accelerator: Any) -> None:
    """Write a state, sharded with torch.distributed.checkpoint, or as one file on rank 0 if it is a full state dict.

    Args:
        key: Key of the state in a sharded checkpoint.
        state: State dict.
        root: Folder.
        stem: Beginning of the file's or folder's name.
        index: Index of the model or optimizer, part of the name.
        is_full: Whether `state` is a full state dict.
        accelerator: Accelerator of this process.
    """
    if not is_full:
        save({key: state}, checkpoint_id=Path(root) / f"{stem}_{index}")
    elif accelerator.process_index == 0:
        Path(root).mkdir(parents=True, exist_ok=True)
        torch.save(state, _make_path(root, stem, index))


def _read_on_rank_0(file: Path, accelerator: Any) -> Any:
    """Return the contents of a file on rank 0, and an empty dict on all other ranks.

    torch's state dict functions then broadcast rank 0's values to the other ranks.
    """
    return torch.load(file, map_location="cpu", weights_only=True) if accelerator.process_index == 0 else {}


def _make_load_options(accelerator: Any) -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, broadcast_from_rank0=accelerator.num_processes > 1)


def _read_adapter_state(model: Any) -> dict[str, Any]:
    """Return the state dict of the model's active PEFT adapter."""
    from peft import get_peft_model_state_dict

    adapter_state: dict[str, Any] = get_peft_model_state_dict(model, adapter_name=model.active_adapter)
    return adapter_state


def _unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    inner = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(inner, torch.optim.Optimizer)
    return inner


def get_parameters_from_modules(
    modules: Iterable[torch.nn.Module] | str | None, model: torch.nn.Module, device: Any
) -> set[torch.nn.Parameter]:
    """Move modules of a model to a device and return their parameters, as for FSDP's `ignored_modules`.

    Args:
        modules: Modules, or a regular expression that must match their full names. None: no modules.
        model: Model that contains the modules.
        device: Device to move the modules to.
    """
    import re

    if modules is None:
        return set()
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    return {parameter for module in modules for parameter in module.to(device).parameters()}
