"""One training step on fake tensors: every piece of memory it asks for and gives back, in order.

What is followed is the memory behind tensors, by weak references to it: views ask for nothing, and memory is given back when the last
tensor on it goes, wherever that is held. Nothing is computed, so a step of any size takes seconds and hardly any memory.

FSDP empties and fills storages past torch's dispatcher, where a trace sees no operation: `fully_shard` makes the memory of a
gathered parameter once, gives its bytes back after the unit's forward, and asks for them again at the next gather
(`UntypedStorage.resize_`). The storages are known from the operation that fills them; what has become of them is looked up before
each operation that follows.
"""

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.common.callsite import Frame, stack, users_frame
from headway.errors import UnsupportedError
from headway.forecasting.device import kernels
from headway.forecasting.device.allocator import UNSURE, MemoryEvent
from headway.forecasting.device.devices import Device
from headway.forecasting.device.kernels import NAMESPACES, UNKNOWN_SCRATCH
from headway.forecasting.tracing.step import StepObserver
from headway.forecasting.tracing.tensors import at_most, plain, stand_for_others, without_masks
from headway.forecasting.tracing.work import StepWork, WorkCounter

Storage = torch.UntypedStorage


class GatheredStorages:
    """The storages of gathered parameters, those of one unit together: they come and go at once.

    Args:
        changed: is told of a storage whose size may have changed.
    """

    def __init__(self, changed: Callable[[Storage], None]) -> None:
        self._changed = changed
        self._units: list[tuple[list[weakref.ref[Storage]], int]] = []
        self._known: set[int] = set()

    def filled(self, tensors: Iterable[Any]) -> list[torch.Tensor]:
        """One unit's parameters are gathered into these; returns those on storages that were not known."""
        new = [
            leaf
            for each in tensors
            if isinstance(each, torch.Tensor)
            for leaf in plain(each)
            if leaf.untyped_storage()._cdata not in self._known
        ]
        if new:
            storages = [leaf.untyped_storage() for leaf in new]
            # Their memory is FSDP's for as long as the model is there, so no address is another's meanwhile.
            self._known.update(storage._cdata for storage in storages)
            self._units.append(([weakref.ref(storage) for storage in storages], storages[0].nbytes()))
        return new

    def look(self) -> None:
        """See which units were emptied or filled since the last look."""
        for index, (storages, size) in enumerate(self._units):
            first = storages[0]()
            if first is None or first.nbytes() == size:
                continue
            for reference in storages:
                storage = reference()
                if storage is not None:
                    self._changed(storage)
            self._units[index] = storages, first.nbytes()


_WORTH_A_LINE = 1 << 20
"""Bytes from which on the user's line is looked up, which takes longer than all the rest."""
_DEVICE = torch.ops.prim.device.default
"""Two calls of three, and answered here in a fifth of the time."""
_RESIZE, _WAIT = "resize_", "_c10d_functional::wait_tensor"
_GATHER, _SPLIT, _REDUCE = "fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "c10d::_reduce_scatter_base_"
_COPY = "aten::copy_"
_OF_SHARDS = {_GATHER: 1, _SPLIT: 0, _REDUCE: 2, _COPY: 0}
"""FSDP's operations, and the stream on which it asks for what they fill."""
_OF_ONE = "wait_for_unshard"
"""A function of FSDP's, which copies what is on one rank alone, such as experts of ranks that share none."""
_FOR_A_SHAPE, _DEEPEST = "_propagate_tensor_meta", 64
"""A function of torch's DTensor, and how many frames above an operation it may lie."""
_WRAPPERS = ("_fn", "inner")
"""Functions of torch's around a mode's dispatch."""
_ADDS = tuple(f"aten::{name}" for name in ("add", "scatter", "scatter_add", "index_add", "index_put"))
_IN_PLACE, _LOGITS_LOSS = ("aten::sub", "aten::mul", "aten::div"), "BinaryCrossEntropyWithLogitsBackward0"
"""What torch's C++ computes in place in backward of this loss, but not of subclasses of tensors such as fake ones."""
_COMPILED = ("compile_wrapper", "_call_impl_compiled")


def _refuse_compiled() -> None:
    """A compiled function runs uncompiled on fake tensors, without a word, and asks for other memory."""
    if "torch._dynamo.eval_frame" not in sys.modules:
        return
    for code in (frame.f_code for frame in stack()):
        if code.co_name in _COMPILED and code.co_filename.endswith("eval_frame.py"):
            raise UnsupportedError(
                "a function compiled by torch.compile was called, which headway.forecast alone can follow, if inductor compiles it. "
                "Leave torch.compile out; a compiled step mostly takes less"
            )


def _node() -> str:
    """Whose backward runs, if any."""
    return getattr(torch._C._current_autograd_node(), "name", str)()


def _is_for_a_shape() -> bool:
    """Is the operation run for its result's shape alone? DTensors do so on whole tensors before they compute on parts."""
    return any(frame.f_code.co_name.startswith(_FOR_A_SHAPE) for frame in islice(stack(), _DEEPEST))


def _is_sum_of_gradients(args: tuple[Any, ...], result: Any) -> bool:
    """Has autograd itself added up what two users of a tensor sent back, where plain tensors are added in place?

    The engine does so (`can_accumulate_inplace` in input_buffer.cpp) with a dense gradient that nothing else holds, as a view's base
    does, but not with a subclass of tensors such as a fake one, for which it asks for a third. So does backward of what picks values
    out (gather, index, max, sort), with zeros that it has just made (FunctionsManual.cpp).
    """
    first = args[0]
    caller = next(frame.f_code.co_name for frame in islice(stack(), 3, None) if frame.f_code.co_name not in _WRAPPERS)
    return (
        torch._C._current_graph_task_id() != -1
        and not torch.is_grad_enabled()
        and isinstance(first, torch.Tensor)
        and not first._is_view()
        and (first.shape, first.dtype) == (result.shape, result.dtype)
        and caller == "_engine_run_backward"  # not a function of the user's, run by the engine
    )


def _in_order(events: list[MemoryEvent]) -> list[MemoryEvent]:
    """What is given back at one moment, by its keys: autocast drops its casts in the order of their addresses, which differs."""
    found: list[MemoryEvent] = []
    for is_asked, run in groupby(events, lambda event: event.num_bytes >= 0):
        same = list(run)
        found += same if is_asked else sorted(same, key=lambda event: event.key)
    return found


@dataclass(frozen=True)
class Trace:
    """What a step asked for.

    Attributes:
        events: in order.
        phases: the index of the first event of each phase, by "step 1 forward", "step 1 backward", "step 1 update" ...
        operations: how often each ran.
        caveats: what the trace cannot vouch for.
        work: what the operations of each phase have to do.
    """

    events: list[MemoryEvent]
    phases: dict[str, int]
    operations: dict[str, int]
    caveats: tuple[str, ...]
    work: dict[str, StepWork] = field(default_factory=dict)


class StorageTracker(TorchDispatchMode, StepObserver):  # type: ignore[no-untyped-call]
    """Follows the memory of the tensors that are made in its block, fake or real.

    Args:
        device: whose kernels' scratch memory is added.
        counting: is told of every operation; None: work is not counted.
        graphs: files of the graphs that inductor has compiled, see `compiled.without_kernels`; None: it does not.

    Attributes:
        events: so far.
        phases: see `Trace`.
        last: what ran last, for an error's message.
    """

    def __init__(
        self, device: Device, counting: WorkCounter | None = None, graphs: Collection[str] | None = None
    ) -> None:
        self._graphs = graphs
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[MemoryEvent] = []
        self.phases: dict[str, int] = {}
        self.last = ""
        self._device = device
        self._table, self._late = kernels.scratch(device)
        self._oversized = kernels.oversized(device)
        self._operations: Counter[str] = Counter()
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int]] = {}
        self._kinds: dict[int, str] = {}
        self._streams: dict[int, int] = {}
        self._next_key = 0
        self._threads: set[str] = set()
        self._phase = ""
        self._begin = 0
        self._is_updating = False
        self._unsure = 0
        self._is_bounded = False
        self._gathered = GatheredStorages(self._sized)
        self._has_parts = False
        self._counting = counting
        self._sum = (0, 0, 0)  # keys of the first term and of the total, and where the total lies

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        """TorchDynamo compiles in its block, and what it does for that is not followed; what is compiled is."""
        return self._graphs is not None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if stand_for_others(types):
            self._has_parts = True
            return NotImplemented  # it comes back as what it does to the tensors behind
        if func is _DEVICE and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device
        if func.namespace == "prim" or (self._has_parts and _is_for_a_shape()):
            return func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == _WAIT and isinstance(args[0], FakeTensor):
            return args[0]  # as it does with values; without them, torch makes another
        self._gathered.look()
        self.last = name
        self._operations[name] += 1
        self._count_unsure(name, args)
        asked = [self._scratch(size, name) for size in self._table[name](args)] if name in self._table else ()
        result = at_most(func, args)
        if result is None:
            told = without_masks(func, args)
            result = kernels.grouped_products(func, args)
            result = func(*told, **(kwargs or {})) if result is None else result
            self._is_bounded |= told is not args
        else:
            self._is_bounded = True
        if self._counting is not None:
            self._counting.add(self._phase, func, args, kwargs, result)
        if (name.endswith(_RESIZE) or name == "aten::set_") and isinstance(args[0], torch.Tensor):
            self._sized(args[0].untyped_storage())
        self._results(result, name, args)
        self._late_scratch(name, args)
        if kernels.takes_cublas(self._device, name, args):
            self._workspace()
        if name in _ADDS or (name in _IN_PLACE and _node() == _LOGITS_LOSS):
            self._summed(args, result)
        for event in asked:
            self.events.append(event._replace(num_bytes=-event.num_bytes))
        if name in _OF_SHARDS:
            self._sharded(name, args, kwargs or {})
        return result

    def _summed(self, args: tuple[Any, ...], result: Any) -> None:
        if _is_sum_of_gradients(args, result):
            first, total = (each.untyped_storage()._cdata for each in (args[0], result))
            if first in self._live and total in self._live:
                self._sum = self._live[first][1], self._live[total][1], total

    def _results(self, result: Any, name: str, args: tuple[Any, ...]) -> None:
        behind = self._oversized[name](args) if name in self._oversized else ()
        if name == "aten::native_dropout":
            result = result[::-1]  # its kernel on CUDA asks for the mask first
        for index, leaf in enumerate(result if isinstance(result, tuple | list) else (result,)):
            for each in leaf if isinstance(leaf, tuple | list) else (leaf,):
                if isinstance(each, torch.Tensor):
                    self._seen(each, name, args, behind[index] if index < len(behind) else 0)

    def _count_unsure(self, name: str, args: tuple[Any, ...]) -> None:
        """Where a workspace is not known, it is assumed to be no larger than what the operation reads and is assumed to keep."""
        if name in UNKNOWN_SCRATCH and self._device.is_cuda:
            num_bytes = sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            num_bytes += sum(self._oversized[name](args)) if name in self._oversized else 0  # assumed as well
            self._unsure = max(self._unsure, num_bytes)

    def enter(self, phase: str) -> None:
        """What follows belongs to this phase of the step: "step 1 forward", say."""
        self._gathered.look()
        if self._graphs:
            self._collect()
        self._phase = phase
        self._begin = len(self.events)
        self._is_updating = phase.endswith("update")
        self.phases.setdefault(phase, len(self.events))

    def _collect(self) -> None:
        """Where a graph breaks, cycles of TorchDynamo's hold tensors of the first call until Python searches for garbage."""
        before = sum(size for _, _, size in self._live.values())
        gc.collect()
        self._unsure = max(self._unsure, before - sum(size for _, _, size in self._live.values()))

    def mark(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Say what these tensors are; those not seen before count from here on."""
        for each in tensors:
            for tensor in plain(each):
                key = self._seen(tensor, kind, ())
                if key is not None:
                    self._kinds[key] = kind

    def mark_activations(self) -> None:
        """Forward has ended: what it has made, and is still held, is kept for backward."""
        self._gathered.look()
        held = {key for _, key, _ in self._live.values()}
        for event in self.events[self._begin :]:
            if event.num_bytes > 0 and event.key in held:
                self._kinds.setdefault(event.key, "activations")

    def held(self, kind: str) -> int:
        """Bytes of that kind that are held now."""
        return sum(size for _, key, size in self._live.values() if self._kinds.get(key) == kind)

    def trace(self) -> Trace:
        """What was seen; call it after the block."""
        events = [
            event._replace(kind=self._kinds.get(event.key, event.kind), stream=self._streams.get(event.key, 0))
            for event in _in_order(self.events[: self.phases.get("end")])
        ]
        if self._unsure:
            events.append(MemoryEvent(self._next_key + 1, self._unsure, UNSURE))
        work = {} if self._counting is None else self._counting.by_phase
        return Trace(events, dict(self.phases), dict(self._operations), self._caveats(), work)

    # ---------------------------------------------------------------- memory

    def _seen(self, tensor: torch.Tensor, what: str, args: tuple[Any, ...], behind: int = 0) -> int | None:
        """The key of the memory behind a tensor, of so many bytes at least; None where it has none, or on the host."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a subclass without memory of its own
            return None
        address, size = storage._cdata, max(storage.nbytes(), behind) if behind >= 0 else 0
        known = self._live.get(address)
        if known is not None and known[0]() is storage:
            return known[1]
        if size == 0 or self._is_on_host(tensor, args):
            return None
        key = self._asked(size, what)

        def gone(reference: weakref.ref[torch.UntypedStorage], address: int = address) -> None:
            found = self._live.get(address)
            if found is not None and found[0] is reference:
                del self._live[address]
                if found[2] and not self._is_summed_in_place(found[1], found[2]):
                    self.events.append(MemoryEvent(found[1], -found[2], what))

        self._live[address] = weakref.ref(storage, gone), key, size
        return key

    def _is_summed_in_place(self, key: int, size: int) -> bool:
        """Was this a gradient that nothing held but a sum of two? The sum then lies where it lay, and asked for nothing."""
        first, total, address = self._sum
        known = self._live.get(address)
        if first != key or known is None or known[1:] != (total, size):
            return False
        for index in range(len(self.events) - 1, self._begin - 1, -1):
            if self.events[index].num_bytes > 0:  # of tensors asked for since, the sum must be the last
                if self.events[index].key != total:
                    if self._kinds.get(self.events[index].key) == "workspaces":
                        continue
                    return False
                del self.events[index]
                self._next_key -= self._next_key == total
                self._live[address] = known[0], key, size
                return True
        return False

    def _is_on_host(self, tensor: torch.Tensor, args: tuple[Any, ...]) -> bool:
        """An optimizer's count of steps lies in host memory, unless it is fused: one number, made of no other tensor."""
        return (
            self._device.is_cuda
            and self._is_updating
            and tensor.dim() == 0
            and not any(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in tree_leaves(args))
        )

    def _sharded(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """FSDP has gathered a unit, or summed its gradients: on streams whose memory CUDA's allocator keeps apart."""
        if name in (_SPLIT, _COPY):
            if name == _SPLIT or any(frame.f_code.co_name == _OF_ONE for frame in islice(stack(), _DEEPEST)):
                self.mark(self._gathered.filled(kwargs["out"] if name == _SPLIT else args[:1]), "gathered weights")
            return
        if name == _GATHER:
            self.mark([args[1]], "gathered weights")
        key = self._seen(args[1] if name == _GATHER else args[0], name, ())
        if key is not None:
            self._streams[key] = _OF_SHARDS[name]

    def _asked(self, size: int, what: str) -> int:
        self._next_key += 1
        where = ""
        if size >= _WORTH_A_LINE:
            if self._graphs is None:
                _refuse_compiled()
            frame = users_frame(but=self._graphs or ())
            where = "" if frame is None else str(Frame.of(frame))
        self.events.append(MemoryEvent(self._next_key, size, what, where))
        return self._next_key

    def _scratch(self, size: int, what: str) -> MemoryEvent:
        self._kinds[self._asked(size, what)] = "workspaces"
        return self.events[-1]

    def _late_scratch(self, name: str, args: tuple[Any, ...]) -> None:
        """What a kernel asks for when it has its results."""
        asked: list[MemoryEvent] = []
        for size in self._late[name](args) if name in self._late else ():
            if size > 0:
                asked.append(self._scratch(size, name))
                continue
            back = next(event for event in reversed(asked) if event.num_bytes == -size)
            asked.remove(back)
            self.events.append(back._replace(num_bytes=size))
        self.events += [event._replace(num_bytes=-event.num_bytes) for event in asked]

    def _workspace(self) -> None:
        """cuBLAS has a handle, and so a workspace, for each thread; autograd runs backward on a thread of its own."""
        thread = "backward" if self._phase.endswith("backward") else "forward"
        if thread not in self._threads:
            self._threads.add(thread)
            self._scratch(self._device.cublas, "cuBLAS's workspace")

    def _sized(self, storage: torch.UntypedStorage) -> None:
        """A storage may have another size than it had."""
        known = self._live.get(storage._cdata)
        size = storage.nbytes()
        if known is None or known[0]() is not storage or known[2] == size:
            return
        reference, key, before = known
        kind = self._kinds.get(key, "temporaries")
        if size:
            # What it was and what it becomes are both there while it is copied.
            new = self._asked(size, "resize_")
            self._kinds.setdefault(new, kind)
            self._live[storage._cdata] = reference, new, size
        else:
            self._live[storage._cdata] = reference, key, 0
        if before:
            self.events.append(MemoryEvent(key, -before, "resize_"))

    def _caveats(self) -> tuple[str, ...]:
        found: list[str] = []
        if self._device.is_cuda:
            found += dict.fromkeys(UNKNOWN_SCRATCH[name] for name in self._operations if name in UNKNOWN_SCRATCH)
        if self._graphs:
            found.append(
                "compiled code is counted with the buffers that inductor plans for a CPU; on a GPU it fuses a little differently"
            )
        if self._is_bounded:
            found.append(
                "sizes that depend on values (nonzero, unique, masks as indices, the lengths of CTC's targets) are taken at their "
                "largest, so a run takes as much or less"
            )
        foreign = sorted(
            name for name in self._operations if name.partition("::")[0] not in NAMESPACES and name not in self._table
        )
        if foreign:
            found.append(f"what these operations need beside their results is not known: {', '.join(foreign)}")
        return tuple(found)
