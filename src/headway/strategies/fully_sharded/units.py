"""What is sharded and gathered together: the units of a model, found in its module tree; and what cannot be sharded, by name.

A unit is a module whose parameters are gathered by one collective when its forward begins. Blocks that are repeated are units;
what lies in none of them belongs to the root. A parameter that several modules share must lie in one unit with all of them, because
each unit would make a parameter of its own of it: a block that shares one with modules outside of it is opened, and its parts that
share nothing are units instead.

Values for models that were built without memory (on the meta device), after they were sharded: no rank ever holds a whole one.

Unit by unit, each rank makes the unit's tensors whole, lets its modules initialise them, takes rank 0's values and keeps its part.
What a module begins with is what its `reset_parameters` says, or the model's `_init_weights` (transformers).
"""

import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from headway.common.optional import Later
from headway.common.text import listed
from headway.config.parallelism import ShardingOptions
from headway.errors import ConfigError, PrepareError
from headway.log import get_logger
from headway.runtime.collectives.checked import Collectives
from headway.strategies.fully_sharded import dtensors
from headway.strategies.fully_sharded import fsdp_state as gathered
from headway.strategies.parts import find_blocks, holders_of, is_wanted
from headway.weights.names import TensorLocation, own_places, places_of
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
        if isinstance(module, torch.nn.parallel.DistributedDataParallel) or (
            type(module).__name__ == "FullyShardedDataParallel"
        ):
            raise PrepareError(f"{where} is a {type(module).__name__}; give the bare model; prepare() shards it")
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


def is_without_memory(model: torch.nn.Module) -> bool:
    """Does any tensor of the model lie on the meta device?"""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def check_initialisers(model: torch.nn.Module, expected: Container[str] = ()) -> None:
    """Can each module without memory make its values, but for those that are expected from elsewhere?

    Raises:
        PrepareError: one cannot; the message names it.
    """
    lacking = _lacking(model, expected)
    helpless = [
        name or type(model).__name__
        for name, module in model.named_modules()
        if any(id(each.tensor) in lacking for each in own_places(module)) and _initialiser(model, module) is None
    ]
    if helpless:
        raise PrepareError(
            f"{type(model).__name__} was built on the meta device, and these of its modules cannot initialise themselves: "
            f"{listed(helpless)}. Give their classes a method reset_parameters() that fills the module's own "
            "parameters and buffers; or build the model with its values; for buffers alone, build it under init_empty_weights(); "
            "or name a checkpoint that has them all: accelerator.load_weights(model, folder)"
        )


def _lacking(model: torch.nn.Module, expected: Container[str]) -> set[int]:
    """Which tensors have no memory, by id, and none of whose names is expected."""
    places = places_of(model)
    found = {id(place.tensor) for place in places.values() if place.tensor.is_meta}
    return found - {id(place.tensor) for name, place in places.items() if name in expected}


def fill(
    model: torch.nn.Module,
    units: Iterable[torch.nn.Module],
    device: torch.device,
    everyone: Collectives,
    expected: Container[str] = (),
) -> int:
    """Give a model's empty tensors memory and, one unit at a time, rank 0's values.

    Args:
        model: it may be sharded; its parameters are tensors or DTensors without memory.
        units: what is sharded by itself, the innermost first; the root is not among them.
        device: where values are made.
        everyone: all ranks.
        expected: names of tensors whose values come from elsewhere, afterwards.

    Returns:
        The bytes of the largest unit, which is what a rank has held besides its parts.

    Raises:
        PrepareError: a module initialises parameters of its own together with those of units.
    """
    largest = 0
    taken: set[int] = set()
    lacking = _lacking(model, expected)
    for record in gathered.records(model):
        _allocate_part(record)
    for place in places_of(model).values():
        _allocate(place.tensor, device)
    with torch.no_grad():
        for unit in (*units, model):
            own = [module for module in _children_first(unit) if id(module) not in taken]
            largest = max(largest, _fill_unit(model, own, lacking, device, everyone))
            taken.update(map(id, own))
    return largest


def _allocate_part(record: Any) -> None:
    """Give a part memory, where it has none."""
    part = record.sharded_param
    if not part.is_meta:
        return
    device = torch.device("cpu") if record.offload_to_cpu else record.device
    room = torch.empty_like(dtensors.local(part), device=device)
    _become(part, record.to_sharded_dtensor(room))
    record.reset_sharded_param()


def _allocate(tensor: torch.Tensor, device: torch.device) -> None:
    """Give memory to a tensor that has none and is no part of a unit: whole, or cut by tensor parallelism."""
    if not tensor.is_meta:
        return
    if not is_dtensor(tensor):
        _become(tensor, torch.empty_like(tensor, device=device))
        return
    room = torch.empty_like(dtensors.local(tensor), device=device)
    _become(tensor, dtensors.around(room.detach(), tensor))


def _become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Be that one, as the same object: the module tree and ties hold it."""
    if isinstance(tensor, torch.nn.Parameter):
        other = torch.nn.Parameter(other.detach(), requires_grad=tensor.requires_grad)
    if not is_dtensor(tensor):
        other.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]


def _fill_unit(
    model: torch.nn.Module,
    modules: list[torch.nn.Module],
    lacking: set[int],
    device: torch.device,
    everyone: Collectives,
) -> int:
    whole: dict[int, torch.Tensor] = {}
    held: list[tuple[TensorLocation, torch.Tensor]] = []
    for module in modules:
        places = list(own_places(module))
        if lacking.isdisjoint(id(each.tensor) for each in places):
            continue  # it has its values, or will get them
        for each in places:
            if id(each.tensor) in lacking or is_dtensor(each.tensor):
                held.append((each, each.tensor))
                # What is tied begins as its first holder says; the others fill something else meanwhile.
                room = _room(each.tensor, device)
                if id(each.tensor) in lacking:
                    whole.setdefault(id(each.tensor), room)
                each.put(room)
    try:
        _initialise(model, modules, whole.values())
    finally:
        for each, tensor in held:
            each.put(tensor)
    _check_filled(model, whole.values())
    if whole:
        everyone.broadcast_into([tensor.detach() for tensor in whole.values()])
    for _, tensor in held:
        if id(tensor) in whole:
            dtensors.put_whole(tensor.detach(), whole[id(tensor)])
    return sum(tensor.nbytes for tensor in whole.values())


def take_values(model: torch.nn.Module, everyone: Collectives) -> dict[str, torch.Tensor]:
    """By name, rank 0's tensors of a model that only some ranks have built with values; it is without memory from here on.

    Raises:
        PrepareError: rank 0 has none.
    """
    lacking = [row[0] for row in everyone.gather_numbers([float(is_without_memory(model))])]
    if len(set(lacking)) < 2:
        return {}
    if lacking[0]:
        ranks = ", ".join(str(rank) for rank, lacks in enumerate(lacking) if lacks)
        raise PrepareError(
            f"{type(model).__name__} was built on the meta device on ranks {ranks} only; build it there on all ranks, or on all but "
            "rank 0, whose values all of them get"
        )
    made: dict[int, torch.Tensor] = {}
    given: dict[str, torch.Tensor] = {}
    for name, place in places_of(model).items():
        old = given[name] = place.tensor
        if id(old) not in made:
            empty = torch.empty_like(old, device="meta")
            made[id(old)] = torch.nn.Parameter(empty, old.requires_grad) if place.is_parameter else empty
        place.put(made[id(old)])
    return given


def spread_values(
    model: torch.nn.Module, given: dict[str, torch.Tensor], device: torch.device, everyone: Collectives
) -> None:
    """Put what `take_values` has taken into all ranks' parts, one tensor at a time, which rank 0 lets go of then."""
    with torch.no_grad():
        for name, place in places_of(model).items() if given else ():
            whole = given.pop(name)
            if any(whole is other for other in given.values()):
                continue  # tied: the last of its names brings it
            whole = torch.empty_like(whole, device=device) if whole.is_meta else whole.detach().to(device)
            everyone.broadcast_into([whole])
            dtensors.put_whole(place.tensor.detach(), whole)


def _room(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """New memory for it, in which what nobody writes will be seen."""
    room = torch.full(tensor.shape, _unwritten(tensor.dtype), dtype=tensor.dtype, device=device)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(room, requires_grad=tensor.requires_grad) if is_parameter else room


def _unwritten(dtype: torch.dtype) -> float:
    if dtype.itemsize == 1:
        return 0  # any value of so small a number may be meant
    return math.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def _check_filled(model: torch.nn.Module, tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        value = _unwritten(tensor.dtype)
        if value and bool((tensor.isnan() if math.isnan(value) else tensor == value).any()):
            raise PrepareError(
                f"{type(model).__name__} was built on the meta device, and its own initialisation leaves a tensor of shape "
                f"{tuple(tensor.shape)} without values; build it under init_empty_weights(), which computes buffers, or with values"
            )


def _initialise(model: torch.nn.Module, modules: list[torch.nn.Module], awaited: Iterable[torch.Tensor]) -> None:
    """Let modules initialise themselves, children first, those that are or hold what waits, and whose parts are all here."""
    here, waiting = set(map(id, modules)), set(map(id, awaited))
    for module in modules:
        initialise = _initialiser(model, module)
        inside = {id(each.tensor) for part in module.modules() for each in own_places(part)} if waiting else set()
        if initialise is None or waiting.isdisjoint(inside):
            continue
        if all(id(part) in here for part in module.modules()):
            initialise()
        elif any(id(each.tensor) in waiting for each in own_places(module)):
            raise PrepareError(
                f"{type(module).__name__} was built on the meta device, and initialises its own tensors together with "
                "those of blocks, which are sharded separately; move its own parameters and buffers to a separate module, or build "
                "the model with its values"
            )


def _initialiser(model: torch.nn.Module, module: torch.nn.Module) -> Callable[[], object] | None:
    adapters, configs = getattr(module, "reset_lora_parameters", None), getattr(model, "peft_config", {})
    if callable(adapters):  # after its matrices, which the model's own way would not begin with zeros
        return lambda: [
            adapters(name, configs[name].init_lora_weights) for name in dict(module.named_children())["lora_A"]
        ]
    by_model = getattr(model, "_init_weights", None)
    if callable(by_model) and hasattr(model, "config"):
        return lambda: by_model(module)
    for name in ("reset_parameters", "_reset_parameters"):
        own: Callable[[], object] | None = getattr(module, name, None)
        if callable(own):
            return own
    return None


def _children_first(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """All modules below and the module itself, each once."""
    seen: set[int] = set()

    def walk(one: torch.nn.Module) -> Iterator[torch.nn.Module]:
        seen.add(id(one))
        for child in one.children():
            if id(child) not in seen:
                yield from walk(child)
        yield one

    yield from walk(module)
