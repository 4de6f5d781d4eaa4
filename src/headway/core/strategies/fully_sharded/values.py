"""Initialization of models on the meta device after they were sharded, so that no rank ever holds a full model.

One unit at a time, each rank allocates the unit's full tensors, has the unit's modules initialize them, receives
rank 0's values, and keeps its own shards. A module's initial values come from its `reset_parameters`, or from the
model's `_init_weights` (transformers).
"""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Set
from typing import Any

import torch

from headway.common.text import format_bytes, join_names
from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.fully_sharded import dtensors, fsdp_state
from headway.core.weights.names import TensorLocation, iterate_own_locations, map_locations
from headway.core.weights.pieces import is_dtensor, iterate_inner_tensors
from headway.errors import PrepareError
from headway.log import get_logger

log = get_logger(__name__)


def wrap_like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return `values` as a parameter if `tensor` is a parameter, else unchanged."""
    return torch.nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else values


def is_without_memory(model: torch.nn.Module) -> bool:
    """Whether any tensor of the model is on the meta device."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def check_initializers(model: torch.nn.Module, expected: Container[str] = ()) -> None:
    """Raise an error if a module on the meta device cannot initialize its tensors.

    Tensors in `expected` are not checked.

    Args:
        model: Model to check.
        expected: Names of tensors whose values come from elsewhere.

    Raises:
        PrepareError: If a module cannot initialize its tensors. The message names all such modules.
    """
    lacking = _find_missing(model, expected)
    helpless = [
        name or type(model).__name__
        for name, module in model.named_modules()
        if any(id(each.tensor) in lacking for each in iterate_own_locations(module))
        and _get_initializer(model, module) is None
    ]
    if helpless:
        raise PrepareError(
            f"{type(model).__name__} was built on the meta device, and these of its modules cannot initialize themselves: "
            f"{join_names(helpless)}. Give their classes a method reset_parameters() that fills the module's own "
            "parameters and buffers; or build the model with its values; for buffers alone, build it under init_empty_weights(); "
            "or name a checkpoint that has them all: accelerator.load_weights(model, folder)"
        )


def _find_missing(model: torch.nn.Module, expected: Container[str]) -> set[int]:
    """Return the IDs of tensors on the meta device that the model must initialize.

    A tensor need not be initialized if one of its names is in `expected`.
    """
    places = map_locations(model)
    found = {id(place.tensor) for place in places.values() if place.tensor.is_meta}
    return found - {id(place.tensor) for name, place in places.items() if name in expected}


def fill_model(
    model: torch.nn.Module,
    units: Iterable[torch.nn.Module],
    device: torch.device,
    everyone: Collectives,
    expected: Container[str] = (),
    elsewhere: Container[int] = (),
) -> int:
    """Allocate a model's tensors that have no memory and fill them with rank 0's values, one unit at a time.

    Args:
        model: Model, possibly sharded, whose parameters are tensors or DTensors without memory.
        units: Separately sharded modules, innermost first, without the root.
        device: Device on which values are computed.
        everyone: Collectives over all ranks.
        expected: Names of tensors whose values are loaded from elsewhere afterwards.
        elsewhere: IDs of tensors that stay empty, because other ranks hold them. Random numbers are drawn for them
            nevertheless, so that the other tensors get the values of a full initialization.

    Returns:
        Bytes of the largest unit, which a rank holds temporarily in addition to its shards.

    Raises:
        PrepareError: If a module initializes its own parameters together with those of units.
    """
    largest = 0
    taken: set[int] = set()
    lacking = _find_missing(model, expected)
    for record in fsdp_state.iterate_records(model):
        _allocate_part(record)
    for place in map_locations(model).values():
        if id(place.tensor) not in elsewhere:
            _allocate_unsharded(place.tensor, device)
    with torch.no_grad():
        for unit in (*units, model):
            own = [module for module in _iterate_children_first(unit) if id(module) not in taken]
            largest = max(largest, _fill_unit(model, own, lacking, device, everyone))
            taken.update(map(id, own))
    log.info("%s was initialized unit by unit; the largest takes %s", type(model).__name__, format_bytes(largest))
    return largest


def _allocate_part(record: Any) -> None:
    """Allocate FSDP's shard of a parameter if it has no memory."""
    part = record.sharded_param
    if not part.is_meta:
        return
    device = torch.device("cpu") if record.offload_to_cpu else record.device
    room = torch.empty_like(dtensors.get_local_shard(part), device=device)
    _replace_content(part, record.to_sharded_dtensor(room))
    record.reset_sharded_param()


def _allocate_unsharded(tensor: torch.Tensor, device: torch.device) -> None:
    """Allocate memory for a meta tensor that FSDP does not shard.

    The tensor is a plain tensor, or a DTensor of tensor parallelism.
    """
    if not tensor.is_meta:
        return
    if not is_dtensor(tensor):
        _replace_content(tensor, torch.empty_like(tensor, device=device))
        return
    room = torch.empty_like(dtensors.get_local_shard(tensor), device=device)
    _replace_content(tensor, dtensors.wrap_like(room.detach(), tensor))


def _replace_content(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Replace a tensor's content in place, because the module tree and tied modules refer to this tensor object."""
    other = wrap_like(tensor, other)
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
    """Have modules initialize their full tensors, give all ranks rank 0's values, and keep this rank's shards.

    Args:
        model: Model that contains the modules.
        modules: Modules of one unit, children first.
        lacking: IDs of the tensors that have no values and must be initialized.
        device: Device on which values are computed.
        everyone: Collectives over all ranks.

    Returns:
        Bytes of the full tensors that were initialized.

    Raises:
        PrepareError: If the modules leave a tensor without values.
    """
    whole: dict[int, torch.Tensor] = {}
    held: list[tuple[TensorLocation, torch.Tensor]] = []
    for module in modules:
        places = list(iterate_own_locations(module))
        if lacking.isdisjoint(id(each.tensor) for each in places):
            continue  # its values exist or come from elsewhere
        for each in places:
            if id(each.tensor) in lacking or is_dtensor(each.tensor):
                held.append((each, each.tensor))
                # The first module that holds a tied tensor initializes it; the others fill temporary memory.
                room = _allocate_marked(each.tensor, device)
                if id(each.tensor) in lacking:
                    whole.setdefault(id(each.tensor), room)
                each.put_tensor(room)
    try:
        _initialize_modules(model, modules, whole.values())
    finally:
        for each, tensor in held:
            each.put_tensor(tensor)
    _check_filled(model, whole.values())
    if whole:
        everyone.broadcast_into([tensor.detach() for tensor in whole.values()])
    for _, tensor in held:
        if id(tensor) in whole:
            dtensors.put_whole(tensor.detach(), whole[id(tensor)])
    return sum(tensor.nbytes for tensor in whole.values())


def take_values(model: torch.nn.Module, everyone: Collectives) -> dict[str, torch.Tensor]:
    """Remove rank 0's tensors from a model that other ranks built on the meta device, and return them.

    Meta tensors replace them in the model.

    Returns:
        The tensors by name. On ranks that built the model on the meta device, they are meta tensors. Empty if all
            ranks, or none, did so.

    Raises:
        PrepareError: If rank 0 has no values but other ranks do.
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
    for name, place in map_locations(model).items():
        old = given[name] = place.tensor
        if id(old) not in made:
            made[id(old)] = wrap_like(old, torch.empty_like(old, device="meta"))
        place.put_tensor(made[id(old)])
    return given


class AwaitedValues:
    """Tensors that have no values when their model is prepared, and the source from which each gets its values.

    The values are read from files, taken from rank 0, or computed by the modules. Existing values are replaced with
    rank 0's.

    Args:
        model: Model as the user built it.
        everyone: Collectives over all ranks.
        expected: Names of tensors whose values are read from files afterwards.

    Raises:
        PrepareError: If values are missing and cannot be initialized.
    """

    def __init__(self, model: torch.nn.Module, everyone: Collectives, expected: Set[str]) -> None:
        self._given = take_values(model, everyone)
        self._everyone = everyone
        self._expected = self._given.keys() or expected
        self._is_lacking = is_without_memory(model)
        if self._is_lacking:
            check_initializers(model, self._expected)  # includes buffers
        # In place, before sharding. Models built with different seeds would otherwise be mixed.
        tensors = iterate_inner_tensors((*model.parameters(), *model.buffers()))
        everyone.broadcast_into([each for each in tensors if not each.is_meta])

    def fill(self, model: torch.nn.Module, units: Iterable[torch.nn.Module], elsewhere: Container[int] = ()) -> None:
        """Allocate this rank's shards of the model, and fill them with the values that are not read from files.

        Tensors from `take_values` are distributed to the shards of all ranks one at a time. Rank 0 frees each tensor
        afterwards.

        Args:
            model: Model, which has been sharded or split.
            units: Separately sharded modules, innermost first.
            elsewhere: IDs of tensors that stay empty, because other ranks hold them.
        """
        device, given = self._everyone.runtime.device, self._given
        if self._is_lacking:
            fill_model(model, units, device, self._everyone, self._expected, elsewhere)
        with torch.no_grad():
            for name, place in map_locations(model).items() if given else ():
                whole = given.pop(name)
                if any(whole is other for other in given.values()):
                    continue  # tied: distributed with the last of its names
                whole = torch.empty_like(whole, device=device) if whole.is_meta else whole.detach().to(device)
                self._everyone.broadcast_into([whole])
                dtensors.put_whole(place.tensor.detach(), whole)


def _allocate_marked(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Allocate memory for a tensor, filled with a marker value that reveals elements which no module initializes.

    Tensors of one-byte dtypes are filled with zeros, because any of their values may be valid.
    """
    return wrap_like(tensor, torch.full(tensor.shape, _get_fill_value(tensor.dtype), dtype=tensor.dtype, device=device))


def _get_fill_value(dtype: torch.dtype) -> float:
    if dtype.itemsize == 1:
        return 0  # any value of a one-byte type may be valid
    return math.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def _check_filled(model: torch.nn.Module, tensors: Iterable[torch.Tensor]) -> None:
    """Raise `PrepareError` if a tensor from `_allocate_marked` still contains its marker value."""
    for tensor in tensors:
        value = _get_fill_value(tensor.dtype)
        if value and bool((tensor.isnan() if math.isnan(value) else tensor == value).any()):
            raise PrepareError(
                f"{type(model).__name__} was built on the meta device, and its own initialization leaves a tensor of shape "
                f"{tuple(tensor.shape)} without values; build it under init_empty_weights(), which computes buffers, or with values"
            )


def _initialize_modules(
    model: torch.nn.Module, modules: list[torch.nn.Module], awaited: Iterable[torch.Tensor]
) -> None:
    """Make modules initialize their own tensors, children first.

    A module is skipped unless it contains tensors without values and all of its submodules are in `modules`.

    Args:
        model: Model that contains the modules.
        modules: Modules to initialize.
        awaited: Tensors without values.

    Raises:
        PrepareError: If a module initializes its own tensors together with those of submodules not in `modules`.
    """
    here, waiting = set(map(id, modules)), set(map(id, awaited))
    for module in modules:
        initialize = _get_initializer(model, module)
        inside = (
            {id(each.tensor) for part in module.modules() for each in iterate_own_locations(part)} if waiting else set()
        )
        if initialize is None or waiting.isdisjoint(inside):
            continue
        if all(id(part) in here for part in module.modules()):
            initialize()
        elif any(id(each.tensor) in waiting for each in iterate_own_locations(module)):
            raise PrepareError(
                f"{type(module).__name__} was built on the meta device, and initializes its own tensors together with "
                "those of blocks, which are sharded separately; move its own parameters and buffers to a separate module, or build "
                "the model with its values"
            )


def _get_initializer(model: torch.nn.Module, module: torch.nn.Module) -> Callable[[], object] | None:
    """Return a function that initializes a module's tensors, or None if there is none.

    It is PEFT's method for LoRA layers, the model's `_init_weights`, or the module's own `reset_parameters`.
    """
    lora: Any = module
    configs: Any = getattr(model, "peft_config", {})
    if configs and hasattr(lora, "reset_lora_parameters"):  # LoRA matrices are not initialized by the model's method
        return lambda: [lora.reset_lora_parameters(name, configs[name].init_lora_weights) for name in lora.lora_A]
    by_model = getattr(model, "_init_weights", None)
    if callable(by_model) and hasattr(model, "config"):
        return lambda: by_model(module)
    for name in ("reset_parameters", "_reset_parameters"):
        own: Callable[[], object] | None = getattr(module, name, None)
        if callable(own):
            return own
    return None


def _iterate_children_first(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield all submodules and then the module itself, each once."""
    seen: set[int] = set()

    def walk_children_first(one: torch.nn.Module) -> Iterator[torch.nn.Module]:
        seen.add(id(one))
        for child in one.children():
            if id(child) not in seen:
                yield from walk_children_first(child)
        yield one

    yield from walk_children_first(module)
