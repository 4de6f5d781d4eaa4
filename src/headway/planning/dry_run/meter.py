"""What one update sends and computes, counted at the operations themselves: bytes by collective and axis, and FLOPs."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.config.mesh import Layout
from headway.forecasting.tracing.trace import StorageTracker
from headway.forecasting.tracing.work import flops_of
from headway.strategies.fully_sharded.dtensors import local

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
_SILENT = ("wait", "barrier", "recv", "monitored")  # what is received has been counted where it is sent
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


SHARED = {"cp": "shard_cp", "ep": "shard_ep"}
"""What parameters and gradients are exchanged along where sequences are cut, or experts distributed: all ranks that share them."""


@dataclass(frozen=True)
class MeteredCollective:
    """A kind of exchange of one update.

    Attributes:
        phase: "forward", "backward" or "update".
        kind: which collective: "all_gather", "reduce_scatter", "all_reduce" ...
        axis: along which axis of the layout; several are joined by "x". "shard_cp": shards and parts of sequences, which share
            parameters, "shard_ep" likewise; "cp" is then what attention sends, "ep" what experts do.
        num_ranks: of its group.
    """

    phase: str
    kind: str
    axis: str
    num_ranks: int

    def sent(self, num_bytes: int) -> float:
        """Bytes that one rank sends in rings for tensors of so many bytes, whole."""
        others = (self.num_ranks - 1) / self.num_ranks
        return num_bytes * {"all_reduce": 2 * others, "broadcast": 1.0, "send": 1.0}.get(self.kind, others)


@dataclass
class Volume:
    """How often, and how much.

    Attributes:
        calls: of the collective.
        num_bytes: of the whole tensors: what an all-gather gives, what a reduce-scatter takes.
        largest: the most of one call.
    """

    calls: int = 0
    num_bytes: int = 0
    largest: int = 0


@dataclass(frozen=True)
class PlanEvent:
    """What a rank does next, and others may wait for.

    Attributes:
        kind: "compute", "send", "recv", or a collective.
        amount: FLOPs, or bytes that this rank sends.
        axis: of an exchange.
        ranks: that take part, this one excluded for "send" and "recv".
    """

    kind: str
    amount: float
    axis: str = ""
    ranks: tuple[int, ...] = ()


class StepMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is done in its block; tensors may be real or fake.

    Args:
        layout: says along which axis a group of ranks lies.

    Attributes:
        phase: what is going on, for the exchanges that follow.
        volumes: by exchange.
        flops: by phase, of matrix products, convolutions and attention.
        gathered: storages, by address, into which sharded parameters were gathered.
        events: computing and exchanges in order, where the layout has stages, which wait for each other.
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
            return NotImplemented  # it comes back as what it does to the local tensors
        kwargs = kwargs or {}
        if self._arriving and not func.is_view:
            self._read(args)
        result = func(*args, **kwargs)
        if func.namespace in _NAMESPACES:
            self._exchanged(func, (*args, *kwargs.values()), result)
        elif func.namespace == "fsdp" and func._schema.name != "fsdp::chunk_cat":  # a copy of gradients, which goes
            for tensor in _tensors(kwargs.get("out")):
                storage = tensor.untyped_storage()
                self.gathered[storage._cdata] = storage
        else:
            self._computed(flops_of(func, args, kwargs, result))
        return result

    def _read(self, args: tuple[Any, ...]) -> None:
        """A rank waits for a message where it first reads it: schedules post receives long before."""
        for tensor in _tensors(args):
            arrived = self._arriving.pop(tensor.untyped_storage()._cdata, None)
            if arrived is not None:
                self.events.append(arrived[1])

    def _computed(self, flops: int) -> None:
        self.flops[self.phase] += flops
        if flops and self._layout.pp > 1:
            before = self.events.pop().amount if self.events and self.events[-1].kind == "compute" else 0.0
            self.events.append(PlanEvent("compute", before + flops))

    def _exchanged(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        name = func._schema.name.partition("::")[2]
        if name.startswith("recv") and self._layout.pp > 1:
            self._note("recv", 0, args)
            event = self.events.pop()
            for tensor in _tensors(args):
                storage = tensor.untyped_storage()
                self._arriving[storage._cdata] = storage, event
        if any(word in name for word in _SILENT):
            return
        kind = next((kind for kind, words in _KINDS if any(word in name for word in words)), name)
        axis, ranks = self._axis(args)
        # FSDP alone calls c10d's own operations there: attention and experts call functional ones, which autograd sees.
        if func.namespace == "c10d":
            axis = next((both for inner, both in SHARED.items() if inner in axis.split("x")), axis)
        results = result if isinstance(result, tuple) else (result,)
        size = max((sum(tensor.nbytes for tensor in _tensors(value)) for value in (*args, *results)), default=0)
        exchange = MeteredCollective(self.phase, kind, axis, len(ranks))
        if self._layout.pp > 1:
            self._note(kind, exchange.sent(size), args)
        volume = self.volumes.setdefault(exchange, Volume())
        volume.calls += 1
        volume.num_bytes += size
        volume.largest = max(volume.largest, size)

    def _note(self, kind: str, amount: float, args: tuple[Any, ...]) -> None:
        axis, ranks = self._axis(args)
        if kind in ("send", "recv"):
            ranks = [ranks[next(each for each in args if isinstance(each, int))]]
        self.events.append(PlanEvent(kind, amount, axis, tuple(ranks)))

    def _axis(self, args: tuple[Any, ...]) -> tuple[str, list[int]]:
        name = _group_name(args)
        if name not in self._groups:
            c10d: Any = dist.distributed_c10d
            ranks = dist.get_process_group_ranks(c10d._resolve_process_group(name))
            self._groups[name] = axes_of(ranks, self._layout), list(ranks)
        return self._groups[name]


def axes_of(ranks: list[int], layout: Layout) -> str:
    """The axes of the layout along which these ranks differ, joined by "x"; "world" where there is none of the kind."""
    found, stride = [], layout.num_ranks
    for axis, size in layout.sizes.items():  # not by coordinates(), which take long for thousands of ranks
        stride //= size
        found += [axis] if len({rank // stride % size for rank in ranks}) > 1 else []
    return "x".join(found) or "world"


def _group_name(args: tuple[Any, ...]) -> str:
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in value._type().name():  # type: ignore[attr-defined]
            return str(dist.ProcessGroup.unbox(value).group_name)
    names = [value for value in args if isinstance(value, str)]
    return names[-1]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class ActivationMeter:
    """What autograd keeps for backward, each storage once.

    Args:
        meter: knows what is a gathered parameter.
        own: tensors that do not count: the model's.
        memory: sees every tensor, those included that selective checkpointing keeps past autograd.

    Attributes:
        peak: the most bytes that were kept at once, as far as noted.
    """

    def __init__(self, meter: StepMeter, own: list[torch.Tensor], memory: StorageTracker) -> None:
        self._meter, self._memory, self._model = meter, memory, own
        # Held, not only noted: where one is freed, another may come to lie at its address.
        self._own = {storage._cdata: storage for storage in (local(tensor).untyped_storage() for tensor in own)}
        self._sizes: dict[int, int] = {}
        self._times: Counter[int] = Counter()
        self._now = self.peak = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A block whose forward is looked at."""
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Kept(tensor, self), lambda kept: kept.tensor):
            yield

    def keep(self, tensor: torch.Tensor) -> int:
        """One more node of the graph keeps this tensor; returns its storage's address."""
        storage = local(tensor).untyped_storage()
        address: int = storage._cdata
        if address in self._own or address in self._meter.gathered:
            return 0
        if not self._times[address]:
            self._sizes[address] = storage.nbytes()
            self._now += self._sizes[address]
        self._times[address] += 1
        self.peak = max(self.peak, self._now)
        return address

    def free(self, address: int) -> None:
        """One node less."""
        self._times[address] -= 1
        if not self._times[address]:
            del self._times[address]
            self._now -= self._sizes.pop(address)

    def forward_ended(self, loss: torch.Tensor) -> None:
        """All that forward has made, and is still held, is kept for backward."""
        self._memory.mark(self._model, "weights")  # FSDP pads parameters anew in its first forward
        self._memory.mark([loss], "temporaries")
        self._memory.mark_activations()
        self.peak = self._memory.held("activations")

    def forget(self) -> None:
        """What was kept so far does not count."""
        self.peak = self._now


class _Kept:
    """A tensor that a node of the graph keeps, for as long as it does."""

    __slots__ = ("_address", "_saved", "tensor")

    def __init__(self, tensor: torch.Tensor, saved: ActivationMeter) -> None:
        self.tensor, self._saved, self._address = tensor, saved, saved.keep(tensor)

    def __del__(self) -> None:
        if self._address:
            self._saved.free(self._address)
