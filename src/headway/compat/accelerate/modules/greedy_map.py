"""infer_auto_device_map by Accelerate's rule: devices in order, each filled as far as it goes, and never returned to.

Its sizes and balanced budgets are Accelerate's too. The first accelerator and the CPU keep room for the largest layer that is
still to be placed. A module that does not fit is split, or the next device's turn comes. Headway's own maps
(`headway.infer_auto_device_map`) put more on accelerators.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from headway.compat.accelerate.modules.models import get_module_leaves, get_module_size_with_ties
from headway.log import get_logger
from headway.offload.placement import sizes
from headway.offload.placement.budget import Device, as_device, get_max_memory
from headway.offload.placement.device_map import clean_device_map
from headway.offload.placement.sizes import (
    Dtype,
    as_dtype,
    class_names,
    find_tied_parameters,
    get_max_layer_size,
    named_module_tensors,
)

_KEPT = ("torch.uint", "torch.int", "torch.bool")
"""Kinds of dtype that loading does not convert."""


def dtype_byte_size(dtype: Any) -> int | float:
    """Bytes of one element; of a truth value an eighth, as Accelerate has it, although torch takes a whole byte."""
    return 1 / 8 if dtype == torch.bool else sizes.dtype_byte_size(dtype)


def prefixes(name: str) -> list[str]:
    """The names of the modules around a tensor or module, from "", the model, to its own."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> Counter[str]:
    """Bytes of every module and tensor by name; "" is the whole model.

    Args:
        model: on any device, the meta device included.
        dtype: what the model will be loaded with; a tensor of a narrower type keeps its own.
        special_dtypes: {tensor name: dtype} that come before `dtype`.
        buffers_only: leave parameters out.
    """
    special = {name: dtype_byte_size(as_dtype(kind)) for name, kind in (special_dtypes or {}).items()}
    width = None if dtype is None else dtype_byte_size(as_dtype(dtype))
    found: Counter[str] = Counter()
    for name, tensor in model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True):
        own = dtype_byte_size(tensor.dtype)
        converted = own if width is None or str(tensor.dtype).startswith(_KEPT) else min(width, own)
        size: Any = tensor.numel() * special.get(name, converted)
        for prefix in prefixes(name):
            found[prefix] += size
    return found


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Dtype | None = None, special_dtypes: Mapping[str, Dtype] | None = None
) -> int:
    """Bytes of all buffers; the arguments are those of compute_module_sizes."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)[""]


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> dict[Device, int]:
    """Budgets that spread a model evenly over the accelerators, each with room for a layer more; the last keeps its own.

    Args:
        model: on any device, the meta device included.
        max_memory: as of get_max_memory.
        no_split_module_classes: class names of modules whose parts must lie on one device.
        dtype, special_dtypes: as of compute_module_sizes.
        low_zero: leave as little as possible on device 0, for generation.
    """
    budgets = get_max_memory(max_memory)
    accelerators = [device for device, size in budgets.items() if device not in ("cpu", "disk") and size > 0]
    indices: list[Any] = [device for device in accelerators if isinstance(device, int)]
    if not accelerators:
        return budgets
    if len(accelerators) == 1:
        low_zero = False
        if max_memory is None and indices:
            budgets[indices[0]] = int(0.9 * budgets[indices[0]])
    found = compute_module_sizes(model, dtype, special_dtypes)
    share = int(found[""] // (len(accelerators) - low_zero) + int(1.25 * _room(model, found, no_split_module_classes)))
    for device in indices[:-1]:
        if not (low_zero and device == 0):
            budgets[device] = min(share, budgets[device])
    if low_zero:
        rest = max(0, found[""] - sum(budgets[device] for device in range(1, len(accelerators))))
        budgets[0] = min(rest, budgets[0])
    return budgets


def _room(model: nn.Module, found: Counter[str], whole: Iterable[str] | str | None) -> int:
    """The largest of: the first module of each class that stays whole, and the mean of the modules without children."""
    modules, names, first = dict(model.named_modules()), class_names(whole), dict[str, int]()
    for name, size in found.items():
        kind = type(modules.get(name)).__name__
        if name and kind in names:
            first.setdefault(kind, size)
    tensors = set(get_module_leaves(found))
    leaves = get_module_leaves(name for name in found if name not in tensors)
    return max([int(sum(found[name] for name in leaves) / max(len(leaves), 1)), *first.values()])


log = get_logger(__name__)

Item = tuple[str, Any]
"""A name, and a module or tensor."""


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Device]:
    """Place the model's modules on devices, first devices first, as Accelerate does.

    Args:
        model: on any device, the meta device included.
        max_memory: as of get_max_memory.
        no_split_module_classes: class names of modules whose parts must lie on one device.
        dtype: what the model will be loaded with.
        special_dtypes: {tensor name: dtype} that come before `dtype`.
        verbose: log each placement.
        clean_result: one entry for a module that lies on one device as a whole.
        offload_buffers: accepted: buffers change no map.
        fallback_allocation: on a device that nothing was put on, put the first module that fits, wherever it stands.
    """
    whole = list(class_names(no_split_module_classes))
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    # Of balanced budgets with masks in them, which take a bit for each entry: no whole bytes.
    fractions = {as_device(key): size for key, size in (max_memory or {}).items() if isinstance(size, float)}
    greedy = _Greedy(model, {**get_max_memory(max_memory), **fractions}, whole, sizes, fallback_allocation)
    greedy.run()
    if verbose:
        log.info("device map: %s", greedy.placed)
    return clean_device_map(greedy.placed) if clean_result else greedy.placed


def _children(name: str, module: Any) -> list[Item]:
    """What a module is split into: its own parameters, then its children."""
    parts = [*module.named_parameters(recurse=False), *module.named_children()]
    return [(f"{name}.{each}", value) for each, value in parts]


class _Greedy:
    def __init__(
        self, model: nn.Module, budgets: dict[Device, Any], whole: list[str], sizes: Mapping[str, int], falls_back: bool
    ) -> None:
        self.placed: dict[str, Device] = {}
        self._sizes, self._whole, self._falls_back = sizes, whole, falls_back
        self._tied = find_tied_parameters(model)
        self._queue: list[Item] = [
            *model.named_parameters(recurse=False),
            *model.named_children(),
            *model.named_buffers(recurse=False),
        ]
        accelerators = [each for each in budgets if each not in ("cpu", "disk")]
        first = ["mps"] if "mps" in accelerators else [*accelerators[:1], "cpu"]
        self._keeps_room = set(first)
        self._devices: list[Device] = [*budgets, *(() if "disk" in budgets else ("disk",))]
        self._limits: dict[Device, float | None] = {**budgets, "disk": None}
        self._used: dict[Device, int] = dict.fromkeys(self._devices, 0)
        self._measure()

    def _measure(self) -> None:
        """The largest layer that is still to be placed."""
        modules = [(name, each) for name, each in self._queue if isinstance(each, nn.Module)]
        self._room, self._largest = get_max_layer_size(modules, dict(self._sizes), self._whole)

    def run(self) -> None:
        """Place everything."""
        while self._queue:
            name, module = self._queue.pop(0)
            self._largest = [each for each in self._largest if each != name and not each.startswith(f"{name}.")]
            if not self._largest:
                self._measure()
            self._treat(name, module)

    def _treat(self, name: str, module: Any) -> None:
        device = self._devices[0]
        room = self._room if device in self._keeps_room else 0
        limit = self._limits[device]
        free = None if limit is None else limit - room - self._used[device]
        ties = self._ties(name)
        size, names, partners = get_module_size_with_ties(ties, self._sizes[name], self._sizes, self._queue)
        if free is None or size <= free:
            self._put(name, names, size, device)
        elif not (
            (ties and self._sizes[name] <= free and self._split_partner(name, module, names, partners))
            or (self._sizes[name] >= free and self._split(name, module))
            or self._fall_back(name, module, size, device)
        ):
            self._used[device] += room
            self._devices.pop(0)
            self._queue.insert(0, (name, module))

    def _ties(self, name: str) -> list[str]:
        """The tensors outside that are those of tensors inside."""
        found = []
        for group in self._tied:
            outside = [each for each in group if f"{name}." not in f"{each}."]
            if outside and len(outside) < len(group):
                found += outside
        return found

    def _put(self, name: str, partners: list[str], size: int, device: Device) -> None:
        self._used[device] += size
        for each in (name, *partners):
            self.placed[each] = device
        self._queue = [item for item in self._queue if item[0] not in partners]

    def _is_whole(self, module: Any) -> bool:
        is_leaf = isinstance(module, torch.Tensor) or not list(module.named_children())
        return is_leaf or type(module).__name__ in self._whole

    def _split(self, name: str, module: Any) -> bool:
        if self._is_whole(module):
            return False
        self._queue = [*_children(name, module), *self._queue]
        self._measure()
        return True

    def _split_partner(self, name: str, module: Any, names: list[str], partners: list[nn.Module]) -> bool:
        for other, partner in zip(names, partners):
            if not self._is_whole(partner):
                at = next(index for index, item in enumerate(self._queue) if item[0] == other)
                rest = [*self._queue[:at], *_children(other, partner), *self._queue[at + 1 :]]
                self._queue = [(name, module), *rest]
                self._measure()
                return True
        return False

    def _fall_back(self, name: str, module: Any, size: int, device: Device) -> bool:
        limit = self._limits[device]
        if not self._falls_back or self._used[device] or limit is None:
            return False
        # What is in hand is not among those that are searched.
        spare = limit - max(self._room, size)
        found = self._first_that_fits(spare) if spare >= 0 else None
        if found is None:
            return False
        for parent in prefixes(found)[1:-1]:
            at = next((index for index, item in enumerate(self._queue) if item[0] == parent), None)
            if at is not None:
                self._queue[at : at + 1] = _children(parent, self._queue[at][1])
        at = next(index for index, item in enumerate(self._queue) if item[0] == found)
        self._queue = [self._queue.pop(at), (name, module), *self._queue]
        return True

    def _first_that_fits(self, limit: float) -> str | None:
        search = list(self._queue)
        while search:
            name, module = search.pop(0)
            if get_module_size_with_ties(self._ties(name), self._sizes[name], self._sizes, search)[0] <= limit:
                return name
            if not self._is_whole(module):
                search = [*_children(name, module), *search]
        return None
