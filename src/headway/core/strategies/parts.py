"""Helpers for models that are distributed over ranks: device mesh, blocks, and a map from parameters to their shards.

`build_mesh` creates torch's device mesh of a layout, with axes named as in the layout. A script may still refer to
gathered parameters or to parameters from before prepare(). `ReplacedParameters` maps them to their shards.
`ShardedModels` records how models of this process were sharded, because a second prepare must request an equal layout.
`find_blocks` returns the blocks of a model: its repeated modules, or those that the options name. Activation
checkpointing, compilation and sharding work on these blocks.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch

from headway.common.optional import LazyModule
from headway.core.config.mesh import Layout
from headway.core.strategies._torch import clear_sharding_cache
from headway.core.strategies.fully_sharded import fsdp_state
from headway.core.weights.pieces import is_dtensor
from headway.errors import ConfigError, PrepareError

device_mesh = LazyModule("torch.distributed.device_mesh")


def build_mesh(device_type: str, layout: Layout) -> tuple[Any, Any, Any]:
    """Create the device mesh of a layout.

    Parameters are also sharded over the ranks along cp (context parallelism) and ep (expert parallelism). Otherwise
    these ranks would hold equal parameters. Gradients have to be reduced over these ranks in any case. Experts differ
    along ep, so they are sharded only over the ranks along shard and cp.

    Args:
        device_type: Device type, such as "cuda".
        layout: Number of ranks along each axis.

    Returns:
        Triple of the mesh, the submesh along which `fully_shard` shards and replicates, and the submesh for distributed
            experts. The first submesh is None if `fully_shard` is not used. The second submesh is None without expert
            parallelism.
    """
    # torch treats submeshes of two meshes as equal if names and ranks agree. Its cached results of operators could then refer
    # to an earlier mesh, with other axes around it or with process groups that have ended.
    clear_sharding_cache()
    sizes = {axis: layout.sizes[axis] for axis in layout.sizes}
    shards: list[str] = [axis for axis in ("shard", "cp", "ep") if axis in sizes]
    if "replicate" in sizes and not shards:
        # fully_shard needs a shard axis in addition to the one along which it replicates, even with only one rank.
        sizes = {a: getattr(layout, a) for a in ("pp", "replicate", "shard", "cp", "tp") if a in sizes or a == "shard"}
        shards = ["shard"]
    replicas = [axis for axis in sizes if axis == "replicate"]
    if len(shards) < 2 and layout.ep == 1:
        mesh = device_mesh.init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return mesh, mesh[tuple(replicas + shards)] if shards else None, None
    # Create one axis for all of them, and unflatten it. Experts are sharded along "shard", even if it has only one rank.
    names = [axis for axis in sizes if axis not in shards]
    place, whole = names.index("tp") if "tp" in names else len(names), "_".join(dict.fromkeys(("shard", *shards)))
    names.insert(place, whole)
    flat = device_mesh.init_device_mesh(
        device_type, tuple(sizes.get(axis, layout.num_shards) for axis in names), mesh_dim_names=tuple(names)
    )
    mesh, experts, outer = flat, None, whole.removesuffix("_ep")
    if layout.ep > 1:
        mesh = flat._unflatten(place, (layout.num_shards // layout.ep, layout.ep), (outer, "ep"))
        own = (*replicas, outer)
        experts = mesh[own]
    if layout.cp > 1:
        mesh = mesh._unflatten(place, (layout.shard, layout.cp), ("shard", "cp"))
    own = (*replicas, whole)
    return mesh, flat[own], experts


def explain_ended_groups(layout: Layout) -> str:
    """Return the error message for preparing a model in a layout whose process groups have been destroyed."""
    return (
        f"the process groups of this Accelerator ({layout.describe()}) have ended: memory ran out in an attempt of "
        "find_executable_batch_size, which goes on with new ones. Create the Accelerator inside its function, with this layout"
    )


class ReplacedParameters:
    """Map from original or gathered parameters, which a script may still use, to the shards that have replaced them.

    Optimizers and gradient clipping use it to find the current parameters.

    Args:
        models: Function that returns the strategy's sharded models.
    """

    def __init__(self, models: Callable[[], Iterable[torch.nn.Module]]) -> None:
        self._models = models
        self._before: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._whole: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
        self._num_whole = -1
        self._num_records = 0

    def record_pairs(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Record pairs of a parameter and the parameter that has replaced it."""
        self._before.update((id(before), (weakref.ref(before), now)) for before, now in pairs)

    def forget_gathered(self) -> None:
        """Discard the mapping of gathered parameters, because the strategy's models have changed."""
        self._whole.clear()
        self._num_whole = -1

    def forget_released(self) -> None:
        """Discard the mapping of parameters whose replacement no longer belongs to any model."""
        held = {id(p) for model in self._models() for p in model.parameters()}
        self._before = {key: pair for key, pair in self._before.items() if id(pair[1]) in held}
        self.forget_gathered()

    def get_current(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the parameter that has replaced `parameter`, or `parameter` itself if it was not replaced.

        For a gathered parameter, return the shard that it was gathered from.
        """
        known = self._before.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return known[1]
        if is_dtensor(parameter):
            return parameter
        found = self._whole.get(id(parameter))
        if found is None and self._num_whole < self._num_records:
            self._note_whole()  # a gathered parameter exists from its first gather on
            found = self._whole.get(id(parameter))
        if found is None or found[0]() is not parameter:
            return parameter
        part: torch.Tensor = found[1].sharded_param
        return part

    def _note_whole(self) -> None:
        """Map each gathered parameter to FSDP's record of it.

        Gradient clipping and optimizer steps then find its shard.
        """
        self._whole.clear()
        records = [record for model in self._models() for record in fsdp_state.iterate_records(model)]
        for record in records:
            whole = fsdp_state.get_gathered_parameter(record)
            if whole is not None:
                self._whole[id(whole)] = weakref.ref(whole), record
        self._num_whole = len(self._whole)
        self._num_records = len(records)


class ShardedModels:
    """Registry of models that were sharded or split into stages, with their layouts.

    Models stay registered after they are released, because they stay sharded.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, tuple[tuple[object, ...], Any]] = (
            weakref.WeakKeyDictionary()
        )

    def __contains__(self, model: torch.nn.Module) -> bool:
        return model in self._known

    def record_model(self, model: torch.nn.Module, how: tuple[object, ...], kept: Any) -> None:
        """Record that a model was sharded.

        Args:
            model: Sharded model.
            how: Layout and options with which it was sharded.
            kept: Value that `find_record` returns if the model is prepared a second time.
        """
        self._known[model] = how, kept

    def find_record(self, model: torch.nn.Module, how: tuple[object, ...]) -> Any:
        """Return the value that `record_model` recorded for a model, or None if the model was not sharded.

        Args:
            model: Model to prepare.
            how: Layout and options with which it is prepared now.

        Raises:
            PrepareError: If the model was sharded with another layout or other options.
        """
        before, kept = self._known.get(model, (how, None))
        if before != how:
            raise PrepareError(
                f"{type(model).__name__} is already sharded in another way ({', '.join(map(str, before))}); build it again, and load "
                "its values from a checkpoint"
            )
        return kept


class ShardedStages(ShardedModels):
    """Registry of pipeline stages that were separated from their model and then sharded."""


BARE_CLASS = "_headway_bare_class"
"""Attribute in which a block whose class was replaced keeps its original class."""
_CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)
"""Containers whose repeated children count as blocks."""
_NOT_CALLED = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
"""Containers that have no forward."""


def find_blocks(model: torch.nn.Module, wanted: tuple[Any, ...] = ()) -> list[torch.nn.Module]:
    """Return the blocks of a model in the order of its module tree, each once, without blocks inside of other blocks.

    Args:
        model: Any module.
        wanted: Classes, class names, or module names. Default: (), which selects repeated modules: children of a
            ModuleList, Sequential or ModuleDict that have submodules and whose class occurs at least twice.

    Raises:
        ConfigError: If nothing in the model matches one of the wanted classes or names.
    """
    if wanted:
        for one in wanted:
            if not any(is_wanted(name, module, (one,)) for name, module in model.named_modules()):
                raise ConfigError(
                    f"blocks names {one!r}, which {type(model).__name__} does not contain; give classes, class names or module names"
                )
        matching = {id(module) for name, module in model.named_modules() if is_wanted(name, module, wanted)}
    else:
        repeated: dict[type, list[int]] = {}
        for container in model.modules():
            if isinstance(container, _CONTAINERS):
                for child in container.children() if not isinstance(container, torch.nn.ModuleList) else container:
                    if any(True for _ in child.children()) and not isinstance(child, _NOT_CALLED):
                        repeated.setdefault(get_bare_class(child), []).append(id(child))
        matching = {known for members in repeated.values() if len(members) > 1 for known in members}
    return list(find_outermost(model.children(), lambda module: id(module) in matching))


def is_wanted(name: str, module: torch.nn.Module, wanted: tuple[Any, ...]) -> bool:
    """Whether a module is an instance of a wanted class, or its class or module name is among the wanted names.

    Args:
        name: Name of the module in the model.
        module: Module to test.
        wanted: Classes, class names, or module names.
    """
    return any(
        isinstance(module, one) if isinstance(one, type) else one in (name, get_bare_class(module).__name__)
        for one in wanted
    )


def get_bare_class(module: torch.nn.Module) -> type:
    """Return a module's original class, even if `prepare()` has replaced it by a subclass."""
    bare: type = module.__dict__.get(BARE_CLASS, type(module))
    return bare


def find_outermost(
    roots: Iterable[torch.nn.Module], is_one: Callable[[torch.nn.Module], bool]
) -> Iterator[torch.nn.Module]:
    """Yield the modules for which `is_one` returns true, each once, unless another such module contains them.

    Args:
        roots: Modules to search, together with all modules below them.
        is_one: Function that returns whether a module is one of those to yield.
    """
    waiting, seen = list(roots)[::-1], set()
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if is_one(module):
            yield module
        else:
            waiting += reversed(list(module.children()))


Holder = tuple[str, torch.nn.Module, str]
"""Triple of a module's name, the module, and the name of one of its parameters."""


def find_holders(model: torch.nn.Module) -> dict[int, tuple[torch.nn.Parameter, list[Holder]]]:
    """Return a dict from each parameter's ID to the parameter and a list of the modules that contain it.

    A tied parameter is in several modules.
    """
    found: dict[int, tuple[torch.nn.Parameter, list[Holder]]] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (parameter, []))[1].append((name, module, key))
    return found


def is_container(module: torch.nn.Module) -> bool:
    """Whether a module has no forward, such as a `ModuleList` or a `ParameterDict`: other modules use what it contains."""
    return type(module).forward is torch.nn.Module.forward and "forward" not in vars(module)


def extend_class(module: torch.nn.Module, mixin: Any) -> None:
    """Replace a module's class by a subclass in which a mixin precedes the module's own class.

    Args:
        module: Module to change.
        mixin: Class that precedes the module's own.

    Raises:
        PrepareError: If the class cannot be extended.
    """
    bare: Any = type(module)
    try:
        module.__class__ = _create_extended(mixin, bare)
    except TypeError as error:
        raise PrepareError(f"the class {bare.__qualname__} cannot be extended: {error}") from error


@cache
def _create_extended(mixin: Any, bare: Any) -> type:
    """Return the class that inherits from the mixin and from a module's class.

    It is created once for each module class, because the guards of torch.compile compare classes.
    """
    return type(bare.__name__, (mixin, bare), {"__module__": bare.__module__, "__doc__": bare.__doc__})
