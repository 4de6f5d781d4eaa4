"""Count one update's communication, in bytes by collective and axis, and its floating-point operations."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from headway.core.config.mesh import Layout
from headway.forecasting.tracing.work import count_flops
from headway.planning._torch import TorchDispatchMode, tree_leaves
from headway.planning.dry_run.joint_axes import JOINT_AXES

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


class _RankGroup(NamedTuple):
    """Process group of the layout.

    Attributes:
        axis: Axes along which its ranks differ, joined by "x", or "world" if the layout has no such axis.
        ranks: Global ranks of the group.
    """

    axis: str
    ranks: list[int]


class _Receive(NamedTuple):
    """Posted receive whose message has not been read yet.

    Attributes:
        storage: Storage into which the message is received. The reference keeps its address from being reused.
        event: Event to record when the message is read.
    """

    storage: torch.UntypedStorage
    event: PlanEvent


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
        self._groups: dict[str, _RankGroup] = {}  # by name of the process group
        self.events: list[PlanEvent] = []
        self._unread_receives: dict[int, _Receive] = {}  # by address of the storage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # torch dispatches the same call again on the local tensors
        kwargs = kwargs or {}
        if self._unread_receives and not func.is_view:
            self._record_reads(args)
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

    def _record_reads(self, args: tuple[Any, ...]) -> None:
        """Record the receipt of a message when an operation first reads its tensor.

        Receives are posted long before that, and posting does not make the rank wait.

        Args:
            args: Arguments of the operation.
        """
        for tensor in _list_tensors(args):
            receive = self._unread_receives.pop(tensor.untyped_storage()._cdata, None)
            if receive is not None:
                self.events.append(receive.event)

    def _record_compute(self, flops: int) -> None:
        """Add floating-point operations to the current phase. Successive ones become one event of the pipeline."""
        self.flops[self.phase] += flops
        if flops and self._layout.pp > 1:
            earlier_flops = 0.0
            if self.events and self.events[-1].kind == "compute":
                earlier_flops = self.events.pop().amount
            self.events.append(PlanEvent("compute", earlier_flops + flops))

    def _record_exchange(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Count a collective or a message.

        Args:
            func: Operation that communicates.
            args: Positional arguments of the operation, followed by the values of its keyword arguments.
            result: Result of the operation.
        """
        name = func._schema.name.partition("::")[2]
        if name.startswith("recv") and self._layout.pp > 1:
            # The rank waits for the message only when it uses the received tensor, so the event is added then.
            event = self._make_event("recv", 0, args)
            for tensor in _list_tensors(args):
                storage = tensor.untyped_storage()
                self._unread_receives[storage._cdata] = _Receive(storage, event)
        if any(word in name for word in _SILENT):
            return
        kind = next((kind for kind, words in _KINDS if any(word in name for word in words)), name)
        axis, ranks = self._find_group(args)
        # Along the axes in `JOINT_AXES`, only FSDP uses c10d's own operations. Attention and experts use functional
        # collectives, which autograd supports.
        if func.namespace == "c10d":
            inner_axes = tuple(each for each in axis.split("x") if each in ("cp", "ep"))
            axis = JOINT_AXES.get(inner_axes, axis)
        # The larger of the two tensors, or lists of tensors, is the full one: the output of an all-gather, the input of a
        # reduce-scatter. Some operations return their output, and others have it among their arguments.
        results = result if isinstance(result, tuple) else (result,)
        sizes = [sum(tensor.nbytes for tensor in _list_tensors(value)) for value in (*args, *results)]
        full_size = max(sizes, default=0)
        exchange = MeteredCollective(self.phase, kind, axis, len(ranks))
        if self._layout.pp > 1:
            self.events.append(self._make_event(kind, exchange.count_sent_bytes(full_size), args))
        volume = self.volumes.setdefault(exchange, Volume())
        volume.calls += 1
        volume.num_bytes += full_size
        volume.largest = max(volume.largest, full_size)

    def _make_event(self, kind: str, amount: float, args: tuple[Any, ...]) -> PlanEvent:
        """Return the event of an exchange. A message has the rank of the other side, a collective all ranks.

        Args:
            kind: "send", "recv", or the kind of a collective.
            amount: Sent bytes.
            args: Arguments of the operation.
        """
        axis, ranks = self._find_group(args)
        if kind in ("send", "recv"):
            other_index = next(each for each in args if isinstance(each, int))  # the peer's rank in the group
            ranks = [ranks[other_index]]
        return PlanEvent(kind, amount, axis, tuple(ranks))

    def _find_group(self, args: tuple[Any, ...]) -> _RankGroup:
        """Return the process group that is among the arguments of an operation."""
        name = _get_group_name(args)
        if name not in self._groups:
            c10d: Any = dist.distributed_c10d
            ranks = dist.get_process_group_ranks(c10d._resolve_process_group(name))
            self._groups[name] = _RankGroup(name_axes(ranks, self._layout), list(ranks))
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
    """Return the name of the process group that an operation got: as an object (c10d), or as its last string."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in value._type().name():  # type: ignore[attr-defined]
            return str(dist.ProcessGroup.unbox(value).group_name)
    names = [value for value in args if isinstance(value, str)]
    return names[-1]


def _list_tensors(value: Any) -> list[torch.Tensor]:
    """Return all tensors in a value, which can be a tree of containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
