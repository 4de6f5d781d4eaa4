"""Load a model, quantize its linear layers with torchao or bitsandbytes, and place it on devices."""

import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from headway.common.optional import require
from headway.errors import ConfigError, UnsupportedError
from headway.log import get_logger
from headway.offload.dispatch import dispatch_model, get_default_device
from headway.offload.placement.automatic_map import resolve_device_map
from headway.offload.placement.budget import Device
from headway.offload.placement.device_map import get_device
from headway.offload.placement.sizes import CustomDtype, find_tied_parameters
from headway.offload.placement.storage_devices import Placement, make_placement
from headway.offload.weight_loading import load_checkpoint_in_model

TORCHAO = "torchao>=0.18"
"""Requirement for torchao's version, for messages."""
BITSANDBYTES = "bitsandbytes>=0.48"
"""Requirement for bitsandbytes' version, for messages."""
_COMPUTE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Compute dtypes that bitsandbytes accepts, by name."""
log = get_logger(__name__)


@dataclass(frozen=True)
class QuantizationOptions:
    """Options to quantize the weights of linear layers to integers with torchao. Activations keep their dtype.

    Args:
        weights: "int8" (the default) with one scale per output, or "int4" with one scale per group of inputs.
        group_size: Number of inputs per scale, for "int4". A layer is quantized only if its number of inputs is a
            multiple of the group size. Default: 32.
        dtype: Dtype of all other weights. None (the default): the model's dtype.
        skip_modules: Names of modules that are not quantized, such as "lm_head" or "layers.0.mlp". None (the default):
            the output layer and tied layers.
        keep_in_fp32_modules: Names of modules that stay in float32. Default: none.

    Raises:
        ConfigError: If `weights` is unknown or `group_size` is not positive.
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

    def can_quantize(self, layer: nn.Linear) -> bool:
        """Whether a layer can be quantized with these options, which depends on its number of inputs."""
        return self.weights == "int8" or layer.in_features % self.group_size == 0

    def convert_layers(self, model: nn.Module, names: Iterable[str], device: torch.device) -> None:
        """Quantize the named layers in place, in the format for the device on which they will run.

        Args:
            model: Model that contains the layers.
            names: Full names of the layers.
            device: Device on which the layers will run.

        Raises:
            OptionalDependencyMissing: If torchao is not installed.
        """
        torchao, layer_names = require("torchao.quantization", "QuantizationOptions needs", TORCHAO), set(names)
        if self.weights == "int8":
            config = torchao.Int8WeightOnlyConfig()
        elif device.type == "cuda":
            config = torchao.Int4WeightOnlyConfig(group_size=self.group_size, int4_packing_format="tile_packed_to_4d")
        else:
            int4: torch.dtype = torch.int4  # type: ignore[attr-defined]
            config = torchao.IntxWeightOnlyConfig(weight_dtype=int4, granularity=torchao.PerGroup(self.group_size))
        # torchao packs this layout on the device itself.
        target = device if self.weights == "int4" and device.type == "cuda" else None
        torchao.quantize_(model, config, filter_fn=lambda module, name: name in layer_names, device=target)


@dataclass
class BnbQuantizationConfig:
    """Options to replace linear layers with those of bitsandbytes. Accelerate's class has the same name and arguments.

    Args:
        load_in_8bit: Whether to use int8. Outliers among the activations are then computed separately. Default: False.
        llm_int8_threshold: Minimum magnitude of an activation that counts as an outlier. Default: 6.0.
        load_in_4bit: Whether to use four bits. Default: False.
        bnb_4bit_quant_type: "fp4" (the default) or "nf4".
        bnb_4bit_use_double_quant: Whether the scales are quantized, too. Default: False.
        bnb_4bit_compute_dtype: "fp32", "fp16" (the default), "bf16" or a torch dtype.
        torch_dtype: Dtype of all other weights. None (the default): the model's dtype.
        skip_modules: Names of modules that are not quantized. None (the default): the output layer and tied layers.
        keep_in_fp32_modules: Names of modules that stay in float32. None (the default): none.

    Attributes:
        target_dtype: Format of the quantized weights: torch.int8 or `CustomDtype.INT4`.

    Raises:
        ConfigError: If not exactly one of `load_in_8bit` and `load_in_4bit` is set, or another value is unknown or of a
            wrong type.
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
        dtype = _COMPUTE_DTYPES.get(self.bnb_4bit_compute_dtype, self.bnb_4bit_compute_dtype)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"bnb_4bit_compute_dtype={dtype!r}: give 'fp32', 'fp16', 'bf16' or a torch dtype")
        for name in ("skip_modules", "keep_in_fp32_modules"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, list):
                raise ConfigError(f"BnbQuantizationConfig({name}={value!r}): give a list of names")
        if self.load_in_4bit and self.llm_int8_threshold != 6.0:
            warnings.warn("llm_int8_threshold can only be used for model loaded in 8bit", UserWarning, stacklevel=3)
        self.bnb_4bit_compute_dtype = dtype
        self.target_dtype = torch.int8 if self.load_in_8bit else CustomDtype.INT4

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of all weights that are not quantized, or None for the model's dtype."""
        return self.torch_dtype

    def can_quantize(self, layer: nn.Linear) -> bool:
        """Return True, because bitsandbytes can quantize every linear layer."""
        return True

    def convert_layers(self, model: nn.Module, names: Iterable[str], device: torch.device) -> None:
        """Replace the named layers with bitsandbytes layers on `device`, where their weights are quantized.

        Args:
            model: Model that contains the layers.
            names: Full names of the layers.
            device: Device on which the layers will run.

        Raises:
            OptionalDependencyMissing: If bitsandbytes is not installed.
        """
        for name in names:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, self._make_layer(model.get_submodule(name)).to(device))

    def _make_layer(self, layer: Any) -> nn.Module:
        """Return a bitsandbytes layer with the weights of a linear layer, which are quantized when it is moved."""
        layers = require("bitsandbytes", "BnbQuantizationConfig needs", BITSANDBYTES).nn
        sizes = (layer.in_features, layer.out_features, layer.bias is not None)
        with torch.device("meta"):
            if self.load_in_8bit:
                new = layers.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=self.llm_int8_threshold)
                weight = layers.Int8Params(layer.weight.detach(), requires_grad=False, has_fp16_weights=False)
            else:
                options = {
                    "compress_statistics": self.bnb_4bit_use_double_quant,
                    "quant_type": self.bnb_4bit_quant_type,
                }
                new = layers.Linear4bit(*sizes, self.bnb_4bit_compute_dtype, **options)
                weight = layers.Params4bit(layer.weight.detach(), requires_grad=False, module=new, **options)
        new.weight = weight
        new.bias = layer.bias
        quantized: nn.Module = new.requires_grad_(False).train(layer.training)
        return quantized


Quantization = QuantizationOptions | BnbQuantizationConfig
"""Quantization options for torchao or for bitsandbytes."""


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Return the names of modules that are not quantized by default.

    These are tied modules, and the last module, which is the output layer. The list is empty for a transformers base
    model without tied modules, because a base model has no output layer.
    """
    tied = {name.rpartition(".")[0]: None for group in find_tied_parameters(model) for name in group}
    prefix = getattr(model, "base_model_prefix", None)
    if not tied and prefix is not None and not hasattr(model, prefix):
        return []
    last = [name for name, _ in model.named_children()][-1:]
    return list(dict.fromkeys([*tied, *last]))


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Whether the model has a `Linear4bit` layer of bitsandbytes.

    Raises:
        OptionalDependencyMissing: If bitsandbytes is not installed.
    """
    layers = require("bitsandbytes", "has_4bit_bnb_layers() needs", BITSANDBYTES).nn
    return any(isinstance(each, layers.Linear4bit) for each in model.modules())


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
    """Load a checkpoint, quantize the linear layers one at a time, place the model on devices, and return it.

    Args:
        model: Model built under init_empty_weights(), or with values. It is quantized in place.
        bnb_quantization_config: QuantizationOptions (torchao) or BnbQuantizationConfig (bitsandbytes).
        weights_location: File, index, folder, or model ID on the Hugging Face Hub. Required if the model has no values.
            None (the default): the values of the model.
        device_map: Name of a placement strategy such as "auto" or of a device, or devices by module name. None: this
            process's accelerator, or else the CPU. A name means the CPU if the machine has no accelerator and
            `max_memory` is not given. If a map by module name offloads layers to disk, or to host memory while the
            model runs on an accelerator, these layers are not quantized.
        no_split_module_classes: Classes whose modules are not split over devices, or None for the classes that the
            model declares.
        max_memory: Memory limit of each device, in bytes or as text such as "10GiB". Used if `device_map` is the name
            of a strategy. None (the default): the free memory of each device.
        offload_folder: Folder for weights that are placed on "disk" and are not in a mapped file yet.
            None (the default): no folder.
        offload_state_dict: No effect, because a checkpoint is mapped and is never entirely in memory.

    Raises:
        ConfigError: If the model has no values and there is nothing to load, or no linear layer can be quantized. Also
            if the device map does not match the model or the machine (DeviceMapError).
        CheckpointError: If the checkpoint is damaged or does not fit the model.
        UnsupportedError: If `device_map` is the name of a strategy, and the resulting map offloads layers that should
            be quantized.
    """
    config = bnb_quantization_config
    is_empty = any(each.is_meta for each in model.parameters())
    if is_empty and weights_location is None:
        raise ConfigError("the model has no values yet; give weights_location=, the checkpoint to load")
    fp32_modules = tuple(config.keep_in_fp32_modules or ())
    if weights_location is not None:
        load_checkpoint_in_model(model, weights_location, dtype=config.dtype, keep_in_fp32_modules=fp32_modules)
    elif config.dtype is not None:
        _cast_parameters(model, config.dtype, fp32_modules)
    skipped = get_keys_to_not_convert(model) if config.skip_modules is None else config.skip_modules
    names = [
        name
        for name, each in model.named_modules()
        if type(each) is nn.Linear and not _is_inside(name, (*skipped, *fp32_modules)) and config.can_quantize(each)
    ]
    default_device = get_default_device()
    requested_map = default_device if device_map is None else device_map
    if isinstance(requested_map, str) and max_memory is None and default_device.type == "cpu":
        requested_map = "cpu"
    placement = make_placement(model, resolve_device_map(model, requested_map, max_memory, no_split_module_classes))
    _quantize_layers(model, config, names, placement, device_map)
    return dispatch_model(model, placement.device_map, offload_dir=offload_folder)


def _quantize_layers(
    model: nn.Module, config: Quantization, names: list[str], placement: Placement, device_map: object
) -> None:
    """Quantize the named layers in place, except layers that are offloaded.

    Args:
        model: Model with values.
        config: Options of the quantization.
        names: Names of the layers.
        placement: Devices of the model's parts.
        device_map: Value of `device_map` that the user gave.

    Raises:
        UnsupportedError: If any of the layers is offloaded and `device_map` is not a map by module name.
        ConfigError: If no layer remains that can be quantized.
    """
    stores = {"disk"} if placement.main.type == "cpu" else {"cpu", "disk"}
    offloaded = {name for name in names if get_device(placement.device_map, name) in stores}
    if offloaded and not isinstance(device_map, Mapping):
        raise UnsupportedError(
            f"device_map={device_map!r} offloads {len(offloaded)} layers to quantize, such as {min(offloaded)}, but quantized layers "
            "must stay where they run; raise max_memory, or give a map by hand, whose offloaded layers are not quantized"
        )
    quantized = [name for name in names if name not in offloaded]
    if not quantized:
        raise ConfigError(
            f"{type(model).__name__} has no linear layer to quantize: all are skipped, offloaded or of another kind"
        )
    if isinstance(config, BnbQuantizationConfig):
        # PEFT and transformers read these flags to know how to treat the model.
        model.is_loaded_in_8bit, model.is_loaded_in_4bit = config.load_in_8bit, config.load_in_4bit  # type: ignore[assignment]
    for device in {placement.get_run_device(name) for name in quantized}:
        config.convert_layers(model, [name for name in quantized if placement.get_run_device(name) == device], device)
    log.info("%d linear layers are quantized, %d are not", len(quantized), len(offloaded))


def _is_inside(name: str, modules: Collection[str]) -> bool:
    """Whether a dotted name is, or contains as successive components, one of the module names.

    For example, "layers.0.mlp.up" is inside of "mlp" and "layers.0".
    """
    return any(f".{each}." in f".{name}." for each in modules)


def _cast_parameters(model: nn.Module, dtype: torch.dtype, fp32_modules: tuple[str, ...]) -> None:
    """Convert the floating parameters of a model to `dtype`, and those inside of some modules to float32.

    Args:
        model: Model with values.
        dtype: Dtype of most parameters.
        fp32_modules: Names of the modules whose parameters are converted to float32.
    """
    for name, module in model.named_modules():
        target = torch.float32 if _is_inside(name, fp32_modules) else dtype
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(target)
