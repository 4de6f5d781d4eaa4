"""Sharded models and their optimizers in Accelerate's files: a folder with a part from each rank, or whole tensors in one file.

A library that keeps checkpoints of its own (transformers' Trainer) calls these; `save_state` needs none of them. Saving goes by
the plugin's `state_dict_type`, loading by what is there.
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

_MODEL, _OPTIMIZER = "pytorch_model_fsdp", "optimizer"
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def fsdp2_prepare_model(accelerator: Any, model: torch.nn.Module) -> Any:
    """Prepare a model by itself, which shards it; one that is sharded stays as it is.

    Args:
        accelerator: of a run with shards.
        model: what is sharded, in place; returned.
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
    """Write a prepared model's weights below `output_dir`; called on all ranks.

    Args:
        fsdp_plugin: its `state_dict_type` "FULL_STATE_DICT" writes whole tensors into `pytorch_model_fsdp.bin`, from rank 0;
            otherwise each rank writes its part into the folder `pytorch_model_fsdp_N`.
        accelerator: that prepared the model.
        model: prepared, with its parameters sharded.
        output_dir: the checkpoint's folder.
        model_index: the N.
        adapter_only: of a PEFT model only what learns; in parts, the active adapter by PEFT's names.
        use_dcp: ignored: parts are written by torch.distributed.checkpoint.
    """
    is_whole = _is_whole(fsdp_plugin)
    is_adapter = adapter_only and is_peft_model(model)
    if is_whole:
        weights = get_model_state_dict(model, options=replace(_WHOLE, ignore_frozen_params=is_adapter))
    else:
        weights = _adapter(model) if is_adapter else get_model_state_dict(model)
    _write("model", weights, output_dir, _MODEL, model_index, is_whole, accelerator)


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: torch.nn.Module,
    input_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Read what `save_fsdp_model` wrote, Headway's or Accelerate's, into the prepared model on any number of ranks; called on all.

    Returns:
        The missing and unexpected keys, as `load_state_dict` gives them.

    Raises:
        CheckpointError: neither kind of file is there.
    """
    accelerator.wait_for_everyone()
    is_adapter = adapter_only and is_peft_model(model)
    place, is_whole = _find(input_dir, _MODEL, model_index)
    if is_whole:
        options = replace(_spreading(accelerator), strict=not is_adapter)
        return set_model_state_dict(model, _read_first(place, accelerator), options=options)
    weights = _adapter(model) if is_adapter else get_model_state_dict(model)
    load({"model": weights}, checkpoint_id=place)
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
    """Write a prepared optimizer's state, as `save_fsdp_model` does: `optimizer.bin`, or the folder `optimizer_N`."""
    is_whole = _is_whole(fsdp_plugin)
    state = get_optimizer_state_dict(model, _torch_optimizer(optimizer), options=_WHOLE if is_whole else None)
    _write("optimizer", state, output_dir, _OPTIMIZER, optimizer_index, is_whole, accelerator)


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
    """Read what `save_fsdp_optimizer` wrote, Headway's or Accelerate's, on any number of ranks; called on all.

    Raises:
        CheckpointError: neither kind of file is there.
    """
    accelerator.wait_for_everyone()
    inner = _torch_optimizer(optimizer)
    place, is_whole = _find(input_dir, _OPTIMIZER, optimizer_index)
    if is_whole:
        state = _read_first(place, accelerator)
        set_optimizer_state_dict(model, inner, state, options=_spreading(accelerator))
        return
    state = get_optimizer_state_dict(model, inner)
    load({"optimizer": state}, checkpoint_id=place)
    set_optimizer_state_dict(model, inner, state)


def _is_whole(fsdp_plugin: Any) -> bool:
    return "FULL_STATE_DICT" in str(getattr(fsdp_plugin, "state_dict_type", ""))


def _file(root: Any, word: str, index: int) -> Path:
    return Path(root) / (f"{word}_{index}.bin" if index else f"{word}.bin")


def _find(root: Any, word: str, index: int) -> tuple[Path, bool]:
    """Where it lies, and whether it is one file of whole tensors."""
    name, file = f"{word}_{index}", _file(root, word, index)
    for folder in (Path(root) / name, Path(root)):
        if folder.name == name and folder.is_dir():
            return folder, False
    if file.is_file():
        return file, True
    raise CheckpointError(
        f"{root} holds neither a folder {name} nor a file {file.name}; give a folder that save_fsdp_model and "
        "save_fsdp_optimizer wrote into"
    )


def _write(key: str, state: Any, root: Any, word: str, index: int, is_whole: bool, accelerator: Any) -> None:
    if not is_whole:
        save({key: state}, checkpoint_id=Path(root) / f"{word}_{index}")
    elif accelerator.process_index == 0:
        Path(root).mkdir(parents=True, exist_ok=True)
        torch.save(state, _file(root, word, index))


def _read_first(file: Path, accelerator: Any) -> Any:
    """On rank 0, the contents of the file, which it passes on; nothing on the others."""
    return torch.load(file, map_location="cpu", weights_only=True) if accelerator.process_index == 0 else {}


def _spreading(accelerator: Any) -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, broadcast_from_rank0=accelerator.num_processes > 1)


def _adapter(model: Any) -> dict[str, Any]:
    from peft import get_peft_model_state_dict

    found: dict[str, Any] = get_peft_model_state_dict(model, adapter_name=model.active_adapter)
    return found


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
