"""float8 (mixed_precision="fp8"): linear layers multiply in float8 by torchao, everything else is bf16's autocast.

Weights, gradients and the optimizer's state keep their dtype. A layer is exchanged for torchao's Float8Linear, which holds the same
parameters under the same names. Scales are dynamic: nothing is kept from step to step, so a checkpoint has nothing of it.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from headway.common.optional import require
from headway.common.text import listed
from headway.config.engines import EngineOptions, Float8Options
from headway.errors import ConfigError, PrepareError, UnsupportedError
from headway.log import get_logger
from headway.runtime.collectives.checked import Collectives
from headway.runtime.device import Hardware

log = get_logger(__name__)

INSTALL = "torchao>=0.18"
_MULTIPLE = 16
"""What float8 matrix units need sizes to be multiples of."""
_NUM_NAMES = 3
_LEAST = (8, 9)
"""The first compute capability of CUDA with float8 matrix units: Ada (L4, RTX 40); then Hopper."""


def check_float8(name: str, hardware: Hardware, options: EngineOptions) -> None:
    """Can this process compute in float8, where that is asked for?

    Args:
        name: the run's mixed_precision.
        hardware: what computes.
        options: of float8 among others.

    Raises:
        ConfigError: options of float8 for another format.
        UnsupportedError: the hardware has no float8, and it is not to be emulated.
        OptionalDependencyMissing: torchao is not installed.
    """
    if name != "fp8":
        if options.float8 is not None:
            raise ConfigError(
                f"kwargs_handlers has options of float8, but mixed_precision={name!r}; pass mixed_precision='fp8', or remove them"
            )
        return
    problem = None if (options.float8 or Float8Options()).is_emulated else _lack(hardware)
    if problem is not None:
        raise UnsupportedError(
            f"mixed_precision='fp8': {problem}. float8 needs CUDA from compute capability {_LEAST[0]}.{_LEAST[1]} on (L4, RTX 40, "
            "H100 and later) or AMD's MI300 and later. Use mixed_precision='bf16'; or, to try slowly what float8 does to a model, "
            "kwargs_handlers=[Float8Options(emulate=True)]"
        )
    require("torchao.float8", "mixed_precision='fp8' needs", INSTALL)


def _lack(hardware: Hardware) -> str | None:
    """Why this hardware does not compute in float8; None: it does."""
    if hardware.kind != "cuda":
        return f"this run computes on {hardware.kind}, for which torch has no float8 matrix products that train"
    if torch.version.hip:
        arch = str(getattr(torch.cuda.get_device_properties(), "gcnArchName", ""))
        return None if arch.startswith(("gfx94", "gfx95")) else f"this GPU ({arch}) has no float8 matrix units"
    found = torch.cuda.get_device_capability()
    if found >= _LEAST:
        return None
    return f"{torch.cuda.get_device_name()} (compute capability {found[0]}.{found[1]}) has no float8 matrix units"


def convert_model(model: torch.nn.Module, options: Float8Options, ranks: Collectives | None = None) -> torch.nn.Module:
    """Let linear layers of a model compute in float8, in place; those that do already are left as they are.

    Args:
        model: whole, before it is compiled, checkpointed or sharded.
        options: which layers, and how.
        ranks: all that convert it now and must choose alike; None: this one alone.

    Returns:
        The same object. Its converted layers are other objects, with the same parameters and names.

    Raises:
        PrepareError: ranks choose other layers.
    """
    torchao = require("torchao.float8", "mixed_precision='fp8' needs", INSTALL)
    linears = [(name, m) for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    is_done = any(_is_float8(module) for _, module in linears)
    left = _left_out(model, linears, options)
    chosen = {id(module): name for name, module in linears if name not in left and not _is_float8(module)}
    if ranks is not None:
        _agree(model, sorted(chosen.values()), ranks)
    if chosen:
        torchao.convert_to_float8_training(
            model, config=_config(options), module_filter_fn=lambda module, name: id(module) in chosen
        )
        for name in chosen.values():
            model.get_submodule(name).register_forward_pre_hook(_cast_input, with_kwargs=True)
    _tell(model, len(chosen), len(linears), left, options, is_done)
    return model


def _is_float8(module: torch.nn.Module) -> bool:
    return any(kind.__name__ == "Float8Linear" for kind in type(module).__mro__)


def _config(options: Float8Options) -> Any:
    """torchao's, in which weights are plain: those that are gathered in float8 are wrapped when they are sharded."""
    kind = require("torchao.float8", "mixed_precision='fp8' needs", INSTALL).Float8LinearConfig
    if options.config is not None:
        return replace(options.config, enable_fsdp_float8_all_gather=False)
    made = kind.from_recipe_name(options.recipe)
    return replace(made, pad_inner_dim=options.pad_inner_dim, emulate=options.emulate)


def _left_out(
    model: torch.nn.Module, linears: Sequence[tuple[str, torch.nn.Linear]], options: Float8Options
) -> dict[str, str]:
    """Linear layers that stay in bf16, by name, each with its reason."""
    ends = {linears[0][0], linears[-1][0]} if linears and options.keeps_first_and_last else set()
    held: dict[int, int] = {}
    for parent in model.modules():
        for child in parent._modules.values():
            held[id(child)] = held.get(id(child), 0) + 1
    left: dict[str, str] = {}
    for name, linear in linears:
        if _is_float8(linear):
            continue
        reason = _obstacle(model, linear, held.get(id(linear), 0))
        if reason is None and options.module_filter is not None:
            reason = None if options.module_filter(linear, name) else "left out by module_filter"
        elif reason is None and name in ends:
            reason = "first and last"
        elif reason is None and _is_kept(model, name, options.keeps):
            reason = "left out by keeps"
        if reason is None and (linear.in_features % _MULTIPLE or linear.out_features % _MULTIPLE):
            reason = f"sizes that are no multiples of {_MULTIPLE}"
        if reason is not None:
            left[name] = reason
    return left


def _obstacle(model: torch.nn.Module, linear: torch.nn.Linear, num_holders: int) -> str | None:
    """Why exchanging this layer would change more than its format."""
    if linear is model:
        return "the model itself"
    if type(linear) is not torch.nn.Linear:
        return "of a class of their own"
    if linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks or linear._backward_pre_hooks:
        return "with hooks"
    if num_holders > 1:
        return "in several places of the model"
    return None if linear.weight.is_floating_point() else "without floating-point weights"


def _is_kept(model: torch.nn.Module, name: str, keeps: tuple[Any, ...]) -> bool:
    around, module = "", model
    for part in ("", *name.split(".")):
        if part:
            around, module = f"{around}.{part}" if around else part, module.get_submodule(part)
        kinds = type(module).__mro__
        if any(one == around or one in kinds or any(one == kind.__name__ for kind in kinds) for one in keeps):
            return True
    return False


def _agree(model: torch.nn.Module, names: list[str], ranks: Collectives) -> None:
    rows = ranks.gather_numbers([float(len(names)), float(zlib.crc32("\n".join(names).encode()))])
    if any(row != rows[0] for row in rows):
        counts = ", ".join(str(int(row[0])) for row in rows)
        raise PrepareError(
            f"ranks convert other linear layers of {type(model).__name__} to float8 (by rank, how many: {counts}); give all ranks "
            "the same model, and a module_filter that decides by name and sizes alone"
        )


def _cast_input(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Autocast for the layer's input. torchao's layer asks for CUDA's only, so that elsewhere products would be float32."""
    cast: Callable[[Any], Any] = _autocast
    return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}


def _autocast(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and torch.is_autocast_enabled(value.device.type):
        return value.to(torch.get_autocast_dtype(value.device.type))
    return value


def _tell(
    model: torch.nn.Module, num_made: int, num_all: int, left: dict[str, str], options: Float8Options, is_done: bool
) -> None:
    """One line: how many layers compute in float8, and which do not, by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left.items():
        by_reason.setdefault(reason, []).append(name)
    rest = "; ".join(f"{reason}: {_names(names)}" for reason, names in by_reason.items())
    kind = type(model).__name__
    if num_made:
        log.info(
            "%d of %d linear layers of %s compute in float8 (%s)%s",
            num_made,
            num_all,
            kind,
            options.told,
            f"; in bf16 stay: {rest}" if rest else "",
        )
    elif not is_done:
        log.warning_once(
            "mixed_precision='fp8', but no linear layer of %s computes in float8%s. Use mixed_precision='bf16', or see Float8Options",
            kind,
            f" ({rest})" if rest else ": it has none",
        )


def _names(names: list[str]) -> str:
    return listed([name or "itself" for name in names], _NUM_NAMES)
