"""float8 training: linear layers are computed in float8 by torchao, and everything else runs under bf16 autocast.

It is enabled by `mixed_precision="fp8"`. Weights, gradients and optimizer state keep their dtype. A converted layer is
torchao's Float8Linear, with unchanged parameters and names. Scales are recomputed in each step, so checkpoints
contain no float8 state.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from headway.common.optional import require
from headway.common.text import join_names
from headway.core.config.engines import EngineOptions
from headway.core.config.float8 import Float8Options
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.device import Hardware
from headway.core.strategies.blocks import get_class_name
from headway.errors import PrepareError, UnsupportedError
from headway.log import get_logger

if TYPE_CHECKING:
    from headway.layouts.tensor.float8 import LayerSplit

log = get_logger(__name__)

INSTALL = "torchao>=0.18"
_SIZE_MULTIPLE = 16
"""Number that must divide a layer's input and output size, as float8 matrix units require."""
_NUM_SHOWN = 3
"""Number of layer names that a message lists for each reason."""
_MIN_CAPABILITY = (8, 9)
"""Lowest CUDA compute capability with float8 matrix units: 8.9 (Ada, such as L4 and RTX 40). Hopper has 9.0."""


def check_float8(hardware: Hardware, options: EngineOptions) -> None:
    """Raise an error if this process cannot compute in float8.

    Args:
        hardware: Hardware of this process.
        options: Engine options of the run, including those for float8.

    Raises:
        UnsupportedError: If the hardware has no float8 units and emulation was not requested.
        OptionalDependencyMissing: If torchao is not installed.
    """
    problem = None if (options.float8 or Float8Options()).is_emulated else _explain_missing_support(hardware)
    if problem is not None:
        capability = ".".join(map(str, _MIN_CAPABILITY))
        raise UnsupportedError(
            f"mixed_precision='fp8': {problem}. float8 needs CUDA from compute capability {capability} on (L4, RTX 40, "
            "H100 and later) or AMD's MI300 and later. Use mixed_precision='bf16'; or, to try slowly what float8 does to a model, "
            "kwargs_handlers=[Float8Options(emulate=True)]"
        )
    require("torchao.float8", "mixed_precision='fp8' needs", INSTALL)


def _explain_missing_support(hardware: Hardware) -> str | None:
    """Return the reason why this hardware cannot compute in float8, or None if it can."""
    if hardware.kind != "cuda":
        return f"this run computes on {hardware.kind}, for which torch has no float8 matrix products that train"
    if torch.version.hip:
        arch = str(getattr(torch.cuda.get_device_properties(), "gcnArchName", ""))
        return None if arch.startswith(("gfx94", "gfx95")) else f"this GPU ({arch}) has no float8 matrix units"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) >= _MIN_CAPABILITY:
        return None
    return f"{torch.cuda.get_device_name()} (compute capability {major}.{minor}) has no float8 matrix units"


def convert_model(
    model: torch.nn.Module,
    options: Float8Options,
    ranks: Collectives | None = None,
    splits: Mapping[str, "LayerSplit"] = MappingProxyType({}),
) -> torch.nn.Module:
    """Convert linear layers of a model to float8, in place. Layers that are already converted are not changed.

    Args:
        model: Unsharded model, before it is compiled or its activations are checkpointed.
        options: Selection of layers, and float8 recipe.
        ranks: Collectives over all ranks that convert the model, which must select the same layers. If None, only this
            rank converts it.
        splits: How the matrices of linear layers will be split across ranks, by the layers' names. Default: no layer is
            split.

    Returns:
        The model that was passed in. Converted layers are new objects with the original parameters and names.

    Raises:
        PrepareError: If ranks selected different layers.
        OptionalDependencyMissing: If torchao is not installed.
    """
    torchao = require("torchao.float8", "mixed_precision='fp8' needs", INSTALL)
    linears = [(name, m) for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    was_converted = any(_is_float8(module) for _, module in linears)
    exclusions = _explain_exclusions(model, linears, options, splits)
    converted = {id(module): name for name, module in linears if name not in exclusions and not _is_float8(module)}
    if ranks is not None:
        _check_equal_layers(model, sorted(converted.values()), ranks)
    if converted:
        from headway.layouts.tensor.float8 import split_layer

        torchao.convert_to_float8_training(
            model, config=_build_config(options), module_filter_fn=lambda module, name: id(module) in converted
        )
        for name in converted.values():
            layer = model.get_submodule(name)
            if name in splits:
                split_layer(layer, splits[name])  # casts its input itself, after the collectives at its boundary
            else:
                layer.register_forward_pre_hook(_cast_input, with_kwargs=True)
    _log_conversion(model, len(converted), len(linears), exclusions, options, was_converted)
    return model


def _is_float8(module: torch.nn.Module) -> bool:
    return any(kind.__name__ == "Float8Linear" for kind in type(module).__mro__)


def _build_config(options: Float8Options) -> Any:
    """Return torchao's configuration with float8 all-gather disabled.

    If weights are to be all-gathered in float8, they are wrapped later, when the model is sharded.
    """
    config_class = require("torchao.float8", "mixed_precision='fp8' needs", INSTALL).Float8LinearConfig
    if options.config is not None:
        return replace(options.config, enable_fsdp_float8_all_gather=False)
    config = config_class.from_recipe_name(options.recipe)
    return replace(config, pad_inner_dim=options.pad_inner_dim, emulate=options.emulate)


def _explain_exclusions(
    model: torch.nn.Module,
    linears: Sequence[tuple[str, torch.nn.Linear]],
    options: Float8Options,
    splits: Mapping[str, "LayerSplit"],
) -> dict[str, str]:
    """Return the linear layers that stay in bf16, as a dict from layer names to reasons.

    Layers that are converted already are left out. A layer gets the first reason that applies: the layer cannot be
    converted, the options exclude it, or its sizes or those of its shards are no multiples of 16.

    Args:
        model: Model that contains the layers.
        linears: Names and modules of all linear layers.
        options: Options that select layers.
        splits: How the matrices of layers will be split across ranks, by name.
    """
    first_and_last = {linears[0][0], linears[-1][0]} if linears else set()
    num_holders: dict[int, int] = {}
    for parent in model.modules():
        for child in parent._modules.values():
            num_holders[id(child)] = num_holders.get(id(child), 0) + 1
    exclusions: dict[str, str] = {}
    for name, linear in linears:
        if _is_float8(linear):
            continue
        reason = _find_obstacle(model, linear, num_holders.get(id(linear), 0))
        if reason is None:
            reason = _explain_deselection(model, linear, name, options, is_end=name in first_and_last)
        if reason is None and (linear.in_features % _SIZE_MULTIPLE or linear.out_features % _SIZE_MULTIPLE):
            reason = f"sizes that are no multiples of {_SIZE_MULTIPLE}"
        if reason is None and name in splits:
            reason = splits[name].explain_misfit(linear, _SIZE_MULTIPLE)
        if reason is not None:
            exclusions[name] = reason
    return exclusions


def _explain_deselection(
    model: torch.nn.Module, linear: torch.nn.Linear, name: str, options: Float8Options, is_end: bool
) -> str | None:
    """Return the reason why the options keep a layer in bf16, or None if they do not.

    Args:
        model: Model that contains the layer.
        linear: Linear layer.
        name: Name of the layer in the model.
        options: Options that select layers. A `module_filter` decides alone.
        is_end: Whether the layer is the model's first or last linear layer.
    """
    if options.module_filter is not None:
        return None if options.module_filter(linear, name) else "left out by module_filter"
    if options.keeps_first_and_last and is_end:
        return "first and last"
    return "left out by keeps" if _matches_keeps(model, name, options.keeps) else None


def _find_obstacle(model: torch.nn.Module, linear: torch.nn.Linear, num_holders: int) -> str | None:
    """Return the reason why a layer must not be converted, or None if it can be.

    A layer must not be converted if the conversion would change more than the number format.

    Args:
        model: Model that contains the layer.
        linear: Linear layer.
        num_holders: Number of modules that have the layer as a child.
    """
    if linear is model:
        return "the model itself"
    if type(linear) is not torch.nn.Linear:
        return "of a class of their own"
    if linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks or linear._backward_pre_hooks:
        return "with hooks"
    if num_holders > 1:
        return "in several places of the model"
    return None if linear.weight.is_floating_point() else "without floating-point weights"


def _matches_keeps(model: torch.nn.Module, name: str, keeps: tuple[Any, ...]) -> bool:
    """Whether `keeps` lists the name or the class of a layer or of a module around it.

    Args:
        model: Model that contains the layer.
        name: Name of the layer in the model.
        keeps: Module names, classes, and class names. A base class matches, too.
    """
    parts = name.split(".")
    for path in [".".join(parts[:length]) for length in range(len(parts) + 1)]:  # from the model itself to the layer
        classes = type(model.get_submodule(path)).__mro__
        class_names = [each.__name__ for each in classes]
        if any(keep == path or keep in classes or keep in class_names for keep in keeps):
            return True
    return False


def _check_equal_layers(model: torch.nn.Module, names: list[str], ranks: Collectives) -> None:
    """Raise an error unless all ranks convert the same layers.

    Args:
        model: Model, for the message.
        names: Names of the layers that this rank converts.
        ranks: Collectives over all ranks that convert the model.

    Raises:
        PrepareError: If the names differ between ranks.
    """
    rows = ranks.gather_numbers([float(len(names)), float(zlib.crc32("\n".join(names).encode()))])
    if any(row != rows[0] for row in rows):
        counts = ", ".join(str(int(row[0])) for row in rows)
        raise PrepareError(
            f"ranks convert other linear layers of {get_class_name(model)} to float8 (by rank, how many: {counts}); give all ranks "
            "the same model, and a module_filter that decides by name and sizes alone"
        )


def _cast_input(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Forward pre-hook that casts a layer's inputs to the dtype of autocast.

    torchao's layers cast their inputs only under CUDA autocast. On other devices, matrix products would be computed in
    float32 without this hook.
    """
    cast: Callable[[Any], Any] = _cast_to_autocast_dtype
    return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}


def _cast_to_autocast_dtype(value: Any) -> Any:
    """Return a tensor in the dtype of autocast, if autocast is enabled. Other values are returned unchanged."""
    if isinstance(value, torch.Tensor) and torch.is_autocast_enabled(value.device.type):
        return value.to(torch.get_autocast_dtype(value.device.type))
    return value


def _log_conversion(
    model: torch.nn.Module,
    num_converted: int,
    num_linears: int,
    exclusions: dict[str, str],
    options: Float8Options,
    was_converted: bool,
) -> None:
    """Log how many layers were converted to float8, and which layers were not, grouped by reason.

    Warn once if none was converted, now or by an earlier call.

    Args:
        model: Model whose layers were converted.
        num_converted: Number of layers that this call has converted to float8.
        num_linears: Number of linear layers.
        exclusions: Reason for each linear layer that stays in bf16, by name.
        options: Options of float8.
        was_converted: Whether the model had been converted by an earlier call.
    """
    by_reason: dict[str, list[str]] = {}
    for name, reason in exclusions.items():
        by_reason.setdefault(reason, []).append(name)
    excluded_text = "; ".join(f"{reason} ({_join_layer_names(names)})" for reason, names in by_reason.items())
    kind = get_class_name(model)
    if num_converted:
        log.info(
            "%d of %d linear layers of %s compute in float8 (%s)%s",
            num_converted,
            num_linears,
            kind,
            options.description,
            f"; kept in bf16: {excluded_text}" if excluded_text else "",
        )
    elif not was_converted:
        log.warning_once(
            "mixed_precision='fp8', but no linear layer of %s computes in float8%s. Use mixed_precision='bf16', or see Float8Options",
            kind,
            f" ({excluded_text})" if excluded_text else ": it has none",
        )


def _join_layer_names(names: list[str]) -> str:
    return join_names([name or "itself" for name in names], _NUM_SHOWN)
