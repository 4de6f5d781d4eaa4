"""What is sharded and gathered together, the units of a model, and in which dtypes; and what cannot be sharded, by name.

A unit is a module whose parameters are gathered by one collective when its forward begins. Blocks that are repeated are units;
what lies in none of them belongs to the root. A parameter that several modules share must lie in one unit with all of them, because
each unit would make a parameter of its own of it: a block that shares one with modules outside of it is opened, and its parts that
share nothing are units instead.

In which dtypes sharded parameters are gathered and their gradients summed; float8's scales, one for all ranks.

Under mixed precision forwards run under autocast, as everywhere. Autocast alone would keep a half-precision copy of each whole weight
from forward to backward, which sharding is there to avoid; so blocks are gathered in half precision to begin with, and autocast has
nothing to copy. Their inputs are not cast: the residual stream stays float32, as it does under DDP. The root (embeddings, the last
norm, the head) is gathered in float32, and so are norms that a device cannot compute from half-precision weights.

float8 all-gathers: a sharded weight of a float8 layer is cast before it is gathered, by one scale for all of its parts.

torchao's tensor around the part does the cast and gives the gathered float8 values to the layer. The scale needs the largest value of
all parts. It is computed for all weights in one exchange: without that, each gather would begin with an exchange of its own, in
forward and in backward. That happens after an update, for who calls a block alone; and again as a forward begins, because weights may
have been changed in between (a checkpoint, an optimizer that swaps averages), so that an older scale would cut values off.
"""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from headway.common.optional import Later
from headway.common.text import listed
from headway.config.engines import Float8Options
from headway.config.parallelism import ShardingOptions
from headway.errors import ConfigError, PrepareError, StateError, UnsupportedError
from headway.log import get_logger
from headway.strategies.fully_sharded import fsdp_state as gathered
from headway.strategies.parts import find_blocks, holders_of, is_wanted
from headway.weights.pieces import is_dtensor
from headway.weights.shards import dtype_name

fsdp = Later("torch.distributed.fsdp")
torchao = Later("torchao.float8")
weights = Later("torchao.float8.fsdp_utils")
log = get_logger(__name__)

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
# Running statistics are float32 on every device, and must have their weights' type.
_WITH_STATISTICS = torch.nn.modules.batchnorm._NormBase
_NORMS = (torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm)


@dataclass(frozen=True)
class ShardingUnits:
    """How a model is cut up.

    Attributes:
        modules: each a unit, the innermost first; the root is not among them.
        ignored: frozen parameters that stay whole.
        split: names of blocks that share parameters with the rest of the model, and are no units for that reason.
    """

    modules: tuple[torch.nn.Module, ...]
    ignored: frozenset[torch.nn.Parameter]
    split: tuple[str, ...] = ()


def find_units(model: torch.nn.Module, options: ShardingOptions) -> ShardingUnits:
    """The units of a model.

    Raises:
        PrepareError: what cannot be sharded; the message names it and says what to do.
        ConfigError: the options name what the model does not hold.
    """
    _check_wrapped(model)
    ignored = _ignored(model, options.ignored)
    names = {id(module): name for name, module in model.named_modules()}
    chosen = list(_by_size(model, options.min_num_params)) if options.min_num_params else _named(model, options)
    tied = _ties(model)
    split: list[str] = []
    units: list[torch.nn.Module] = []
    for module in chosen:
        whole = list(_whole(module, tied))
        if whole != [module]:
            split.append(names[id(module)])
        units += [part for part in whole if not any(part is known for known in units)]
    units = [unit for unit in units if any(p not in ignored for p in unit.parameters())]
    units.sort(key=lambda unit: -names[id(unit)].count("."))
    _check_parameters(model, units, ignored)
    return ShardingUnits(tuple(units), frozenset(ignored), tuple(split))


# ---------------------------------------------------------------- choosing


def _named(model: torch.nn.Module, options: ShardingOptions) -> list[torch.nn.Module]:
    if not options.units:
        return find_blocks(model)
    for one in options.units:
        if not any(is_wanted(name, module, (one,)) for name, module in model.named_modules()):
            raise ConfigError(
                f"ShardingOptions(units=...) names {one!r}, which {type(model).__name__} lacks; give classes or names"
            )
    found = [(name, m) for name, m in model.named_modules() if m is not model and is_wanted(name, m, options.units)]
    for name, module in found:
        if isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict):
            raise ConfigError(
                f"ShardingOptions(units=...) names {name!r}, a {type(module).__name__}, which is never called; name its submodules"
            )
    return [module for _, module in found]


def _by_size(module: torch.nn.Module, least: int, is_root: bool = True) -> Iterator[torch.nn.Module]:
    """Modules with at least so many parameters that lie in no smaller such module, bottom up."""
    found: list[torch.nn.Module] = []
    for child in module.children():
        found += _by_size(child, least, is_root=False)
    yield from found
    taken = {id(p) for unit in found for p in unit.parameters()}
    is_called = not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)
    if not is_root and is_called and sum(p.numel() for p in module.parameters() if id(p) not in taken) >= least:
        yield module


def _ties(model: torch.nn.Module) -> dict[int, list[torch.nn.Module]]:
    """By id of each parameter that several modules hold: those modules."""
    found = {key: [module for _, module, _ in holders] for key, (_, holders) in holders_of(model).items()}
    return {key: modules for key, modules in found.items() if len(modules) > 1}


def _whole(module: torch.nn.Module, tied: dict[int, list[torch.nn.Module]]) -> Iterator[torch.nn.Module]:
    """The module where it holds all sides of its ties; else those of its parts that do."""
    inside = {id(part) for part in module.modules()}
    shared = [key for part in module.modules() for p in part._parameters.values() if (key := id(p)) in tied]
    if all(id(holder) in inside for key in shared for holder in tied[key]):
        yield module
        return
    for child in module.children():
        yield from _whole(child, tied)


def _ignored(model: torch.nn.Module, wanted: tuple[object, ...]) -> set[torch.nn.Parameter]:
    found: set[torch.nn.Parameter] = set()
    for one in wanted:
        matching = [(name, m) for name, m in model.named_modules() if is_wanted(name, m, (one,))]
        direct = [p for name, p in model.named_parameters() if name == one]
        if not matching and not direct:
            raise ConfigError(
                f"ShardingOptions(ignored=...) names {one!r}, which {type(model).__name__} does not contain; give classes, class "
                "names, module names or names of parameters"
            )
        found.update(direct, *(m.parameters() for _, m in matching))
    whole = [p for p in model.parameters() if _stays_whole(p)]
    if whole:
        log.info("%d frozen, quantised weights of %s stay whole on every rank", len(whole), type(model).__name__)
    found.update(whole)
    learning = [name for name, p in model.named_parameters() if p in found and p.requires_grad]
    if learning:
        raise PrepareError(
            f"ShardingOptions(ignored=...) contains trainable parameters ({listed(learning)}): their gradients would not be summed "
            "over the ranks. Freeze them with requires_grad_(False), or shard them"
        )
    return found


def _stays_whole(parameter: torch.nn.Parameter) -> bool:
    """Is it a frozen, quantised one that loses what belongs to it when it is cut: int8 by bitsandbytes, or a class by torchao?"""
    if parameter.requires_grad or type(parameter) is torch.nn.Parameter or is_dtensor(parameter):
        return False
    is_wrapper = is_traceable_wrapper_subclass(parameter) and not hasattr(parameter, "fsdp_pre_all_gather")
    return is_wrapper or parameter.dtype is torch.int8


# ---------------------------------------------------------------- what cannot be sharded


def _check_wrapped(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        where = f"the module {name!r} of {type(model).__name__}" if name else type(model).__name__
        kind = type(module).__name__
        if isinstance(module, torch.nn.parallel.DistributedDataParallel) or kind == "FullyShardedDataParallel":
            raise PrepareError(f"{where} is a {kind}; give the bare model; prepare() shards it")
        if isinstance(module, fsdp.FSDPModule):
            raise PrepareError(f"{where} is already sharded (fully_shard), as prepare() would do; give the bare model")
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            raise PrepareError(
                f"{where} produces sparse gradients, which cannot be sharded; build it with sparse=False"
            )


def _check_parameters(
    model: torch.nn.Module, units: Iterable[torch.nn.Module], ignored: set[torch.nn.Parameter]
) -> None:
    kind = type(model).__name__
    for name, parameter in model.named_parameters():
        if parameter in ignored:
            continue
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise PrepareError(f"{kind} has the lazy parameter {name!r}; run one forward pass before prepare()")
        if parameter.ndim == 0:
            raise PrepareError(
                f"the parameter {name!r} of {kind} is a scalar, which cannot be sharded; make it torch.nn.Parameter(value.reshape(1))"
            )
        if not parameter.is_contiguous():
            raise PrepareError(
                f"the parameter {name!r} of {kind} is not contiguous (shape {tuple(parameter.shape)}, strides {parameter.stride()}); "
                "before prepare(): parameter.data = parameter.data.contiguous()"
            )
    taken: set[int] = set()
    names = {id(p): name for name, p in model.named_parameters()}
    for unit in [*units, model]:
        own = [p for p in unit.parameters() if id(p) not in taken and p not in ignored]
        taken.update(map(id, own))
        by_dtype: dict[torch.dtype, list[str]] = {}
        for parameter in own:
            if parameter.requires_grad:
                by_dtype.setdefault(parameter.dtype, []).append(names[id(parameter)])
        if len(by_dtype) > 1:
            told = "; ".join(f"{dtype_name(dtype)}: {listed(n)}" for dtype, n in by_dtype.items())
            raise PrepareError(
                f"trainable parameters that are gathered together must have one dtype, but a unit of {kind} has several ({told}). "
                "Convert them, or make their modules separate units: kwargs_handlers=[ShardingOptions(units=[...])]"
            )


def check_whole(model: torch.nn.Module) -> None:
    """Refuse parameters that are spread over ranks already.

    Raises:
        PrepareError: some are; one is named.
    """
    parts = [name for name, parameter in model.named_parameters() if is_dtensor(parameter)]
    if parts:
        raise PrepareError(
            f"{len(parts)} parameters of {type(model).__name__}, such as {parts[0]!r}, are spread over the ranks already: it shares "
            "them with a model that was prepared before, or the script has sharded them itself. Models that share parameters "
            "need strategy='ddp', or one module that holds both; leave the script's own sharding out"
        )


def units_here(
    model: torch.nn.Module, units: Iterable[torch.nn.Module], elsewhere: Container[int]
) -> list[torch.nn.Module]:
    """Those of which this rank holds the parameters.

    Raises:
        ConfigError: a rank has a part of one.
    """
    found = []
    for unit in units:
        there = [id(p) in elsewhere for p in unit.parameters()]
        if not all(there):
            found.append(unit)
        if len(set(there)) > 1:
            name = next(name for name, module in model.named_modules() if module is unit)
            raise ConfigError(
                f"ShardingOptions(units=...) takes {name!r} for a unit, which lies on several stages of the pipeline; name modules "
                "within blocks, or the blocks"
            )
    return found


def bring_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Move a model's buffers; its parameters, as DTensors, lie there already. (`fully_shard` moves them itself.)"""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:  # another stage of a pipeline has it
                module._buffers[name] = buffer.to(device)


# ---------------------------------------------------------------- dtypes


@dataclass(frozen=True)
class MixedPrecisionFormats:
    """The formats of one run.

    Attributes:
        blocks: policy of units below the root.
        root: policy of the root, and of norms that stay in float32.
        keeps_norms: norms within blocks are units of their own, in float32.
        told: what is said at the start; empty where nothing is converted.
    """

    blocks: Any
    root: Any
    keeps_norms: tuple[type, ...]
    told: str = ""


def choose_formats(options: ShardingOptions, number_format: str, device_type: str) -> MixedPrecisionFormats:
    """The formats that the run's mixed_precision and the options of sharding mean.

    Args:
        options: of sharding; what they say wins.
        number_format: the run's mixed_precision.
        device_type: of the device that computes.
    """
    reduce, output = _dtype(options.reduce_dtype), _dtype(options.output_dtype)
    given = _dtype(options.param_dtype)
    half = _HALF.get(number_format)
    if half is None:
        # Without autocast, a unit's inputs must have the type of its parameters.
        is_cast = given is not None
        reduce = reduce or (torch.float32 if is_cast else None)
        policy = partial(fsdp.MixedPrecisionPolicy, param_dtype=given, reduce_dtype=reduce, cast_forward_inputs=is_cast)
        told = "" if given is None else f"all units compute with {dtype_name(given)} parameters"
        return MixedPrecisionFormats(policy(), policy(output_dtype=output), (), told)
    param = given or half
    policy = partial(fsdp.MixedPrecisionPolicy, cast_forward_inputs=False)
    blocks = policy(param_dtype=param, reduce_dtype=reduce or torch.float32)
    root = policy(reduce_dtype=reduce, output_dtype=output)
    # Autocast computes these norms in float32 on accelerators, whatever their weights are; on a CPU torch refuses the mixture.
    norms = (_WITH_STATISTICS, *_NORMS) if device_type == "cpu" else (_WITH_STATISTICS,)
    told = (
        f"mixed_precision={number_format!r}: blocks are gathered in {dtype_name(param)}, the root and its residual stream keep "
        f"their dtype; gradients of blocks are summed in {dtype_name(reduce or torch.float32)}, and the optimizer's parameters keep "
        "their dtype"
    )
    return MixedPrecisionFormats(blocks, root, norms, told)


def norms_within(units: Iterable[torch.nn.Module], formats: MixedPrecisionFormats) -> Iterator[torch.nn.Module]:
    """Norms with parameters that lie in these units and stay in float32, each once."""
    seen = {id(unit) for unit in units}
    for unit in units:
        for module in unit.modules():
            has_own = any(p is not None for p in module._parameters.values())
            if isinstance(module, formats.keeps_norms) and id(module) not in seen and has_own:
                seen.add(id(module))
                yield module


def check_formats(model: torch.nn.Module, expected: dict[int, torch.dtype]) -> None:
    """Before the first update: parameters and gradients have the types they were promised to have.

    Args:
        model: a sharded one.
        expected: by id of a sharded parameter, its type when it was set up.

    Raises:
        StateError: something has converted them.
    """
    for record in gathered.records(model):
        part, whole = record.sharded_param, gathered.whole_parameter(record)
        wanted = expected.get(id(part))
        if wanted is None:
            continue
        computed = record.mp_policy.param_dtype or wanted
        found = {"its part": (part.dtype, wanted)}
        if part.grad is not None:
            found["its gradient"] = (part.grad.dtype, wanted)
        if whole is not None and wanted.is_floating_point:
            found["the gathered parameter"] = (whole.dtype, computed)
        for what, (dtype, should) in found.items():
            if dtype != should:
                raise StateError(
                    f"the parameter {record._param_fqn} of {type(model).__name__}: {what} is {dtype_name(dtype)} instead of "
                    f"{dtype_name(should)}. Convert models (model.to(dtype)) before prepare(), not after"
                )


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def check_float8(
    number_format: str,
    options: Float8Options | None,
    sharding: ShardingOptions,
    num_parts: int,
    num_sequence_parts: int = 1,
) -> None:
    """Can a layout of this kind compute in float8 as it is asked to?

    Args:
        number_format: the run's mixed_precision.
        options: of float8.
        sharding: of shards.
        num_parts: among how many ranks a matrix is split (tensor parallelism).
        num_sequence_parts: among how many ranks a sequence is split (context parallelism).

    Raises:
        UnsupportedError: it cannot.
    """
    if number_format != "fp8":
        return
    if num_parts > 1:
        raise UnsupportedError(
            "mixed_precision='fp8' does not support tensor parallelism yet: the parts of a matrix would have scales of their own; "
            "use strategy='fsdp' or 'hsdp', or mixed_precision='bf16'"
        )
    if num_sequence_parts > 1:
        raise UnsupportedError(
            "mixed_precision='fp8' does not support context parallelism (cp): parts of a sequence would have scales of their own, so "
            "that they cannot be compared with the whole; use strategy='fsdp' or 'hsdp', or mixed_precision='bf16'"
        )
    if options is not None and options.all_gather and _is_partly_kept(sharding):
        raise UnsupportedError(
            f"ShardingOptions(reshard_after_forward={sharding.reshard_after_forward}) keeps parts of gathered weights, which torch "
            "cannot do with weights in float8; use True or False, or Float8Options(fsdp_all_gather=False)"
        )


def _is_partly_kept(sharding: ShardingOptions) -> bool:
    chosen = sharding.reshard_after_forward
    return chosen is not None and not isinstance(chosen, bool)


def wrap_weights(
    model: torch.nn.Module, options: Float8Options | None, sharding: ShardingOptions, num_shards: int
) -> int:
    """Let weights of float8 layers be gathered in float8, before they are sharded; returns how many.

    Those stay plain that are shared by several modules, whose scales go by rows, or whose rows cannot be divided among the shards.

    Args:
        model: whose layers have been converted.
        options: of float8.
        sharding: of shards.
        num_shards: among how many ranks a weight is cut.
    """
    wish = None if options is None else options.all_gather
    layers: list[Any] = [module for module in model.modules() if _is_float8(module)]
    if wish is False or not layers or _is_partly_kept(sharding):
        return 0
    holders, count = holders_of(model), 0
    for layer in layers:
        weight, cast = layer.weight, layer.config.cast_config_weight
        is_one_scale = cast.scaling_granularity.value == "tensorwise" and cast.scaling_type.value == "dynamic"
        # torchao rounds scales in the layer only.
        is_one_scale = is_one_scale and not layer.config.round_scales_to_power_of_2
        if is_one_scale and len(holders[id(weight)][1]) == 1 and weight.shape[0] % num_shards == 0:
            wrapped = weights.WeightWithDynamicFloat8CastTensor(
                weight.detach(), layer.linear_mm_config, cast.target_dtype
            )
            layer.weight = torch.nn.Parameter(wrapped, requires_grad=weight.requires_grad)
            count += 1
    if count or wish:
        log.info("%d of %d float8 weights of %s are gathered in float8", count, len(layers), type(model).__name__)
    return count


def compute_scales(models: Iterable[torch.nn.Module]) -> None:
    """The scales of weights as they are now, one exchange for each model that has such weights; all ranks call it."""
    for model in models:
        torchao.precompute_float8_dynamic_scale_for_fsdp(model)


def _is_float8(module: Any) -> bool:
    return isinstance(module, torch.nn.Linear) and hasattr(module, "linear_mm_config")
