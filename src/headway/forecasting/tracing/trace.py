"""Record all memory that training steps on fake tensors allocate and free, in order.

The tracker watches the storages of tensors with weak references. Views allocate nothing. Memory is freed when the last
tensor that uses it is deleted, wherever that tensor was stored. Nothing is computed, so a step of any size takes
seconds and hardly any memory.

FSDP resizes storages without torch's dispatcher, so a trace sees no operation. `fully_shard` creates the storage of a
gathered parameter once. After the forward of the FSDP unit, `fully_shard` frees the storage's bytes, and at the next
gather it allocates them again (`UntypedStorage.resize_`). The tracker recognizes these storages by the operation that
fills them. Before each later operation, it checks whether their sizes have changed.
"""

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any, NamedTuple

import torch

from headway.common.callsite import Frame, find_user_frame, walk_stack
from headway.errors import UnsupportedError
from headway.forecasting._torch import (
    FakeTensor,
    TorchDispatchMode,
    current_autograd_node,
    current_graph_task_id,
    tree_leaves,
)
from headway.forecasting.device import kernels
from headway.forecasting.device.allocator import UNSURE, MemoryEvent
from headway.forecasting.device.devices import Device
from headway.forecasting.device.kernels import NAMESPACES, UNKNOWN_SCRATCH
from headway.forecasting.tracing.step import StepObserver
from headway.forecasting.tracing.tensors import (
    expand_masks,
    has_wrapper_type,
    iterate_plain_tensors,
    make_largest_result,
)
from headway.forecasting.tracing.work import StepWork, WorkCounter

Storage = torch.UntypedStorage

_WORTH_A_LINE = 1 << 20
"""Minimum size in bytes of a request for which the user's source line is looked up.

The lookup takes longer than all other tracing work.
"""
_DEVICE = torch.ops.prim.device.default
"""Operation that returns a tensor's device.

Two thirds of all calls are of this operation. If the dispatch mode handles it, a call takes a fifth of the time.
"""
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
_WRAPPERS = ("_fn", "inner", "__torch_dispatch__")
"""Names of functions that call the tracker's dispatch method: torch's wrappers, and the method of a subclass."""
_ADDS = tuple(f"aten::{name}" for name in ("add", "scatter", "scatter_add", "index_add", "index_put"))
"""Names of the operations with which autograd can accumulate gradients."""
_IN_PLACE = ("aten::sub", "aten::mul", "aten::div")
"""Operations that torch's C++ code runs in place in the backward of binary cross-entropy with logits.

For tensor subclasses, such as fake tensors, torch allocates the results of these operations instead.
"""
_LOGITS_LOSS = "BinaryCrossEntropyWithLogitsBackward0"
"""Name of the autograd node of binary cross-entropy with logits."""
_COMPILED = ("compile_wrapper", "_call_impl_compiled")
"""Names of TorchDynamo's functions through which a compiled function is called."""


@dataclass
class _GatheredUnit:
    """Storages of one FSDP unit's gathered parameters.

    Attributes:
        storages: Weak references to the storages.
        first_bytes: Bytes of the first storage at the last check. 0 while the unit is not gathered.
    """

    storages: list[weakref.ref[Storage]]
    first_bytes: int


class GatheredStorages:
    """Storages of gathered parameters, grouped by FSDP unit. All storages of a unit are allocated and freed together.

    Args:
        record_resize: Function that is called with each storage whose size has changed.
    """

    def __init__(self, record_resize: Callable[[Storage], None]) -> None:
        self._record_resize = record_resize
        self._units: list[_GatheredUnit] = []
        self._addresses: set[int] = set()

    def register_unit(self, tensors: Iterable[Any]) -> list[torch.Tensor]:
        """Register the storages of an FSDP unit's tensors, and return the tensors whose storages are new."""
        new = [
            leaf
            for each in tensors
            if isinstance(each, torch.Tensor)
            for leaf in iterate_plain_tensors(each)
            if leaf.untyped_storage()._cdata not in self._addresses
        ]
        if new:
            storages = [leaf.untyped_storage() for leaf in new]
            # FSDP keeps these storages as long as the model exists, so their addresses are not reused.
            self._addresses.update(storage._cdata for storage in storages)
            self._units.append(_GatheredUnit([weakref.ref(storage) for storage in storages], storages[0].nbytes()))
        return new

    def check_sizes(self) -> None:
        """Find the FSDP units whose parameters were gathered or freed since the last check.

        The function `record_resize` is called with each storage of these units.
        """
        for unit in self._units:
            first = unit.storages[0]()
            if first is None or first.nbytes() == unit.first_bytes:
                continue
            for reference in unit.storages:
                storage = reference()
                if storage is not None:
                    self._record_resize(storage)
            unit.first_bytes = first.nbytes()


def _refuse_compiled() -> None:
    """Raise UnsupportedError if a compiled function is running.

    On fake tensors, a compiled function would run uncompiled without a warning, and its memory requests would differ.
    """
    if "torch._dynamo.eval_frame" not in sys.modules:
        return
    for code in (frame.f_code for frame in walk_stack()):
        if code.co_name in _COMPILED and code.co_filename.endswith("eval_frame.py"):
            raise UnsupportedError(
                "a function compiled by torch.compile was called, which headway.forecast alone can follow, if inductor compiles "
                "it. Leave torch.compile out; a compiled step usually needs less memory"
            )


def _get_backward_name() -> str:
    """Return the name of the autograd node whose backward is running, or "" if none is running."""
    return getattr(current_autograd_node(), "name", str)()


def _is_shape_propagation() -> bool:
    """Whether DTensor runs the current operation only to determine the shape of its result.

    DTensor does this with tensors of the full shape before it computes with shards.
    """
    return any(frame.f_code.co_name.startswith(_SHAPE_FUNCTION) for frame in islice(walk_stack(), _MAX_FRAMES))


def _is_sum_of_gradients(args: tuple[Any, ...], result: Any) -> bool:
    """Whether an addition sums two gradients of one tensor into a new tensor, but would run in place on plain tensors.

    The trace runs on fake tensors, for which autograd allocates a tensor in two cases that need none for plain tensors:
    - The engine sums two gradients of one tensor. For plain tensors, it adds in place if nothing else refers to the
      first gradient (`can_accumulate_inplace` in input_buffer.cpp).
    - The backward of an operation that selects values (gather, index, max, sort) adds its gradient to a tensor of zeros
      that it has just allocated (FunctionsManual.cpp).

    Args:
        args: Arguments of the addition.
        result: Result of the addition.
    """
    first = args[0]
    # The innermost frames are those of the tracker's own methods, up to its dispatch method.
    callers = (frame.f_code.co_name for frame in islice(walk_stack(), 3, None))
    caller = next(name for name in callers if name not in _WRAPPERS)
    return (
        current_graph_task_id() != -1
        and not torch.is_grad_enabled()
        and isinstance(first, torch.Tensor)
        and not first._is_view()
        and (first.shape, first.dtype) == (result.shape, result.dtype)
        and caller == "_engine_run_backward"  # rules out a user's autograd function that the engine calls
    )


def _sort_frees(events: list[MemoryEvent]) -> list[MemoryEvent]:
    """Return the events with each run of consecutive frees sorted by key, so that traces are reproducible.

    Autocast frees its cached casts in the order of their addresses, which differs from run to run.
    """
    reproducible: list[MemoryEvent] = []
    for is_allocation, run in groupby(events, lambda event: event.num_bytes >= 0):
        same_kind = list(run)
        reproducible += same_kind if is_allocation else sorted(same_kind, key=lambda event: event.key)
    return reproducible


@dataclass(frozen=True)
class Trace:
    """Allocation events of traced training steps.

    Attributes:
        events: Allocations and frees, in order.
        phases: Index of the first event of each phase, by name: "step 1 forward", "step 1 backward", "step 1 update"
            and so on.
        operations: Number of calls of each operation, by name.
        caveats: Assumptions and known gaps of the trace, as sentences.
        work: Floating point operations and memory traffic by phase. Empty if they were not counted.
    """

    events: list[MemoryEvent]
    phases: dict[str, int]
    operations: dict[str, int]
    caveats: tuple[str, ...]
    work: dict[str, StepWork] = field(default_factory=dict)


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
        phases: Index of the first event of each phase so far.
        last_operation: Name of the last operation that was traced, or "" before the first, for error messages.
    """

    def __init__(
        self, device: Device, work_counter: WorkCounter | None = None, graphs: Collection[str] | None = None
    ) -> None:
        self._graphs = graphs
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[MemoryEvent] = []
        self.phases: dict[str, int] = {}
        self.last_operation = ""
        self._device = device
        self._early_scratch, self._late_scratch = kernels.list_scratch_rules(device)
        self._storage_rules = kernels.list_storage_rules(device)
        self._operations: Counter[str] = Counter()
        self._live: dict[int, _LiveStorage] = {}  # by address of the storage
        self._kinds: dict[int, str] = {}  # by key of the allocation event, like `_streams`
        self._streams: dict[int, int] = {}
        self._next_key = 0
        self._threads: set[str] = set()
        self._phase = ""
        self._begin = 0
        self._is_updating = False
        self._unsure = 0
        self._is_bounded = False
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
        if func is _DEVICE and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device
        if func.namespace == "prim" or (self._has_wrapper_tensors and _is_shape_propagation()):
            return func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == _WAIT and isinstance(args[0], FakeTensor):
            return args[0]  # torch returns a real tensor itself, but allocates a copy of a fake one
        self._gathered.check_sizes()
        self.last_operation = name
        self._operations[name] += 1
        self._record_unsure_workspace(name, args)
        early_sizes = self._early_scratch[name](args) if name in self._early_scratch else ()
        early_scratch = [self._record_scratch(size, name) for size in early_sizes]
        result = make_largest_result(func, args)
        if result is None:
            expanded = expand_masks(func, args)
            result = kernels.make_grouped_product(func, args)
            result = func(*expanded, **(kwargs or {})) if result is None else result
            self._is_bounded |= expanded is not args
        else:
            self._is_bounded = True
        if self._work_counter is not None:
            self._work_counter.add_operation(self._phase, func, args, kwargs, result)
        if (name.endswith(_RESIZE) or name == "aten::set_") and isinstance(args[0], torch.Tensor):
            self._record_resize(args[0].untyped_storage())
        self._record_results(result, name, args)
        self._record_late_scratch(name, args)
        if kernels.is_cublas_operation(self._device, name, args):
            self._record_workspace()
        if name in _ADDS or (name in _IN_PLACE and _get_backward_name() == _LOGITS_LOSS):
            self._record_sum(args, result)
        for event in early_scratch:
            self.events.append(event._replace(num_bytes=-event.num_bytes))
        if name in _FSDP_STREAMS or name == _EXCHANGE:
            self._record_transfer(name, args, kwargs or {})
        return result

    def _mark_buckets(self, name: str, args: tuple[Any, ...]) -> None:
        """Mark tensors that an all-to-all operation sends or receives, and tensors copied from them, as "buckets".

        Args:
            name: Name of the operation: all-to-all, or a copy.
            args: Arguments of the operation.
        """
        tensors = [tensor for tensor in args[:2] if isinstance(tensor, torch.Tensor)]
        storages = [self._live.get(tensor.untyped_storage()._cdata) for tensor in tensors]
        keys = [storage.key for storage in storages if storage is not None]
        if name == _EXCHANGE or (len(keys) == 2 and self._kinds.get(keys[1]) == "buckets"):
            for key in keys:
                self._kinds.setdefault(key, "buckets")

    def _record_sum(self, args: tuple[Any, ...], result: Any) -> None:
        if _is_sum_of_gradients(args, result):
            first_address, sum_address = (each.untyped_storage()._cdata for each in (args[0], result))
            if first_address in self._live and sum_address in self._live:
                first_key, sum_key = self._live[first_address].key, self._live[sum_address].key
                self._gradient_sum = _GradientSum(first_key, sum_key, sum_address)

    def _record_results(self, result: Any, name: str, args: tuple[Any, ...]) -> None:
        min_bytes = self._storage_rules[name](args) if name in self._storage_rules else ()
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
            if name in self._storage_rules:
                num_bytes += sum(self._storage_rules[name](args))  # also only an assumption
            self._unsure = max(self._unsure, num_bytes)

    def enter_phase(self, phase: str) -> None:
        """Start a phase of the step, such as "step 1 forward"."""
        self._gathered.check_sizes()
        if self._graphs:
            self._collect_garbage()
        self._phase = phase
        self._begin = len(self.events)
        self._is_updating = phase.endswith("update")
        self.phases.setdefault(phase, len(self.events))

    def _collect_garbage(self) -> None:
        """Run Python's garbage collector, and record the freed bytes as memory that a real run might still use.

        After a graph break, reference cycles in TorchDynamo keep tensors of the first call alive until Python collects
        garbage.
        """
        before = sum(storage.num_bytes for storage in self._live.values())
        gc.collect()
        after = sum(storage.num_bytes for storage in self._live.values())
        self._unsure = max(self._unsure, before - after)

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
        keys_in_use = {storage.key for storage in self._live.values()}
        for event in self.events[self._begin :]:
            if event.num_bytes > 0 and event.key in keys_in_use:
                self._kinds.setdefault(event.key, "activations")

    def count_held_bytes(self, kind: str) -> int:
        """Return the bytes in use for one kind of memory, such as "gradients"."""
        return sum(storage.num_bytes for storage in self._live.values() if self._kinds.get(storage.key) == kind)

    def build_trace(self) -> Trace:
        """Return the trace of the events before the phase "end". Call it after the dispatch mode has ended.

        A last event is added for memory that a run might need in addition, such as workspaces of unknown size.
        """
        events = [
            event._replace(kind=self._kinds.get(event.key, event.kind), stream=self._streams.get(event.key, 0))
            for event in _sort_frees(self.events[: self.phases.get("end")])
        ]
        if self._unsure:
            events.append(MemoryEvent(self._next_key + 1, self._unsure, UNSURE))
        work = {} if self._work_counter is None else self._work_counter.by_phase
        return Trace(events, dict(self.phases), dict(self._operations), self._list_caveats(), work)

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
        known = self._live.get(address)
        if known is not None and known.reference() is storage:
            return known.key
        size = max(storage.nbytes(), min_bytes) if min_bytes >= 0 else 0
        if size == 0 or self._is_on_host(tensor, args):
            return None
        key = self._record_request(size, operation)

        def record_free(reference: weakref.ref[torch.UntypedStorage]) -> None:
            # The entry can belong to a newer storage at the same address.
            freed = self._live.get(address)
            if freed is not None and freed.reference is reference:
                del self._live[address]
                if freed.num_bytes and not self._drop_in_place_sum(freed.key, freed.num_bytes):
                    self.events.append(MemoryEvent(freed.key, -freed.num_bytes, operation))

        self._live[address] = _LiveStorage(weakref.ref(storage, record_free), key, size)
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
        total = self._live.get(sum_address)
        if first_key != key or total is None or (total.key, total.num_bytes) != (sum_key, size):
            return False
        for index in range(len(self.events) - 1, self._begin - 1, -1):
            event = self.events[index]
            if event.num_bytes <= 0 or (event.key != sum_key and self._kinds.get(event.key) == "workspaces"):
                continue
            if event.key != sum_key:  # another tensor was allocated after the sum
                return False
            del self.events[index]
            if self._next_key == sum_key:
                self._next_key -= 1
            self._live[sum_address] = total._replace(key=key)
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
        """Record an operation that may move parts of parameters or gradients between ranks or buffers."""
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
        """Record an allocation, and return its key. Requests of at least `_WORTH_A_LINE` bytes get a source line.

        Args:
            size: Requested bytes.
            operation: Operation that requests the memory.

        Raises:
            UnsupportedError: If compiled models are not traced, and a compiled function makes a request of this size.
        """
        self._next_key += 1
        source_line = ""
        if size >= _WORTH_A_LINE:
            if self._graphs is None:
                _refuse_compiled()
            frame = find_user_frame(excluded_files=self._graphs or ())
            source_line = "" if frame is None else str(Frame.from_frame(frame))
        self.events.append(MemoryEvent(self._next_key, size, operation, source_line))
        return self._next_key

    def _record_scratch(self, size: int, operation: str) -> MemoryEvent:
        self._kinds[self._record_request(size, operation)] = "workspaces"
        return self.events[-1]

    def _record_late_scratch(self, name: str, args: tuple[Any, ...]) -> None:
        """Record the scratch memory that an operation's kernel allocates after its results.

        Args:
            name: Name of the operation.
            args: Arguments of the operation.
        """
        allocated: list[MemoryEvent] = []
        for size in self._late_scratch[name](args) if name in self._late_scratch else ():
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
        if thread not in self._threads:
            self._threads.add(thread)
            self._record_scratch(self._device.cublas, "cuBLAS's workspace")

    def _record_resize(self, storage: torch.UntypedStorage) -> None:
        """Record an allocation or a free if the size of a storage has changed."""
        known = self._live.get(storage._cdata)
        size = storage.nbytes()
        if known is None or known.reference() is not storage or known.num_bytes == size:
            return
        new_key = known.key
        if size:
            # `resize_` copies, so the old and the new memory are allocated at the same time.
            new_key = self._record_request(size, "resize_")
            self._kinds.setdefault(new_key, self._kinds.get(known.key, "temporaries"))
        self._live[storage._cdata] = _LiveStorage(known.reference, new_key, size)
        if known.num_bytes:
            self.events.append(MemoryEvent(known.key, -known.num_bytes, "resize_"))

    def _list_caveats(self) -> tuple[str, ...]:
        caveats: list[str] = []
        if self._device.is_cuda:
            caveats += dict.fromkeys(UNKNOWN_SCRATCH[name] for name in self._operations if name in UNKNOWN_SCRATCH)
        if self._graphs:
            caveats.append(
                "compiled code is counted with the buffers that inductor plans for a CPU; on a GPU it fuses a little differently"
            )
        if self._is_bounded:
            caveats.append(
                "sizes that depend on values (nonzero, unique, masks as indices, the lengths of CTC's targets) are taken at their "
                "largest, so a run takes as much or less"
            )
        foreign = sorted(
            name
            for name in self._operations
            if name.partition("::")[0] not in NAMESPACES and name not in self._early_scratch
        )
        if foreign:
            caveats.append(f"what these operations need besides their results is not known: {', '.join(foreign)}")
        return tuple(caveats)
