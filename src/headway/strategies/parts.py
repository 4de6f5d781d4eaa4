"""Models of which ranks hold parts: their mesh, their repeated blocks, which these models are, which part stands for a tensor.

torch's device mesh of a layout, its axes named as in the layout.

Which part of a sharded parameter stands for the tensor that a script holds: the one from before prepare(), or a gathered one.

The models of this process of which ranks hold parts: a second prepare must ask for the same layout.

The blocks of a model: what is repeated in its module tree, or what was named.

Activation checkpointing, compilation and sharding go by them.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch

from headway.common.optional import Later
from headway.config.mesh import Layout
from headway.errors import ConfigError, PrepareError
from headway.strategies.fully_sharded import fsdp_state as gathered
from headway.weights.pieces import is_dtensor

device_mesh = Later("torch.distributed.device_mesh")
debug = Later("torch.distributed.tensor.debug")


def build_mesh(device_type: str, layout: Layout) -> tuple[Any, Any]:
    """The mesh, and the part of it on which `fully_shard` works: replicas, if any, and those that share parameters.

    Ranks along ep or cp share parameters, too: they would hold the same ones, and their gradients have to be summed anyway.
    """
    # torch takes parts of two meshes for one where names and ranks agree, and gives results of operators that it has seen the former
    # one: a mesh with other axes around it, or with groups that have ended.
    debug._clear_sharding_prop_cache()
    sizes = {axis: layout.sizes[axis] for axis in layout.sizes}
    shards = [axis for axis in ("shard", "ep", "cp") if axis in sizes]
    if "replicate" in sizes and not shards:
        # fully_shard replicates along an axis beside the one it cuts along, if only of one rank.
        sizes = {a: getattr(layout, a) for a in ("pp", "replicate", "shard", "cp", "tp") if a in sizes or a == "shard"}
        shards = ["shard"]
    if len(shards) < 2 and layout.ep == 1:
        mesh = device_mesh.init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return mesh, mesh[tuple(axis for axis in ("replicate", *shards) if axis in sizes)] if shards else None
    # One axis for both, which is opened for those who ask for one alone; experts are sharded along "shard", if only of one rank.
    inner = shards[-1]
    both = f"shard_{inner}"
    names = [axis for axis in sizes if axis not in shards]
    place = names.index("tp") if "tp" in names else len(names)
    names.insert(place, both)
    flat = device_mesh.init_device_mesh(
        device_type, tuple(sizes.get(axis, layout.num_shards) for axis in names), mesh_dim_names=tuple(names)
    )
    mesh = flat._unflatten(place, (layout.shard, layout.sizes[inner]), ("shard", inner))
    return mesh, flat[("replicate", both)] if "replicate" in sizes else flat[both]


def left(layout: Layout) -> str:
    """What a person should hear where a model is prepared in a layout whose process groups have ended."""
    return (
        f"the process groups of this Accelerator ({layout.describe()}) have ended: memory ran out in an attempt of "
        "find_executable_batch_size, which goes on with new ones. Create the Accelerator inside its function, with this layout"
    )


class ReplacedParameters:
    """The parameters of a strategy's models, by what stood or stands in their place.

    Args:
        models: gives the strategy's sharded models.
    """

    def __init__(self, models: Callable[[], Iterable[torch.nn.Module]]) -> None:
        self._models = models
        self._before: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._whole: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
        self._num_whole, self._num_records = -1, 0

    def note(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Parameters from before, each with the one that has taken its place."""
        self._before.update((id(before), (weakref.ref(before), now)) for before, now in pairs)

    def look_again(self) -> None:
        """There are other models: gathered parameters are looked for anew."""
        self._whole.clear()
        self._num_whole = -1

    def forget(self) -> None:
        """Models are gone, and what has taken the place of their parameters."""
        held = {id(p) for model in self._models() for p in model.parameters()}
        self._before = {key: pair for key, pair in self._before.items() if id(pair[1]) in held}
        self.look_again()

    def current(self, parameter: torch.Tensor) -> torch.Tensor:
        """The part that took its place; for a gathered parameter, which the tree shows while it is whole, its part."""
        known = self._before.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return known[1]
        if is_dtensor(parameter):
            return parameter
        found = self._whole.get(id(parameter))
        if found is None and self._num_whole < self._num_records:
            self._note_whole()  # each is there from its first gather on
            found = self._whole.get(id(parameter))
        if found is None or found[0]() is not parameter:
            return parameter
        part: torch.Tensor = found[1].sharded_param
        return part

    def _note_whole(self) -> None:
        """Which record each gathered parameter belongs to: clippings and steps look it up."""
        self._whole.clear()
        records = [record for model in self._models() for record in gathered.records(model)]
        for record in records:
            whole = gathered.whole_parameter(record)
            if whole is not None:
                self._whole[id(whole)] = weakref.ref(whole), record
        self._num_whole, self._num_records = len(self._whole), len(records)


class ShardedModels:
    """The models that were sharded, or cut into stages, and how; they stay so when they are released."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, tuple[tuple[object, ...], Any]] = (
            weakref.WeakKeyDictionary()
        )

    def __contains__(self, model: torch.nn.Module) -> bool:
        return model in self._known

    def note(self, model: torch.nn.Module, how: tuple[object, ...], kept: Any) -> None:
        """It has been sharded in this way; `kept` is what a second prepare takes up."""
        self._known[model] = how, kept

    def find(self, model: torch.nn.Module, how: tuple[object, ...]) -> Any:
        """What was kept of it; None where it has not been sharded.

        Raises:
            PrepareError: it was, in another way.
        """
        before, kept = self._known.get(model, (how, None))
        if before != how:
            raise PrepareError(
                f"{type(model).__name__} is already sharded in another way ({', '.join(map(str, before))}); build it again, and load "
                "its values from a checkpoint"
            )
        return kept


class ShardedStages(ShardedModels):
    """Those of a pipeline's stages, which were cut into stages, too."""


BARE_CLASS = "_headway_bare_class"
"""Where a block whose class was exchanged keeps the one it had."""
_CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)
_NOT_CALLED = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)


def find_blocks(model: torch.nn.Module, wanted: tuple[Any, ...] = ()) -> list[torch.nn.Module]:
    """The blocks of a model, in the order of its tree, each once; blocks inside of blocks are left out.

    Args:
        model: any module.
        wanted: classes, class names, or names of modules; none: modules with parts of their own that lie in a ModuleList,
            Sequential or ModuleDict and whose class does so at least twice.

    Raises:
        ConfigError: nothing in the model is what was named.
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
                        repeated.setdefault(bare_class(child), []).append(id(child))
        matching = {known for members in repeated.values() if len(members) > 1 for known in members}
    return list(outermost(model.children(), lambda module: id(module) in matching))


def is_wanted(name: str, module: torch.nn.Module, wanted: tuple[Any, ...]) -> bool:
    """Is it of one of the classes, or called like one of the classes or modules?"""
    return any(
        isinstance(module, one) if isinstance(one, type) else one in (name, bare_class(module).__name__)
        for one in wanted
    )


def bare_class(module: torch.nn.Module) -> type:
    """The user's class."""
    bare: type = module.__dict__.get(BARE_CLASS, type(module))
    return bare


def outermost(roots: Iterable[torch.nn.Module], is_one: Callable[[torch.nn.Module], bool]) -> Iterator[torch.nn.Module]:
    """The modules among and below `roots` for which `is_one` holds and that lie in no other such module, each once."""
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
"""A module's name, the module, and the name of a parameter in it."""


def holders_of(model: torch.nn.Module) -> dict[int, tuple[torch.nn.Parameter, list[Holder]]]:
    """By id, each parameter of a model and all that hold it: several where it is tied."""
    found: dict[int, tuple[torch.nn.Parameter, list[Holder]]] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (parameter, []))[1].append((name, module, key))
    return found


def extend(module: torch.nn.Module, mixin: Any) -> None:
    """Put a class before a module's own.

    Raises:
        PrepareError: its class cannot be extended.
    """
    bare: Any = type(module)
    try:
        module.__class__ = _extended(mixin, bare)
    except TypeError as error:
        raise PrepareError(f"the class {bare.__qualname__} cannot be extended: {error}") from error


@cache
def _extended(mixin: Any, bare: Any) -> type:
    """One for all modules of a class: the compiler's guards look at it."""
    return type(bare.__name__, (mixin, bare), {"__module__": bare.__module__, "__doc__": bare.__doc__})
