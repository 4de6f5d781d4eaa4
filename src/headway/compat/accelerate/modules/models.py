"""Models for scripts: unwrapping them, setting a tensor by name, and objects and weights in files."""

import sys
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file
from torch import nn

from headway.compat.accelerate.state import collectives
from headway.errors import ConfigError, UnsupportedError
from headway.weights.export import save_object


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """The user's own module out of DDP, DataParallel or FSDP1 of the user's making; what prepare() gave back is that already.

    Args:
        model: a module.
        keep_fp32_wrapper: accepted for the name's sake: outputs are never converted.
        keep_torch_compile: False: also take off torch.compile's wrapper.
        recursive: also unwrap its submodules, in place.
    """
    compiled = model if "_orig_mod" in getattr(model, "_modules", ()) else None  # what torch.compile(model) returned
    inner = model._orig_mod if compiled is not None else model
    while _wraps(inner):
        inner = inner.module
    if recursive:
        for name, child in list(inner.named_children()):
            setattr(inner, name, extract_model_from_parallel(child, recursive=True))
    if compiled is None or not keep_torch_compile:
        return inner
    compiled._orig_mod = inner
    return compiled


def _wraps(model: Any) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a model of it cannot be there before
    kinds: tuple[type, ...] = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    if fsdp is not None:
        kinds += (fsdp.FullyShardedDataParallel,)
    return isinstance(model, kinds)


def is_peft_model(model: Any) -> bool:
    """Is it a PeftModel, wrapped or not? peft is not imported to know: no such model could be there without it."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(extract_model_from_parallel(model, keep_torch_compile=False), peft.PeftModel)


def model_has_dtensor(model: torch.nn.Module) -> bool:
    """Is one of its parameters a DTensor?"""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and any(isinstance(each, tensor.DTensor) for each in model.parameters())


def get_module_class_from_name(module: torch.nn.Module, name: str) -> type | None:
    """The class called `name` among the module's and its submodules'; None where there is none."""
    return next((type(each) for each in module.modules() if type(each).__name__ == name), None)


def get_module_children_bottom_up(model: torch.nn.Module, return_fqns: bool = False) -> list[Any]:
    """The model's modules, children before their parents; the model comes last.

    Args:
        model: a module.
        return_fqns: pairs of name and module instead.
    """
    waiting: list[tuple[str, torch.nn.Module]] = [("", model)]
    ordered = []
    while waiting:
        prefix, module = waiting.pop()
        waiting += [(f"{prefix}.{name}" if prefix else name, child) for name, child in module.named_children()]
        ordered.append((prefix, module) if return_fqns else module)
    return ordered[::-1]


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Any,
    value: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: dict[int, dict[torch.device, torch.Tensor]] | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put a parameter or buffer on `device`, with `value` where one is given; a parameter stays a parameter of its class.

    Args:
        module: the module, or one above it.
        tensor_name: the tensor's name from there, "encoder.0.weight" say.
        device: where it goes.
        value: its new value; needed where it has none yet (meta device).
        dtype: of the value; None: that of the tensor there. Whole numbers and truth values keep theirs.
        fp16_statistics: bitsandbytes' statistics, kept with the parameter as `SCB`.
        tied_params_map: values by where they lie, and the copies of them that are on devices already: such a one is used.
        non_blocking: do not wait for the copy.
        clear_cache: accepted for the name's sake: emptying the cache for each tensor only costs time.

    Raises:
        ConfigError: no such tensor, a value of another shape, or none for a tensor without memory.
    """
    owner, _, name = tensor_name.rpartition(".")
    try:
        holder = module.get_submodule(owner)
    except AttributeError as error:
        raise ConfigError(f"{type(module).__name__} has no tensor {tensor_name!r}: {error}") from None
    held: dict[str, Any] = holder._parameters if name in holder._parameters else holder._buffers
    old = held.get(name)
    if old is None:
        raise ConfigError(f"{type(module).__name__} has no parameter or buffer {tensor_name!r}")
    target = torch.device(device)
    tied = _tied(old if value is None else value, target, tied_params_map)
    if tied is not None:
        held[name] = tied
        return
    _check(tensor_name, old, target, value)
    with torch.no_grad():
        new = (old if value is None else value).to(_dtype(old, value, dtype)).to(target, non_blocking=non_blocking)
        if isinstance(old, nn.Parameter) and (value is not None or new is not old):
            new = type(old)(new.detach(), requires_grad=old.requires_grad)
            new.__dict__.update(old.__dict__)
    held[name] = new
    if fp16_statistics is not None:
        new.__dict__["SCB"] = fp16_statistics.to(target)


def _dtype(old: torch.Tensor, value: torch.Tensor | None, dtype: torch.dtype | None) -> torch.dtype:
    if value is None:
        return old.dtype
    if dtype is None:
        return old.dtype
    return dtype if value.is_floating_point() or value.is_complex() else value.dtype


def _tied(tensor: torch.Tensor, device: torch.device, known: Any) -> torch.Tensor | None:
    found: torch.Tensor | None = (known or {}).get(tensor.data_ptr(), {}).get(device) if known else None
    return found


def _check(name: str, old: torch.Tensor, device: torch.device, value: torch.Tensor | None) -> None:
    if value is None and old.is_meta and device.type != "meta":
        raise ConfigError(f"{name} has no memory yet (meta device), so it cannot go to {device} as it is; give value=")
    if value is not None and value.shape != old.shape:
        raise ConfigError(
            f"{name} has the shape {tuple(old.shape)}, but value has {tuple(value.shape)}; give one of its shape"
        )


WEIGHTS_NAME = "pytorch_model.bin"
SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"


def save(obj: Any, f: str | Path, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write an object with torch.save (or a dict of tensors with safetensors), from the main process only.

    Args:
        obj: the object.
        f: the file.
        save_on_each_node: from the first process of every machine.
        safe_serialization: with safetensors.
    """
    runtime = collectives().runtime
    if runtime.is_local_main_process if save_on_each_node else runtime.is_main_process:
        save_object(obj, f, safe_serialization)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """torch.load, which runs no code of the file's (`weights_only=True`) unless told so; numpy arrays may be in it.

    Args:
        f: a file or its path.
        map_location: where tensors go.
        kwargs: for torch.load.
    """
    kinds = [type(numpy.dtype(kind)) for kind in ("uint8", "uint32", "int32", "int64", "float32", "float64", "bool")]
    reconstruct: Any = numpy.empty(0).__reduce__()[0]
    with torch.serialization.safe_globals([reconstruct, numpy.ndarray, numpy.dtype, *kinds]):
        return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})


def load_state_dict(checkpoint_file: str | Path, device_map: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a weights file by name, safetensors or torch's own.

    Args:
        checkpoint_file: the file.
        device_map: a map whose parts lie on one device: tensors go there. None: the CPU.

    Raises:
        UnsupportedError: a map over several devices.
    """
    devices = set((device_map or {"": "cpu"}).values())
    if len(devices) > 1:
        raise UnsupportedError(
            f"load_state_dict got a device_map over {len(devices)} devices; use load_checkpoint_in_model(model, file, "
            "device_map), which puts each tensor where it belongs"
        )
    device = torch.device(devices.pop())
    if str(checkpoint_file).endswith(".safetensors"):
        return load_file(checkpoint_file, device=str(device))
    loaded: dict[str, torch.Tensor] = torch.load(checkpoint_file, map_location=device, weights_only=True)
    return loaded
