"""What autograd saves for backward, kept in host memory meanwhile: copied on a stream of its own, beside the compute."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from headway.common import scope
from headway.runtime.transfers import pieces

MIN_BYTES = 1 << 20
"""Smaller tensors stay on the device: copying them costs more than they take."""

_MOST = 2
"""Of the largest activation's size: what may be on its way out, or brought back and not used yet, however far the host is ahead."""

_SAME_VALUES = frozenset(
    (
        *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "AsStrided", "Select", "Slice", "Split"),
        *("Unbind", "Unsqueeze", "Squeeze", "Expand", "Alias", "ToCopy", "Clone"),
    )
)
"""Operations whose result holds nothing but the values of their one input, as autograd's nodes are called."""


@dataclass(frozen=True)
class Host:
    """Values in pinned host memory, in pieces of sizes that torch does not round up by much.

    Attributes:
        pieces: one after the other, each a row.
        shape: of the tensor.
    """

    pieces: tuple[torch.Tensor, ...]
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """Of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)


class CopyLane:
    """One device's copies to the host and back, on a stream of their own where the device has streams.

    Args:
        device: whose.
        has_stream: False: copies are made in order with everything else.

    Attributes:
        last: what was fetched last, whose values on the device may be wanted again by the next step of backward.
    """

    def __init__(self, device: torch.device, has_stream: bool = True) -> None:
        self._device = device
        has_stream = has_stream and hasattr(torch.get_device_module(device), "Stream")
        self._stream = torch.Stream(device) if has_stream else None
        self.last: weakref.ref[ActivationCopy] | None = None
        self._largest = 0
        self._leaving: deque[tuple[torch.Event, torch.Stream, torch.Tensor]] = deque()
        self._returned: deque[tuple[torch.Event, int]] = deque()

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor | Host, torch.Event | None]:
        """A copy in host memory, and what is set when it is complete; None where it already is."""
        if self._stream is None:
            return tensor.to("cpu", copy=True), None
        row = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        parts = row.split_with_sizes([size // row.itemsize for size in pieces(row.nbytes)])
        host = Host(tuple(torch.empty_like(part, device="cpu", pin_memory=True) for part in parts), tensor.shape)
        compute = torch.accelerator.current_stream(self._device)
        self._stream.wait_stream(compute)
        with self._stream:
            for piece, part in zip(host.pieces, parts):
                piece.copy_(part, non_blocking=True)
            ready = self._stream.record_event()
        # Its memory is free once what computes waits for the copy: also for a host that is far ahead.
        self._leaving.append((ready, compute, row))
        self._largest = max(self._largest, row.nbytes)
        self._let_go(_MOST * self._largest)
        return host, ready

    def _let_go(self, most: int) -> None:
        """Keep at most so many bytes of what is on its way out; for older copies what computes waits, and the host does not."""
        held = sum(tensor.nbytes for _, _, tensor in self._leaving)
        while self._leaving and (held > most or self._leaving[0][0].query()):
            ready, compute, tensor = self._leaving.popleft()
            compute.wait_event(ready)
            held -= tensor.nbytes

    def to_device(self, host: torch.Tensor | Host, ready: torch.Event | None) -> torch.Tensor:
        """The copy on the device again; before it is used it must have `arrived`."""
        if isinstance(host, torch.Tensor):
            return host.to(self._device)
        assert self._stream is not None
        self._let_go(0)
        self._returned.append((torch.accelerator.current_stream(self._device).record_event(), host.nbytes))
        # Its memory is the copying stream's, and free when what computes has used it: the host stays that near to the device.
        while sum(num_bytes for _, num_bytes in self._returned) > (_MOST + 1) * max(self._largest, host.nbytes):
            self._returned.popleft()[0].synchronize()
        with self._stream:
            if ready is not None:
                self._stream.wait_event(ready)
            lengths = [piece.numel() for piece in host.pieces]
            row = host.pieces[0].new_empty(sum(lengths), device=self._device)
            for part, piece in zip(row.split_with_sizes(lengths), host.pieces):
                part.copy_(piece, non_blocking=True)
            return row.view(host.shape)

    def arrived(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, in order for what is computed next on the stream in use, which may be another one each time."""
        if self._stream is not None:
            compute = torch.accelerator.current_stream(self._device)
            compute.wait_stream(self._stream)
            tensor.record_stream(compute)
        return tensor


class Names:
    """Tells storages apart by their addresses, none of which is given to another one while it is held."""

    def of(self, storage: torch.UntypedStorage) -> int:
        """The storage's own number."""
        return int(storage._cdata)

    def hold(self, storage: torch.UntypedStorage) -> Any:
        """What keeps the number from being another's, and the memory from nothing."""
        return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Ways:
    """How activations are moved.

    Attributes:
        lane: makes a device's lane.
        kind: the class of tensors that are moved.
        names: tell their storages apart.
        from_host: those on the host are moved too: they stand for a device's.
    """

    lane: Callable[[torch.device], CopyLane] = field(default_factory=lambda: CopyLane)
    kind: type = torch.Tensor
    names: Names = field(default_factory=Names)
    from_host: bool = False


class _Lanes(dict[torch.device, CopyLane]):
    """Each device's lane, made on first use.

    Attributes:
        ways: how.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ways = Ways()

    def __missing__(self, device: torch.device) -> CopyLane:
        """Make it."""
        self[device] = lane = self.ways.lane(device)
        return lane


@contextmanager
def pretending(ways: Ways) -> Iterator[None]:
    """A block in which activations are moved in other ways: those of a trace, which computes on tensors without values."""
    lanes = scope.own(_Lanes)
    lanes.clear()
    lanes.ways = ways
    try:
        yield
    finally:
        lanes.clear()
        lanes.ways = Ways()


class ActivationCopy:
    """The values of a storage in host memory, once for all that save them.

    Args:
        values: what to copy: the whole storage as one row, or a part of it.
    """

    def __init__(self, values: torch.Tensor) -> None:
        lanes = scope.own(_Lanes)
        self._lane = lanes[values.device]
        # It keeps the storage's address from being given to another one for as long as this copy is found by it.
        self._source = lanes.ways.names.hold(values.untyped_storage())
        self._host, self._ready = self._lane.to_host(values)
        self._fetched: torch.Tensor | None = None

    def fetch(self) -> torch.Tensor:
        """The values on the device; they stay there until the next copy is fetched, or nobody holds this one."""
        if self._fetched is None:
            before = self._lane.last() if self._lane.last is not None else None
            if before is not None:
                before._fetched = None
            self._fetched = self._lane.to_device(self._host, self._ready)
            self._lane.last = weakref.ref(self)
        return self._lane.arrived(self._fetched)


class _Copies(weakref.WeakValueDictionary[tuple[Any, ...], ActivationCopy]):
    """Those that some saved tensor still needs: by storage, version, number format and, of parts, place."""


@dataclass(frozen=True)
class OffloadedActivation:
    """A saved tensor in host memory.

    Attributes:
        copy: its values, and perhaps others beside them.
        view: where it lies in the copy: size, stride and offset in elements; None: it is the copy.
    """

    copy: ActivationCopy
    view: tuple[torch.Size, tuple[int, ...], int] | None


class _OwnStorages:
    """What a block holds on the device anyway, apart from weights that are trained, which the graph tells.

    Args:
        block: None: nothing is known.
    """

    def __init__(self, block: torch.nn.Module | None) -> None:
        held = [] if block is None else [buffer for buffer in block.buffers() if buffer.layout is torch.strided]
        frozen = [] if block is None else [each for each in block.parameters() if not each.requires_grad]
        self._storages = {tensor.untyped_storage()._cdata for tensor in held}
        # Autocast's copies of these have no graph; a constant of a weight's shape, in another format, stays as well.
        self._frozen = {(tensor.shape, tensor.dtype) for tensor in frozen}

    def has(self, tensor: torch.Tensor) -> bool:
        """Is it one of the block's buffers, or as a frozen weight in another format would be?"""
        if tensor.untyped_storage()._cdata in self._storages:
            return True
        base = tensor if tensor._base is None else tensor._base
        return not tensor.requires_grad and any(
            base.shape == shape and base.dtype != dtype for shape, dtype in self._frozen
        )


def offloading(min_bytes: int = MIN_BYTES, block: torch.nn.Module | None = None) -> AbstractContextManager[Any]:
    """A context in which what autograd saves goes to host memory, and comes back when backward asks for it.

    What several operations save is copied once, also as different views, as long as it is not changed in between. Left on
    the device: parameters, their views and their copies in another number format (which autocast makes and keeps), the block's
    buffers, tensors below `min_bytes`, sparse ones, tensor subclasses, and tensors that are on the host already.

    Args:
        min_bytes: from which size on.
        block: whose forward runs in the context.
    """
    own = _OwnStorages(block)

    def pack(tensor: torch.Tensor) -> torch.Tensor | OffloadedActivation:
        return _park(tensor) if _is_worth_it(tensor, min_bytes) and not own.has(tensor) else tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, _fetch)


def _is_worth_it(tensor: torch.Tensor, min_bytes: int) -> bool:
    lanes = scope.own(_Lanes)
    if _is_on_host(tensor) and not lanes.ways.from_host:
        return False
    if tensor.layout is not torch.strided or type(tensor) is not lanes.ways.kind:
        return False
    # An expanded tensor is larger than what it lies in.
    return min(tensor.nbytes, tensor.untyped_storage().nbytes()) >= min_bytes and not _is_weight(tensor)


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _is_weight(tensor: torch.Tensor) -> bool:
    """Does it hold a parameter's values, as a view (a transpose, say) or in another format?"""
    if isinstance(tensor._base, torch.nn.Parameter):
        return True
    node: Any = tensor.grad_fn
    while node is not None:
        name = node.name()
        if name.endswith("AccumulateGrad"):
            return isinstance(node.variable, torch.nn.Parameter)
        if name.rstrip("0123456789").removesuffix("Backward") not in _SAME_VALUES:
            return False
        node = node.next_functions[0][0]
    return False


def _park(tensor: torch.Tensor) -> OffloadedActivation:
    storage = tensor.untyped_storage()
    # Of a small part of a storage only the part; and what is a mere mark on a tensor, conjugation, must be carried out.
    is_whole = 2 * tensor.nbytes > storage.nbytes() and not (tensor.is_conj() or tensor.is_neg())
    view = (tensor.size(), tensor.stride(), int(tensor.storage_offset()))
    mark = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
    key = (scope.own(_Lanes).ways.names.of(storage), tensor._version, *mark, None if is_whole else view)
    copies = scope.own(_Copies)
    copy = copies.get(key)
    if copy is None:
        copy = copies[key] = ActivationCopy(_row(tensor) if is_whole else tensor)
    return OffloadedActivation(copy, view if is_whole else None)


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """All of the tensor's storage as one row of its number format."""
    num = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((num,), (1,), 0)


def _fetch(saved: torch.Tensor | OffloadedActivation) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    values = saved.copy.fetch()
    return values if saved.view is None else values.as_strided(*saved.view)
