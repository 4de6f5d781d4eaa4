"""Setting one tensor of a model: another device, another value."""

from typing import Any

import torch
from torch import nn

from headway.errors import ConfigError


def set_module_tensor_to_device(
    module: nn.Module, tensor_name: str, device: Any, value: torch.Tensor | None = None,
    dtype: torch.dtype | None = None, fp16_statistics: torch.Tensor | None = None,
    tied_params_map: dict[int, dict[torch.device, torch.Tensor]] | None = None, non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:  # fmt: skip
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
