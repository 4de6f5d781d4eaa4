"""Activation offloading: tensors saved for backward are kept in host memory.

The copies run on a separate stream, while the device computes.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from headway.common import scope
from headway.core.runtime.pinned_sizes import split_into_powers_of_two

MIN_BYTES = 1 << 20
"""Minimum bytes of an offloaded tensor. For smaller tensors, the copy costs more than their memory is worth."""

_TRANSIT_FACTOR = 2
"""Limit on the device memory of copies in transit, as a multiple of the largest activation.

A copy to the host is in transit until it is complete. A copy back to the device is in transit until it has been used.
The limit holds no matter how far the host runs ahead of the device.
"""

_VALUE_PRESERVING_NODES = frozenset(
    (
        *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "AsStrided", "Select", "Slice", "Split"),
        *("Unbind", "Unsqueeze", "Squeeze", "Expand", "Alias", "ToCopy", "Clone"),
    )
)
"""Names of autograd nodes whose result contains only values of their single input."""


@dataclass(frozen=True)
class PinnedCopy:
    """Copy of a tensor in pinned host memory.

    The copy is split into pieces, because torch rounds up the size of pinned allocations. The piece sizes are chosen so
    that the rounding wastes little memory.

    Attributes:
        pieces: Consecutive pieces, each a 1-d tensor.
        shape: Shape of the tensor.
    """

    pieces: tuple[torch.Tensor, ...]
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """Size of the copied tensor in bytes."""
        return sum(piece.nbytes for piece in self.pieces)


class _CopyToHost(NamedTuple):
    """Copy of a tensor to the host that the compute stream has not waited for yet.

    Attributes:
        done: Event that marks the completion of the copy.
        compute_stream: Stream that has computed the tensor.
        source: Device tensor, which must live until the copy is complete.
    """

    done: torch.Event
    compute_stream: torch.Stream
    source: torch.Tensor


class _CopyToDevice(NamedTuple):
    """Copy back to the device whose memory backward may still use.

    Attributes:
        earlier_work: Event that marks the completion of the device work from before the copy.
        num_bytes: Size of the copy.
    """

    earlier_work: torch.Event
    num_bytes: int


class CopyLane:
    """Copier of saved activations between one device and the host. It uses a separate stream if the device has streams.

    Args:
        device: Device to copy from and to.
        has_stream: Whether to use a separate stream. If False, copies run in order with all other work. Default: True.

    Attributes:
        last_fetched: Weak reference to the `ActivationCopy` that was fetched last. Its values stay on the device until
            another one is fetched, because the next backward operation might need them too. None before the first.
    """

    def __init__(self, device: torch.device, has_stream: bool = True) -> None:
        self._device = device
        has_stream = has_stream and hasattr(torch.get_device_module(device), "Stream")
        self._stream = torch.Stream(device) if has_stream else None
        self.last_fetched: weakref.ref[ActivationCopy] | None = None
        self._largest_bytes = 0  # of all activations so far
        self._copies_to_host: deque[_CopyToHost] = deque()
        self._copies_to_device: deque[_CopyToDevice] = deque()

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor | PinnedCopy, torch.Event | None]:
        """Copy a tensor to host memory.

        Returns:
            The copy, and the event that marks its completion. The event is None if the copy is already complete.
        """
        if self._stream is None:
            return tensor.to("cpu", copy=True), None
        row = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        parts = row.split_with_sizes([size // row.itemsize for size in split_into_powers_of_two(row.nbytes)])
        host = PinnedCopy(tuple(torch.empty_like(part, device="cpu", pin_memory=True) for part in parts), tensor.shape)
        compute = torch.accelerator.current_stream(self._device)
        self._stream.wait_stream(compute)
        with self._stream:
            for piece, part in zip(host.pieces, parts):
                piece.copy_(part, non_blocking=True)
            ready = self._stream.record_event()
        # The device memory can be reused once the compute stream waits for the copy, even if the host is far ahead.
        self._copies_to_host.append(_CopyToHost(ready, compute, row))
        self._largest_bytes = max(self._largest_bytes, row.nbytes)
        self._wait_for_copies(_TRANSIT_FACTOR * self._largest_bytes)
        return host, ready

    def _wait_for_copies(self, max_bytes: int) -> None:
        """Make the compute stream wait for copies to the host, oldest first, until at most `max_bytes` are in transit.

        Also forget copies that are complete already. Only the compute stream waits. The host does not wait.

        Args:
            max_bytes: Largest total size of the copies that the compute stream has not waited for.
        """
        pending_bytes = sum(copy.source.nbytes for copy in self._copies_to_host)
        while self._copies_to_host and (pending_bytes > max_bytes or self._copies_to_host[0].done.query()):
            copy = self._copies_to_host.popleft()
            copy.compute_stream.wait_event(copy.done)
            pending_bytes -= copy.source.nbytes

    def to_device(self, host: torch.Tensor | PinnedCopy, ready: torch.Event | None) -> torch.Tensor:
        """Start to copy a host copy back to the device. Call `await_arrival` before using the result.

        Args:
            host: Host copy, as returned by `to_host`.
            ready: Event that marks the completion of the copy to the host, or None if that copy is complete.
        """
        if isinstance(host, torch.Tensor):
            return host.to(self._device)
        assert self._stream is not None
        self._wait_for_copies(0)
        earlier_work = torch.accelerator.current_stream(self._device).record_event()
        self._copies_to_device.append(_CopyToDevice(earlier_work, host.nbytes))
        # The copy stream owns this memory, which is free only once the compute stream has used it. So the host waits if
        # it is too far ahead.
        max_bytes = (_TRANSIT_FACTOR + 1) * max(self._largest_bytes, host.nbytes)
        while sum(copy.num_bytes for copy in self._copies_to_device) > max_bytes:
            self._copies_to_device.popleft().earlier_work.synchronize()
        with self._stream:
            if ready is not None:
                self._stream.wait_event(ready)
            lengths = [piece.numel() for piece in host.pieces]
            row = host.pieces[0].new_empty(sum(lengths), device=self._device)
            for part, piece in zip(row.split_with_sizes(lengths), host.pieces):
                part.copy_(piece, non_blocking=True)
            return row.view(host.shape)

    def await_arrival(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make the current stream wait until a tensor has been copied back to the device, and return the tensor.

        The method may be called for one tensor on several streams.
        """
        if self._stream is not None:
            compute = torch.accelerator.current_stream(self._device)
            compute.wait_stream(self._stream)
            tensor.record_stream(compute)
        return tensor


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
    if isinstance(saved, torch.Tensor):
        return saved
    values = saved.copy.fetch()
    return values if saved.view is None else values.as_strided(*saved.view)
