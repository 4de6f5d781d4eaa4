"""Record all memory that training steps on fake tensors allocate and free, in order.

The tracker watches the storages of tensors with weak references. Views allocate nothing. Memory is freed when the last
tensor that uses it is deleted, wherever that tensor was stored. Nothing is computed, so a step of any size takes
seconds and hardly any memory.

FSDP resizes the storages of gathered parameters without torch's dispatcher. The tracker recognizes these storages by the
operation that fills them. Before each later operation, it checks whether their sizes have changed (`GatheredStorages`).
"""

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import groupby, islice
from typing import Any, NamedTuple

import torch

from headway.common.callsite import Frame, find_user_frame, walk_stack
from headway.errors import UnsupportedError
from headway.forecasting._torch import (
    FakeTensor,
    TorchDispatchMode,
    tree_leaves,
)
from headway.forecasting.device import kernels, memory_rules
from headway.forecasting.device.devices import Device
from headway.forecasting.device.memory_events import MemoryEvent
from headway.forecasting.device.memory_rules import NAMESPACES, UNKNOWN_SCRATCH
from headway.forecasting.tracing.engine import StepObserver
from headway.forecasting.tracing.gathered_storages import GatheredStorages
from headway.forecasting.tracing.gradient_sums import is_sum_of_gradients
from headway.forecasting.tracing.largest_results import expand_masks, make_largest_result
from headway.forecasting.tracing.tensors import has_wrapper_type, iterate_plain_tensors
from headway.forecasting.tracing.trace import PhaseStart, Trace
from headway.forecasting.tracing.work import WorkCounter

_MIN_BYTES_FOR_LINE = 1 << 20
"""Minimum size in bytes of a request for which the user's source line is looked up.

The lookup takes longer than all other tracing work.
"""
_GET_DEVICE = torch.ops.prim.device.default
"""Operation that returns a tensor's device.

Two thirds of all calls are of this operation. If the dispatch mode handles it, a call takes a fifth of the time.
"""
# Names of operations that the tracker handles specially: resizing, waiting for a collective, and those of FSDP.
_RESIZE = "resize_"
_WAIT = "_c10d_functional::wait_tensor"
_GATHER = "fsdp::all_gather_copy_in"
_SPLIT = "fsdp::split_with_sizes_copy"
_REDUCE = "c10d::_reduce_scatter_base_"
_COPY = "aten::copy_"
_EXCHANGE = "c10d::alltoall_base_"
"""Operation that exchanges parameters and gradients between shards and the ranks that update whole parameters.

Outside of updates, experts exchange tokens with it.
"""
_FSDP_STREAMS = {_GATHER: 1, _SPLIT: 0, _REDUCE: 2, _COPY: 0}
"""CUDA stream on which each of FSDP's operations allocates its results, by the operation's name."""
_UNSHARD_FUNCTION = "wait_for_unshard"
"""Name of the FSDP function that copies parameters which only one rank has, such as experts."""
_SHAPE_FUNCTION = "_propagate_tensor_meta"
"""Prefix of the DTensor function that runs an operation only to determine the shape of its result."""
_MAX_FRAMES = 64
"""Maximum number of stack frames that are searched for a torch function that called the current operation."""
_COMPILED_CALLERS = ("compile_wrapper", "_call_impl_compiled")
"""Names of TorchDynamo's functions through which a compiled function is called."""


class _LiveStorage(NamedTuple):
    """Storage whose memory is in use.

    Attributes:
        reference: Weak reference to the storage. Its callback records the free.
        key: Key of the memory's allocation event.
        num_bytes: Recorded bytes of the storage.
    """

    reference: weakref.ref[torch.UntypedStorage]
    key: int
    num_bytes: int


class _GradientSum(NamedTuple):
    """Last addition in which autograd has summed two gradients of one tensor.

    Attributes:
        first_key: Key of the first gradient's memory.
        sum_key: Key of the sum's memory.
        sum_address: Address of the sum's storage.
    """

    first_key: int
    sum_key: int
    sum_address: int


class StorageTracker(TorchDispatchMode, StepObserver):  # type: ignore[no-untyped-call]
    """Dispatch mode that records when the memory of tensors is allocated and freed, for fake and real tensors.

    Only tensors that are created while the mode is active, or passed to `mark_tensors`, are recorded.

    Args:
        device: Device that is traced for. The scratch memory of its kernels is added.
        work_counter: Counter to which every operation is reported, or None to count no work.
        graphs: Paths of the graphs that inductor has compiled (see `compiled.skip_kernels`), or None if compiled models
            are not traced.

    Attributes:
        events: Events so far.
        phase_starts: Starts of the phases so far, in order.
        last_operation: Name of the last operation that was traced, or "" before the first, for error messages.
    """

    runs_compiled_eagerly: bool = False
    """Whether functions that `torch.compile` has compiled run without compilation, so that their requests are traced."""

    def __init__(
        self, device: Device, work_counter: WorkCounter | None = None, graphs: Collection[str] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[MemoryEvent] = []
        self.phase_starts: list[PhaseStart] = []
        self.last_operation = ""
        self._device = device
        self._graphs = graphs
        self._rules = memory_rules.list_rules(device)
        self._operations: Counter[str] = Counter()
        self._live_storages: dict[int, _LiveStorage] = {}  # by address of the storage
        self._kinds: dict[int, str] = {}  # by key of the allocation event, like `_streams`
        self._streams: dict[int, int] = {}
        self._last_key = 0  # of the last allocation
        self._cublas_threads: set[str] = set()  # threads that have used cuBLAS: "forward", "backward"
        self._phase = ""
        self._phase_start = 0  # index of the first event of the current phase
        self._is_updating = False
        self._unsure_bytes = 0
        self._has_upper_bounds = False  # whether a size that depends on values was taken at its largest
        self._gathered = GatheredStorages(self._record_resize)
        self._has_wrapper_tensors = False
        self._work_counter = work_counter
        self._gradient_sum = _GradientSum(0, 0, 0)

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        """Whether TorchDynamo can compile while this mode is active.

        If so, the compilation itself is not traced, but the compiled code is.
        """
        return self._graphs is not None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if has_wrapper_type(types):
            self._has_wrapper_tensors = True
            return NotImplemented  # torch dispatches the same call again on the inner tensors
        if func is _GET_DEVICE and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device
        if func.namespace == "prim" or (self._has_wrapper_tensors and _is_shape_propagation()):
            return func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == _WAIT and isinstance(args[0], FakeTensor):
            return args[0]  # torch returns a real tensor itself, but allocates a copy of a fake one
        # FSDP may have resized storages since the last operation.
        self._gathered.check_sizes()
        self.last_operation = name
        self._operations[name] += 1
        self._record_unsure_workspace(name, args)
        # Scratch memory of this kind is requested before the results, and freed after them.
        early_scratch: list[MemoryEvent] = []
        if name in self._rules.before:
            early_scratch = [self._record_scratch(size, name) for size in self._rules.before[name](args)]
        result = self._run_operation(func, args, kwargs or {})
        if self._work_counter is not None:
            self._work_counter.add_operation(self._phase, func, args, kwargs, result)
        if (name.endswith(_RESIZE) or name == "aten::set_") and isinstance(args[0], torch.Tensor):
            self._record_resize(args[0].untyped_storage())
        self._record_results(result, name, args)
        self._record_late_scratch(name, args)
        if memory_rules.is_cublas_operation(self._device, name, args):
            self._record_workspace()
        self._record_sum(name, args, result)
        for event in early_scratch:
            self.events.append(event._replace(num_bytes=-event.num_bytes))
        if name in _FSDP_STREAMS or name == _EXCHANGE:
            self._record_transfer(name, args, kwargs or {})
        return result

    def _run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and return its result.

        If the shape of the result depends on values, which fake tensors do not have, the largest possible result is
        returned. The trace then has a caveat.

        Args:
            func: Operation.
            args: Arguments of the operation.
            kwargs: Keyword arguments of the operation.
        """
        largest_result = make_largest_result(func, args)
        if largest_result is not None:
            self._has_upper_bounds = True
            return largest_result
        args_without_masks = expand_masks(func, args)
        if args_without_masks is not args:
            self._has_upper_bounds = True
        grouped_product = kernels.make_grouped_product(func, args)
        if grouped_product is not None:
            return grouped_product
        return func(*args_without_masks, **kwargs)

    def _mark_buckets(self, name: str, args: tuple[Any, ...]) -> None:
        """Mark tensors that an all-to-all operation sends or receives, and tensors copied from them, as "buckets".

        Args:
            name: Name of the operation: all-to-all, or a copy.
            args: Arguments of the operation.
        """
        tensors = [tensor for tensor in args[:2] if isinstance(tensor, torch.Tensor)]
        storages = [self._live_storages.get(tensor.untyped_storage()._cdata) for tensor in tensors]
        keys = [storage.key for storage in storages if storage is not None]
        if name == _EXCHANGE or (len(keys) == 2 and self._kinds.get(keys[1]) == "buckets"):
            for key in keys:
                self._kinds.setdefault(key, "buckets")

    def _record_sum(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Remember the memory of an addition's first argument and result if autograd sums two gradients with it.

        If the first gradient is freed next, `_drop_in_place_sum` removes the recorded allocation of the sum.

        Args:
            name: Name of the operation. Do nothing unless it is an addition.
            args: Arguments of the operation.
            result: Result of the operation.
        """
        if not is_sum_of_gradients(name, args, result):
            return
        first, total = (self._live_storages.get(each.untyped_storage()._cdata) for each in (args[0], result))
        if first is not None and total is not None:
            self._gradient_sum = _GradientSum(first.key, total.key, result.untyped_storage()._cdata)

    def _record_results(self, result: Any, name: str, args: tuple[Any, ...]) -> None:
        """Record the memory of all tensors in an operation's result that is new.

        Args:
            result: Result of the operation.
            name: Name of the operation.
            args: Arguments of the operation.
        """
        min_bytes = self._rules.results[name](args) if name in self._rules.results else ()
        if name == "aten::native_dropout":
            result = result[::-1]  # its kernel on CUDA allocates the mask first
        for index, leaf in enumerate(result if isinstance(result, tuple | list) else (result,)):
            for each in leaf if isinstance(leaf, tuple | list) else (leaf,):
                if isinstance(each, torch.Tensor):
                    self._register_tensor(each, name, args, min_bytes[index] if index < len(min_bytes) else 0)

    def _record_unsure_workspace(self, name: str, args: tuple[Any, ...]) -> None:
        """Record an upper bound for the workspace of an operation whose CUDA kernel has a workspace of unknown size.

        Only the largest bound of all operations is kept. The bound is the sum of the bytes that the operation reads and
        the bytes that it is assumed to keep.

        Args:
            name: Name of the operation.
            args: Arguments of the operation.
        """
        if name in UNKNOWN_SCRATCH and self._device.is_cuda:
            num_bytes = sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            if name in self._rules.results:
                num_bytes += sum(self._rules.results[name](args))  # also only an assumption
            self._unsure_bytes = max(self._unsure_bytes, num_bytes)

    def enter_phase(self, phase: str) -> None:
        """Start a phase of the step, such as "step 1 forward"."""
        self._gathered.check_sizes()
        if self._graphs:
            self._collect_garbage()
        self._phase = phase
        self._phase_start = len(self.events)
        self._is_updating = phase.endswith("update")
        if not self.phase_starts or self.phase_starts[-1].phase != phase:
            self.phase_starts.append(PhaseStart(phase, len(self.events)))

    def _collect_garbage(self) -> None:
        """Run Python's garbage collector, and record the freed bytes as memory that a real run might still use.

        After a graph break, reference cycles in TorchDynamo keep tensors of the first call alive until Python collects
        garbage.
        """
        before = sum(storage.num_bytes for storage in self._live_storages.values())
        gc.collect()
        after = sum(storage.num_bytes for storage in self._live_storages.values())
        self._unsure_bytes = max(self._unsure_bytes, before - after)

    def mark_tensors(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Set the kind of the memory of some tensors, such as "weights" or "gradients".

        If a tensor is not known to the tracker, its allocation is recorded now.
        """
        for each in tensors:
            for tensor in iterate_plain_tensors(each):
                key = self._register_tensor(tensor, kind, ())
                if key is not None:
                    self._kinds[key] = kind

    def mark_activations(self) -> None:
        """Set the kind of all memory that forward has allocated and not freed to "activations".

        Memory whose kind is already known keeps it.
        """
        self._gathered.check_sizes()
        keys_in_use = {storage.key for storage in self._live_storages.values()}
        for event in self.events[self._phase_start :]:
            if event.num_bytes > 0 and event.key in keys_in_use:
                self._kinds.setdefault(event.key, "activations")

    def count_held_bytes(self, kind: str) -> int:
        """Return the bytes in use for one kind of memory, such as "gradients"."""
        return sum(
            storage.num_bytes for storage in self._live_storages.values() if self._kinds.get(storage.key) == kind
        )

    def build_trace(self) -> Trace:
        """Return the trace of the events before the phase "end". Call it after the dispatch mode has ended."""
        end = next((index for phase, index in self.phase_starts if phase == "end"), None)
        events = [
            event._replace(kind=self._kinds.get(event.key, event.kind), stream=self._streams.get(event.key, 0))
            for event in _sort_frees(self.events[:end])
        ]
        work = {} if self._work_counter is None else self._work_counter.by_phase
        return Trace(
            events=events,
            phase_starts=list(self.phase_starts),
            operations=dict(self._operations),
            caveats=self._list_caveats(),
            work=work,
            unsure_bytes=self._unsure_bytes,
        )

    # ---------------------------------------------------------------- memory

    def _register_tensor(
        self, tensor: torch.Tensor, operation: str, args: tuple[Any, ...], min_bytes: int = 0
    ) -> int | None:
        """Return the key of a tensor's memory, and record its allocation if it is new.

        Args:
            tensor: Tensor to register.
            operation: Operation that created the tensor.
            args: Arguments of the operation.
            min_bytes: Minimum size of the storage in bytes. Negative if the device's kernel creates no such tensor.

        Returns:
            The key, or None if the tensor has no memory or is in host memory.
        """
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a subclass without memory of its own
            return None
        address = storage._cdata
        known = self._live_storages.get(address)
        if known is not None and known.reference() is storage:
            return known.key
        size = max(storage.nbytes(), min_bytes) if min_bytes >= 0 else 0
        if size == 0 or self._is_on_host(tensor, args):
            return None
        key = self._record_request(size, operation)

        def record_free(reference: weakref.ref[torch.UntypedStorage]) -> None:
            # The entry can belong to a newer storage at the same address.
            freed = self._live_storages.get(address)
            if freed is not None and freed.reference is reference:
                del self._live_storages[address]
                if freed.num_bytes and not self._drop_in_place_sum(freed.key, freed.num_bytes):
                    self.events.append(MemoryEvent(freed.key, -freed.num_bytes, operation))

        self._live_storages[address] = _LiveStorage(weakref.ref(storage, record_free), key, size)
        return key

    def _drop_in_place_sum(self, key: int, size: int) -> bool:
        """Remove the recorded allocation of a gradient sum if a real run would compute the sum in place.

        In a real run, autograd adds the second gradient to the first in place if nothing else uses the first. A
        trace shows this as an allocation of the sum, followed by the release of the first gradient. The allocation is
        therefore removed only if it is the last recorded one, apart from workspaces.

        Args:
            key: Key of the freed gradient's memory.
            size: Bytes of the freed gradient's memory.

        Returns:
            Whether the allocation was removed.
        """
        first_key, sum_key, sum_address = self._gradient_sum
        total = self._live_storages.get(sum_address)
        if first_key != key or total is None or (total.key, total.num_bytes) != (sum_key, size):
            return False
        for index in range(len(self.events) - 1, self._phase_start - 1, -1):
            event = self.events[index]
            if event.num_bytes <= 0 or (event.key != sum_key and self._kinds.get(event.key) == "workspaces"):
                continue
            if event.key != sum_key:  # another tensor was allocated after the sum
                return False
            del self.events[index]
            if self._last_key == sum_key:
                self._last_key -= 1
            self._live_storages[sum_address] = total._replace(key=key)
            return True
        return False

    def _is_on_host(self, tensor: torch.Tensor, args: tuple[Any, ...]) -> bool:
        """Whether a tensor is an optimizer's step count, which torch keeps on the CPU unless the optimizer is fused.

        Args:
            tensor: Result of an operation.
            args: Arguments of the operation.
        """
        return (
            self._device.is_cuda
            and self._is_updating
            and tensor.dim() == 0
            and not any(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in tree_leaves(args))
        )

    def _record_transfer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record an operation that may move parts of parameters or gradients between ranks or buffers.

        Args:
            name: Name of the operation: one of FSDP's, a copy, or an all-to-all.
            args: Arguments of the operation.
            kwargs: Keyword arguments of the operation.
        """
        if self._is_updating and name in (_EXCHANGE, _COPY):
            self._mark_buckets(name, args)
        elif name in _FSDP_STREAMS:
            self._record_sharding(name, args, kwargs)

    def _record_sharding(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record that FSDP has gathered a unit's parameters or reduced its gradients, and on which stream.

        The stream matters because CUDA's allocator has separate pools for each stream.

        Args:
            name: Name of FSDP's operation.
            args: Arguments of the operation.
            kwargs: Keyword arguments of the operation.
        """
        if name == _SPLIT:
            self.mark_tensors(self._gathered.register_unit(kwargs["out"]), "gathered weights")
            return
        if name == _COPY:
            # Most copies are not FSDP's. Only its unshard function copies parameters that a single rank has.
            frames = islice(walk_stack(), _MAX_FRAMES)
            if any(frame.f_code.co_name == _UNSHARD_FUNCTION for frame in frames):
                self.mark_tensors(self._gathered.register_unit(args[:1]), "gathered weights")
            return
        buffer = args[0]
        if name == _GATHER:
            buffer = args[1]
            self.mark_tensors([buffer], "gathered weights")
        key = self._register_tensor(buffer, name, ())
        if key is not None:
            self._streams[key] = _FSDP_STREAMS[name]

    def _record_request(self, size: int, operation: str) -> int:
        """Record an allocation, and return its key. Requests of at least `_MIN_BYTES_FOR_LINE` bytes get a source line.

        Args:
            size: Requested bytes.
            operation: Operation that requests the memory.

        Raises:
            UnsupportedError: If compiled models are not traced, and a compiled function makes a request of this size.
        """
        self._last_key += 1
        source_line = ""
        if size >= _MIN_BYTES_FOR_LINE:
            if self._graphs is None and not self.runs_compiled_eagerly:
                _refuse_compiled()
            frame = find_user_frame(excluded_files=self._graphs or ())
            source_line = "" if frame is None else str(Frame.from_frame(frame))
        self.events.append(MemoryEvent(self._last_key, size, operation, source_line))
        return self._last_key

    def _record_scratch(self, size: int, operation: str) -> MemoryEvent:
        """Record an allocation of scratch memory with `size` bytes, and return its event. The caller records the free."""
        key = self._record_request(size, operation)
        self._kinds[key] = "workspaces"
        return self.events[-1]

    def _record_late_scratch(self, name: str, args: tuple[Any, ...]) -> None:
        """Record the scratch memory that an operation's kernel allocates after its results.

        Args:
            name: Name of the operation.
            args: Arguments of the operation.
        """
        if name not in self._rules.after:
            return
        allocated: list[MemoryEvent] = []
        for size in self._rules.after[name](args):
            if size > 0:
                allocated.append(self._record_scratch(size, name))
                continue
            # A negative size frees the newest scratch memory of this size.
            freed = next(event for event in reversed(allocated) if event.num_bytes == -size)
            allocated.remove(freed)
            self.events.append(freed._replace(num_bytes=size))
        self.events += [event._replace(num_bytes=-event.num_bytes) for event in allocated]

    def _record_workspace(self) -> None:
        """Record cuBLAS's workspace when a thread first uses cuBLAS.

        cuBLAS has one handle, and therefore one workspace, per thread. Autograd runs backward in a separate thread.
        """
        thread = "backward" if self._phase.endswith("backward") else "forward"
        if thread not in self._cublas_threads:
            self._cublas_threads.add(thread)
            self._record_scratch(self._device.cublas, "cuBLAS's workspace")

    def _record_resize(self, storage: torch.UntypedStorage) -> None:
        """Record an allocation or a free if the size of a storage has changed."""
        known = self._live_storages.get(storage._cdata)
        size = storage.nbytes()
        if known is None or known.reference() is not storage or known.num_bytes == size:
            return
        new_key = known.key
        if size:
            # `resize_` copies, so the old and the new memory are allocated at the same time.
            new_key = self._record_request(size, "resize_")
            self._kinds.setdefault(new_key, self._kinds.get(known.key, "temporaries"))
        self._live_storages[storage._cdata] = _LiveStorage(known.reference, new_key, size)
        if known.num_bytes:
            self.events.append(MemoryEvent(known.key, -known.num_bytes, "resize_"))

    def _list_caveats(self) -> tuple[str, ...]:
        """Return the assumptions and known gaps of the trace so far, as sentences."""
        caveats: list[str] = []
        if self._device.is_cuda:
            caveats += dict.fromkeys(UNKNOWN_SCRATCH[name] for name in self._operations if name in UNKNOWN_SCRATCH)
        if self._graphs:
            caveats.append(
                "compiled code is counted with the buffers that inductor plans for a CPU; on a GPU it fuses a little differently"
            )
        if self._has_upper_bounds:
            caveats.append(
                "sizes that depend on values (nonzero, unique, masks as indices, the lengths of CTC's targets) are taken at their "
                "largest, so a run takes as much or less"
            )
        foreign = sorted(
            name
            for name in self._operations
            if name.partition("::")[0] not in NAMESPACES and name not in self._rules.before
        )
        if foreign:
            caveats.append(f"what these operations need besides their results is not known: {', '.join(foreign)}")
        return tuple(caveats)


def _refuse_compiled() -> None:
    """Raise UnsupportedError if a compiled function is running.

    On fake tensors, a compiled function would run uncompiled without a warning, and its memory requests would differ.
    """
    if "torch._dynamo.eval_frame" not in sys.modules:
        return
    for code in (frame.f_code for frame in walk_stack()):
        if code.co_name in _COMPILED_CALLERS and code.co_filename.endswith("eval_frame.py"):
            raise UnsupportedError(
                "a function compiled by torch.compile was called, which headway.forecast alone can follow, if inductor compiles "
                "it. Leave torch.compile out; a compiled step usually needs less memory"
            )


def _is_shape_propagation() -> bool:
    """Whether DTensor runs the current operation only to determine the shape of its result.

    DTensor does this with tensors of the full shape before it computes with shards.
    """
    return any(frame.f_code.co_name.startswith(_SHAPE_FUNCTION) for frame in islice(walk_stack(), _MAX_FRAMES))


def _sort_frees(events: list[MemoryEvent]) -> list[MemoryEvent]:
    """Return the events with each run of consecutive frees sorted by key, so that traces are reproducible.

    Autocast frees its cached casts in the order of their addresses, which differs from run to run.
    """
    reproducible: list[MemoryEvent] = []
    for is_allocation, run in groupby(events, lambda event: event.num_bytes >= 0):
        same_kind = list(run)
        reproducible += same_kind if is_allocation else sorted(same_kind, key=lambda event: event.key)
    return reproducible
