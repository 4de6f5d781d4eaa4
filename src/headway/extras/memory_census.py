"""Census of live tensors: find each tensor's purpose, owner and size in bytes.

Tensors are found through the garbage collector (modules, optimizers, tensors), an error's stack frames, and the
autograd graph, whose saved tensors have no Python name. Saved tensors are not unpacked, because the unpack hook of
activation checkpointing would recompute a block.
"""

import gc
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from headway.extras.activation_offload import OffloadedActivation

CATEGORIES = ("parameters", "gradients", "optimizer state", "buffers", "saved for backward", "other tensors")
"""Purposes of memory, each with the tensors of a model or of training that belong to it."""
_MAX_NODES = 200_000
"""Maximum number of autograd nodes that are visited. A larger graph is counted in part."""


@dataclass(frozen=True)
class LiveStorage:
    """Live tensor storage, with its purpose and owner.

    Attributes:
        category: Purpose of the storage, one of CATEGORIES, such as "optimizer state".
        num_bytes: Size of the storage in bytes, however many tensors share it.
        shape: Shape of the tensor through which the storage was found.
        dtype: Dtype of that tensor.
        owner: Description of its owner, such as "layers.0.weight of Net", "exp_avg of layers.0.weight of Net",
            "saved by MulBackward0", or "`hidden` in forward (net.py:12)".
    """

    category: str
    num_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: str


@dataclass
class TensorCensus:
    """Live storages on one type of device, counted by purpose.

    Attributes:
        device_type: Device type such as "cpu" or "cuda".
        storages: Storages by (device, address). Each one counts once, for the first category that claims it.
        roots: Modules that are not part of another module.
        optimizers: Instances of torch.optim.Optimizer.
        num_graph_scalars: Number of scalars that keep an autograd graph alive, such as losses that were not detached.
        is_complete: False if memory ran out while counting.
    """

    device_type: str
    storages: dict[tuple[str, int], LiveStorage] = field(default_factory=dict)
    roots: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    num_graph_scalars: int = 0
    is_complete: bool = True

    def sum_bytes(self, category: str) -> int:
        """Return the total bytes of the storages in a category, one of CATEGORIES."""
        return sum(storage.num_bytes for storage in self.storages.values() if storage.category == category)

    def list_largest(self, count: int) -> list[LiveStorage]:
        """Return the `count` largest storages, in descending order."""
        return sorted(self.storages.values(), key=lambda storage: -storage.num_bytes)[:count]

    def add_tensor(self, category: str, tensor: torch.Tensor | None, owner: str) -> None:
        """Count a tensor's storage for a category, unless it is on another type of device or already counted.

        Args:
            category: Purpose of the storage, one of CATEGORIES.
            tensor: Tensor to count, or None to do nothing.
            owner: Description of the tensor's owner.
        """
        if tensor is None or tensor.device.type != self.device_type:
            return
        key = _locate_storage(tensor)
        has_memory = key[1] != 0
        if has_memory and key not in self.storages:
            num_bytes = tensor.untyped_storage().nbytes()
            self.storages[key] = LiveStorage(category, num_bytes, tuple(tensor.shape), tensor.dtype, owner)


def take_census(device_type: str, frames: Iterable[FrameType] = ()) -> TensorCensus:
    """Count the live tensors on one type of device, by purpose and owner.

    Args:
        device_type: Device type such as "cpu" or "cuda".
        frames: Stack frames whose local variables give names to tensors, outermost first. Default: none.
    """
    census = TensorCensus(device_type)
    try:
        _count_tensors(census, list(frames))
    except MemoryError:
        census.is_complete = False
    return census


def _count_tensors(census: TensorCensus, frames: list[FrameType]) -> None:
    """Fill an empty census with the tensors of this process.

    Args:
        census: Census to fill.
        frames: Stack frames whose local variables give names to tensors, outermost first.
    """
    tensors: list[torch.Tensor] = []
    modules: list[torch.nn.Module] = []
    for obj in gc.get_objects():
        own_class = type(obj)  # isinstance would ask proxies, which may import or raise
        if issubclass(own_class, torch.nn.Module):
            modules.append(obj)
        elif issubclass(own_class, torch.optim.Optimizer) and "state" in vars(obj):
            census.optimizers.append(obj)
        elif issubclass(own_class, torch.Tensor):
            tensors.append(obj)
    # `vars` also works for objects whose constructor has failed or is still running.
    submodule_ids = {id(child) for module in modules for child in vars(module).get("_modules", {}).values()}
    census.roots = [module for module in modules if id(module) not in submodule_ids and "_modules" in vars(module)]
    # The order matters: a storage counts for the first category that claims it.
    names = _count_models(census)
    _count_optimizers(census, names)
    for tensor in tensors:
        if tensor.is_leaf and tensor.requires_grad:
            census.add_tensor("gradients", tensor.grad, f"gradient of {names.get(id(tensor), 'a leaf tensor')}")
    local_names = dict(_iterate_locals(frames))
    census.num_graph_scalars = sum(tensor.numel() == 1 and tensor.grad_fn is not None for tensor in tensors)
    _count_graph(census, [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None], local_names)
    for tensor in tensors:
        census.add_tensor("other tensors", tensor, local_names.get(_locate_storage(tensor), "no name was found"))


def _count_models(census: TensorCensus) -> dict[int, str]:
    """Add the parameters of all modules, their gradients and buffers to the census.

    Return the names of the parameters by their `id`.
    """
    names: dict[int, str] = {}
    # Start with the largest module tree, so that a module that also has a smaller wrapper is named after the tree.
    for root in sorted(census.roots, key=lambda module: -sum(1 for _ in module.modules())):
        for name, parameter in root.named_parameters():
            owner = names.setdefault(id(parameter), f"{name} of {type(root).__name__}")
            census.add_tensor("parameters", parameter, owner)
            census.add_tensor("gradients", parameter.grad if parameter.is_leaf else None, f"gradient of {owner}")
        for name, buffer in root.named_buffers():
            census.add_tensor("buffers", buffer, f"{name} of {type(root).__name__}")
    return names


def _count_optimizers(census: TensorCensus, names: dict[int, str]) -> None:
    """Add the tensors in the states of all optimizers to a census.

    Args:
        census: Census to fill.
        names: Names of parameters by `id`.
    """
    for optimizer in census.optimizers:
        for parameter, state in list(optimizer.state.items()):
            owner = names.get(id(parameter), type(optimizer).__name__)
            for name, value in state.items() if isinstance(state, dict) else ():
                for tensor in _iterate_tensors(value):
                    census.add_tensor("optimizer state", tensor, f"{name} of {owner}")


def _count_graph(census: TensorCensus, starts: list[Any], local_names: dict[tuple[str, int], str]) -> None:
    """Add tensors saved by autograd to the census, walking the graph from some nodes toward its leaves.

    Args:
        census: Census to add to.
        starts: Autograd nodes to start from.
        local_names: Descriptions of tensors in local variables, by (device, address) of their storages.
    """
    pending, seen = list(starts), set[Any]()
    while pending and len(seen) < _MAX_NODES:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for attribute in dir(type(node)):
            if attribute.startswith("_raw_saved_"):
                for tensor in _iterate_saved_tensors(node, attribute):
                    variable = local_names.get(_locate_storage(tensor))
                    owner = f"saved by {node.name()}{_find_source_line(node)}"
                    description = owner if variable is None else f"{variable}, {owner}"
                    census.add_tensor("saved for backward", tensor, description)
        pending += [following for following, _ in node.next_functions]


def _find_source_line(node: Any) -> str:
    """Return the source line that created an autograd node, or "" if it is unknown.

    torch records the line only in anomaly mode.
    """
    trace = node.metadata.get("traceback_") if torch.is_anomaly_enabled() else None
    return f", made by {trace[-1].strip().splitlines()[0].strip()}" if trace else ""


def _iterate_saved_tensors(node: Any, attribute: str) -> Iterator[torch.Tensor]:
    """Yield the tensors that an autograd node keeps for backward, without running unpack hooks.

    Args:
        node: Autograd node.
        attribute: Attribute with one of its saved values, which begins with "_raw_saved_".
    """
    try:
        value = getattr(node, attribute)
    except RuntimeError:  # backward has freed it
        return
    for saved in value if isinstance(value, list | tuple) else (value,):
        try:
            data = getattr(saved, "data", None)
        except RuntimeError:
            continue
        if isinstance(data, OffloadedActivation):
            yield from data.copy.list_host_tensors()
        elif getattr(saved, "unpack_hook", None) is not None:
            # A hook packs its tensor in any form. torch's `save_on_cpu` returns (device, tensor).
            yield from islice(_iterate_tensors(data), 1)
        elif isinstance(data, torch.Tensor):
            yield data


def _iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a dict, list or tuple, or the value itself if it is a tensor.

    Nested containers are not searched.
    """
    if isinstance(value, dict):
        value = list(value.values())
    parts = value if isinstance(value, list | tuple) else [value]
    yield from (each for each in parts if isinstance(each, torch.Tensor))


def _locate_storage(tensor: torch.Tensor) -> tuple[str, int]:
    """Return the device and the address of a tensor's storage, or ("", 0) if the tensor has no memory of its own."""
    try:
        return str(tensor.device), tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor without memory of its own (a fake one, a wrapper)
        return "", 0


def _iterate_locals(frames: list[FrameType]) -> Iterator[tuple[tuple[str, int], str]]:
    """Yield pairs of ((device, address) of the storage, description) for tensors in local variables.

    Innermost frames come first. In a dict made from the pairs, names in outer frames therefore take precedence.
    """
    for frame in reversed(frames):
        code = frame.f_code
        place = f"in {code.co_name} ({'/'.join(Path(code.co_filename).parts[-2:])}:{frame.f_lineno})"
        for name, value in list(frame.f_locals.items()):
            for tensor in _iterate_tensors(value):
                yield _locate_storage(tensor), f"`{name}` {place}"


def list_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, then its chain of causes and contexts (`__cause__`, else `__context__`)."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def list_frames(error: BaseException) -> list[FrameType]:
    """Return the stack frames of an error and its causes, outermost first."""
    return [frame for each in list_causes(error) for frame, _ in traceback.walk_tb(each.__traceback__)]
