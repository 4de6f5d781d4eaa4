"""Values for models that were built without memory (on the meta device), after they were sharded: no rank ever holds a whole one.

Unit by unit, each rank makes the unit's tensors whole, lets its modules initialise them, takes rank 0's values and keeps its part.
What a module begins with is what its `reset_parameters` says, or the model's `_init_weights` (transformers).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from headway.common.text import listed
from headway.errors import PrepareError
from headway.runtime.collectives.checked import Collectives
from headway.strategies.fully_sharded import dtensors
from headway.strategies.fully_sharded import fsdp_state as gathered
from headway.weights.names import own_places


def is_without_memory(model: torch.nn.Module) -> bool:
    """Does any tensor of the model lie on the meta device?"""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def check_initialisers(model: torch.nn.Module) -> None:
    """Can each module without memory make its values?

    Raises:
        PrepareError: one cannot; the message names it.
    """
    helpless = [
        name or type(model).__name__
        for name, module in model.named_modules()
        if any(each.tensor.is_meta for each in own_places(module)) and _initialiser(model, module) is None
    ]
    if helpless:
        raise PrepareError(
            f"{type(model).__name__} was built on the meta device, and these of its modules cannot initialise themselves: "
            f"{listed(helpless)}. Give their classes a method reset_parameters() that fills the module's own "
            "parameters and buffers; or build the model with its values; for buffers alone, build it under init_empty_weights()"
        )


def fill(model: torch.nn.Module, units: Iterable[torch.nn.Module], device: torch.device, everyone: Collectives) -> int:
    """Give a sharded model's empty tensors memory and rank 0's values, one unit at a time.

    Args:
        model: sharded; its parameters are DTensors without memory.
        units: what is sharded by itself, the innermost first; the root is not among them.
        device: where values are made.
        everyone: all ranks.

    Returns:
        The bytes of the largest unit, which is what a rank has held besides its parts.

    Raises:
        PrepareError: a module initialises parameters of its own together with those of units.
    """
    largest = 0
    taken: set[int] = set()
    awaited = {id(record.sharded_param) for record in gathered.records(model) if _allocate(record)}
    with torch.no_grad():
        for unit in (*units, model):
            own = [module for module in _children_first(unit) if id(module) not in taken]
            largest = max(largest, _fill_unit(model, own, awaited, device, everyone))
            taken.update(map(id, own))
    return largest


def _allocate(record: Any) -> bool:
    """Give a part memory; returns whether it had none."""
    part = record.sharded_param
    if not part.is_meta:
        return False
    device = torch.device("cpu") if record.offload_to_cpu else record.device
    room = torch.empty_like(dtensors.local(part), device=device)
    filled = torch.nn.Parameter(record.to_sharded_dtensor(room), requires_grad=part.requires_grad)
    # The object stays: the module tree and ties hold it.
    torch.utils.swap_tensors(part, filled)  # type: ignore[no-untyped-call]
    record.reset_sharded_param()
    return True


def _fill_unit(
    model: torch.nn.Module,
    modules: list[torch.nn.Module],
    awaited: set[int],
    device: torch.device,
    everyone: Collectives,
) -> int:
    whole: dict[int, torch.Tensor] = {}
    parts: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and (id(parameter) in awaited or parameter.is_meta):
                is_part = id(parameter) in awaited
                if is_part:
                    parts.append((module, name, parameter))
                # What is tied begins as its first holder says; the others fill something else meanwhile.
                room = _room(parameter, device)
                whole.setdefault(id(parameter), room)
                module._parameters[name] = room  # type: ignore[assignment]
                if not is_part:
                    parts.append((module, name, whole[id(parameter)]))  # type: ignore[arg-type]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = whole.setdefault(id(buffer), _room(buffer, device))
    try:
        _initialise(model, modules, whole.values())
    finally:
        for module, name, parameter in parts:
            module._parameters[name] = parameter
    everyone.broadcast_into([tensor.detach() for tensor in whole.values()])
    for _, _, parameter in parts:
        if id(parameter) in awaited:
            dtensors.put_part(dtensors.local(parameter.detach()), whole[id(parameter)], parameter)
    return sum(tensor.nbytes for tensor in whole.values())


def _room(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    room = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(room, requires_grad=tensor.requires_grad) if is_parameter else room


def _initialise(model: torch.nn.Module, modules: list[torch.nn.Module], awaited: Iterable[torch.Tensor]) -> None:
    """Let modules initialise themselves, children first, those whose parts are all here."""
    here, waiting = set(map(id, modules)), set(map(id, awaited))
    for module in modules:
        initialise = _initialiser(model, module)
        if initialise is None or not waiting:
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
