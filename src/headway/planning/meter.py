"""What one update sends and computes, counted at the operations themselves: bytes by collective and axis, and FLOPs."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from headway.config.mesh import Layout

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


@dataclass(frozen=True)
class Exchange:
    """A kind of exchange of one update.

    Attributes:
        phase: "forward", "backward" or "update".
        kind: which collective: "all_gather", "reduce_scatter", "all_reduce" ...
        axis: along which axis of the layout; several are joined by "x".
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


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is done in its block; tensors may be real or fake.

    Args:
        layout: says along which axis a group of ranks lies.

    Attributes:
        phase: what is going on, for the exchanges that follow.
        volumes: by exchange.
        flops: by phase, of matrix products, convolutions and attention.
        gathered: storages, by address, into which sharded parameters were gathered.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "forward"
        self.volumes: dict[Exchange, Volume] = {}
        self.flops: Counter[str] = Counter()
        self.gathered: dict[int, torch.UntypedStorage] = {}
        self._layout = layout
        self._groups: dict[str, tuple[str, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as what it does to the local tensors
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace in _NAMESPACES:
            self._exchanged(func, (*args, *kwargs.values()), result)
        elif func.namespace == "fsdp":
            for tensor in _tensors(kwargs.get("out")):
                storage = tensor.untyped_storage()
                self.gathered[storage._cdata] = storage
        else:
            self.flops[self.phase] += _flops(func, args, kwargs, result)
        return result

    def _exchanged(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        name = func._schema.name.partition("::")[2]
        if any(word in name for word in _SILENT):
            return
        kind = next((kind for kind, words in _KINDS if any(word in name for word in words)), name)
        axis, num_ranks = self._axis(args)
        results = result if isinstance(result, tuple) else (result,)
        size = max((sum(tensor.nbytes for tensor in _tensors(value)) for value in (*args, *results)), default=0)
        volume = self.volumes.setdefault(Exchange(self.phase, kind, axis, num_ranks), Volume())
        volume.calls += 1
        volume.num_bytes += size
        volume.largest = max(volume.largest, size)

    def _axis(self, args: tuple[Any, ...]) -> tuple[str, int]:
        name = _group_name(args)
        if name not in self._groups:
            c10d: Any = dist.distributed_c10d
            ranks = dist.get_process_group_ranks(c10d._resolve_process_group(name))
            self._groups[name] = axes_of(ranks, self._layout), len(ranks)
        return self._groups[name]


def axes_of(ranks: list[int], layout: Layout) -> str:
    """The axes of the layout along which these ranks differ, joined by "x"; "world" where there is none of the kind."""
    found, stride = [], layout.num_ranks
    for axis, size in layout.sizes.items():
        stride //= size
        if len({rank // stride % size for rank in ranks}) > 1:
            found.append(axis)
    return "x".join(found) or "world"


def _group_name(args: tuple[Any, ...]) -> str:
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in value._type().name():  # type: ignore[attr-defined]
            return str(dist.ProcessGroup.unbox(value).group_name)
    names = [value for value in args if isinstance(value, str)]
    return names[-1]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    packet = func._overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    own = _NOT_REGISTERED.get(func._schema.name)
    return own(*args) if own is not None else 0


# torch counts the kernels of accelerators only, and plans run on none.
_NOT_REGISTERED: dict[str, Callable[..., int]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda query, key, value, *_: int(
        sdpa_flop_count(query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda grad, query, key, value, *_: int(
        sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]
    ),
}


class Saved:
    """What autograd keeps between forward and backward, each storage once.

    Args:
        meter: knows what is a gathered parameter.
        own: tensors that do not count: the model's.
    """

    def __init__(self, meter: Meter, own: list[torch.Tensor]) -> None:
        self._meter = meter
        # Held, not only noted: where one is freed, another may come to lie at its address.
        self._own = {storage._cdata: storage for storage in (local(tensor).untyped_storage() for tensor in own)}
        self._kept: dict[int, torch.UntypedStorage] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A block whose forward is looked at."""
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor):
            yield

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = local(tensor).untyped_storage()
        self._kept[storage._cdata] = storage
        return tensor

    def num_bytes(self) -> int:
        """Call it between forward and backward."""
        others = self._own.keys() | self._meter.gathered.keys()
        found = sum(storage.nbytes() for address, storage in self._kept.items() if address not in others)
        self._kept.clear()
        return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
