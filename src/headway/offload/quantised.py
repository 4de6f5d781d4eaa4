"""Loading a model with its linear layers quantised, and placing it."""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import nn

from headway.errors import ConfigError, UnsupportedError
from headway.log import get_logger
from headway.offload.dispatch import default_device, dispatch_model
from headway.offload.load import load_checkpoint_in_model
from headway.offload.placement.budget import Device
from headway.offload.placement.device_map import device_of, resolve_device_map
from headway.offload.placement.homes import Placement, settle
from headway.offload.quantisation import BnbQuantizationConfig, Quantization, get_keys_to_not_convert

log = get_logger(__name__)


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: Quantization,
    weights_location: str | Path | None = None,
    device_map: str | Mapping[str, Device | torch.device] | None = None,
    no_split_module_classes: list[str] | None = None,
    max_memory: Mapping[Device, int | str] | None = None,
    offload_folder: str | Path | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Load a checkpoint, quantise the linear layers one after the other, and place the model; returns it.

    Args:
        model: built under init_empty_weights(), or with values, which are then quantised in place.
        bnb_quantization_config: QuantizationOptions (torchao) or BnbQuantizationConfig (bitsandbytes).
        weights_location: as for load_checkpoint_in_model(); needed where the model has no values.
        device_map: as for dispatch_model(). None: this process's accelerator, else the CPU. Layers that a map puts in host memory
            while others are on an accelerator, or on disk, are not quantised.
        no_split_module_classes, max_memory: for the words of `device_map`.
        offload_folder: as for dispatch_model().
        offload_state_dict: accepted for the name's sake: a checkpoint is mapped, and never in memory as a whole.

    Raises:
        ConfigError: there is nothing to load, or the model has no linear layer that can be quantised.
        CheckpointError: the checkpoint is damaged or does not fit.
        UnsupportedError: a word for `device_map` does not leave all quantised layers where they run.
    """
    config = bnb_quantization_config
    is_empty = any(each.is_meta for each in model.parameters())
    if is_empty and weights_location is None:
        raise ConfigError("the model has no values yet; give weights_location=, the checkpoint to load")
    in_fp32 = tuple(config.keep_in_fp32_modules or ())
    if weights_location is not None:
        load_checkpoint_in_model(model, weights_location, dtype=config.dtype, keep_in_fp32_modules=in_fp32)
    elif config.dtype is not None:
        _cast(model, config.dtype, in_fp32)
    skipped = get_keys_to_not_convert(model) if config.skip_modules is None else config.skip_modules
    names = [
        name
        for name, each in model.named_modules()
        if type(each) is nn.Linear and not _is_of(name, (*skipped, *in_fp32)) and config.takes(each)
    ]
    default = default_device()
    given = default if device_map is None else device_map
    if isinstance(given, str) and max_memory is None and default.type == "cpu":
        given = "cpu"
    placed = settle(model, resolve_device_map(model, given, max_memory, no_split_module_classes))
    _quantise(model, config, names, placed, device_map)
    return dispatch_model(model, placed.device_map, offload_dir=offload_folder)


def _quantise(model: nn.Module, config: Quantization, names: list[str], placed: Placement, device_map: object) -> None:
    """Those of the layers that run where they lie."""
    elsewhere = {"disk"} if placed.main.type == "cpu" else {"cpu", "disk"}
    away = {name for name in names if device_of(placed.device_map, name) in elsewhere}
    if away and not isinstance(device_map, Mapping):
        raise UnsupportedError(
            f"device_map={device_map!r} offloads {len(away)} layers that are quantised, {sorted(away)[0]} say, and those stay where "
            "they run; give more max_memory, or a map by hand: what it offloads is not quantised"
        )
    chosen = [name for name in names if name not in away]
    if not chosen:
        raise ConfigError(
            f"{type(model).__name__} has no linear layer to quantise: skipped, offloaded or of another kind"
        )
    if isinstance(config, BnbQuantizationConfig):
        # What PEFT and transformers ask to know how to treat the model.
        model.is_loaded_in_8bit, model.is_loaded_in_4bit = config.load_in_8bit, config.load_in_4bit  # type: ignore[assignment]
    for device in {placed.runs_on(name) for name in chosen}:
        config.convert(model, [name for name in chosen if placed.runs_on(name) == device], device)
    log.info("%d linear layers are quantised, %d are not", len(chosen), len(away))


def _is_of(name: str, modules: Collection[str]) -> bool:
    return any(f".{each}." in f".{name}." for each in modules)


def _cast(model: nn.Module, dtype: torch.dtype, in_fp32: tuple[str, ...]) -> None:
    for name, each in model.named_modules():
        wanted = torch.float32 if _is_of(name, in_fp32) else dtype
        for parameter in each.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(wanted)
