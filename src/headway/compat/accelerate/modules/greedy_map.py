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

_UNCONVERTED_DTYPES = ("torch.uint", "torch.int", "torch.bool")
"""Prefixes of the names of those dtypes that are not converted when a model is loaded in another dtype."""


def dtype_byte_size(dtype: Any) -> int | float:
    """Return the size of one element of a dtype in bytes.

    A boolean counts as an eighth of a byte, as in Accelerate, although torch uses one byte.
    """
    return 1 / 8 if dtype == torch.bool else sizes.dtype_byte_size(dtype)


def list_prefixes(name: str) -> list[str]:
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
        special_dtypes: Dtypes of single tensors by name, which override `dtype`. None (the default): no such tensors.
        buffers_only: Whether to leave out parameters. Default: False.
    """
    special_bytes = {name: dtype_byte_size(parse_dtype(kind)) for name, kind in (special_dtypes or {}).items()}
    converted_bytes = None if dtype is None else dtype_byte_size(parse_dtype(dtype))
    bytes_by_name: Counter[str] = Counter()
    for name, tensor in model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True):
        current_bytes = dtype_byte_size(tensor.dtype)
        element_bytes = (
            current_bytes
            if converted_bytes is None or str(tensor.dtype).startswith(_UNCONVERTED_DTYPES)
            else min(converted_bytes, current_bytes)
        )
        size: Any = tensor.numel() * special_bytes.get(name, element_bytes)
        for prefix in list_prefixes(name):
            bytes_by_name[prefix] += size
    return bytes_by_name


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Dtype | None = None, special_dtypes: Mapping[str, Dtype] | None = None
) -> int:
    """Return the total size of a model's buffers in bytes.

    Args:
        model: Model on any device, including the meta device.
        dtype: Dtype in which the model will be loaded. None: the current dtypes.
        special_dtypes: Dtypes of single tensors by name, which override `dtype`. None (the default): no such tensors.
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

    Each accelerator but the last gets an equal share of the model plus space for one more layer, at most its limit. The
    budgets of the last accelerator and of the CPU are their limits. With a single accelerator and no `max_memory`, its
    budget is 90% of its free memory. Without accelerators, the result is that of `get_max_memory`.

    Args:
        model: Model on any device, including the meta device.
        max_memory: Memory limits by device, as in `get_max_memory`. None (the default): the free memory.
        no_split_module_classes: Class names of modules that must not be split over several devices.
            None (the default): none.
        dtype: Dtype in which the model will be loaded. None (the default): the current dtypes.
        special_dtypes: Dtypes of single tensors by name, which override `dtype`. None (the default): no such tensors.
        low_zero: Whether device 0 gets only what does not fit on the other accelerators, for example to leave memory
            for generation. Ignored with a single accelerator, or without device 0. Default: False.
    """
    budgets = get_max_memory(max_memory)
    accelerators = [device for device, size in budgets.items() if device not in ("cpu", "disk") and size > 0]
    indices: list[Any] = [device for device in accelerators if isinstance(device, int)]
    if not accelerators:
        return budgets
    low_zero = low_zero and 0 in indices and len(accelerators) > 1
    if len(accelerators) == 1 and max_memory is None and indices:
        budgets[indices[0]] = int(0.9 * budgets[indices[0]])
    module_sizes = compute_module_sizes(model, dtype, special_dtypes)
    num_sharing = len(accelerators) - 1 if low_zero else len(accelerators)
    # Accelerate's margin, so that the last layer of a device fits although layers differ in size.
    margin = int(1.25 * _compute_reserve(model, module_sizes, no_split_module_classes))
    share = int(module_sizes[""] // num_sharing + margin)
    for device in indices[:-1]:
        if not (low_zero and device == 0):
            budgets[device] = min(share, budgets[device])
    if low_zero:
        remaining = max(0, module_sizes[""] - sum(budgets[device] for device in accelerators if device != 0))
        budgets[0] = min(remaining, budgets[0])
    return budgets


def _compute_reserve(model: nn.Module, module_sizes: Counter[str], no_split_classes: Iterable[str] | str | None) -> int:
    """Return the number of bytes to reserve on a device for one more layer.

    It is the size of the largest module whose class is in `no_split_classes`, or the mean size of modules without
    children if that is larger. Only the first module of each class is measured.

    Args:
        model: Model whose layers are placed.
        module_sizes: Sizes of modules and tensors in bytes, by name.
        no_split_classes: Class names of modules that must not be split over several devices. None: none.
    """
    modules = dict(model.named_modules())
    class_names = collect_class_names(no_split_classes)
    size_by_class: dict[str, int] = {}
    for name, size in module_sizes.items():
        class_name = type(modules.get(name)).__name__
        if name and class_name in class_names:
            size_by_class.setdefault(class_name, size)
    tensors = set(get_module_leaves(module_sizes))
    leaves = get_module_leaves(name for name in module_sizes if name not in tensors)
    return max([int(sum(module_sizes[name] for name in leaves) / max(len(leaves), 1)), *size_by_class.values()])


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
        max_memory: Memory limits by device, as in `get_max_memory`. None (the default): the free memory.
        no_split_module_classes: Class names of modules that must not be split over several devices.
            None (the default): none.
        dtype: Dtype in which the model will be loaded. None (the default): the current dtypes.
        special_dtypes: Dtypes of single tensors by name, which override `dtype`. None (the default): no such tensors.
        verbose: Whether to log the device map. Default: False.
        clean_result: Whether a module whose parts are all on one device gets one entry instead of one entry per part.
            Default: True.
        offload_buffers: Ignored. Buffers do not change the map.
        fallback_allocation: Whether to search for another module that fits if the next module does not fit on a device
            that is still empty. Default: False.

    Returns:
        Devices by the names of modules and tensors.
    """
    class_names = list(collect_class_names(no_split_module_classes))
    module_sizes = compute_module_sizes(model, dtype, special_dtypes)
    # Balanced budgets can be fractions of bytes, because boolean masks count an eighth of a byte per element.
    fractional_budgets = {
        parse_device(key): size for key, size in (max_memory or {}).items() if isinstance(size, float)
    }
    placement = _GreedyPlacement(
        model, {**get_max_memory(max_memory), **fractional_budgets}, class_names, module_sizes, fallback_allocation
    )
    placement.run()
    if verbose:
        log.info("device map: %s", placement.placed)
    return clean_device_map(placement.placed) if clean_result else placement.placed


def _list_children(name: str, module: Any) -> list[Item]:
    """Return the parts into which a module can be split, as pairs of (name, module or parameter).

    The module's own parameters precede its child modules.
    """
    parts = [*module.named_parameters(recurse=False), *module.named_children()]
    return [(f"{name}.{each}", value) for each, value in parts]


class _GreedyPlacement:
    """State of the greedy rule: modules that are not placed yet, the devices that are left, and the memory in use.

    Args:
        model: Model whose modules are placed.
        budgets: Memory limits in bytes, by device, in the order in which the devices are filled.
        no_split_classes: Class names of modules that must not be split over several devices.
        sizes: Sizes of modules and tensors in bytes, by name.
        has_fallback: Whether to search for another module that fits if the next module does not fit on a device that is
            still empty.

    Attributes:
        placed: Devices of the modules and tensors that are placed, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        budgets: dict[Device, Any],
        no_split_classes: list[str],
        sizes: Mapping[str, int],
        has_fallback: bool,
    ) -> None:
        self.placed: dict[str, Device] = {}
        self._sizes = sizes
        self._no_split_classes = no_split_classes
        self._falls_back = has_fallback
        self._tied = find_tied_parameters(model)
        self._queue: list[Item] = [
            *model.named_parameters(recurse=False),
            *model.named_children(),
            *model.named_buffers(recurse=False),
        ]
        accelerators = [each for each in budgets if each not in ("cpu", "disk")]
        reserving = ["mps"] if "mps" in accelerators else [*accelerators[:1], "cpu"]
        self._devices_with_reserve = set(reserving)
        self._devices: list[Device] = [*budgets, *(() if "disk" in budgets else ("disk",))]
        self._limit_bytes: dict[Device, float | None] = {**budgets, "disk": None}
        self._used_bytes: dict[Device, int] = dict.fromkeys(self._devices, 0)
        self._measure_reserve()

    def _measure_reserve(self) -> None:
        """Compute how much space to reserve: the size of the largest layer that has not been placed yet."""
        modules = [(name, each) for name, each in self._queue if isinstance(each, nn.Module)]
        self._reserve_bytes, self._largest_layer_names = get_max_layer_size(
            modules, dict(self._sizes), self._no_split_classes
        )

    def run(self) -> None:
        """Assign a device to every module and tensor that has not been placed yet."""
        while self._queue:
            name, module = self._queue.pop(0)
            self._largest_layer_names = [
                each for each in self._largest_layer_names if each != name and not each.startswith(f"{name}.")
            ]
            if not self._largest_layer_names:
                self._measure_reserve()
            self._place_item(name, module)

    def _place_item(self, name: str, module: Any) -> None:
        """Assign a device to the item, or change the queue or the current device so that a later step can.

        If the item does not fit on the current device, try in this order: split a module that shares parameters with
        it, split the item itself, search for another item that fits, and continue with the next device.

        Args:
            name: Name of the item.
            module: Module, parameter or buffer, which has been removed from the queue.
        """
        device = self._devices[0]
        reserve = self._reserve_bytes if device in self._devices_with_reserve else 0
        limit_bytes = self._limit_bytes[device]
        free_bytes = None if limit_bytes is None else limit_bytes - reserve - self._used_bytes[device]
        ties = self._find_ties(name)
        size, names, partners = get_module_size_with_ties(ties, self._sizes[name], self._sizes, self._queue)
        if free_bytes is None or size <= free_bytes:
            self._assign_device(name, names, size, device)
            return
        # The module does not fit together with the modules that share its parameters.
        is_resolved = False
        if ties and self._sizes[name] <= free_bytes:
            is_resolved = self._split_partner(name, module, names, partners)
        if not is_resolved and self._sizes[name] >= free_bytes:
            is_resolved = self._split_module(name, module)
        if not is_resolved and not self._fall_back(name, module, size, device):
            # The greedy rule never returns to a device: go on with the next one.
            self._used_bytes[device] += reserve
            self._devices.pop(0)
            self._queue.insert(0, (name, module))

    def _find_ties(self, name: str) -> list[str]:
        """Return the names of tensors outside a module that are tied to tensors inside the module."""
        tied_names = []
        for group in self._tied:
            outside = [each for each in group if f"{name}." not in f"{each}."]
            if outside and len(outside) < len(group):
                tied_names += outside
        return tied_names

    def _assign_device(self, name: str, partners: list[str], size: int, device: Device) -> None:
        """Place a module and its partners on a device, and remove the partners from the queue.

        Args:
            name: Name of the module.
            partners: Names of modules that share tensors with it.
            size: Bytes of all of them together.
            device: Device.
        """
        self._used_bytes[device] += size
        for each in (name, *partners):
            self.placed[each] = device
        self._queue = [item for item in self._queue if item[0] not in partners]

    def _is_indivisible(self, module: Any) -> bool:
        is_leaf = isinstance(module, torch.Tensor) or not list(module.named_children())
        return is_leaf or type(module).__name__ in self._no_split_classes

    def _split_module(self, name: str, module: Any) -> bool:
        """Put the module's children at the front of the queue. Return False if the module cannot be split."""
        if self._is_indivisible(module):
            return False
        self._queue = [*_list_children(name, module), *self._queue]
        self._measure_reserve()
        return True

    def _split_partner(self, name: str, module: Any, names: list[str], partners: list[nn.Module]) -> bool:
        """Replace the first divisible partner by its children in the queue. Return False if there is none.

        Args:
            name: Name of the current item, which is put back at the front of the queue.
            module: Module or tensor of the current item.
            names: Names of the partners.
            partners: Modules in the queue that share parameters with the current item.
        """
        for other, partner in zip(names, partners):
            if not self._is_indivisible(partner):
                index = next(index for index, item in enumerate(self._queue) if item[0] == other)
                rest = [*self._queue[:index], *_list_children(other, partner), *self._queue[index + 1 :]]
                self._queue = [(name, module), *rest]
                self._measure_reserve()
                return True
        return False

    def _fall_back(self, name: str, module: Any, size: int, device: Device) -> bool:
        """Move a later item that fits on an empty device to the front of the queue. Return False if there is none.

        Args:
            name: Name of the current item, which is put back into the queue behind the item that fits.
            module: Module or tensor of the current item.
            size: Size of the current item in bytes, including modules that share parameters with it.
            device: Device to fill.
        """
        limit_bytes = self._limit_bytes[device]
        if not self._falls_back or self._used_bytes[device] or limit_bytes is None:
            return False
        # The search must leave space for the current module too, which has been removed from the queue.
        spare_bytes = limit_bytes - max(self._reserve_bytes, size)
        name_that_fits = self._find_first_fitting(spare_bytes) if spare_bytes >= 0 else None
        if name_that_fits is None:
            return False
        for parent in list_prefixes(name_that_fits)[1:-1]:
            position = next((index for index, item in enumerate(self._queue) if item[0] == parent), None)
            if position is not None:
                self._queue[position : position + 1] = _list_children(parent, self._queue[position][1])
        position = next(index for index, item in enumerate(self._queue) if item[0] == name_that_fits)
        self._queue = [self._queue.pop(position), (name, module), *self._queue]
        return True

    def _find_first_fitting(self, limit: float) -> str | None:
        """Return the first name in the queue, or inside its modules, whose size is at most `limit` bytes.

        None if there is no such name.
        """
        search = list(self._queue)
        while search:
            name, module = search.pop(0)
            size, _, _ = get_module_size_with_ties(self._find_ties(name), self._sizes[name], self._sizes, search)
            if size <= limit:
                return name
            if not self._is_indivisible(module):
                search = [*_list_children(name, module), *search]
        return None
