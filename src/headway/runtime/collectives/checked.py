"""Checked collectives: every exchange between ranks passes here, agrees first, then moves bytes.

Each call begins with a handshake: one small all-gather over gloo of (operation, a hash of structure and dtypes, up to
32 numbers such as first dimensions). Ranks that disagree - another operation, another structure - all learn of it
there and raise the same error with every rank's line, where torch would hang, abort or mix up memory. The numbers
alone serve the small exchanges (counts, weights, votes); sizes that differ where they may are padded and cut.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from headway.errors import CollectiveError, ConfigError
from headway.runtime.collective_log import VOTE, CollectiveLedger, CollectiveLog, LedgerEntry, Step
from headway.runtime.collectives.tree import Tree, map_tensors, structure, tensors
from headway.runtime.control_plane.attendance import Attendance
from headway.runtime.group import MARGIN, carries_cpu, part, start_all
from headway.runtime.process import ProcessRuntime

NUM_SLOTS = 32
_HEADER = 3
_FOLDS: dict[str, Callable[[Iterable[float]], float]] = {"sum": math.fsum, "min": min, "max": max}
# torch 2.13 renamed it.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_EXCHANGES = ("numbers", "gather", "reduce", "broadcast", "pad", "objects", "object", "barrier", VOTE, "stream_weights")
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_CARRIED_NAMES = "bool uint8 int8 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"
_CARRIED = frozenset(getattr(torch, name) for name in _CARRIED_NAMES.split())
_BY_WIDTH = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64}


@dataclass
class PendingHandshake:
    """A handshake under way."""

    entry: LedgerEntry
    signature: str
    num_numbers: int
    rows: torch.Tensor
    work: dist.Work | None


class Collectives:
    """Exchanges among a group of processes; on one process each call returns its input.

    Args:
        runtime: this process.
        group: torch's process group, which carries CPU tensors too; None: all processes.
        is_alone: this process and no other, whatever groups there are; then it has no `group`.
        place: what a batch's trail calls the group, alike on the ranks of all groups that were split together.

    Attributes:
        rank: this process's number in the group; the process's own is `runtime.rank`.
        world_size: the processes of the group.

    Raises:
        CollectiveError: CPU tensors, which handshakes are, cannot travel in the group.
    """

    def __init__(
        self,
        runtime: ProcessRuntime,
        group: dist.ProcessGroup | None = None,
        *,
        is_alone: bool = False,
        place: str = "all",
    ) -> None:
        self.runtime = runtime
        self.group = group
        self.place = place
        self._trail = runtime.scope.own(CollectiveLog)
        self._attendance = runtime.scope.own(Attendance)
        self._num_splits = 0
        self._cpu_group = runtime.cpu_group if group is None else group
        is_joined = dist.is_initialized() and not is_alone
        self.rank = dist.get_rank(group) if is_joined else 0
        self.world_size = dist.get_world_size(group) if is_joined else 1
        if group is not None and self.world_size > 1 and not carries_cpu(group):
            raise CollectiveError(
                f"a group of {self.world_size} processes has no engine for CPU tensors, which ranks need to agree before each "
                "collective; create it with Collectives.split, or with backend='cpu:gloo,cuda:nccl'"
            )
        self.ledger = CollectiveLedger()
        self._last: tuple[torch.Tensor, ...] = ()

    def split(self, groups: Sequence[Sequence[int]]) -> "Collectives":
        """The part of all processes that this one is in; every process calls it, with the same groups.

        Args:
            groups: ranks, each of them in one group.

        Raises:
            CollectiveError: a rank is in no group or in two, or does not exist; or this is a part already.
        """
        world = range(self.runtime.world_size)
        if sorted(rank for ranks in groups for rank in ranks) != list(world) or self.world_size != len(world):
            raise CollectiveError(f"groups {[list(g) for g in groups]} do not contain each of {len(world)} ranks once")
        own: dist.ProcessGroup | None = None
        for ranks in groups:
            if len(ranks) > 1 and len(ranks) < len(world):  # all ranks make all groups, in this order
                own = part(ranks, self.runtime.timeout + MARGIN) or own
        is_alone = any(list(ranks) == [self.runtime.rank] for ranks in groups)
        self._num_splits += 1
        return Collectives(self.runtime, own, is_alone=is_alone, place=f"part{self._num_splits}")

    # ---------------------------------------------------------------- small numbers

    def gather_numbers(self, values: Sequence[float], operation: str = "numbers") -> list[list[float]]:
        """Every rank's `values` (as many on each rank; exact for integers up to 2^53), by rank.

        Args:
            values: this rank's.
            operation: what the exchange is called where ranks miss it.
        """
        if self.world_size == 1:
            return [list(values)]
        return self._agree(operation, "", values)

    def start_sum(self, values: Sequence[float]) -> PendingHandshake | list[float]:
        """Begin to sum `values` over the ranks, element by element; `finish_sum` waits for the result."""
        if self.world_size == 1:
            return list(values)
        return self._start("numbers", "", values)

    def finish_sum(self, pending: PendingHandshake | list[float]) -> list[float]:
        """The sums that `start_sum` began."""
        if isinstance(pending, list):
            return pending
        return [sum(column) for column in zip(*self._finish(pending))]

    def reduce_numbers(self, values: Sequence[float], op: str = "sum") -> list[float]:
        """Sum, minimum or maximum of `values` over the ranks, element by element."""
        return [_FOLDS[op](column) for column in zip(*self.gather_numbers(values))]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            self._agree("barrier", "", ())

    # ---------------------------------------------------------------- tensors

    def gather(self, tree: Tree) -> Tree:
        """Concatenate each tensor of all ranks along dim 0, in rank order; a 0-d tensor counts as one row.

        First dimensions may differ between ranks.

        Raises:
            CollectiveError: ranks differ in structure, dtype, or another dimension.
        """
        rows = [tensor.reshape(1) if tensor.ndim == 0 else tensor for tensor in tensors(tree)]
        if self.world_size == 1:
            joined = iter(rows)
            return map_tensors(lambda _: next(joined), tree)
        signature = structure(tree) + "".join(f"|{t.dtype}{tuple(t.shape[1:])}" for t in rows)
        sizes = self._agree("gather", signature, [t.shape[0] for t in rows])
        gathered = iter([self._gather_rows(t, [int(row[i]) for row in sizes]) for i, t in enumerate(rows)])
        return map_tensors(lambda _: next(gathered), tree)

    def _gather_rows(self, tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        longest = max(sizes)
        # Engines read raw memory: only contiguous, and only the types they know.
        piece = _carrier(tensor.detach()).contiguous()
        if piece.shape[0] < longest:
            piece = torch.cat([piece, piece.new_zeros((longest - piece.shape[0], *piece.shape[1:]))])
        out = piece.new_empty((longest * self.world_size, *piece.shape[1:]))
        if piece.numel():
            _all_gather_single(out, piece, group=self._for(piece))
        if min(sizes) < longest:
            out = torch.cat([out[rank * longest : rank * longest + size] for rank, size in enumerate(sizes)])
        return out.view(tensor.dtype) if out.dtype != tensor.dtype else out

    def reduce(self, tree: Tree, reduction: str = "sum", scale: float = 1.0) -> Tree:
        """Combine each tensor over the ranks, element by element.

        Args:
            tree: tensors of equal shapes on all ranks.
            reduction: "sum" (of truth values: their count), "mean" (of integers: a float tensor), "max" or "min".
            scale: multiplies the result.

        Raises:
            ConfigError: another reduction.
            CollectiveError: ranks differ in structure, dtype or shape.
        """
        if reduction not in _REDUCTIONS:
            raise ConfigError(f"reduction={reduction!r} is unknown; allowed: {', '.join(_REDUCTIONS)}")
        found = list(tensors(tree))
        if self.world_size > 1:
            signature = f"{reduction}{structure(tree)}" + "".join(f"|{t.dtype}{tuple(t.shape)}" for t in found)
            self._agree("reduce", signature, ())
        return map_tensors(lambda tensor: self._reduce_one(tensor, reduction, scale), tree)

    def _reduce_one(self, tensor: torch.Tensor, reduction: str, scale: float) -> torch.Tensor:
        working, result = _arithmetic(tensor.dtype, reduction)
        out = tensor.detach().to(working).clone(memory_format=torch.contiguous_format)
        if self.world_size > 1 and out.numel():
            dist.all_reduce(out, _REDUCTIONS[reduction], group=self._for(out))
        if reduction == "mean":
            out = out / self.world_size
        out = out.to(result)
        return out * scale if scale != 1.0 else out

    def broadcast(self, tree: Tree, src: int = 0) -> Tree:
        """Rank `src`'s tensors on every rank; the others hand in tensors of the same shapes and dtypes."""
        if self.world_size == 1:
            return tree
        found = list(tensors(tree))
        signature = f"{src}{structure(tree)}" + "".join(f"|{t.dtype}{tuple(t.shape)}" for t in found)
        self._agree("broadcast", signature, ())

        def send(tensor: torch.Tensor) -> torch.Tensor:
            out = _carrier(tensor.detach()).clone(memory_format=torch.contiguous_format)
            if out.numel():
                dist.broadcast(out, self._global_rank(src), group=self._for(out))
            return out.view(tensor.dtype) if out.dtype != tensor.dtype else out

        return map_tensors(send, tree)

    def broadcast_into(self, found: Sequence[torch.Tensor], src: int = 0) -> None:
        """Rank `src`'s values into tensors of the same shapes and dtypes on all ranks, where they lie.

        Only what engines cannot read as it lies goes through a copy, one at a time.

        Raises:
            CollectiveError: ranks differ in number, shapes or dtypes.
        """
        if self.world_size == 1:
            return
        self._agree("broadcast", f"into {src}" + "".join(f"|{t.dtype}{tuple(t.shape)}" for t in found), ())
        carried = [_carrier(tensor.detach()) for tensor in found]
        # Of one memory order here and of another there: all ranks must send it the same way.
        scattered = [index for index, tensor in enumerate(carried) if not tensor.is_contiguous()]
        through_copy: set[int] = set().union(*self._all_gather_objects(scattered))
        straight = [tensor for index, tensor in enumerate(carried) if index not in through_copy]
        self.broadcast_in_place(straight, src)
        for index in sorted(through_copy):
            self._broadcast_through_copy(carried[index], src)

    def _broadcast_through_copy(self, tensor: torch.Tensor, src: int) -> None:
        copy = tensor.contiguous()
        self.broadcast_in_place([copy], src)
        tensor.copy_(copy)

    def sum_in_place(self, found: Sequence[torch.Tensor]) -> None:
        """Sum contiguous tensors over the ranks where they lie, all at once.

        Without a handshake: for callers that have just agreed otherwise (a vote) on what will travel.
        """
        self._in_place("sum in place", found, lambda t: dist.all_reduce(t, group=self._for(t), async_op=True))

    def broadcast_in_place(self, found: Sequence[torch.Tensor], src: int = 0) -> None:
        """Rank `src`'s values into contiguous tensors of all ranks; without a handshake, as `sum_in_place`."""
        root = self._global_rank(src)
        self._in_place(
            "broadcast in place", found, lambda t: dist.broadcast(t, root, group=self._for(t), async_op=True), src
        )

    def _in_place(
        self,
        operation: str,
        found: Sequence[torch.Tensor],
        start: Callable[[torch.Tensor], Any],
        src: int | None = None,
    ) -> None:
        """Carry out what `start` begins for each tensor: from rank `src`; None: a sum."""
        is_sum = src is None
        if self.world_size == 1:
            return
        entry = self.ledger.record(operation)
        if self._trail.is_open:
            kinds = [(t.numel(), str(t.dtype).removeprefix("torch."), t.device.type) for t in found]
            self._trail.note(self.place, "in place", is_sum, src or 0, kinds)
        for work in start_all([tensor for tensor in found if tensor.numel()], self._for, start, is_sum=is_sum):
            work.wait()
        self._trail.passed()
        self.ledger.leave(entry)

    def pad_across_processes(self, tree: Tree, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Tree:
        """Pad each tensor along `dim` to the longest of all ranks.

        Args:
            tree: tensors; one without dimension `dim` passes through.
            dim: counted from the end where negative.
            pad_index: the value of the padding.
            pad_first: pad before the data instead of after it.
        """
        if self.world_size == 1:
            return tree
        found = list(tensors(tree))
        signature = f"{dim}{structure(tree)}" + "".join(f"|{t.dtype}{t.ndim}" for t in found)
        sizes = self._agree("pad", signature, [t.shape[dim] if _has_dim(t, dim) else 0 for t in found])
        longest = iter([int(max(column)) for column in zip(*sizes)])
        return map_tensors(lambda tensor: pad_dim(tensor, dim, next(longest), pad_index, pad_first), tree)

    # ---------------------------------------------------------------- objects

    def gather_objects(self, obj: Any) -> list[Any]:
        """Every rank's object, by rank (pickled between the processes of one run)."""
        if self.world_size == 1:
            return [obj]
        self._agree("objects", "", ())
        return self._all_gather_objects(obj)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Rank `src`'s object on every rank."""
        if self.world_size == 1:
            return obj
        self._agree("object", str(src), ())
        box = [obj if self.rank == src else None]
        dist.broadcast_object_list(box, self._global_rank(src), group=self._cpu_group)
        return box[0]

    # ---------------------------------------------------------------- between two ranks

    def send(self, flat: torch.Tensor, to: int) -> None:
        """Bytes of the host to one rank, which calls `receive`; without a handshake: all ranks have agreed on what travels."""
        with self._attendance.between_two():
            dist.send(flat, self._global_rank(to), group=self._cpu_group)

    def receive(self, flat: torch.Tensor, source: int) -> None:
        """As many bytes as one rank sends, into memory of the host."""
        with self._attendance.between_two():
            dist.recv(flat, self._global_rank(source), group=self._cpu_group)

    # ---------------------------------------------------------------- the handshake

    def _agree(self, operation: str, signature: str, numbers: Sequence[float]) -> list[list[float]]:
        if len(numbers) <= NUM_SLOTS:
            return self._finish(self._start(operation, signature, numbers))
        # More numbers than slots: agree on the first ones, then send the rest in rounds that all ranks now expect.
        rows = self._agree(operation, f"{signature}#{len(numbers)}", numbers[:NUM_SLOTS])
        for start in range(NUM_SLOTS, len(numbers), NUM_SLOTS):
            more = self._agree(operation, signature, numbers[start : start + NUM_SLOTS])
            rows = [row + extra for row, extra in zip(rows, more)]
        return rows

    def _start(self, operation: str, signature: str, numbers: Sequence[float]) -> PendingHandshake:
        if len(numbers) > NUM_SLOTS:
            raise CollectiveError(f"{len(numbers)} numbers in one handshake; it holds {NUM_SLOTS}")
        if self.group is None:
            self._attendance.count_exchange()
        entry = self.ledger.record(operation)
        self._trail.note(self.place, "numbers", operation, signature, len(numbers))
        slots = [float(_EXCHANGES.index(operation)), digest(signature), float(len(numbers)), *numbers]
        slots += [0.0] * (_HEADER + NUM_SLOTS - len(slots))
        rows = torch.empty(self.world_size, _HEADER + NUM_SLOTS, dtype=torch.float64)
        row = torch.tensor([slots], dtype=torch.float64)
        work = _all_gather_single(rows, row, group=self._cpu_group, async_op=True)
        # Kept until the next one: an engine's thread that drops the last reference needs Python, which may be ending.
        self._last = (row, rows)
        return PendingHandshake(entry, signature, len(numbers), rows, work)

    def _finish(self, pending: PendingHandshake) -> list[list[float]]:
        try:
            if pending.work is not None:
                pending.work.wait()
        except RuntimeError as error:  # the engine names a socket, not a cause
            raise CollectiveError(_left_alone(pending.entry, error)) from error
        self._trail.passed()
        self.ledger.leave(pending.entry)
        rows: list[list[float]] = pending.rows.tolist()
        if any(row[:_HEADER] != rows[0][:_HEADER] for row in rows):
            self._raise_mismatch(pending)
        return [row[_HEADER : _HEADER + pending.num_numbers] for row in rows]

    # ---------------------------------------------------------------- for a rank that fell out

    def members(self) -> list[int]:
        """The ranks of the group."""
        return [self._global_rank(rank) for rank in range(self.world_size)]

    def stand_in(self, step: Step) -> None:
        """Take part, with nothing of its own, in an exchange of the others, as a trail has noted it.

        Raises:
            CollectiveError: it is none of those that a batch is made of.
        """
        _, kind, *how = step
        if kind == "in place":
            is_sum, src, kinds = how
            nothing = [torch.zeros(n, dtype=getattr(torch, dtype), device=self._device(on)) for n, dtype, on in kinds]
            if is_sum:
                self.sum_in_place(nothing)
            else:
                self.broadcast_in_place(nothing, src)
            return
        operation, signature, count = how
        if operation not in ("numbers", "objects"):
            raise CollectiveError(f"{operation} was called by the script in the middle of a batch")
        self._finish(self._start(operation, signature, [0.0] * count))
        if operation == "objects":
            self._all_gather_objects(None)

    def _device(self, kind: str) -> torch.device:
        own = self.runtime.device
        return own if own.type == kind else torch.device(kind)

    def _raise_mismatch(self, pending: PendingHandshake) -> None:
        entry = pending.entry
        lines = self._all_gather_objects((entry.operation, entry.call_site, pending.signature, pending.num_numbers))
        told = "\n".join(
            f"  rank {self._global_rank(rank)}: {operation} #{entry.sequence} at {site} of {signature or 'nothing'}"
            for rank, (operation, site, signature, _) in enumerate(lines)
        )
        raise CollectiveError(
            f"ranks called collectives that do not fit together:\n{told}\nEvery rank must make the same calls in the same order, "
            "with equal structures, dtypes and shapes (dim 0 may differ in gather; pad_across_processes evens another out)"
        )

    def _all_gather_objects(self, obj: Any) -> list[Any]:
        out: list[Any] = [None] * self.world_size
        dist.all_gather_object(out, obj, group=self._cpu_group)
        return out

    def _for(self, tensor: torch.Tensor) -> dist.ProcessGroup | None:
        """The group in which this tensor travels."""
        return self._cpu_group if tensor.device.type == "cpu" else self.group

    def _global_rank(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def _left_alone(entry: LedgerEntry, error: RuntimeError) -> str:
    return (
        f"{entry.operation} at {entry.call_site}: not every rank came here. One ended, was lost, or never makes this call: call it "
        f"on every rank, outside conditions on the rank ({str(error).partition('. ')[0]})"
    )


def pad_dim(tensor: torch.Tensor, dim: int, length: int, pad_index: float, pad_first: bool) -> torch.Tensor:
    """`tensor` filled up to `length` along `dim`; itself where it is as long, or has no such dimension."""
    if not _has_dim(tensor, dim) or tensor.shape[dim] >= length:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = length
    out = tensor.new_full(shape, pad_index)
    start = length - tensor.shape[dim] if pad_first else 0
    out.narrow(dim, start, tensor.shape[dim]).copy_(tensor)
    return out


def _has_dim(tensor: torch.Tensor, dim: int) -> bool:
    return -tensor.ndim <= dim < tensor.ndim


def digest(text: str) -> float:
    """A hash of 52 bits, which is exact among an exchange's numbers."""
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 12)


def _carrier(tensor: torch.Tensor) -> torch.Tensor:
    """The same bits as a type of that width that every engine carries (gloo knows no int16, uint32 or float8)."""
    return tensor if tensor.dtype in _CARRIED else tensor.view(_BY_WIDTH[tensor.dtype.itemsize])


def _arithmetic(dtype: torch.dtype, reduction: str) -> tuple[torch.dtype, torch.dtype]:
    """In which type values are combined, and which type the result has."""
    is_inexact = dtype.is_floating_point or dtype.is_complex
    if is_inexact:
        return (dtype, dtype) if dtype in _CARRIED else (torch.float32, dtype)
    if reduction == "mean":
        return torch.float32, torch.float32
    if dtype == torch.bool:
        return torch.int64, torch.int64 if reduction == "sum" else torch.bool
    return (dtype, dtype) if dtype in _CARRIED else (torch.int64, dtype)
