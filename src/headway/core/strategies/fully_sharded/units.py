"""Choice of the units in which FSDP shards a model. Models that cannot be sharded are rejected.

A unit is a module whose parameters are gathered by one collective when its forward begins. Repeated blocks are
units; all other modules belong to the root. If several modules use one parameter (tied weights), one unit must contain
all of them. Otherwise each unit would turn it into a separate parameter. If a block is tied to a module outside of it,
those of its submodules that are not tied are units instead.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from headway.common.optional import LazyModule
from headway.common.text import join_names
from headway.core import extensions
from headway.core.config.parallelism import ShardingOptions
from headway.core.strategies._torch import is_traceable_wrapper_subclass
from headway.core.strategies.blocks import find_blocks, find_parameter_owners, is_container, is_selected
from headway.core.weights.pieces import is_dtensor
from headway.core.weights.tensor_bytes import get_dtype_name
from headway.errors import ConfigError, PrepareError
from headway.log import get_logger

fsdp = LazyModule("torch.distributed.fsdp")
log = get_logger(__name__)


@dataclass(frozen=True)
class ShardingUnits:
    """Modules of a model that FSDP gathers separately, and parameters that stay unsharded.

    Attributes:
        modules: Modules that are units, innermost first, without the root.
        ignored: Parameters that stay unsharded: all parameters without dimensions, and some frozen ones.
        divided_blocks: Names of blocks that are not units, because their parameters are tied to the rest of the model.
            Those of their submodules that are not tied are units instead.
    """

    modules: tuple[torch.nn.Module, ...]
    ignored: frozenset[torch.nn.Parameter]
    divided_blocks: tuple[str, ...] = ()


def find_units(
    model: torch.nn.Module, options: ShardingOptions, other_models: Iterable[torch.nn.Module] = ()
) -> ShardingUnits:
    """Choose the modules of a model that FSDP gathers separately (its units).

    Args:
        model: Model to shard.
        options: Sharding options, which apply to all models of the Accelerator.
        other_models: Other models of the Accelerator. The options may name modules that only these contain.

    Raises:
        PrepareError: If the model cannot be sharded. The message names the cause and a remedy.
        ConfigError: If the options name modules that no model contains.
    """
    other_models = tuple(other_models)
    _check_wrapped(model)
    if sys.modules.keys() & {"peft", "bitsandbytes"}:  # otherwise the model has neither adapters nor 4-bit weights
        extensions.load("feature", "adapted_models")(model)
    ignored = _find_ignored(model, options.ignored, other_models)
    if options.min_num_params:
        candidates = list(_iterate_by_size(model, options.min_num_params))
    else:
        candidates = _find_named_units(model, options, other_models)
    names = {id(module): name for name, module in model.named_modules()}
    units, divided_blocks = _divide_tied_modules(model, candidates, names)
    units = [unit for unit in units if any(p not in ignored for p in unit.parameters())]
    # Innermost first, as fully_shard requires.
    units.sort(key=lambda unit: names[id(unit)].count("."), reverse=True)
    _check_parameters(model, ignored)
    _check_dtypes(model, units, ignored)
    return ShardingUnits(tuple(units), frozenset(ignored), tuple(divided_blocks))


# ---------------------------------------------------------------- choice of units


def _find_named_units(
    model: torch.nn.Module, options: ShardingOptions, other_models: Iterable[torch.nn.Module]
) -> list[torch.nn.Module]:
    """Return the modules that the options name as units. If they name none, return the model's repeated blocks.

    Args:
        model: Model to shard.
        options: Sharding options.
        other_models: Other models, which may contain named modules that `model` lacks.

    Raises:
        ConfigError: If no model contains a named module, or if a named module is never called.
    """
    missing = [selector for selector in options.units if not _contains(model, selector)]
    for selector in missing:
        if not any(_contains(other, selector) for other in other_models):
            raise ConfigError(
                f"ShardingOptions(units=...) names {selector!r}, which {type(model).__name__} lacks; give classes or names. If "
                "another model contains it, pass both models to one prepare() call"
            )
    if len(missing) == len(options.units):
        return find_blocks(model)
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


def _contains(model: torch.nn.Module, selector: object) -> bool:
    """Whether a model contains a module with this class, class name or module name."""
    return any(is_selected(name, module, (selector,)) for name, module in model.named_modules())


def _iterate_by_size(module: torch.nn.Module, min_elements: int, is_root: bool = True) -> Iterator[torch.nn.Module]:
    """Yield modules with at least `min_elements` parameter elements, innermost first.

    Parameters of modules that were already yielded do not count. The root, and containers without a forward, are not
    yielded.

    Args:
        module: Module to search, with its submodules.
        min_elements: Minimum number of parameter elements of a unit.
        is_root: Whether `module` is the root. Default: True.
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


def _divide_tied_modules(
    model: torch.nn.Module, candidates: Iterable[torch.nn.Module], names: dict[int, str]
) -> tuple[list[torch.nn.Module], list[str]]:
    """Replace modules whose parameters are tied to the rest of the model by those of their submodules that are not tied.

    Args:
        model: Model to shard.
        candidates: Modules that would be units if no parameter were tied.
        names: Name of each module, by its ID.

    Returns:
        The units, each once, and the names of the replaced modules.
    """
    users_by_parameter = _find_ties(model)
    units: list[torch.nn.Module] = []
    divided: list[str] = []
    for module in candidates:
        untied = list(_iterate_untied(module, users_by_parameter))
        if untied != [module]:
            divided.append(names[id(module)])
        units += [part for part in untied if not any(part is unit for unit in units)]
    return units, divided


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


def _select_parameters(model: torch.nn.Module, selector: object) -> list[torch.nn.Parameter] | None:
    """Return the parameter whose name is `selector`, and the parameters of all modules that `selector` selects.

    Parameters of nested selected modules occur more than once. Return None if there is no such parameter or module.

    Args:
        model: Model with the parameters.
        selector: Class, class name, module name or parameter name.
    """
    modules = [module for name, module in model.named_modules() if is_selected(name, module, (selector,))]
    parameters = [p for name, p in model.named_parameters() if name == selector]
    if not modules and not parameters:
        return None
    return [*parameters, *(p for module in modules for p in module.parameters())]


def _find_ignored(
    model: torch.nn.Module, selectors: tuple[object, ...], other_models: Iterable[torch.nn.Module]
) -> set[torch.nn.Parameter]:
    """Return the parameters that stay unsharded.

    These are the requested ones, frozen quantized ones that sharding breaks, and parameters without dimensions (scalars,
    such as CLIP's `logit_scale`), which have no dimension to shard. `MeshStrategy` averages the gradients of scalars.

    Args:
        model: Model to shard.
        selectors: Classes, class names, module names or parameter names that the options request.
        other_models: Other models, which may contain what `model` lacks.

    Raises:
        ConfigError: If no model contains anything that matches one of these.
        PrepareError: If one of the parameters is trainable and no scalar.
    """
    ignored: set[torch.nn.Parameter] = set()
    for selector in selectors:
        selected = _select_parameters(model, selector)
        if selected is None and not any(_select_parameters(other, selector) is not None for other in other_models):
            raise ConfigError(
                f"ShardingOptions(ignored=...) names {selector!r}, which {type(model).__name__} does not contain; give classes, "
                "class names, module names or names of parameters. If another model contains it, pass both models to one "
                "prepare() call"
            )
        ignored.update(selected or ())
    quantized = [p for p in model.parameters() if _must_stay_unsharded(p)]
    if quantized:
        log.info(
            "%d frozen, quantized weights of %s stay unsharded on every rank", len(quantized), type(model).__name__
        )
    ignored.update(quantized)
    trainable = [name for name, p in model.named_parameters() if p in ignored and p.requires_grad and p.ndim]
    if trainable:
        raise PrepareError(
            f"ShardingOptions(ignored=...) contains trainable parameters ({join_names(trainable)}): their gradients "
            "would not be summed "
            "over the ranks. Freeze them with requires_grad_(False), or shard them"
        )
    ignored.update(p for p in model.parameters() if p.ndim == 0)
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


def _check_parameters(model: torch.nn.Module, ignored: set[torch.nn.Parameter]) -> None:
    """Raise an error if a parameter cannot be sharded.

    Args:
        model: Model to shard.
        ignored: Parameters that stay unsharded, and are not checked.

    Raises:
        PrepareError: If a parameter is lazy or not contiguous.
    """
    kind = type(model).__name__
    for name, parameter in model.named_parameters():
        if parameter in ignored:
            continue
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise PrepareError(f"{kind} has the lazy parameter {name!r}; run one forward pass before prepare()")
        if not parameter.is_contiguous():
            raise PrepareError(
                f"the parameter {name!r} of {kind} is not contiguous (shape {tuple(parameter.shape)}, strides {parameter.stride()}); "
                "before prepare(): parameter.data = parameter.data.contiguous()"
            )


def _check_dtypes(model: torch.nn.Module, units: Iterable[torch.nn.Module], ignored: set[torch.nn.Parameter]) -> None:
    """Raise an error if trainable parameters that are gathered by one collective differ in dtype.

    Args:
        model: Model to shard. Its parameters outside of all units are gathered together, too.
        units: Modules that become units, innermost first, without the root.
        ignored: Parameters that stay unsharded, and are not checked.

    Raises:
        PrepareError: If a unit has several dtypes.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    inner_parameters: set[int] = set()
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
                f"trainable parameters that are gathered together must have one dtype, but a unit of {type(model).__name__} has "
                f"several ({dtypes}). Convert them, or make their modules separate units: "
                "kwargs_handlers=[ShardingOptions(units=[...])]"
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
