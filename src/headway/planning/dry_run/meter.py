"""Count one update's communication, in bytes by collective and axis, and its floating point operations."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from headway.core.config.mesh import Layout
from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.forecasting.tracing.trace import StorageTracker
from headway.forecasting.tracing.work import count_flops
from headway.planning._torch import TorchDispatchMode, tree_leaves

_KINDS = (
    ("all_gather", ("allgather", "all_gather")),
    ("reduce_scatter", ("reduce_scatter",)),
    ("all_reduce", ("allreduce", "all_reduce")),
    ("all_to_all", ("alltoall", "all_to_all")),
    ("broadcast", ("broadcast",)),
    ("scatter", ("scatter",)),
    ("gather", ("gather",)),
    ("reduce", ("reduce",)),
    ("send", ("send",)),
)
"""Pairs of the name of a collective and words in the names of its operations. The first pair that matches is used."""
_SILENT = ("wait", "barrier", "recv", "monitored")
"""Words in the names of operations that send nothing. Received messages are counted where they are sent."""
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
"""Namespaces of operations that communicate."""


SHARED = {("cp",): "shard_cp", ("ep",): "shard_ep", ("cp", "ep"): "shard_cp_ep"}
"""Names of joint axes along which FSDP shards in layouts with "cp" or "ep".

A joint axis consists of "shard" and the axes in its key.
"""


@dataclass(frozen=True)
class MeteredCollective:
    """Key under which a dry run counts the collectives of one kind in one update.

    Attributes:
        phase: "forward", "backward", "update", or "schedule" for a pipeline schedule that runs forward and backward.
        kind: Name of the collective, such as "all_gather", "reduce_scatter" or "all_reduce".
        axis: Name of the layout's axis, or several names joined by "x". "world" is for groups that differ along no
            axis. "cp" is for collectives of attention and "ep" for those of experts. FSDP's collectives over the ranks
            along these axes have the names "shard_cp", "shard_ep" and "shard_cp_ep".
        num_ranks: Size of the process group.
    """

    phase: str
    kind: str
    axis: str
    num_ranks: int

    def count_sent_bytes(self, num_bytes: int) -> float:
        """Return the bytes that each rank sends in a collective over a ring of ranks.

        Args:
            num_bytes: Bytes of the full tensors of the collective.
        """
        if self.kind in ("broadcast", "send"):
            return float(num_bytes)
        # Around a ring, each rank sends all parts of the tensors but one. An all-reduce does this twice.
        sent = num_bytes * ((self.num_ranks - 1) / self.num_ranks)
        return 2 * sent if self.kind == "all_reduce" else sent


@dataclass
class Volume:
    """Number of calls and bytes of one kind of collective.

    Attributes:
        calls: Number of calls.
        num_bytes: Bytes of the full tensors in all calls: outputs of an all-gather, inputs of a reduce-scatter.
        largest: Largest number of bytes in one call.
    """

    calls: int = 0
    num_bytes: int = 0
    largest: int = 0


@dataclass(frozen=True)
class PlanEvent:
    """Computation or communication of a rank, as an event in the simulation of all ranks of a pipeline.

    Attributes:
        kind: "compute", "send", "recv", or the name of a collective.
        amount: Floating point operations for "compute", otherwise the bytes that this rank sends. 0 for "recv".
        axis: Axis of the layout along which ranks communicate. Empty for "compute".
        ranks: Ranks that take part. For "send" and "recv", only the other rank. Empty for "compute".
    """

    kind: str
    amount: float
    axis: str = ""
    ranks: tuple[int, ...] = ()


class StepMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts the communication and computation of operations on real or fake tensors.

    Args:
        layout: Layout whose axes provide the names of the groups of ranks.

    Attributes:
        phase: Current phase, which is recorded with each collective.
        volumes: Number of calls and bytes of each kind of collective.
        flops: Floating point operations of matrix products, convolutions and attention, by phase.
        gathered: Storages that contain gathered parameters, by address.
        events: Computation and communication in order. Recorded only for layouts with pipeline stages.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "forward"
        self.volumes: dict[MeteredCollective, Volume] = {}
        self.flops: Counter[str] = Counter()
        self.gathered: dict[int, torch.UntypedStorage] = {}
        self._layout = layout
        self._groups: dict[str, tuple[str, list[int]]] = {}
        self.events: list[PlanEvent] = []
        self._arriving: dict[int, tuple[torch.UntypedStorage, PlanEvent]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # torch dispatches the same call again on the local tensors
        kwargs = kwargs or {}
        if self._arriving and not func.is_view:
            self._record_arrival(args)
        result = func(*args, **kwargs)
        if func.namespace in _NAMESPACES:
            self._record_exchange(func, (*args, *kwargs.values()), result)
        elif func.namespace == "fsdp" and func._schema.name != "fsdp::chunk_cat":  # chunk_cat only copies gradients
            for tensor in _list_tensors(kwargs.get("out")):
                storage = tensor.untyped_storage()
                self.gathered[storage._cdata] = storage
        else:
            self._record_compute(count_flops(func, args, kwargs, result))
        return result

    def _record_arrival(self, args: tuple[Any, ...]) -> None:
        """Record the receipt of a message when an operation first reads its tensor.

        Receives are posted long before that, and posting does not make the rank wait.
        """
        for tensor in _list_tensors(args):
            arrived = self._arriving.pop(tensor.untyped_storage()._cdata, None)
            if arrived is not None:
                self.events.append(arrived[1])

    def _record_compute(self, flops: int) -> None:
        self.flops[self.phase] += flops
        if flops and self._layout.pp > 1:
            before = self.events.pop().amount if self.events and self.events[-1].kind == "compute" else 0.0
            self.events.append(PlanEvent("compute", before + flops))

    def _record_exchange(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        name = func._schema.name.partition("::")[2]
        if name.startswith("recv") and self._layout.pp > 1:
            self._record_event("recv", 0, args)
            event = self.events.pop()
            for tensor in _list_tensors(args):
                storage = tensor.untyped_storage()
                self._arriving[storage._cdata] = storage, event
        if any(word in name for word in _SILENT):
            return
        kind = next((kind for kind, words in _KINDS if any(word in name for word in words)), name)
        axis, ranks = self._find_axis(args)
        # Along the axes in `SHARED`, only FSDP uses c10d's own operations. Attention and experts use functional
        # collectives, which autograd supports.
        if func.namespace == "c10d":
            axis = SHARED.get(tuple(each for each in axis.split("x") if each in ("cp", "ep")), axis)
        results = result if isinstance(result, tuple) else (result,)
        size = max((sum(tensor.nbytes for tensor in _list_tensors(value)) for value in (*args, *results)), default=0)
        exchange = MeteredCollective(self.phase, kind, axis, len(ranks))
        if self._layout.pp > 1:
            self._record_event(kind, exchange.count_sent_bytes(size), args)
        volume = self.volumes.setdefault(exchange, Volume())
        volume.calls += 1
        volume.num_bytes += size
        volume.largest = max(volume.largest, size)

    def _record_event(self, kind: str, amount: float, args: tuple[Any, ...]) -> None:
        axis, ranks = self._find_axis(args)
        if kind in ("send", "recv"):
            ranks = [ranks[next(each for each in args if isinstance(each, int))]]
        self.events.append(PlanEvent(kind, amount, axis, tuple(ranks)))

    def _find_axis(self, args: tuple[Any, ...]) -> tuple[str, list[int]]:
        name = _get_group_name(args)
        if name not in self._groups:
            c10d: Any = dist.distributed_c10d
            ranks = dist.get_process_group_ranks(c10d._resolve_process_group(name))
            self._groups[name] = name_axes(ranks, self._layout), list(ranks)
        return self._groups[name]


def name_axes(ranks: list[int], layout: Layout) -> str:
    """Return the axes along which the given ranks differ, joined by "x", or "world" if the layout has no such axis."""
    axes, stride = [], layout.num_ranks
    for axis, size in layout.sizes.items():  # find_coordinates() would be slow for thousands of ranks
        stride //= size
        if len({rank // stride % size for rank in ranks}) > 1:
            axes.append(axis)
    return "x".join(axes) or "world"


def _get_group_name(args: tuple[Any, ...]) -> str:
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in value._type().name():  # type: ignore[attr-defined]
            return str(dist.ProcessGroup.unbox(value).group_name)
    names = [value for value in args if isinstance(value, str)]
    return names[-1]


def _list_tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class ActivationMeter:
    """Meter of the memory that autograd keeps for backward. Each storage counts once.

    Args:
        meter: Meter of the step, which lists the storages of gathered parameters.
        model_tensors: Parameters and buffers of the model, which do not count.
        tracker: Tracker of all tensors, including those that selective checkpointing keeps outside of autograd.

    Attributes:
        peak: Largest number of bytes kept at once so far.
    """

    def __init__(self, meter: StepMeter, model_tensors: list[torch.Tensor], tracker: StorageTracker) -> None:
        self._meter = meter
        self._tracker = tracker
        self._model_tensors = model_tensors
        # References keep these storages alive, so that their addresses are not reused.
        storages = [get_local_shard(tensor).untyped_storage() for tensor in model_tensors]
        self._model_storages = {storage._cdata: storage for storage in storages}
        self._sizes: dict[int, int] = {}  # by address of the storage, like `_num_saved`
        self._num_saved: Counter[int] = Counter()  # number of nodes that have saved a tensor of the storage
        self._kept_bytes = 0
        self.peak = 0

    @contextmanager
    def watch_forward(self) -> Iterator[None]:
        """Return a context in which tensors saved by autograd are recorded."""
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _SavedTensor(tensor, self), lambda kept: kept.tensor
        ):
            yield

    def keep_tensor(self, tensor: torch.Tensor) -> int:
        """Record that a node of the autograd graph saves a tensor.

        Returns:
            The address of the tensor's storage, or 0 if the tensor does not count.
        """
        storage = get_local_shard(tensor).untyped_storage()
        address: int = storage._cdata
        if address in self._model_storages or address in self._meter.gathered:
            return 0
        if not self._num_saved[address]:
            self._sizes[address] = storage.nbytes()
            self._kept_bytes += self._sizes[address]
        self._num_saved[address] += 1
        self.peak = max(self.peak, self._kept_bytes)
        return address

    def release_tensor(self, address: int) -> None:
        """Record that a node of the autograd graph has released the storage at the given address."""
        self._num_saved[address] -= 1
        if not self._num_saved[address]:
            del self._num_saved[address]
            self._kept_bytes -= self._sizes.pop(address)

    def end_forward(self, loss: torch.Tensor) -> None:
        """Count all memory that forward has allocated and not freed as activations, and set `peak` to its size.

        Args:
            loss: Loss that forward returned, which does not count.
        """
        self._tracker.mark_tensors(self._model_tensors, "weights")  # FSDP pads parameters anew in its first forward
        self._tracker.mark_tensors([loss], "temporaries")
        self._tracker.mark_activations()
        self.peak = self._tracker.count_held_bytes("activations")

    def reset_peak(self) -> None:
        """Reset the peak to the number of bytes that are kept at this time."""
        self.peak = self._kept_bytes


class _SavedTensor:
    """Tensor that a node of the autograd graph has saved.

    When the node releases the tensor, the meter is notified.
    """

    __slots__ = ("_address", "_meter", "tensor")

    def __init__(self, tensor: torch.Tensor, meter: ActivationMeter) -> None:
        self.tensor = tensor
        self._meter = meter
        self._address = meter.keep_tensor(tensor)

    def __del__(self) -> None:
        if self._address:
            self._meter.release_tensor(self._address)
