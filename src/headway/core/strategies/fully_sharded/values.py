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
from headway.core.weights.locations import TensorLocation, iterate_own_locations, map_locations
from headway.core.weights.pieces import is_dtensor, iterate_inner_tensors
from headway.errors import PrepareError
from headway.log import get_logger

log = get_logger(__name__)


class MissingValues:
    """Tensors of a model that have no values when it is prepared, and the source from which each gets its values.

    The values are read from files, taken from rank 0, or computed by the modules. The constructor also replaces existing
    values with rank 0's. All ranks must create this object.

    Args:
        model: Model as the user built it.
        everyone: Collectives over all ranks.
        expected: Names of tensors whose values are read from files afterwards.

    Raises:
        PrepareError: If values are missing and cannot be initialized.
    """

    def __init__(self, model: torch.nn.Module, everyone: Collectives, expected: Set[str]) -> None:
        self._rank_0_tensors = remove_rank_0_values(model, everyone)
        self._everyone = everyone
        self._expected_names = self._rank_0_tensors.keys() or expected
        self._has_meta_tensors = has_meta_tensors(model)
        if self._has_meta_tensors:
            check_initializers(model, self._expected_names)  # includes buffers
        # In place, before sharding. Models built with different seeds would otherwise be mixed.
        tensors = iterate_inner_tensors((*model.parameters(), *model.buffers()))
        everyone.broadcast_into([each for each in tensors if not each.is_meta])

    def fill(
        self, model: torch.nn.Module, units: Iterable[torch.nn.Module], other_stage_ids: Container[int] = ()
    ) -> None:
        """Allocate this rank's shards of the model, and fill them with the values that are not read from files.

        Tensors from `remove_rank_0_values` are distributed to the shards of all ranks one at a time. Rank 0 frees each tensor
        afterwards.

        Args:
            model: Model, which has been sharded or split.
            units: Separately sharded modules, innermost first.
            other_stage_ids: IDs of tensors that stay empty, because other ranks hold them.
        """
        device, rank_0_tensors = self._everyone.runtime.device, self._rank_0_tensors
        if self._has_meta_tensors:
            fill_model(model, units, device, self._everyone, self._expected_names, other_stage_ids)
        if not rank_0_tensors:
            return
        with torch.no_grad():
            for name, location in map_locations(model).items():
                tensor = rank_0_tensors.pop(name)
                if any(tensor is other for other in rank_0_tensors.values()):
                    continue  # tied: distributed with the last of its names
                # Only rank 0 has values. The other ranks allocate memory for them.
                full = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
                self._everyone.broadcast_into([full])
                dtensors.copy_full_values(location.tensor.detach(), full)


def has_meta_tensors(model: torch.nn.Module) -> bool:
    """Whether any tensor of the model is on the meta device."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def remove_rank_0_values(model: torch.nn.Module, everyone: Collectives) -> dict[str, torch.Tensor]:
    """Remove rank 0's tensors from a model that other ranks built on the meta device, and return them.

    Meta tensors replace them in the model.

    Returns:
        The tensors by name. On ranks that built the model on the meta device, they are meta tensors. Empty if all
            ranks, or none, did so.

    Raises:
        PrepareError: If rank 0 has no values but other ranks do.
    """
    is_meta_by_rank = [bool(row[0]) for row in everyone.gather_numbers([float(has_meta_tensors(model))])]
    if len(set(is_meta_by_rank)) < 2:
        return {}
    if is_meta_by_rank[0]:
        ranks = ", ".join(str(rank) for rank, is_meta in enumerate(is_meta_by_rank) if is_meta)
        raise PrepareError(
            f"{type(model).__name__} was built on the meta device on ranks {ranks} only; build it there on all ranks, or on all but "
            "rank 0, whose values all of them get"
        )
    meta_tensors: dict[int, torch.Tensor] = {}  # one for each tensor, so that tied tensors stay tied
    rank_0_tensors: dict[str, torch.Tensor] = {}
    for name, location in map_locations(model).items():
        tensor = rank_0_tensors[name] = location.tensor
        if id(tensor) not in meta_tensors:
            meta_tensors[id(tensor)] = wrap_like(tensor, torch.empty_like(tensor, device="meta"))
        location.put_tensor(meta_tensors[id(tensor)])
    return rank_0_tensors


def check_initializers(model: torch.nn.Module, expected: Container[str] = ()) -> None:
    """Raise an error if a module on the meta device cannot initialize its tensors.

    Tensors in `expected` are not checked.

    Args:
        model: Model to check.
        expected: Names of tensors whose values come from elsewhere.

    Raises:
        PrepareError: If a module cannot initialize its tensors. The message names all such modules.
    """
    missing_ids = _find_missing(model, expected)
    uninitializable = []
    for name, module in model.named_modules():
        is_missing_values = any(id(each.tensor) in missing_ids for each in iterate_own_locations(module))
        if is_missing_values and _get_initializer(model, module) is None:
            uninitializable.append(name or type(model).__name__)
    if uninitializable:
        raise PrepareError(
            f"{type(model).__name__} was built on the meta device, and these of its modules cannot initialize themselves: "
            f"{join_names(uninitializable)}. Give their classes a method reset_parameters() that fills the module's own "
            "parameters and buffers; or build the model with its values; for buffers alone, build it under init_empty_weights(); "
            "or name a checkpoint that has them all: accelerator.load_weights(model, folder)"
        )


def _find_missing(model: torch.nn.Module, expected: Container[str]) -> set[int]:
    """Return the IDs of tensors on the meta device that the model must initialize.

    A tensor need not be initialized if one of its names is in `expected`.
    """
    locations = map_locations(model)
    meta_ids = {id(location.tensor) for location in locations.values() if location.tensor.is_meta}
    return meta_ids - {id(location.tensor) for name, location in locations.items() if name in expected}


def fill_model(
    model: torch.nn.Module,
    units: Iterable[torch.nn.Module],
    device: torch.device,
    everyone: Collectives,
    expected: Container[str] = (),
    other_stage_ids: Container[int] = (),
) -> int:
    """Allocate a model's tensors that have no memory and fill them with rank 0's values, one unit at a time.

    Args:
        model: Model, possibly sharded, whose parameters are tensors or DTensors without memory.
        units: Separately sharded modules, innermost first, without the root.
        device: Device on which values are computed.
        everyone: Collectives over all ranks.
        expected: Names of tensors whose values are loaded from elsewhere afterwards.
        other_stage_ids: IDs of tensors that stay empty, because other ranks hold them. Random numbers are drawn for them
            nevertheless, so that the other tensors get the values of a full initialization.

    Returns:
        Bytes of the largest unit, which a rank holds temporarily in addition to its shards.

    Raises:
        PrepareError: If a module initializes its own parameters together with those of units.
    """
    largest = 0
    filled_module_ids: set[int] = set()
    # Find these first, because the next lines replace the meta tensors' content in place.
    missing_ids = _find_missing(model, expected)
    for record in fsdp_state.iterate_records(model):
        _allocate_shard(record)
    for location in map_locations(model).values():
        if id(location.tensor) not in other_stage_ids:
            _allocate_unsharded(location.tensor, device)
    with torch.no_grad():
        for unit in (*units, model):
            own_modules = [module for module in _iterate_children_first(unit) if id(module) not in filled_module_ids]
            largest = max(largest, _fill_unit(model, own_modules, missing_ids, device, everyone))
            filled_module_ids.update(map(id, own_modules))
    log.info("%s was initialized unit by unit; the largest takes %s", type(model).__name__, format_bytes(largest))
    return largest


def _allocate_shard(record: Any) -> None:
    """Allocate FSDP's shard of a parameter if it has no memory."""
    shard = record.sharded_param
    if not shard.is_meta:
        return
    device = torch.device("cpu") if record.offload_to_cpu else record.device
    memory = torch.empty_like(dtensors.get_local_shard(shard), device=device)
    _replace_content(shard, record.to_sharded_dtensor(memory))
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
    memory = torch.empty_like(dtensors.get_local_shard(tensor), device=device)
    _replace_content(tensor, dtensors.wrap_like(memory.detach(), tensor))


def _replace_content(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Replace a tensor's content, but keep the tensor object, because the module tree and tied modules refer to it.

    Args:
        tensor: Tensor to change. A parameter stays a parameter, but a subclass of Parameter becomes a plain Parameter.
        other: Tensor with the new content. It must not be used afterward.
    """
    content = wrap_like(tensor, other)
    if not is_dtensor(tensor):
        # `swap_tensors` also swaps the attributes that scripts have set on a parameter, such as `_no_weight_decay`.
        content.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, content)  # type: ignore[no-untyped-call]


def wrap_like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return `values` as a parameter if `tensor` is a parameter, else unchanged."""
    return torch.nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else values


def _fill_unit(
    model: torch.nn.Module,
    modules: list[torch.nn.Module],
    missing_ids: set[int],
    device: torch.device,
    everyone: Collectives,
) -> int:
    """Have modules initialize their full tensors, give all ranks rank 0's values, and keep this rank's shards.

    While the modules run their initialization, their shards are replaced by full tensors.

    Args:
        model: Model that contains the modules.
        modules: Modules of one unit, children first.
        missing_ids: IDs of the tensors that have no values and must be initialized. In a sharded model, these tensors
            are the shards.
        device: Device on which values are computed.
        everyone: Collectives over all ranks.

    Returns:
        Bytes of the full tensors that were initialized.

    Raises:
        PrepareError: If the modules leave a tensor without values, or if one of them initializes its own parameters
            together with those of another unit.
    """
    full_tensors: dict[int, torch.Tensor] = {}  # by the ID of the shard that gets the values
    shards: list[tuple[TensorLocation, torch.Tensor]] = []
    for location in _list_locations_to_fill(modules, missing_ids):
        shard = location.tensor
        shards.append((location, shard))
        full_tensor = _allocate_marked(shard, device)
        if id(shard) in missing_ids:
            # A tied tensor gets the values from the first module that holds it. What other modules write is discarded.
            full_tensors.setdefault(id(shard), full_tensor)
        location.put_tensor(full_tensor)
    try:
        _initialize_modules(model, modules, full_tensors.values())
    finally:
        for location, shard in shards:
            location.put_tensor(shard)
    _check_filled(model, full_tensors.values())
    if full_tensors:
        everyone.broadcast_into([tensor.detach() for tensor in full_tensors.values()])
    for _, shard in shards:
        if id(shard) in full_tensors:
            dtensors.copy_full_values(shard.detach(), full_tensors[id(shard)])
    return sum(tensor.nbytes for tensor in full_tensors.values())


def _list_locations_to_fill(modules: Iterable[torch.nn.Module], missing_ids: set[int]) -> list[TensorLocation]:
    """Return the locations of the tensors that need a full tensor while the modules initialize themselves.

    A module whose tensors all have values, or get them from elsewhere, is left out. Any other module fills all of its
    tensors, also those that have values already, such as shards that another module has filled. For this reason, the
    list contains all of its DTensors.

    Args:
        modules: Modules of one unit.
        missing_ids: IDs of the tensors that have no values and must be initialized.
    """
    locations: list[TensorLocation] = []
    for module in modules:
        own_locations = list(iterate_own_locations(module))
        if not missing_ids.isdisjoint(id(location.tensor) for location in own_locations):
            locations += [
                location
                for location in own_locations
                if id(location.tensor) in missing_ids or is_dtensor(location.tensor)
            ]
    return locations


def _allocate_marked(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Allocate memory for a tensor, filled with a marker value that reveals elements which no module initializes.

    Tensors of one-byte dtypes are filled with zeros, because any of their values may be valid.
    """
    return wrap_like(tensor, torch.full(tensor.shape, _get_fill_value(tensor.dtype), dtype=tensor.dtype, device=device))


def _get_fill_value(dtype: torch.dtype) -> float:
    """Return the marker value of a dtype: NaN, or the smallest integer. 0 stands for no marker."""
    if dtype.itemsize == 1:
        return 0  # any value of a one-byte type may be valid
    return math.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def _check_filled(model: torch.nn.Module, tensors: Iterable[torch.Tensor]) -> None:
    """Raise `PrepareError` if a tensor from `_allocate_marked` still contains its marker value."""
    for tensor in tensors:
        marker = _get_fill_value(tensor.dtype)
        if marker == 0:  # a tensor of a one-byte dtype, which has no marker
            continue
        is_unfilled = tensor.isnan() if math.isnan(marker) else tensor == marker
        if bool(is_unfilled.any()):
            raise PrepareError(
                f"{type(model).__name__} was built on the meta device, and its own initialization leaves a tensor of shape "
                f"{tuple(tensor.shape)} without values; build it under init_empty_weights(), which computes buffers, or with values"
            )


def _initialize_modules(
    model: torch.nn.Module, modules: list[torch.nn.Module], uninitialized: Iterable[torch.Tensor]
) -> None:
    """Make modules initialize their own tensors, children first.

    A module is skipped unless it contains tensors without values and all of its submodules are in `modules`.

    Args:
        model: Model that contains the modules.
        modules: Modules to initialize.
        uninitialized: Tensors without values.

    Raises:
        PrepareError: If a module initializes its own tensors together with those of submodules not in `modules`.
    """
    module_ids, uninitialized_ids = set(map(id, modules)), set(map(id, uninitialized))
    if not uninitialized_ids:
        return
    for module in modules:
        initialize = _get_initializer(model, module)
        tensor_ids = {id(each.tensor) for part in module.modules() for each in iterate_own_locations(part)}
        if initialize is None or uninitialized_ids.isdisjoint(tensor_ids):
            continue
        own_tensor_ids = {id(each.tensor) for each in iterate_own_locations(module)}
        if all(id(part) in module_ids for part in module.modules()):
            initialize()
        elif not uninitialized_ids.isdisjoint(own_tensor_ids):
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
