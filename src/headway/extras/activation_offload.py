"""Activation offloading: tensors saved for backward are kept in host memory.

The copies run on a separate stream, while the device computes.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from headway.common import scope
from headway.extras.copy_lane import CopyLane, PinnedCopy

MIN_BYTES = 1 << 20
"""Minimum bytes of an offloaded tensor. For smaller tensors, the copy costs more than their memory is worth."""

_VALUE_PRESERVING_NODES = frozenset(
    (
        *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "AsStrided", "Select", "Slice", "Split"),
        *("Unbind", "Unsqueeze", "Squeeze", "Expand", "Alias", "ToCopy", "Clone"),
    )
)
"""Names of autograd nodes whose result contains only values of their single input."""


class StorageNumbers:
    """Source of numbers that identify storages, so that a storage saved by several operations is copied only once.

    The number of a storage is its address. `hold_storage` prevents the address from being reused.
    """

    def get_number(self, storage: torch.UntypedStorage) -> int:
        """Return the number that identifies the storage."""
        return int(storage._cdata)

    def hold_storage(self, storage: torch.UntypedStorage) -> Any:
        """Return a weak reference that prevents the storage's number from being reused, without keeping its memory."""
        return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class OffloadSettings:
    """Functions and classes that activation offloading uses. A trace on fake tensors replaces them with its own.

    Attributes:
        make_lane: Function that creates a device's `CopyLane`.
        tensor_class: Class of the tensors that are offloaded. Instances of its subclasses stay on the device.
        storage_numbers: Source of the numbers that identify the storages of these tensors.
        offloads_cpu_tensors: Whether CPU tensors are offloaded too, because they represent device tensors in the trace.
    """

    make_lane: Callable[[torch.device], CopyLane] = field(default_factory=lambda: CopyLane)
    tensor_class: type = torch.Tensor
    storage_numbers: StorageNumbers = field(default_factory=StorageNumbers)
    offloads_cpu_tensors: bool = False


class _CopyLanes(dict[torch.device, CopyLane]):
    """Mapping from each device to its `CopyLane`, which is created on first use.

    Attributes:
        settings: Functions and classes that offloading uses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.settings = OffloadSettings()

    def __missing__(self, device: torch.device) -> CopyLane:
        """Create the device's `CopyLane`."""
        self[device] = lane = self.settings.make_lane(device)
        return lane


@contextmanager
def replace_settings(settings: OffloadSettings) -> Iterator[None]:
    """Return a context in which offloading uses the given functions and classes, for a trace on fake tensors."""
    lanes = scope.get_or_create(_CopyLanes)
    lanes.clear()
    lanes.settings = settings
    try:
        yield
    finally:
        lanes.clear()
        lanes.settings = OffloadSettings()


class ActivationCopy:
    """Host copy of a tensor storage, shared by all saved tensors that are views of it.

    Args:
        values: Device tensor to copy: the whole storage as a 1-d tensor, or part of it.
    """

    def __init__(self, values: torch.Tensor) -> None:
        lanes = scope.get_or_create(_CopyLanes)
        self._lane = lanes[values.device]
        # Holding the storage keeps its address from being reused while this copy can be found by it.
        self._source = lanes.settings.storage_numbers.hold_storage(values.untyped_storage())
        self._host, self._ready = self._lane.to_host(values)
        self._fetched: torch.Tensor | None = None

    def list_host_tensors(self) -> Sequence[torch.Tensor]:
        """Return the tensors in host memory that contain the values."""
        return self._host.pieces if isinstance(self._host, PinnedCopy) else (self._host,)

    def fetch(self) -> torch.Tensor:
        """Copy the values back to the device if they are not there, and return them.

        They stay on the device until the next copy is fetched, or this copy is freed.
        """
        if self._fetched is None:
            previous = self._lane.last_fetched() if self._lane.last_fetched is not None else None
            if previous is not None:
                previous._fetched = None
            self._fetched = self._lane.to_device(self._host, self._ready)
            self._lane.last_fetched = weakref.ref(self)
        return self._lane.await_arrival(self._fetched)


class _ActivationCache(weakref.WeakValueDictionary[tuple[Any, ...], ActivationCopy]):
    """Cache of activations that were copied to host memory.

    With it, a tensor that several operations save is copied only once. The key consists of the storage, its version,
    the dtype and the conjugate and negative flags. If only part of the storage was copied, the key also has the size,
    stride and offset of that part. An entry lasts as long as an autograd graph refers to the copy.
    """


@dataclass(frozen=True)
class OffloadedActivation:
    """Saved tensor whose values are in host memory.

    Attributes:
        copy: Host copy of the tensor's storage, or of a part of it.
        view: Tuple (size, stride, offset in elements) of the tensor within the copy. None if the tensor is the entire
            copy.
    """

    copy: ActivationCopy
    view: tuple[torch.Size, tuple[int, ...], int] | None


class _ResidentTensors:
    """Tensors of a block that stay on the device anyway, so that offloading them saves nothing.

    These are the block's buffers, and copies of its frozen weights in another dtype. Trainable weights are not
    included: they are recognized by their autograd graph (see `_is_weight`).

    Args:
        block: Block, or None if it is unknown.
    """

    def __init__(self, block: torch.nn.Module | None) -> None:
        buffers = [] if block is None else [buffer for buffer in block.buffers() if buffer.layout is torch.strided]
        frozen = [] if block is None else [each for each in block.parameters() if not each.requires_grad]
        self._buffer_storages = {buffer.untyped_storage()._cdata for buffer in buffers}
        # Autocast's copies of frozen weights have no graph, so they are recognized by shape. A constant that happens to
        # have a weight's shape and another dtype is then not offloaded either.
        self._frozen = {(tensor.shape, tensor.dtype) for tensor in frozen}

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of the block's buffers, or is probably a frozen weight cast to another dtype.

        A cast weight is recognized by its shape.
        """
        if tensor.untyped_storage()._cdata in self._buffer_storages:
            return True
        base = tensor if tensor._base is None else tensor._base
        return not tensor.requires_grad and any(
            base.shape == shape and base.dtype != dtype for shape, dtype in self._frozen
        )


def offload_saved_tensors(
    min_bytes: int = MIN_BYTES, block: torch.nn.Module | None = None
) -> AbstractContextManager[Any]:
    """Return a context in which tensors saved by autograd are moved to host memory.

    They are copied back when backward needs them. If several operations save a tensor or views of it, it is copied only
    once, unless it is changed in between. The following stay on the device: parameters, their views and
    their copies in another dtype (which autocast makes and keeps), the block's buffers, tensors below `min_bytes`,
    sparse tensors, tensor subclasses, and tensors already on the host.

    Args:
        min_bytes: Smallest size in bytes of an offloaded tensor. Default: 1 MiB.
        block: Module whose forward runs in the context. None: unknown, so buffers and autocast's copies of frozen
            weights are not recognized, and are offloaded too.
    """
    resident = _ResidentTensors(block)

    def pack_tensor(tensor: torch.Tensor) -> torch.Tensor | OffloadedActivation:
        if _is_worth_offloading(tensor, min_bytes) and not resident.contains(tensor):
            return _offload_tensor(tensor)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack_tensor, _fetch_saved)


def _is_worth_offloading(tensor: torch.Tensor, min_bytes: int) -> bool:
    """Whether a saved tensor is a dense activation of at least `min_bytes` bytes, and is not a weight or in host memory."""
    lanes = scope.get_or_create(_CopyLanes)
    if _is_on_host(tensor) and not lanes.settings.offloads_cpu_tensors:
        return False
    if tensor.layout is not torch.strided or type(tensor) is not lanes.settings.tensor_class:
        return False
    # An expanded tensor is larger than its storage.
    return min(tensor.nbytes, tensor.untyped_storage().nbytes()) >= min_bytes and not _is_weight(tensor)


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _is_weight(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the values of a parameter.

    The tensor can be a view of the parameter (for example a transpose) or have another dtype.
    """
    if isinstance(tensor._base, torch.nn.Parameter):
        return True
    node: Any = tensor.grad_fn
    while node is not None:
        name = node.name()
        if name.endswith("AccumulateGrad"):
            return isinstance(node.variable, torch.nn.Parameter)
        if name.rstrip("0123456789").removesuffix("Backward") not in _VALUE_PRESERVING_NODES:
            return False
        node = node.next_functions[0][0]
    return False


def _offload_tensor(tensor: torch.Tensor) -> OffloadedActivation:
    """Start to copy a saved tensor to host memory. Tensors that share a storage also share one copy of it."""
    storage = tensor.untyped_storage()
    # If the tensor is a small part of its storage, copy only that part. Lazy conjugation must be materialized.
    copies_storage = 2 * tensor.nbytes > storage.nbytes() and not (tensor.is_conj() or tensor.is_neg())
    view = (tensor.size(), tensor.stride(), int(tensor.storage_offset()))
    key = (
        scope.get_or_create(_CopyLanes).settings.storage_numbers.get_number(storage),
        tensor._version,
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
        None if copies_storage else view,
    )
    copies = scope.get_or_create(_ActivationCache)
    copy = copies.get(key)
    if copy is None:
        copy = copies[key] = ActivationCopy(_flatten_storage(tensor) if copies_storage else tensor)
    return OffloadedActivation(copy, view if copies_storage else None)


def _flatten_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's entire storage as a 1-d tensor of the tensor's dtype."""
    num_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((num_elements,), (1,), 0)


def _fetch_saved(saved: torch.Tensor | OffloadedActivation) -> torch.Tensor:
    """Return the saved tensor. If it was offloaded, fetch its values from host memory first."""
    if isinstance(saved, torch.Tensor):
        return saved
    values = saved.copy.fetch()
    return values if saved.view is None else values.as_strided(*saved.view)
