"""Values for models that were built without memory (on the meta device), after they were sharded: no rank ever holds a whole one.

Unit by unit, each rank makes the unit's tensors whole, lets its modules initialise them, takes rank 0's values and keeps its part.
What a module begins with is what its `reset_parameters` says, or the model's `_init_weights` (transformers).
"""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Set
from typing import Any

import torch

from headway.common.text import format_bytes, listed
from headway.errors import PrepareError
from headway.log import get_logger
from headway.runtime.collectives.checked import Collectives
from headway.strategies.fully_sharded import dtensors
from headway.strategies.fully_sharded import fsdp_state as gathered
from headway.weights.names import TensorLocation, own_places, places_of
from headway.weights.pieces import inner_tensors, is_dtensor

log = get_logger(__name__)


def same_kind(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Other values in its place: a parameter's as a parameter."""
    return torch.nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else values


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
    elsewhere: Container[int] = (),
) -> int:
    """Give a model's empty tensors memory and, one unit at a time, rank 0's values.

    Args:
        model: it may be sharded; its parameters are tensors or DTensors without memory.
        units: what is sharded by itself, the innermost first; the root is not among them.
        device: where values are made.
        everyone: all ranks.
        expected: names of tensors whose values come from elsewhere, afterwards.
        elsewhere: ids of empty tensors that stay empty, because other ranks hold them; they draw their numbers all the same.

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
        if id(place.tensor) not in elsewhere:
            _allocate(place.tensor, device)
    with torch.no_grad():
        for unit in (*units, model):
            own = [module for module in _children_first(unit) if id(module) not in taken]
            largest = max(largest, _fill_unit(model, own, lacking, device, everyone))
            taken.update(map(id, own))
    log.info("%s was initialised unit by unit; the largest takes %s", type(model).__name__, format_bytes(largest))
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
    other = same_kind(tensor, other)
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
            made[id(old)] = same_kind(old, torch.empty_like(old, device="meta"))
        place.put(made[id(old)])
    return given


class AwaitedValues:
    """The values without which a model comes to `prepare`, and how it gets them; those that are there become rank 0's.

    Args:
        model: as the user built it.
        everyone: all ranks.
        expected: names of tensors whose values are read afterwards.

    Raises:
        PrepareError: they come from nowhere.
    """

    def __init__(self, model: torch.nn.Module, everyone: Collectives, expected: Set[str]) -> None:
        self._given = take_values(model, everyone)
        self._everyone, self._expected = everyone, self._given.keys() or expected
        self._is_lacking = is_without_memory(model)
        if self._is_lacking:
            check_initialisers(model, self._expected)  # of buffers, too
        # Where they lie: parts of models that were made from different seeds would make a patchwork.
        tensors = inner_tensors((*model.parameters(), *model.buffers()))
        everyone.broadcast_into([each for each in tensors if not each.is_meta])

    def fill(self, model: torch.nn.Module, units: Iterable[torch.nn.Module], elsewhere: Container[int] = ()) -> None:
        """Once it is spread: memory for what this rank holds, and the values that are not read from files; see `fill`.

        What `take_values` has taken goes into all ranks' parts, one tensor at a time, which rank 0 lets go of then.
        """
        device, given = self._everyone.runtime.device, self._given
        if self._is_lacking:
            fill(model, units, device, self._everyone, self._expected, elsewhere)
        with torch.no_grad():
            for name, place in places_of(model).items() if given else ():
                whole = given.pop(name)
                if any(whole is other for other in given.values()):
                    continue  # tied: the last of its names brings it
                whole = torch.empty_like(whole, device=device) if whole.is_meta else whole.detach().to(device)
                self._everyone.broadcast_into([whole])
                dtensors.put_whole(place.tensor.detach(), whole)


def _room(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """New memory for it, in which what nobody writes will be seen."""
    return same_kind(tensor, torch.full(tensor.shape, _unwritten(tensor.dtype), dtype=tensor.dtype, device=device))


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
    lora: Any = module
    configs: Any = getattr(model, "peft_config", {})
    if configs and hasattr(lora, "reset_lora_parameters"):  # its matrices do not begin in the model's own way
        return lambda: [lora.reset_lora_parameters(name, configs[name].init_lora_weights) for name in lora.lora_A]
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
