"""Choose the precision of a training step from the run's settings and the device."""

from inspect import signature

import torch

from headway.core import extensions
from headway.core.config.engines import EngineOptions
from headway.core.config.launch import PRECISIONS
from headway.core.config.other_library_names import explain_precision
from headway.core.precision.fp16 import Fp16Precision
from headway.core.precision.mixed import Bf16Precision, Float8Precision, GradientShards, Precision
from headway.core.runtime.device import Hardware
from headway.errors import ConfigError, UnsupportedError
from headway.log import get_logger

log = get_logger(__name__)


def is_bf16_emulated(hardware: Hardware) -> bool:
    """Whether torch emulates bfloat16 on this hardware, as on a V100 or T4, which have no bfloat16 units."""
    is_supported = getattr(hardware.module, "is_bf16_supported", None)
    if is_supported is None or "including_emulation" not in signature(is_supported).parameters:
        return False
    return not is_supported(including_emulation=False)


def _get_device_name(hardware: Hardware) -> str:
    """Return the name of the current device, such as "Tesla T4", or "this mps device" if torch does not know it."""
    get_name = getattr(hardware.module, "get_device_name", None)
    return f"this {hardware.kind} device" if get_name is None else str(get_name())


def build_precision(
    name: str, hardware: Hardware, options: EngineOptions, shards: GradientShards | None = None
) -> Precision:
    """Create the `Precision` object for a value of `mixed_precision`.

    If the hardware only emulates bfloat16 and the precision uses it, a warning is logged.

    Args:
        name: "no", "bf16", "fp16" or "fp8".
        hardware: Device type that this process computes on.
        options: Options for autocast, the gradient scaler and float8.
        shards: Object that returns this rank's shards of the gradients (the strategy). Default: None, gradients are
            unsharded.

    Raises:
        ConfigError: If the name is unknown, or options for another precision are given.
        UnsupportedError: If the hardware cannot compute in this precision.
        OptionalDependencyMissing: If float8 is requested and torchao is not installed.
    """
    if name == "fp8":
        extensions.load("feature", "float8").check_float8(hardware, options)
    elif options.float8 is not None:
        raise ConfigError(
            f"kwargs_handlers has options of float8, but mixed_precision={name!r}; pass mixed_precision='fp8', or remove them"
        )
    if name == "no":
        return Precision()
    if name in ("bf16", "fp8"):
        if not hardware.supports_bf16():
            raise UnsupportedError(
                f"mixed_precision={name!r}, but this {hardware.kind} device has no bfloat16; use 'fp16' or 'no'"
            )
        if is_bf16_emulated(hardware):
            log.warning_once(
                "mixed_precision='%s', but %s only emulates bfloat16, which is slower than float32: it has no bfloat16 units "
                "(CUDA devices have them from compute capability 8.0). Use mixed_precision='fp16'",
                name,
                _get_device_name(hardware),
            )
        _check_autocast(hardware, name, torch.bfloat16)
        return Bf16Precision(hardware, options) if name == "bf16" else Float8Precision(hardware, options)
    if name == "fp16":
        _check_autocast(hardware, name, torch.float16)
        return Fp16Precision(hardware, options, shards)
    hint = explain_precision(name, PRECISIONS)
    raise ConfigError(f"mixed_precision={name!r} is unknown; allowed: 'no', 'bf16', 'fp16', 'fp8'{hint}")


def _check_autocast(hardware: Hardware, name: str, dtype: torch.dtype) -> None:
    """Raise `UnsupportedError` if torch.autocast does not support `dtype` on the hardware.

    Args:
        hardware: Device type.
        name: Name of the precision, for the message.
        dtype: Dtype to which autocast would cast.
    """
    if not hardware.supports_autocast(dtype):
        raise UnsupportedError(
            f"mixed_precision={name!r}, but torch.autocast does not cast to {str(dtype).removeprefix('torch.')} on {hardware.kind} "
            "devices; use 'no', or convert the model itself (model.to(dtype))"
        )
