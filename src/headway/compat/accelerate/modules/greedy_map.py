"""`infer_auto_device_map` by Accelerate's greedy rule, which fills one device after the other.

The rule never returns to an earlier device. Module sizes and balanced memory budgets are computed as in Accelerate.
The first accelerator and the CPU reserve space for the largest layer that has not been placed yet. A module that does
not fit is split, or placed on the next device. In comparison, device maps of `headway.infer_auto_device_map` use more
of the accelerators' memory.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from headway.compat.accelerate.modules.models import get_module_leaves, get_module_size_with_ties
from headway.log import get_logger
from headway.offload.placement import sizes
from headway.offload.placement.budget import Device, get_max_memory, parse_device
from headway.offload.placement.device_map import clean_device_map
from headway.offload.placement.sizes import (
    Dtype,
    collect_class_names,
    find_tied_parameters,
    get_max_layer_size,
    named_module_tensors,
    parse_dtype,
)

_KEPT = ("torch.uint", "torch.int", "torch.bool")
"""Prefixes of the names of those dtypes that are not converted when a model is loaded in another dtype."""


def dtype_byte_size(dtype: Any) -> int | float:
    """Return the size of one element of a dtype in bytes.

    A boolean counts as an eighth of a byte, as in Accelerate, although torch uses one byte.
    """
    return 1 / 8 if dtype == torch.bool else sizes.dtype_byte_size(dtype)


def prefixes(name: str) -> list[str]:
    """Return the names of all modules that contain a module or tensor, followed by the given name itself.

    For "layers.0.weight", the result is ["", "layers", "layers.0", "layers.0.weight"], where "" is the model.
    """
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> Counter[str]:
    """Return the sizes of all modules and tensors in bytes, by name. "" is the name of the model.

    Args:
        model: Model on any device, including the meta device.
        dtype: Dtype in which the model will be loaded. Tensors of integers, booleans or a narrower dtype keep their
            dtype. None: the current dtypes.
        special_dtypes: Dtypes of single tensors by name, which override `dtype`.
        buffers_only: Whether to leave out parameters. Default: False.
    """
    special = {name: dtype_byte_size(parse_dtype(kind)) for name, kind in (special_dtypes or {}).items()}
    width = None if dtype is None else dtype_byte_size(parse_dtype(dtype))
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
    """Return the total size of a model's buffers in bytes.

    Args:
        model: Model on any device, including the meta device.
        dtype: Dtype in which the model will be loaded. None: the current dtypes.
        special_dtypes: Dtypes of single tensors by name, which override `dtype`.
    """
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)[""]


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> dict[Device, int]:
    """Return a memory budget in bytes for each device, so that the model is spread evenly over the accelerators.

    Each budget includes space for one more layer. The budgets of the last accelerator and of the CPU are not reduced.
    With a single accelerator and no `max_memory`, its budget is 90 % of its free memory. Without accelerators, the
    budgets of `get_max_memory` are returned.

    Args:
        model: Model on any device, including the meta device.
        max_memory: Memory limits by device, as in get_max_memory.
        no_split_module_classes: Class names of modules that must not be split over several devices.
        dtype, special_dtypes: As in compute_module_sizes.
        low_zero: Whether to leave as much memory as possible on device 0 for generation. Default: False.
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
    share = int(
        found[""] // (len(accelerators) - low_zero)
        + int(1.25 * _compute_reserve(model, found, no_split_module_classes))
    )
    for device in indices[:-1]:
        if not (low_zero and device == 0):
            budgets[device] = min(share, budgets[device])
    if low_zero:
        rest = max(0, found[""] - sum(budgets[device] for device in range(1, len(accelerators))))
        budgets[0] = min(rest, budgets[0])
    return budgets


def _compute_reserve(model: nn.Module, found: Counter[str], whole: Iterable[str] | str | None) -> int:
    """Return the number of bytes to reserve on a device for one more layer.

    It is the size of the largest module whose class is in `whole`, or the mean size of modules without children if that
    is larger. Only the first module of each class is measured.

    Args:
        model: Model whose layers are placed.
        found: Sizes of modules and tensors in bytes, by name.
        whole: Class names of modules that must not be split over several devices.
    """
    modules, names, first = dict(model.named_modules()), collect_class_names(whole), dict[str, int]()
    for name, size in found.items():
        kind = type(modules.get(name)).__name__
        if name and kind in names:
            first.setdefault(kind, size)
    tensors = set(get_module_leaves(found))
    leaves = get_module_leaves(name for name in found if name not in tensors)
    return max([int(sum(found[name] for name in leaves) / max(len(leaves), 1)), *first.values()])


log = get_logger(__name__)

Item = tuple[str, Any]
"""Pair of (name, module or tensor)."""


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
    """Return a device map that fills the devices in order with the model's modules, as Accelerate does.

    Args:
        model: Model on any device, including the meta device.
        max_memory: Memory limits by device, as in get_max_memory.
        no_split_module_classes: Class names of modules that must not be split over several devices.
        dtype: Dtype in which the model will be loaded. None: the current dtypes.
        special_dtypes: Dtypes of single tensors by name, which override `dtype`.
        verbose: Whether to log the device map. Default: False.
        clean_result: Whether a module whose parts are all on one device gets one entry instead of one entry per part.
            Default: True.
        offload_buffers: Ignored. Buffers do not change the map.
        fallback_allocation: Whether to search for another module that fits if the next module does not fit on a device
            that is still empty. Default: False.

    Returns:
        Devices by the names of modules and tensors.
    """
    whole = list(collect_class_names(no_split_module_classes))
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    # Balanced budgets can be fractions of bytes, because boolean masks count an eighth of a byte per element.
    fractions = {parse_device(key): size for key, size in (max_memory or {}).items() if isinstance(size, float)}
    greedy = _Greedy(model, {**get_max_memory(max_memory), **fractions}, whole, sizes, fallback_allocation)
    greedy.run()
    if verbose:
        log.info("device map: %s", greedy.placed)
    return clean_device_map(greedy.placed) if clean_result else greedy.placed


def _list_children(name: str, module: Any) -> list[Item]:
    """Return the parts into which a module can be split, as pairs of (name, module or parameter).

    The module's own parameters precede its child modules.
    """
    parts = [*module.named_parameters(recurse=False), *module.named_children()]
    return [(f"{name}.{each}", value) for each, value in parts]


class _Greedy:
    """State of the greedy rule: modules that are not placed yet, the devices that are left, and the memory in use.

    Args:
        model: Model whose modules are placed.
        budgets: Memory limits in bytes, by device, in the order in which the devices are filled.
        whole: Class names of modules that must not be split over several devices.
        sizes: Sizes of modules and tensors in bytes, by name.
        falls_back: Whether to search for another module that fits if the next module does not fit on a device that is
            still empty.

    Attributes:
        placed: Devices of the modules and tensors that are placed, by name.
    """

    def __init__(
        self, model: nn.Module, budgets: dict[Device, Any], whole: list[str], sizes: Mapping[str, int], falls_back: bool
    ) -> None:
        self.placed: dict[str, Device] = {}
        self._sizes = sizes
        self._whole = whole
        self._falls_back = falls_back
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
        self._measure_reserve()

    def _measure_reserve(self) -> None:
        """Compute how much space to reserve: the size of the largest layer that has not been placed yet."""
        modules = [(name, each) for name, each in self._queue if isinstance(each, nn.Module)]
        self._room, self._largest = get_max_layer_size(modules, dict(self._sizes), self._whole)

    def run(self) -> None:
        """Assign a device to every module and tensor that has not been placed yet."""
        while self._queue:
            name, module = self._queue.pop(0)
            self._largest = [each for each in self._largest if each != name and not each.startswith(f"{name}.")]
            if not self._largest:
                self._measure_reserve()
            self._place_item(name, module)

    def _place_item(self, name: str, module: Any) -> None:
        device = self._devices[0]
        room = self._room if device in self._keeps_room else 0
        limit = self._limits[device]
        free = None if limit is None else limit - room - self._used[device]
        ties = self._find_ties(name)
        size, names, partners = get_module_size_with_ties(ties, self._sizes[name], self._sizes, self._queue)
        if free is None or size <= free:
            self._assign_device(name, names, size, device)
        elif not (
            (ties and self._sizes[name] <= free and self._split_partner(name, module, names, partners))
            or (self._sizes[name] >= free and self._split_module(name, module))
            or self._fall_back(name, module, size, device)
        ):
            self._used[device] += room
            self._devices.pop(0)
            self._queue.insert(0, (name, module))

    def _find_ties(self, name: str) -> list[str]:
        """Return the names of tensors outside a module that are tied to tensors inside the module."""
        found = []
        for group in self._tied:
            outside = [each for each in group if f"{name}." not in f"{each}."]
            if outside and len(outside) < len(group):
                found += outside
        return found

    def _assign_device(self, name: str, partners: list[str], size: int, device: Device) -> None:
        self._used[device] += size
        for each in (name, *partners):
            self.placed[each] = device
        self._queue = [item for item in self._queue if item[0] not in partners]

    def _is_whole(self, module: Any) -> bool:
        is_leaf = isinstance(module, torch.Tensor) or not list(module.named_children())
        return is_leaf or type(module).__name__ in self._whole

    def _split_module(self, name: str, module: Any) -> bool:
        if self._is_whole(module):
            return False
        self._queue = [*_list_children(name, module), *self._queue]
        self._measure_reserve()
        return True

    def _split_partner(self, name: str, module: Any, names: list[str], partners: list[nn.Module]) -> bool:
        for other, partner in zip(names, partners):
            if not self._is_whole(partner):
                at = next(index for index, item in enumerate(self._queue) if item[0] == other)
                rest = [*self._queue[:at], *_list_children(other, partner), *self._queue[at + 1 :]]
                self._queue = [(name, module), *rest]
                self._measure_reserve()
                return True
        return False

    def _fall_back(self, name: str, module: Any, size: int, device: Device) -> bool:
        limit = self._limits[device]
        if not self._falls_back or self._used[device] or limit is None:
            return False
        # The search must leave space for the current module too, which has been removed from the queue.
        spare = limit - max(self._room, size)
        found = self._find_first_fitting(spare) if spare >= 0 else None
        if found is None:
            return False
        for parent in prefixes(found)[1:-1]:
            at = next((index for index, item in enumerate(self._queue) if item[0] == parent), None)
            if at is not None:
                self._queue[at : at + 1] = _list_children(parent, self._queue[at][1])
        at = next(index for index, item in enumerate(self._queue) if item[0] == found)
        self._queue = [self._queue.pop(at), (name, module), *self._queue]
        return True

    def _find_first_fitting(self, limit: float) -> str | None:
        search = list(self._queue)
        while search:
            name, module = search.pop(0)
            if get_module_size_with_ties(self._find_ties(name), self._sizes[name], self._sizes, search)[0] <= limit:
                return name
            if not self._is_whole(module):
                search = [*_list_children(name, module), *search]
        return None
