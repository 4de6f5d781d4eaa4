"""Choice of the units in which FSDP shards a model, and of their dtypes. Models that cannot be sharded are rejected.

A unit is a module whose parameters are gathered by one collective when its forward begins. Repeated blocks are
units; all other modules belong to the root. If several modules use one parameter (tied weights), one unit must contain
all of them. Otherwise each unit would turn it into a separate parameter. If a block is tied to a module outside of it,
those of its submodules that are not tied are units instead.

Under mixed precision, forwards run under autocast, as in other strategies. Autocast alone would keep a
half-precision copy of each unsharded weight from forward to backward, which sharding should avoid. So blocks are
gathered in half precision, and autocast has nothing to copy. Their inputs are not cast: the residual stream stays
float32, as under DDP. The root (embeddings, the last norm, the head) is gathered in float32, and so are norms that a
device cannot compute from half-precision weights.

For float8 all-gathers, a sharded weight of a float8 layer is cast before it is gathered, with one scale for all of
its shards. torchao's tensor subclass around the shard casts it and passes the gathered float8 values to the layer.
The scale needs the largest absolute value over all shards. The scales of all weights are computed in one collective.
Otherwise each all-gather, in forward and in backward, would need another collective first. The scales are computed
after an update, for scripts that call a block alone. They are computed again when a forward begins, because weights can
change in between: a checkpoint is loaded, or an optimizer swaps in averaged weights. An older scale would clip values.
"""

import sys
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from headway.common.optional import LazyModule
from headway.common.text import join_names
from headway.core import extensions
from headway.core.config.float8 import Float8Options
from headway.core.config.parallelism import ShardingOptions
from headway.core.strategies._torch import BatchNormBase, is_traceable_wrapper_subclass
from headway.core.strategies.blocks import find_blocks, find_parameter_owners, is_container, is_selected
from headway.core.strategies.fully_sharded import fsdp_state
from headway.core.strategies.fully_sharded.dtensors import get_local_shard, wrap_shard
from headway.core.weights.pieces import is_dtensor
from headway.core.weights.shards import get_dtype_name
from headway.errors import ConfigError, PrepareError, StateError
from headway.log import get_logger

fsdp = LazyModule("torch.distributed.fsdp")
torchao = LazyModule("torchao.float8")
fsdp_utils = LazyModule("torchao.float8.fsdp_utils")
log = get_logger(__name__)

_HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
# Running statistics are float32 on every device, and the weights must have the same dtype.
_NORMS_WITH_STATISTICS = BatchNormBase
_NORMS = (torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm)


@dataclass(frozen=True)
class ShardingUnits:
    """Modules of a model that FSDP gathers separately, and parameters that stay unsharded.

    Attributes:
        modules: Modules that are units, innermost first, without the root.
        ignored: Frozen parameters that stay unsharded.
        divided_blocks: Names of blocks that are not units, because their parameters are tied to the rest of the model.
            Those of their submodules that are not tied are units instead.
    """

    modules: tuple[torch.nn.Module, ...]
    ignored: frozenset[torch.nn.Parameter]
    divided_blocks: tuple[str, ...] = ()


def find_units(model: torch.nn.Module, options: ShardingOptions) -> ShardingUnits:
    """Choose the modules of a model that FSDP gathers separately (its units).

    Raises:
        PrepareError: If the model cannot be sharded. The message names the cause and a remedy.
        ConfigError: If the options name modules that the model does not contain.
    """
    _check_wrapped(model)
    if sys.modules.keys() & {"peft", "bitsandbytes"}:  # otherwise the model has neither adapters nor 4-bit weights
        extensions.load("feature", "adapted_models")(model)
    ignored = _find_ignored(model, options.ignored)
    names = {id(module): name for name, module in model.named_modules()}
    if options.min_num_params:
        candidates = list(_iterate_by_size(model, options.min_num_params))
    else:
        candidates = _find_named_units(model, options)
    users_by_parameter = _find_ties(model)
    divided_blocks: list[str] = []
    units: list[torch.nn.Module] = []
    for module in candidates:
        untied = list(_iterate_untied(module, users_by_parameter))
        if untied != [module]:
            divided_blocks.append(names[id(module)])
        units += [part for part in untied if not any(part is known for known in units)]
    units = [unit for unit in units if any(p not in ignored for p in unit.parameters())]
    # Innermost first, as fully_shard requires.
    units.sort(key=lambda unit: names[id(unit)].count("."), reverse=True)
    _check_parameters(model, units, ignored)
    return ShardingUnits(tuple(units), frozenset(ignored), tuple(divided_blocks))


# ---------------------------------------------------------------- choice of units


def _find_named_units(model: torch.nn.Module, options: ShardingOptions) -> list[torch.nn.Module]:
    """Return the modules that the options name as units. If they name none, return the model's repeated blocks.

    Raises:
        ConfigError: If the model does not contain a named module, or if a named module is never called.
    """
    if not options.units:
        return find_blocks(model)
    for selector in options.units:
        if not any(is_selected(name, module, (selector,)) for name, module in model.named_modules()):
            raise ConfigError(
                f"ShardingOptions(units=...) names {selector!r}, which {type(model).__name__} lacks; give classes or names"
            )
    selected = [
        (name, module)
        for name, module in model.named_modules()
        if module is not model and is_selected(name, module, options.units)
    ]
    for name, module in selected:
        if is_container(module):
            raise ConfigError(
                f"ShardingOptions(units=...) names {name!r}, a {type(module).__name__}, which is never called; name modules that are"
            )
    return [module for _, module in selected]


def _iterate_by_size(module: torch.nn.Module, min_elements: int, is_root: bool = True) -> Iterator[torch.nn.Module]:
    """Yield modules with at least `min_elements` parameter elements, innermost first.

    Parameters of modules that were already yielded do not count. The root, and containers without a forward, are not
    yielded.
    """
    inner_units: list[torch.nn.Module] = []
    for child in module.children():
        inner_units += _iterate_by_size(child, min_elements, is_root=False)
    yield from inner_units
    if is_root or is_container(module):
        return
    inner_parameters = {id(p) for unit in inner_units for p in unit.parameters()}
    num_elements = sum(p.numel() for p in module.parameters() if id(p) not in inner_parameters)
    if num_elements >= min_elements:
        yield module


def _find_ties(model: torch.nn.Module) -> dict[int, list[torch.nn.Module]]:
    """Return the modules that use each tied parameter, by the parameter's ID.

    A container is never called, so the modules that contain it are the users of its parameters. VBLoRA's layers, for
    example, share a `ParameterDict` with the vector bank.
    """
    parents: dict[int, dict[int, torch.nn.Module]] = {}
    for module in model.modules():
        for child in filter(is_container, module.children()):
            parents.setdefault(id(child), {})[id(module)] = module
    users_by_parameter: dict[int, list[torch.nn.Module]] = {}
    for parameter_id, (_, owners) in find_parameter_owners(model).items():
        users: list[torch.nn.Module] = []
        for owner in owners:
            users += parents[id(owner.module)].values() if id(owner.module) in parents else [owner.module]
        if len(users) > 1:
            users_by_parameter[parameter_id] = users
    return users_by_parameter


def _iterate_untied(
    module: torch.nn.Module, users_by_parameter: dict[int, list[torch.nn.Module]]
) -> Iterator[torch.nn.Module]:
    """Yield the largest modules within `module` that contain all users of their tied parameters.

    Containers are not yielded, because they are never called, and FSDP gathers parameters when a module is called.

    Args:
        module: Module to divide. It is yielded itself if it contains all users of its tied parameters.
        users_by_parameter: Modules that use each tied parameter, by the parameter's ID.
    """
    inner_ids = {id(part) for part in module.modules()}
    users: list[torch.nn.Module] = []
    for part in module.modules():
        for parameter in part._parameters.values():
            users += users_by_parameter.get(id(parameter), ())
    if not is_container(module) and all(id(user) in inner_ids for user in users):
        yield module
        return
    for child in module.children():
        yield from _iterate_untied(child, users_by_parameter)


def _find_ignored(model: torch.nn.Module, selectors: tuple[object, ...]) -> set[torch.nn.Parameter]:
    """Return the parameters that stay unsharded: the requested ones, and frozen quantized ones that sharding breaks.

    Args:
        model: Model to shard.
        selectors: Classes, class names, module names or parameter names that the options request.

    Raises:
        ConfigError: If the model contains nothing that matches one of these.
        PrepareError: If one of the parameters is trainable.
    """
    ignored: set[torch.nn.Parameter] = set()
    for selector in selectors:
        modules = [module for name, module in model.named_modules() if is_selected(name, module, (selector,))]
        parameters = [p for name, p in model.named_parameters() if name == selector]
        if not modules and not parameters:
            raise ConfigError(
                f"ShardingOptions(ignored=...) names {selector!r}, which {type(model).__name__} does not contain; give classes, "
                "class names, module names or names of parameters"
            )
        ignored.update(parameters, *(module.parameters() for module in modules))
    quantized = [p for p in model.parameters() if _must_stay_unsharded(p)]
    if quantized:
        log.info("%d frozen, quantized weights of %s stay whole on every rank", len(quantized), type(model).__name__)
    ignored.update(quantized)
    trainable = [name for name, p in model.named_parameters() if p in ignored and p.requires_grad]
    if trainable:
        raise PrepareError(
            f"ShardingOptions(ignored=...) contains trainable parameters ({join_names(trainable)}): their gradients "
            "would not be summed "
            "over the ranks. Freeze them with requires_grad_(False), or shard them"
        )
    return ignored


def _must_stay_unsharded(parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter is frozen and quantized in a format that sharding would break.

    Such formats are bitsandbytes int8 and torchao's.
    """
    if parameter.requires_grad or type(parameter) is torch.nn.Parameter or is_dtensor(parameter):
        return False
    is_wrapper = is_traceable_wrapper_subclass(parameter) and not hasattr(parameter, "fsdp_pre_all_gather")
    return is_wrapper or parameter.dtype is torch.int8


# ---------------------------------------------------------------- models that cannot be sharded


def _check_wrapped(model: torch.nn.Module) -> None:
    """Raise an error if a module is already wrapped or sharded, or produces sparse gradients.

    Raises:
        PrepareError: If there is such a module.
    """
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
    """Raise an error if a parameter cannot be sharded, or if trainable parameters of a unit differ in dtype.

    Args:
        model: Model to shard.
        units: Modules that become units, without the root.
        ignored: Parameters that stay unsharded.

    Raises:
        PrepareError: If a parameter is lazy, a scalar or not contiguous, or if a unit has several dtypes.
    """
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
    inner_parameters: set[int] = set()
    names = {id(p): name for name, p in model.named_parameters()}
    for unit in [*units, model]:
        own = [p for p in unit.parameters() if id(p) not in inner_parameters and p not in ignored]
        inner_parameters.update(map(id, own))
        names_by_dtype: dict[torch.dtype, list[str]] = {}
        for parameter in own:
            if parameter.requires_grad:
                names_by_dtype.setdefault(parameter.dtype, []).append(names[id(parameter)])
        if len(names_by_dtype) > 1:
            dtypes = "; ".join(f"{get_dtype_name(dtype)}: {join_names(n)}" for dtype, n in names_by_dtype.items())
            raise PrepareError(
                f"trainable parameters that are gathered together must have one dtype, but a unit of {kind} has several ({dtypes}). "
                "Convert them, or make their modules separate units: kwargs_handlers=[ShardingOptions(units=[...])]"
            )


def check_unsharded(model: torch.nn.Module) -> None:
    """Raise an error if a parameter of the model is already sharded or otherwise distributed over ranks.

    Raises:
        PrepareError: If a parameter is already distributed. The message names one.
    """
    distributed = [name for name, parameter in model.named_parameters() if is_dtensor(parameter)]
    if distributed:
        raise PrepareError(
            f"{len(distributed)} parameters of {type(model).__name__}, such as {distributed[0]!r}, are already sharded: "
            "the model shares them with a model that was prepared earlier, or the script has sharded them. "
            "Models that share parameters need strategy='ddp', or one module that contains both. Leave the script's own sharding out"
        )


def check_sizes(model: torch.nn.Module) -> None:
    """Raise an error if a trainable parameter has no elements, because FSDP cannot reduce its gradient.

    Raises:
        PrepareError: If trainable parameters are empty. The message names up to three.
    """
    empty = [name for name, parameter in model.named_parameters() if parameter.requires_grad and not parameter.numel()]
    if empty:
        raise PrepareError(
            f"{', '.join(empty[:3])} of {type(model).__name__} have no elements, and a sharded layout cannot reduce their gradients: "
            "freeze them with requires_grad_(False) before prepare(), leave them out, or use strategy='ddp'"
        )


def list_local_units(
    model: torch.nn.Module, units: Iterable[torch.nn.Module], other_stage_ids: Container[int]
) -> list[torch.nn.Module]:
    """Return the units whose parameters are on this rank.

    Args:
        model: Model that contains the units, for messages.
        units: Modules that are units.
        other_stage_ids: IDs of parameters and buffers that are empty because they belong to other pipeline stages.

    Raises:
        ConfigError: If only some of a unit's parameters are on this rank.
    """
    local_units = []
    for unit in units:
        is_on_other_stage = [id(p) in other_stage_ids for p in unit.parameters()]
        if not all(is_on_other_stage):
            local_units.append(unit)
        if any(is_on_other_stage) and not all(is_on_other_stage):
            name = next(name for name, module in model.named_modules() if module is unit)
            raise ConfigError(
                f"ShardingOptions(units=...) takes {name!r} as a unit, but it is on several stages of the pipeline; name modules "
                "within blocks, or the blocks"
            )
    return local_units


def move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Move a model's buffers to the device on which its parameters already are.

    This is needed only for models without FSDP, because `fully_shard` moves buffers itself.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:  # meta buffers belong to other pipeline stages
                module._buffers[name] = buffer.to(device)


# ---------------------------------------------------------------- dtypes


@dataclass(frozen=True)
class MixedPrecisionFormats:
    """Dtypes of sharded parameters and gradients.

    Attributes:
        blocks: Mixed-precision policy of units below the root.
        root: Mixed-precision policy of the root, and of norms that stay in float32.
        float32_norms: Classes of norms within blocks that become separate units in float32.
        message: Log message about the conversion. Empty if nothing is converted.
    """

    blocks: Any
    root: Any
    float32_norms: tuple[type, ...]
    message: str = ""


def choose_formats(options: ShardingOptions, number_format: str, device_type: str) -> MixedPrecisionFormats:
    """Return the dtypes of sharded parameters and gradients.

    Args:
        options: Options of sharding, which override `number_format`.
        number_format: Mixed precision of the run, such as "bf16".
        device_type: Type of the device that computes, such as "cuda".
    """
    reduce, output = _parse_dtype(options.reduce_dtype), _parse_dtype(options.output_dtype)
    requested = _parse_dtype(options.param_dtype)
    half = _HALF_DTYPES.get(number_format)
    if half is None:
        # Without autocast, a unit's inputs must have the type of its parameters.
        is_cast = requested is not None
        reduce = reduce or (torch.float32 if is_cast else None)
        policy = partial(
            fsdp.MixedPrecisionPolicy, param_dtype=requested, reduce_dtype=reduce, cast_forward_inputs=is_cast
        )
        message = "" if requested is None else f"all units compute with {get_dtype_name(requested)} parameters"
        return MixedPrecisionFormats(policy(), policy(output_dtype=output), (), message)
    param = requested or half
    policy = partial(fsdp.MixedPrecisionPolicy, cast_forward_inputs=False)
    blocks = policy(param_dtype=param, reduce_dtype=reduce or torch.float32)
    root = policy(reduce_dtype=reduce, output_dtype=output)
    # On accelerators autocast computes these norms in float32 with any weights. On a CPU torch rejects mixed types.
    norms = (_NORMS_WITH_STATISTICS, *_NORMS) if device_type == "cpu" else (_NORMS_WITH_STATISTICS,)
    message = (
        f"mixed_precision={number_format!r}: blocks are gathered in {get_dtype_name(param)}, the root and its residual stream "
        f"keep their dtype; gradients of blocks are summed in {get_dtype_name(reduce or torch.float32)}, and the optimizer's "
        "parameters keep their dtype"
    )
    return MixedPrecisionFormats(blocks, root, norms, message)


def iterate_float32_norms(
    units: Iterable[torch.nn.Module], formats: MixedPrecisionFormats
) -> Iterator[torch.nn.Module]:
    """Yield the norm layers that are inside units, have parameters, and stay in float32."""
    seen = {id(unit) for unit in units}
    for unit in units:
        for module in unit.modules():
            has_own = any(p is not None for p in module._parameters.values())
            if isinstance(module, formats.float32_norms) and id(module) not in seen and has_own:
                seen.add(id(module))
                yield module


def check_formats(model: torch.nn.Module, expected: dict[int, torch.dtype]) -> None:
    """Raise an error before the first update if parameters or gradients do not have the expected dtypes.

    Args:
        model: Sharded model.
        expected: Dtype of each sharded parameter when it was set up, by the parameter's ID.

    Raises:
        StateError: If user code has converted parameters or gradients to another dtype.
    """
    for record in fsdp_state.iterate_records(model):
        shard, gathered = record.sharded_param, fsdp_state.get_gathered_parameter(record)
        storage_dtype = expected.get(id(shard))
        if storage_dtype is None:
            continue
        compute_dtype = record.mp_policy.param_dtype or storage_dtype
        checks = [("its part", shard.dtype, storage_dtype)]
        if shard.grad is not None:
            checks.append(("its gradient", shard.grad.dtype, storage_dtype))
        if gathered is not None and storage_dtype.is_floating_point:
            checks.append(("the gathered parameter", gathered.dtype, compute_dtype))
        for description, dtype, expected_dtype in checks:
            if dtype != expected_dtype:
                raise StateError(
                    f"the parameter {record._param_fqn} of {type(model).__name__}: {description} is "
                    f"{get_dtype_name(dtype)} instead of {get_dtype_name(expected_dtype)}. "
                    "Convert models (model.to(dtype)) before prepare(), not after"
                )


def _parse_dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _is_partly_resharded(sharding: ShardingOptions) -> bool:
    """Whether FSDP reshards weights over fewer ranks after forward, for an all-gather among these ranks in backward."""
    reshard = sharding.reshard_after_forward
    return reshard is not None and not isinstance(reshard, bool)


def wrap_float8_weights(
    model: torch.nn.Module, options: Float8Options | None, sharding: ShardingOptions, num_shards: int
) -> int:
    """Wrap weights of float8 layers so that they are all-gathered in float8. Call this before weights are sharded.

    A weight is not wrapped if several modules use it, its scales are per row or rounded to powers of 2, or its rows
    cannot be divided evenly among the shards. No weight is wrapped if the options disable float8 all-gathers, or if
    gathered weights are partly kept after forward.

    Args:
        model: Model whose layers were converted to float8.
        options: Options of float8.
        sharding: Options of sharding.
        num_shards: Number of shards of a weight.

    Returns:
        Number of weights that are gathered in float8.
    """
    is_requested = None if options is None else options.all_gather
    layers: list[Any] = [module for module in model.modules() if _is_float8(module)]
    if is_requested is False or not layers or _is_partly_resharded(sharding):
        return 0
    parameter_owners, count = find_parameter_owners(model), 0
    for layer in layers:
        weight, cast = layer.weight.detach(), layer.config.cast_config_weight
        local = get_local_shard(weight)  # with tensor parallelism, this rank's part
        has_dynamic_scale = cast.scaling_granularity.value == "tensorwise" and cast.scaling_type.value == "dynamic"
        # torchao rounds scales in the layer, not in the all-gather.
        has_suitable_scale = has_dynamic_scale and not layer.config.round_scales_to_power_of_2
        _, owners = parameter_owners[id(layer.weight)]
        if has_suitable_scale and len(owners) == 1 and local.shape[0] % num_shards == 0:
            wrapped = fsdp_utils.WeightWithDynamicFloat8CastTensor(local, layer.linear_mm_config, cast.target_dtype)
            if is_dtensor(weight):
                wrapped = wrap_shard(wrapped, weight.device_mesh, weight.placements, weight.shape, weight.stride())
            layer.weight = torch.nn.Parameter(wrapped, requires_grad=layer.weight.requires_grad)
            count += 1
    if count or is_requested:
        log.info("%d of %d float8 weights of %s are gathered in float8", count, len(layers), type(model).__name__)
    return count


def compute_float8_scales(models: Iterable[torch.nn.Module]) -> None:
    """Compute the float8 scales of the current weights, in one collective per model that has such weights.

    All ranks must call it.
    """
    for model in models:
        torchao.precompute_float8_dynamic_scale_for_fsdp(model)


def _is_float8(module: Any) -> bool:
    return isinstance(module, torch.nn.Linear) and hasattr(module, "linear_mm_config")
