"""Stream weights to a device: copy them ahead of use, and put the copies into their modules for one forward."""

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple

import torch

from headway.common.callsite import walk_stack
from headway.core.memory.oom import is_out_of_memory
from headway.core.weights.locations import TensorLocation
from headway.offload.readahead import ReadTraffic, UnitReader
from headway.offload.transport import HostTransport


@dataclass(eq=False)
class PendingWeightCopy:
    """Copy of a tensor on the device, in progress or complete.

    Attributes:
        source: Original tensor.
        version: Version counter of the original when the copy was started.
        tensor: Copy on the device.
        future: Future whose result is the transport's ticket for the copy.
        is_ahead: Whether the copy was started before it was needed.
        is_awaited: Whether the computation has been made to wait for the copy.
    """

    source: torch.Tensor
    version: int
    tensor: torch.Tensor
    future: "Future[Any]"
    is_ahead: bool
    is_awaited: bool = False

    def is_current_copy(self, source: torch.Tensor) -> bool:
        """Whether this is a copy of the current values of `source` that has not failed. It can still be in progress."""
        has_failed = self.future.done() and self.future.exception() is not None
        return self.source is source and self.version == source._version and not has_failed


@dataclass
class WeightUse:
    """Use of a unit by a forward in progress. A unit is a group of tensors that are used together.

    Attributes:
        caller: Frame of the forward call.
        replaced: Tensors of the unit. Empty for a nested use of a unit that is already in use.
        saving_hooks: Context manager with the hooks on tensors that autograd saves, or None without gradients.
        sources_by_address: Original tensors by the memory address of their device copies, for `saving_hooks`.
    """

    caller: FrameType
    replaced: "list[ReplacedTensor]" = field(default_factory=list)
    saving_hooks: Any = None
    sources_by_address: dict[int, torch.Tensor] = field(default_factory=dict)

    def is_interrupted(self) -> bool:
        """Whether the forward has ended without its forward hooks, as after a KeyboardInterrupt."""
        try:
            self.caller.clear()  # frees the local variables of a frame that has ended, which nothing uses anymore
        except RuntimeError:  # the frame is still executing
            return False
        return True


@dataclass
class ReplacedTensor:
    """Tensor of a module that a device copy replaces during a forward.

    Attributes:
        place: Location of the tensor in its module.
        source: Original tensor.
        copy: Copy on the device.
        version: Version counter of the copy before the forward.
    """

    place: TensorLocation
    source: torch.Tensor
    copy: torch.Tensor
    version: int

    def restore(self) -> None:
        """Put the original tensor back into the module, with the values that the forward has given to the copy.

        A forward changes buffers such as the running statistics of BatchNorm. A tensor that the forward has assigned
        itself stays in the module.
        """
        current = getattr(self.place.module, self.place.leaf, None)
        if isinstance(current, torch.Tensor) and current is not self.copy:
            self.place.put_tensor(current.to(self.source.device))
            return
        # F.batch_norm changes its running statistics without increasing their version counter.
        may_have_changed = self.place.module.training and not self.place.is_parameter
        if may_have_changed or self.copy._version != self.version:
            with torch.no_grad():
                self.source.copy_(self.copy)
        self.place.put_tensor(self.source)


class _SavedWeight(NamedTuple):
    """Reference to a weight that autograd saves in place of a device copy of the weight or a view of the copy.

    Attributes:
        source: Original tensor.
        shape: Shape of the saved tensor.
        stride: Strides of the saved tensor, in elements.
        offset: Offset of the saved tensor in the copy's storage, in elements.
    """

    source: torch.Tensor
    shape: torch.Size
    stride: tuple[Any, ...]
    offset: Any


class DeviceStream(UnitReader):
    """Stream of weights that are stored in host memory or files and used on a device.

    A unit is a group of tensors that are used together. Its modules have device copies of the tensors only while the
    unit's forward runs. At other times they have the original tensors, so a state dict or a checkpoint always has real
    values. During a forward, the next units are copied, up to `window` bytes. A tensor that several units use is copied
    once and stays on the device.

    For backward, autograd does not save the copy of a weight but a reference to the original, which is copied again
    when backward needs it. A trainable tensor is copied when it is used, by an operation that autograd records, so that
    its gradient reaches the original.

    The host runs ahead of the device, so the device might still use a copy that the host drops. A new copy reuses the
    memory of a dropped one in the computation's stream. The new copy is queued behind all work on that memory, so the
    device waits for that work and the host does not. Therefore `active_bytes` is the memory of weights on the device,
    however far the host is ahead.

    Args:
        units: Groups of tensors that are used together, in the order of registration.
        device: Device that uses the tensors.
        window: Bytes to copy ahead of use. Besides them, the device has only the unit in use and the shared tensors.
        transport: Transport of the copies.

    Attributes:
        active_bytes: Bytes of weights on the device: complete copies, copies in progress, and copies that were dropped
            before they were complete. Weights that autograd keeps are not included: trainable weights of this step, and
            weights that backward copies again.
        peak_bytes: Maximum of `active_bytes` so far.
    """

    _NOT_COPIED = ("_worker", "_copies", "_dropped_copies", "_uses", "_expected_units", "_shared_ids")

    def __init__(
        self, units: list[list[TensorLocation]], device: torch.device, window: int, transport: HostTransport
    ) -> None:
        super().__init__(units, window)
        self._transport = transport
        self.device = device
        self._reset_state()

    def _reset_state(self) -> None:
        """Create the records of copies and uses in their initial state, and the thread that starts copies."""
        # Copies by `id` of the original tensor.
        self._copies: dict[int, PendingWeightCopy] = {}
        # Copies that were dropped while they were in progress. Their memory must not be freed before they end.
        self._dropped_copies: list[PendingWeightCopy] = []
        self.active_bytes = 0
        self.peak_bytes = 0
        # Uses of each unit by forwards in progress, the outermost first.
        self._uses: dict[int, list[WeightUse]] = {}
        # Units that are copied ahead of use, in the expected order.
        self._expected_units: list[int] = []
        # The `id` of each tensor that belongs to several units. None until the first use.
        self._shared_ids: set[int] | None = None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headway-stream")
        # Not at the exit of the interpreter, when the process frees this memory anyway and the device may be shut down.
        weakref.finalize(self, _abandon_copies, self._copies, self._dropped_copies, self._transport).atexit = False

    def _find_shared(self) -> set[int]:
        """Return the `id` of each tensor that belongs to several groups of tensors, such as a tied weight."""
        # A unit that contains a tensor twice counts once.
        counts = Counter(key for unit in self._units for key in {id(place.tensor) for place in unit})
        return {key for key, count in counts.items() if count > 1}

    @property
    def traffic(self) -> ReadTraffic:
        """Statistics of the copies to the device."""
        return self._transport.traffic

    def mark_progress(self) -> Any:
        """Return the current position in the device's compute stream, or None if the device computes synchronously."""
        return self._transport.mark_progress()

    def enter_unit(self, unit: int) -> None:
        """Replace the tensors in a unit's modules with their device copies. Call it before the unit's forward.

        Args:
            unit: Index of a group of tensors that are used together.
        """
        # The caller of this method is the forward pre-hook, whose caller is the module's forward call.
        use = WeightUse(next(islice(walk_stack(), 2, None)))
        uses = self._uses.setdefault(unit, [])
        if uses and uses[0].is_interrupted():
            self._end_interrupted_uses()
        if uses:
            uses.append(use)  # a nested call of the same unit, whose copies are already in the modules
            return
        places = self._units[unit]
        sources = [place.tensor for place in places]
        if self._shared_ids is None:
            self._shared_ids = self._find_shared()
        self.order.record_use(unit)
        self._start_copies(sources)
        for place, source in zip(places, sources):
            copy = self._get_device_copy(source)
            use.replaced.append(ReplacedTensor(place, source, copy, copy._version))
        # The modules change only after all copies have succeeded, so that an error leaves the original tensors in them.
        if torch.is_grad_enabled():
            self._install_saving_hooks(use)
        uses.append(use)
        for replaced in use.replaced:
            replaced.place.put_tensor(replaced.copy)
        self._prefetch_next(unit)

    def leave_unit(self, unit: int) -> None:
        """Restore the original tensors in the modules of a unit. Call it after the unit's forward.

        Copies are dropped unless they are shared by several units or are expected to be used next.

        Args:
            unit: Index of a group of tensors that are used together.
        """
        uses = self._uses.get(unit)
        if not uses:
            return  # `enter_unit` failed
        use = uses.pop()
        if uses:
            return
        if use.saving_hooks is not None:
            use.saving_hooks.__exit__(None, None, None)
        for replaced in use.replaced:
            replaced.restore()
        self._drop_unexpected()

    def _end_interrupted_uses(self) -> None:
        """Restore the original tensors of all units whose forward was interrupted.

        torch calls no forward hooks after exceptions such as KeyboardInterrupt, which are not of the class Exception.
        """
        for uses in self._uses.values():
            if not uses or not uses[0].is_interrupted():
                continue
            # The hooks on saved tensors cannot be removed, because others might have been added since. They do nothing
            # without addresses.
            uses[0].sources_by_address.clear()
            for replaced in uses[0].replaced:
                replaced.restore()
            uses.clear()
        self._drop_unexpected()

    def _is_copied_by_autograd(self, source: torch.Tensor) -> bool:
        return source.requires_grad and torch.is_grad_enabled()

    def _get_device_copy(self, source: torch.Tensor) -> torch.Tensor:
        """Return a tensor's copy on the device, and make the computation wait until the copy is complete.

        If a copy that was started ahead of use has failed, it is repeated once. Any other failure is raised. A tensor
        that needs a gradient is copied here, by an operation that autograd records.

        Args:
            source: Original tensor.
        """
        if self._is_copied_by_autograd(source):
            return source.to(self.device, copy=True)
        copy = self._copies[id(source)]
        start = time.perf_counter()
        try:
            ticket = copy.future.result()
        except Exception:
            # A failed copy must be dropped, because it would raise its error again at every later forward.
            self._drop_copies([id(source)])
            if not copy.is_ahead:
                raise
            self._start_copies([source])  # the cause, such as too little memory, might no longer exist
            return self._get_device_copy(source)
        self.traffic.wait_seconds += time.perf_counter() - start
        self._transport.finish_copy(copy.tensor, ticket)
        copy.is_awaited = True
        return copy.tensor

    def _start_copies(self, sources: Iterable[torch.Tensor], is_ahead: bool = False) -> None:
        """Start to copy those tensors that have no copy, or whose copy has failed or is outdated.

        Tensors that need a gradient are left out, because autograd copies them when they are used.

        Args:
            sources: Original tensors.
            is_ahead: Whether the copies are started before they are needed. Default: False.
        """
        missing: dict[int, torch.Tensor] = {}
        for source in sources:
            if self._is_copied_by_autograd(source) or id(source) in missing:
                continue
            copy = self._copies.get(id(source))
            if copy is not None and copy.is_current_copy(source):
                continue
            if copy is not None:
                self._drop_copies([id(source)])
            missing[id(source)] = source
        targets = [self._transport.allocate(source) for source in missing.values()]
        # The position is recorded after the allocation, so that it includes all earlier work on the allocated memory.
        after = self._transport.mark_progress() if targets else None
        for source, tensor in zip(missing.values(), targets):
            future = self._worker.submit(self._transport.start_copy, source, tensor, after)
            self._copies[id(source)] = PendingWeightCopy(source, source._version, tensor, future, is_ahead)
            self.active_bytes += tensor.nbytes
        self.peak_bytes = max(self.peak_bytes, self.active_bytes)

    def _drop_copies(self, keys: Iterable[int]) -> None:
        """Drop the device copies of tensors.

        The memory of a copy in progress is kept until the compute stream has been set to wait for the copy.

        Args:
            keys: The `id` of each original tensor.
        """
        for key in keys:
            copy = self._copies.pop(key)
            if copy.is_awaited or copy.future.cancel():
                self.active_bytes -= copy.tensor.nbytes
            else:
                self._dropped_copies.append(copy)
        self._release_dropped_copies()

    def _release_dropped_copies(self) -> None:
        """Free the memory of dropped copies that are no longer in progress."""
        for copy in [each for each in self._dropped_copies if each.future.done()]:
            if copy.future.exception() is None:
                self._transport.finish_copy(copy.tensor, copy.future.result())
            self._dropped_copies.remove(copy)
            self.active_bytes -= copy.tensor.nbytes

    def _prefetch_next(self, unit: int) -> None:
        """Start to copy the tensors that are expected to be used next, and drop copies that are not.

        The tensors that are copied ahead fit into the window.

        Args:
            unit: Index of the group of tensors that the computation uses now.
        """
        self._expected_units = self._choose_expected_units(unit)
        self._drop_unexpected()
        for next_unit in self._expected_units:
            sources = [place.tensor for place in self._units[next_unit]]
            missing = [h for h in sources if id(h) not in self._copies and not self._is_copied_by_autograd(h)]
            try:
                if missing:
                    self._start_copies(missing, is_ahead=True)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                break  # there might be enough memory when a later unit is entered

    def _choose_expected_units(self, unit: int) -> list[int]:
        """Return the units that are expected to be used next and fit into the window, in the expected order.

        Args:
            unit: Index of the group of tensors that the computation uses now.
        """
        free_bytes = self.window
        expected_units: list[int] = []
        for next_unit in self.order.predict_next():
            is_cycle_complete = next_unit == unit or next_unit in expected_units
            if is_cycle_complete or self._sizes[next_unit] > free_bytes:
                break
            if self._uses.get(next_unit):
                continue  # the unit of a module that contains the current one, whose copies are already in use
            free_bytes -= self._sizes[next_unit]
            expected_units.append(next_unit)
        return expected_units

    def _drop_unexpected(self) -> None:
        """Drop all device copies except those that are shared by several units, in use, or expected to be used next."""
        kept_ids = set(self._shared_ids or ())
        kept_ids |= {id(place.tensor) for unit in self._expected_units for place in self._units[unit]}
        kept_ids |= {id(each.source) for uses in self._uses.values() for use in uses for each in use.replaced}
        self._drop_copies([key for key in self._copies if key not in kept_ids])

    def _install_saving_hooks(self, use: WeightUse) -> None:
        """Make autograd save references to the original tensors of a unit instead of their device copies."""
        for replaced in use.replaced:
            # Copies with `requires_grad` were made by autograd, which must keep them for backward.
            if not replaced.copy.requires_grad:
                address = replaced.copy.untyped_storage().data_ptr()
                use.sources_by_address[address] = replaced.source
        use.saving_hooks = torch.autograd.graph.saved_tensors_hooks(*self._make_saving_hooks(use.sources_by_address))
        use.saving_hooks.__enter__()

    def _make_saving_hooks(
        self, sources_by_address: dict[int, torch.Tensor]
    ) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        """Return the pair of hooks for `saved_tensors_hooks` in a forward that uses device copies of weights.

        Instead of a device copy, autograd saves a reference to the original weight, and the shape and strides of the
        saved tensor. Backward copies the weight again.

        Args:
            sources_by_address: Original tensors by the address of their device copies.
        """

        def pack_saved(tensor: torch.Tensor) -> Any:
            source = sources_by_address.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
            if source is None or tensor.dtype != source.dtype:
                return tensor
            return _SavedWeight(source, tensor.shape, tensor.stride(), tensor.storage_offset())

        def unpack_saved(saved: Any) -> torch.Tensor:
            if not isinstance(saved, _SavedWeight):
                return saved  # type: ignore[no-any-return]
            copy = self._transport.allocate(saved.source)
            after = self._transport.mark_progress()
            # Only the worker's thread may start copies.
            ticket = self._worker.submit(self._transport.start_copy, saved.source, copy, after).result()
            self._transport.finish_copy(copy, ticket)
            return copy.as_strided(saved.shape, saved.stride, saved.offset)

        return pack_saved, unpack_saved


def _abandon_copies(
    copies: dict[int, PendingWeightCopy], dropped_copies: list[PendingWeightCopy], transport: HostTransport
) -> None:
    """Cancel a stream's copies that have not started, and keep the memory of running copies until they end.

    This is the finalizer of `DeviceStream`. It can run in any thread, even in the copy thread, so it must not wait.

    Args:
        copies: Copies that the stream uses, by `id` of the original tensor.
        dropped_copies: Copies that were dropped before they were complete.
        transport: Transport of the copies.
    """
    for copy in (*copies.values(), *dropped_copies):
        if not copy.is_awaited and not copy.future.cancel():
            copy.future.add_done_callback(partial(_drain_transport, transport, copy.tensor))


def _drain_transport(transport: HostTransport, target: torch.Tensor, done: "Future[Any]") -> None:
    """Wait until all copies are complete. This is the callback of a copy's future.

    Args:
        transport: Transport of the copies.
        target: Target of the copy. The callback refers to it only to keep its memory until all copies are complete.
        done: The future, which is not used.
    """
    transport.drain()
