"""What is sharded and gathered together: the units of a model, found in its module tree; and what cannot be sharded, by name.

A unit is a module whose parameters are gathered by one collective when its forward begins. Blocks that are repeated are units;
what lies in none of them belongs to the root. A parameter that several modules share must lie in one unit with all of them, because
each unit would make a parameter of its own of it: a block that shares one with modules outside of it is opened, and its parts that
share nothing are units instead.
"""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from headway.common.optional import Later
from headway.common.text import listed
from headway.config.parallelism import ShardingOptions
from headway.errors import ConfigError, PrepareError
from headway.log import get_logger
from headway.strategies.parts import find_blocks, holders_of, is_wanted
from headway.weights.pieces import is_dtensor
from headway.weights.shards import dtype_name

fsdp = Later("torch.distributed.fsdp")
log = get_logger(__name__)


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
