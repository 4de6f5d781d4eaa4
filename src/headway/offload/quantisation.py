"""How a model's linear layers are quantised: by torchao, or by bitsandbytes.

Loading a model with its linear layers quantised, and placing it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from headway.common.optional import require
from headway.errors import ConfigError, UnsupportedError
from headway.log import get_logger
from headway.offload.dispatch import default_device, dispatch_model, load_checkpoint_in_model
from headway.offload.placement.budget import Device
from headway.offload.placement.device_map import Placement, device_of, resolve_device_map, settle
from headway.offload.placement.sizes import CustomDtype, find_tied_parameters

TORCHAO = "torchao>=0.18"
BITSANDBYTES = "bitsandbytes>=0.48"
_COMPUTE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class QuantizationOptions:
    """Weights of linear layers as whole numbers, by torchao; activations stay as they are.

    Args:
        weights: "int8", a scale for each output; "int4", a scale for each group of inputs.
        group_size: inputs that share a scale, for "int4"; layers whose inputs it does not divide stay as they are.
        dtype: of all other weights; None: as in the model.
        skip_modules: names of modules that stay as they are ("lm_head", "layers.0.mlp"). None: the output layer, and what is tied.
        keep_in_fp32_modules: names of modules that stay in float32.

    Raises:
        ConfigError: an unknown word, or a group that is not positive.
    """

    weights: Literal["int8", "int4"] = "int8"
    group_size: int = 32
    dtype: torch.dtype | None = None
    skip_modules: tuple[str, ...] | None = None
    keep_in_fp32_modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.weights not in ("int8", "int4"):
            raise ConfigError(f"QuantizationOptions(weights={self.weights!r}): give 'int8' or 'int4'")
        if self.group_size < 1:
            raise ConfigError(f"QuantizationOptions(group_size={self.group_size}): give a number above 0, such as 32")

    def takes(self, layer: nn.Linear) -> bool:
        """Can this layer be quantised?"""
        return self.weights == "int8" or layer.in_features % self.group_size == 0

    def convert(self, model: nn.Module, names: Iterable[str], device: torch.device) -> None:
        """Quantise the layers of these names, where they lie; `device` is where they will run."""
        torchao, wanted = require("torchao.quantization", "QuantizationOptions needs", TORCHAO), set(names)
        if self.weights == "int8":
            how = torchao.Int8WeightOnlyConfig()
        elif device.type == "cuda":
            how = torchao.Int4WeightOnlyConfig(group_size=self.group_size, int4_packing_format="tile_packed_to_4d")
        else:
            int4: torch.dtype = torch.int4  # type: ignore[attr-defined]
            how = torchao.IntxWeightOnlyConfig(weight_dtype=int4, granularity=torchao.PerGroup(self.group_size))
        # The packed layout is made on the device itself.
        there = device if self.weights == "int4" and device.type == "cuda" else None
        torchao.quantize_(model, how, filter_fn=lambda module, name: name in wanted, device=there)


@dataclass
class BnbQuantizationConfig:
    """Linear layers of bitsandbytes, with Accelerate's arguments.

    Args:
        load_in_8bit: int8 with outliers of the activations apart.
        llm_int8_threshold: what an outlier is.
        load_in_4bit: four bits.
        bnb_4bit_quant_type: "fp4" or "nf4".
        bnb_4bit_use_double_quant: quantise the scales as well.
        bnb_4bit_compute_dtype: "fp32", "fp16", "bf16" or a torch dtype.
        torch_dtype: of all other weights; None: as in the model.
        skip_modules: names of modules that stay as they are. None: the output layer, and what is tied.
        keep_in_fp32_modules: names of modules that stay in float32.

    Raises:
        ConfigError: neither or both of 8 and 4 bits, an unknown word, or a value of another type.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: Any = "fp16"
    torch_dtype: torch.dtype | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None
    target_dtype: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.load_in_8bit, bool) or not isinstance(self.load_in_4bit, bool):
            raise ConfigError("BnbQuantizationConfig: load_in_8bit and load_in_4bit are True or False")
        if self.load_in_8bit == self.load_in_4bit:
            raise ConfigError("BnbQuantizationConfig: give either load_in_8bit=True or load_in_4bit=True")
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise ConfigError(f"bnb_4bit_quant_type={self.bnb_4bit_quant_type!r}: give 'fp4' or 'nf4'")
        dtype = _COMPUTE.get(self.bnb_4bit_compute_dtype, self.bnb_4bit_compute_dtype)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"bnb_4bit_compute_dtype={dtype!r}: give 'fp32', 'fp16', 'bf16' or a torch dtype")
        for name in ("skip_modules", "keep_in_fp32_modules"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, list):
                raise ConfigError(f"BnbQuantizationConfig({name}={value!r}): give a list of names")
        self.bnb_4bit_compute_dtype = dtype
        self.target_dtype = torch.int8 if self.load_in_8bit else CustomDtype.INT4

    @property
    def dtype(self) -> torch.dtype | None:
        """Of all other weights."""
        return self.torch_dtype

    def takes(self, layer: nn.Linear) -> bool:
        """Can this layer be quantised?"""
        return True

    def convert(self, model: nn.Module, names: Iterable[str], device: torch.device) -> None:
        """Exchange the layers of these names for bitsandbytes' own; it quantises on the device itself."""
        for name in names:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, self._layer(model.get_submodule(name)).to(device))

    def _layer(self, layer: Any) -> nn.Module:
        layers = require("bitsandbytes", "BnbQuantizationConfig needs", BITSANDBYTES).nn
        sizes = (layer.in_features, layer.out_features, layer.bias is not None)
        with torch.device("meta"):
            if self.load_in_8bit:
                new = layers.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=self.llm_int8_threshold)
                weight = layers.Int8Params(layer.weight.detach(), requires_grad=False, has_fp16_weights=False)
            else:
                how = {"compress_statistics": self.bnb_4bit_use_double_quant, "quant_type": self.bnb_4bit_quant_type}
                new = layers.Linear4bit(*sizes, self.bnb_4bit_compute_dtype, **how)
                weight = layers.Params4bit(layer.weight.detach(), requires_grad=False, module=new, **how)
        new.weight, new.bias = weight, layer.bias
        quantised: nn.Module = new.requires_grad_(False).train(layer.training)
        return quantised


Quantization = QuantizationOptions | BnbQuantizationConfig


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """The modules that are left as they are unless one says otherwise: the last one, which gives the output, and what is tied.

    A model that is the trunk of others (transformers' base models) has no output layer, so nothing is left out of it.
    """
    tied = {name.rpartition(".")[0]: None for group in find_tied_parameters(model) for name in group}
    prefix = getattr(model, "base_model_prefix", None)
    if not tied and prefix is not None and not hasattr(model, prefix):
        return []
    last = [name for name, _ in model.named_children()][-1:]
    return list(dict.fromkeys([*tied, *last]))


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Is one of its layers bitsandbytes' Linear4bit?"""
    layers = require("bitsandbytes", "has_4bit_bnb_layers() needs", BITSANDBYTES).nn
    return any(isinstance(each, layers.Linear4bit) for each in model.modules())


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
