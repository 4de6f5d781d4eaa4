"""Checked collectives: ranks agree on the operation in a handshake before they transfer tensors.

Each call starts with a handshake, which is one small all-gather over gloo. It carries the operation, a hash of the
structure and dtypes, and up to 32 numbers such as first dimensions. If ranks disagree on the operation or the
structure, every rank raises an error that lists the line of user code on each rank. Without the handshake, torch would
hang, abort or corrupt memory.

Small collectives (counts, loss weights, votes) consist of the handshake's numbers alone. Tensors whose sizes can
differ between ranks are padded for the transfer and trimmed afterwards.
"""

import hashlib
import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from headway.common.callsite import find_call_site
from headway.core.runtime.collective_ledger import CollectiveLedger, LedgerEntry
from headway.core.runtime.collective_log import VOTE, CollectiveLog, RecordedCollective
from headway.core.runtime.collectives.transferable import choose_arithmetic, make_transferable, view_as_transferable
from headway.core.runtime.collectives.tree import (
    Tree,
    describe_structure,
    list_tensors,
    map_tensors,
    replace_tensors,
    require_tensors,
)
from headway.core.runtime.control_plane.attendance import Attendance
from headway.core.runtime.group import MARGIN, can_carry_cpu, create_group, start_collectives
from headway.core.runtime.process import ProcessRuntime
from headway.errors import CollectiveError, ConfigError, StateError

MAX_HANDSHAKE_NUMBERS = 32
"""Maximum number of values that one handshake carries."""

_NUM_HEADER_VALUES = 3
"""Number of values before them: the operation, a hash of the signature, and the number of values."""

_NUMBER_REDUCTIONS: dict[str, Callable[[Iterable[float]], float]] = {"sum": math.fsum, "min": min, "max": max}

# torch 2.13 has renamed this function.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

_OPERATIONS = (
    "numbers",
    "gather",
    "reduce",
    "broadcast",
    "pad",
    "objects",
    "object",
    "barrier",
    VOTE,
    "stream_weights",
    "loss weights",
    "comparison before an update",
    "clip_grad_norm_",
    "clip_grad_value_",
)
"""Names of all collectives with a handshake, which carries the index of the name."""

_JOINABLE_OPERATIONS = (
    "numbers",
    "objects",
    "loss weights",
    "comparison before an update",
    "clip_grad_norm_",
    "clip_grad_value_",
)
"""Operations that can occur within a batch, so that a rank that has left the batch early can join them."""

_UNPICKLABLE = -1
"""Size that a rank sends instead of the number of bytes if its object cannot be pickled."""

_TENSOR_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


@dataclass
class PendingHandshake:
    """Handshake that has started but has not been waited for. A handshake is an all-gather before a collective.

    Attributes:
        entry: Record of the collective in the ledger.
        signature: Description of the structure and dtypes of this rank's argument.
        num_numbers: Number of values that the handshake carries.
        rows: Buffer that receives one row of values from each rank.
        work: Pending all-gather; None if there is nothing to wait for.
    """

    entry: LedgerEntry
    signature: str
    num_numbers: int
    rows: torch.Tensor
    work: dist.Work | None


class Collectives:
    """Collectives over a group of processes, with a handshake that checks that all ranks call the same operation.

    Every method with a handshake raises `CollectiveError` if the ranks call different operations or a rank is lost. It
    raises `StateError` if the process group has ended.

    Args:
        runtime: Runtime of this process.
        group: torch process group, which must also carry CPU tensors. Default: all processes.
        is_alone: Whether the group consists of this process only. If it does, `group` must be None, which then does not
            mean all processes. Default: False.
        log_name: Name under which the `CollectiveLog` records the collectives of this group. All groups that one call of
            `split` creates share a name. Default: "all".

    Attributes:
        rank: Rank of this process within the group. Its global rank is `runtime.rank`.
        world_size: Number of processes in the group.
        group: torch process group; None for torch's default group.
        ledger: Counter of this group's collectives.

    Raises:
        CollectiveError: If the group cannot carry CPU tensors, which handshakes need.
    """

    def __init__(
        self,
        runtime: ProcessRuntime,
        group: dist.ProcessGroup | None = None,
        *,
        is_alone: bool = False,
        log_name: str = "all",
    ) -> None:
        self.runtime = runtime
        self.group = group
        self.log_name = log_name
        self._log = runtime.scope.get_or_create(CollectiveLog)
        self._attendance = runtime.scope.get_or_create(Attendance)
        self._num_splits = 0
        self._cpu_group = runtime.cpu_group if group is None else group
        has_group = dist.is_initialized() and not is_alone
        self.rank = dist.get_rank(group) if has_group else 0
        self.world_size = dist.get_world_size(group) if has_group else 1
        if group is not None and self.world_size > 1 and not can_carry_cpu(group):
            raise CollectiveError(
                f"a group of {self.world_size} processes has no engine for CPU tensors, which ranks need to agree before each "
                "collective; create it with Collectives.split, or with backend='cpu:gloo,cuda:nccl'"
            )
        self.ledger = CollectiveLedger()
        self._latest_buffers: tuple[torch.Tensor, ...] = ()

    @property
    def has_ended(self) -> bool:
        """Whether the process group has ended, so that no collective is possible. Always False for a single process."""
        return self.world_size > 1 and not dist.is_initialized()

    def ensure_connected(self, operation: str) -> None:
        """Check that the process group has not ended.

        Args:
            operation: Name of the collective that is about to start, for the message.

        Raises:
            StateError: If the group has ended, for example in `end_training()`.
        """
        if self.has_ended:
            raise StateError(
                f"the process group has ended, so this rank cannot reach the others ({operation} at {find_call_site()}). Before "
                "end_training(), make all calls that need every rank, such as wait_for_everyone(), gather(), prepare(), "
                "save_state(), and save_model() or get_state_dict() of a sharded model"
            )

    def split(self, groups: Sequence[Sequence[int]]) -> "Collectives":
        """Create a process group for each entry of `groups`, and return the collectives of this process's group.

        All processes must call this with equal arguments.

        Args:
            groups: Global ranks of each group, equal on all processes. Each rank must be in exactly one group.

        Raises:
            CollectiveError: If a rank is in no group, is in two groups, or does not exist. Also if this object covers
                only some of the run's ranks, because only the collectives of all ranks can be split.
        """
        world = range(self.runtime.world_size)
        if sorted(rank for ranks in groups for rank in ranks) != list(world) or self.world_size != len(world):
            raise CollectiveError(f"groups {[list(g) for g in groups]} do not contain each of {len(world)} ranks once")
        own: dist.ProcessGroup | None = None
        for ranks in groups:
            if len(ranks) > 1 and len(ranks) < len(world):  # all ranks must create all groups, in the same order
                own = create_group(ranks, self.runtime.timeout + MARGIN) or own
        is_alone = any(list(ranks) == [self.runtime.rank] for ranks in groups)
        self._num_splits += 1
        return Collectives(self.runtime, own, is_alone=is_alone, log_name=f"part{self._num_splits}")

    # ---------------------------------------------------------------- small numbers

    def gather_numbers(
        self, values: Sequence[float], operation: str = "numbers", signature: str = ""
    ) -> list[list[float]]:
        """Return the `values` of every rank, as a list indexed by rank. Integers up to 2^53 are exact.

        Args:
            values: Numbers of this rank. Each rank must pass the same number of values.
            operation: Name of the collective, which must be equal on all ranks and one of `_OPERATIONS`. A different
                name lets the handshake find ranks that exchange other numbers at this point. Default: "numbers".
            signature: Text that must be equal on all ranks. Default: "".
        """
        if self.world_size == 1:
            return [list(values)]
        return self._run_handshake(operation, signature, values)

    def start_sum(self, values: Sequence[float], operation: str = "numbers") -> PendingHandshake | list[float]:
        """Start summing `values` over the ranks, element by element, without waiting for the sums.

        Pass the returned object to `finish_sum`. It is the list of values itself if the group has one process.

        Args:
            values: Numbers of this rank, at most 32. Each rank must pass the same number of values.
            operation: Name of the collective, as for `gather_numbers`. Default: "numbers".

        Raises:
            CollectiveError: If there are more than 32 values.
            StateError: If the process group has ended.
        """
        if self.world_size == 1:
            return list(values)
        return self._start_handshake(operation, "", values)

    def finish_sum(self, pending: PendingHandshake | list[float]) -> list[float]:
        """Wait for a sum that `start_sum` started, and return the sum of each element over the ranks.

        Args:
            pending: Object that `start_sum` returned.

        Raises:
            CollectiveError: If ranks are missing, or called a different collective.
        """
        if isinstance(pending, list):
            return pending
        return [sum(column) for column in zip(*self._finish_handshake(pending))]

    def reduce_numbers(self, values: Sequence[float], op: str = "sum") -> list[float]:
        """Return the sum, minimum or maximum of `values` over the ranks, element by element.

        Args:
            values: Numbers of this rank. Each rank must pass the same number of values.
            op: "sum", "min" or "max".
        """
        return [_NUMBER_REDUCTIONS[op](column) for column in zip(*self.gather_numbers(values))]

    def barrier(self) -> None:
        """Wait until every rank has called barrier()."""
        if self.world_size > 1:
            self._run_handshake("barrier", "", ())

    # ---------------------------------------------------------------- tensors

    def gather(self, tree: Tree) -> Tree:
        """Concatenate each tensor over all ranks along dim 0, in rank order. A 0-d tensor counts as one row.

        First dimensions may differ between ranks.

        Args:
            tree: Tensor or nested structure of tensors.

        Raises:
            CollectiveError: If ranks differ in structure, in dtype, or in any dimension except the first.
            CallError: If an entry is not a tensor. Inside a container, None is also allowed.
        """
        tensors = [tensor.reshape(1) if tensor.ndim == 0 else tensor for tensor in list_tensors(tree)]
        if self.world_size == 1:
            require_tensors(tree, "gather")
            return replace_tensors(tree, tensors)
        signature = describe_structure(tree) + "".join(f"|{t.dtype}{tuple(t.shape[1:])}" for t in tensors)
        sizes = self._run_handshake("gather", signature, [t.shape[0] for t in tensors])
        # Check only after the handshake. If ranks pass different structures, the handshake has raised on all of them.
        # So no rank waits for one that raised an error here.
        require_tensors(tree, "gather")
        gathered = []
        for index, tensor in enumerate(tensors):
            sizes_by_rank = [int(row[index]) for row in sizes]
            gathered.append(self._gather_rows(tensor, sizes_by_rank))
        return replace_tensors(tree, gathered)

    def _gather_rows(self, tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """Concatenate a tensor over all ranks along dim 0.

        All ranks send tensors of the largest size. Padding is removed from the result.

        Args:
            tensor: Tensor of this rank.
            sizes: Size of dim 0 on each rank.
        """
        longest = max(sizes)
        # Backends read raw memory, so tensors must be contiguous and of a supported dtype.
        piece = view_as_transferable(tensor.detach()).contiguous().resolve_conj()
        if piece.shape[0] < longest:
            piece = torch.cat([piece, piece.new_zeros((longest - piece.shape[0], *piece.shape[1:]))])
        out = piece.new_empty((longest * self.world_size, *piece.shape[1:]))
        if piece.numel():
            _all_gather_single(out, piece, group=self.get_group(piece))
        if min(sizes) < longest:
            out = torch.cat([out[rank * longest : rank * longest + size] for rank, size in enumerate(sizes)])
        return out.view(tensor.dtype) if out.dtype != tensor.dtype else out

    def reduce(self, tree: Tree, reduction: str = "sum", scale: float = 1.0) -> Tree:
        """Combine each tensor over the ranks, element by element.

        Args:
            tree: Tensor or nested structure of tensors, with equal shapes on all ranks.
            reduction: "sum", "mean", "max" or "min". The sum of booleans is the number of True values. The mean of
                integers is a float tensor.
            scale: Factor by which the result is multiplied.

        Raises:
            ConfigError: If the reduction is unknown.
            CollectiveError: If ranks differ in structure, dtype or shape.
            CallError: If an entry is not a tensor. Inside a container, None is also allowed.
        """
        if reduction not in _TENSOR_REDUCTIONS:
            raise ConfigError(f"reduction={reduction!r} is unknown; allowed: {', '.join(_TENSOR_REDUCTIONS)}")
        tensors = list(list_tensors(tree))
        if self.world_size > 1:
            self._run_handshake("reduce", f"{reduction}{describe_structure(tree)}{_describe_tensors(tensors)}", ())
        require_tensors(tree, "reduce")
        return map_tensors(lambda tensor: self._reduce_one(tensor, reduction, scale), tree)

    def _reduce_one(self, tensor: torch.Tensor, reduction: str, scale: float) -> torch.Tensor:
        """Return the reduction of a tensor over all ranks, times `scale`, as a new tensor.

        Args:
            tensor: Tensor of this rank. It must have the same shape and dtype on all ranks.
            reduction: "sum", "mean", "max" or "min".
            scale: Factor of the result.
        """
        working, result = choose_arithmetic(tensor.dtype, reduction)
        out = tensor.detach().to(working).clone(memory_format=torch.contiguous_format)
        if self.world_size > 1 and out.numel():
            dist.all_reduce(out, _TENSOR_REDUCTIONS[reduction], group=self.get_group(out))
        if reduction == "mean":
            out = out / self.world_size
        out = out.to(result)
        return out * scale if scale != 1.0 else out

    def broadcast(self, tree: Tree, src: int = 0) -> Tree:
        """Return rank `src`'s tensors on every rank. The other ranks pass tensors of equal shapes and dtypes.

        The returned tensors are new, except that a group of one process returns `tree` itself.

        Args:
            tree: Tensor or nested structure of tensors.
            src: Sender's rank within the group.

        Raises:
            CollectiveError: If ranks differ in structure, dtype or shape.
            CallError: If an entry is not a tensor. Inside a container, None is also allowed.
        """
        if self.world_size == 1:
            require_tensors(tree, "broadcast")
            return tree
        tensors = list(list_tensors(tree))
        self._run_handshake("broadcast", f"{src}{describe_structure(tree)}{_describe_tensors(tensors)}", ())
        require_tensors(tree, "broadcast")

        def send_tensor(tensor: torch.Tensor) -> torch.Tensor:
            out = view_as_transferable(tensor.detach()).clone(memory_format=torch.contiguous_format)
            if out.numel():
                dist.broadcast(out, self._get_global_rank(src), group=self.get_group(out))
            return out.view(tensor.dtype) if out.dtype != tensor.dtype else out

        return map_tensors(send_tensor, tree)

    def broadcast_into(self, tensors: Sequence[torch.Tensor], src: int = 0) -> None:
        """Copy rank `src`'s values into existing tensors of equal shapes and dtypes on all ranks.

        A tensor that is not contiguous on some rank, or a lazy conjugate, is transferred through a contiguous copy, one
        tensor at a time.

        Args:
            tensors: Tensors of this rank.
            src: Sender's rank within the group.

        Raises:
            CollectiveError: If ranks differ in the number, shapes or dtypes of their tensors.
        """
        if self.world_size == 1:
            return
        self._run_handshake("broadcast", f"into {src}{_describe_tensors(tensors)}", ())
        views = [view_as_transferable(tensor.detach()) for tensor in tensors]
        # A tensor's strides can differ between ranks, but all ranks must transfer its elements in the same order.
        needs_copy = [index for index, t in enumerate(views) if not t.is_contiguous() or t.is_conj()]
        needs_copy_anywhere: set[int] = set().union(*self._all_gather_objects(needs_copy))
        direct = [tensor for index, tensor in enumerate(views) if index not in needs_copy_anywhere]
        self.broadcast_in_place(direct, src)
        for index in sorted(needs_copy_anywhere):
            self._broadcast_through_copy(views[index], src)

    def _broadcast_through_copy(self, tensor: torch.Tensor, src: int) -> None:
        """Broadcast a tensor whose memory is not contiguous, through a contiguous copy."""
        copy = tensor.contiguous().resolve_conj()
        self.broadcast_in_place([copy], src)
        tensor.copy_(copy)

    def sum_in_place(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum contiguous tensors over the ranks in place, with as few backend calls as possible.

        There is no handshake. Ranks must already have agreed on the tensors, for example in a vote.

        Args:
            tensors: Contiguous tensors, in the same order on all ranks.
        """
        self._run_in_place(
            "sum in place", tensors, lambda t: dist.all_reduce(t, group=self.get_group(t), async_op=True)
        )

    def broadcast_in_place(self, tensors: Sequence[torch.Tensor], src: int = 0) -> None:
        """Copy rank `src`'s values into contiguous tensors on all ranks.

        There is no handshake. Ranks must already have agreed on the tensors, for example in a vote.

        Args:
            tensors: Contiguous tensors, in the same order on all ranks.
            src: Sender's rank within the group.
        """
        root = self._get_global_rank(src)
        self._run_in_place(
            "broadcast in place",
            tensors,
            lambda t: dist.broadcast(t, root, group=self.get_group(t), async_op=True),
            src,
        )

    def _run_in_place(
        self,
        operation: str,
        tensors: Sequence[torch.Tensor],
        start: Callable[[torch.Tensor], Any],
        src: int | None = None,
    ) -> None:
        """Run one collective for each tensor: a broadcast from rank `src`, or an all-reduce if `src` is None.

        Args:
            operation: Name of the collective in hang reports.
            tensors: Contiguous tensors, in the same order on all ranks.
            start: Function that starts the asynchronous collective of one tensor.
            src: Sender's rank within the group. Default: None, for an all-reduce.
        """
        is_sum = src is None
        if self.world_size == 1:
            return
        if not is_sum:
            tensors = make_transferable(tensors)
        entry = self.ledger.record_entry(operation)
        if self._log.is_open:
            descriptions = [(t.numel(), str(t.dtype).removeprefix("torch."), t.device.type) for t in tensors]
            self._log.record_entry(self.log_name, "in place", is_sum, src or 0, descriptions)
        nonempty = [tensor for tensor in tensors if tensor.numel()]
        for work in start_collectives(nonempty, self.get_group, start, is_sum=is_sum):
            work.wait()
        self._log.record_exit()
        self.ledger.record_exit(entry)

    def pad_across_processes(self, tree: Tree, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Tree:
        """Pad each tensor along `dim` to the largest length on any rank. Tensors of that length are returned unchanged.

        Args:
            tree: Tensor or nested structure of tensors. A tensor without dimension `dim` is returned unchanged.
            dim: Dimension to pad; negative numbers count from the end.
            pad_index: Value of the padding.
            pad_first: Whether to pad before the data instead of after it.

        Raises:
            CollectiveError: If ranks differ in structure, dtype or number of dimensions.
            CallError: If an entry is not a tensor. Inside a container, None is also allowed.
        """
        if self.world_size == 1:
            require_tensors(tree, "pad_across_processes")
            return tree
        tensors = list(list_tensors(tree))
        signature = f"{dim}{describe_structure(tree)}" + "".join(f"|{t.dtype}{t.ndim}" for t in tensors)
        sizes = self._run_handshake("pad", signature, [t.shape[dim] if _has_dim(t, dim) else 0 for t in tensors])
        require_tensors(tree, "pad_across_processes")
        longest = iter([int(max(column)) for column in zip(*sizes)])
        return map_tensors(lambda tensor: pad_dim(tensor, dim, next(longest), pad_index, pad_first), tree)

    # ---------------------------------------------------------------- objects

    def gather_objects(self, obj: Any) -> list[Any]:
        """Return every rank's object, as a list indexed by rank. Objects are pickled for the transfer.

        Raises:
            CollectiveError: If another rank's object cannot be pickled. That rank raises the error of pickle.
        """
        if self.world_size == 1:
            return [obj]
        payload, failure = _pickle_object(obj)
        rows = self._run_handshake("objects", "", (_UNPICKLABLE if failure else len(payload),))
        return self._gather_pickled(payload, failure, [int(row[0]) for row in rows])

    def _gather_pickled(self, payload: bytearray, failure: Exception | None, sizes: list[int]) -> list[Any]:
        """Return every rank's object, after a handshake about the sizes of the pickled objects.

        Args:
            payload: This rank's pickled object.
            failure: Error because of which this rank's object could not be pickled, or None.
            sizes: Bytes of each rank's pickled object, or `_UNPICKLABLE`.
        """
        self._raise_pickle_failures(sizes, failure)
        longest = max(sizes)
        own = torch.zeros(longest, dtype=torch.uint8)
        own[: len(payload)] = torch.frombuffer(payload, dtype=torch.uint8)
        gathered = torch.empty(self.world_size * longest, dtype=torch.uint8)
        _all_gather_single(gathered, own, group=self._cpu_group)
        parts = gathered.view(self.world_size, longest)
        return [pickle.loads(_view_bytes(part[:size])) for part, size in zip(parts, sizes)]

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s object on every rank. The object is pickled for the transfer.

        Args:
            obj: Object to send. It is ignored on the other ranks.
            src: Sender's rank within the group.

        Raises:
            CollectiveError: On the other ranks, if the object cannot be pickled. Rank `src` raises the error of pickle.
        """
        if self.world_size == 1:
            return obj
        payload, failure = _pickle_object(obj) if self.rank == src else (bytearray(), None)
        rows = self._run_handshake("object", str(src), (_UNPICKLABLE if failure else len(payload),))
        size = int(rows[src][0])
        self._raise_pickle_failures([size if rank == src else 0 for rank in range(self.world_size)], failure)
        if self.rank == src:
            data = torch.frombuffer(payload, dtype=torch.uint8)
        else:
            data = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(data, self._get_global_rank(src), group=self._cpu_group)
        return obj if self.rank == src else pickle.loads(_view_bytes(data))

    def _raise_pickle_failures(self, sizes: Sequence[int], failure: Exception | None) -> None:
        """Raise an error on every rank if the object of any rank cannot be pickled.

        Args:
            sizes: Bytes of each rank's pickled object, or `_UNPICKLABLE`.
            failure: Error that this rank's object raised, which is raised again here. None if it was pickled.

        Raises:
            CollectiveError: If only other ranks' objects could not be pickled. The message lists these ranks.
        """
        if failure is not None:
            raise failure
        failed = [self._get_global_rank(rank) for rank, size in enumerate(sizes) if size == _UNPICKLABLE]
        if failed:
            raise CollectiveError(
                f"rank {', '.join(map(str, failed))} cannot send its object, because it cannot be pickled; see its traceback"
            )

    # ---------------------------------------------------------------- between two ranks

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send the bytes of a CPU tensor to one rank, which calls `receive`.

        There is no handshake. Both ranks must have agreed on the transfer.

        Args:
            tensor: Contiguous tensor on the CPU.
            dst: Receiver's rank within the group.
        """
        with self._attendance.exclude_pair_messages():
            dist.send(tensor, self._get_global_rank(dst), group=self._cpu_group)

    def receive(self, tensor: torch.Tensor, src: int) -> None:
        """Receive bytes from one rank, which calls `send`, into a CPU tensor.

        There is no handshake. Both ranks must have agreed on the transfer.

        Args:
            tensor: Contiguous tensor on the CPU to fill. It must have as many bytes as the tensor that `src` sends.
            src: Sender's rank within the group.
        """
        with self._attendance.exclude_pair_messages():
            dist.recv(tensor, self._get_global_rank(src), group=self._cpu_group)

    # ---------------------------------------------------------------- the handshake

    def _run_handshake(self, operation: str, signature: str, numbers: Sequence[float]) -> list[list[float]]:
        """Check that all ranks call the same operation, and return the numbers of every rank, as a list indexed by rank.

        Args:
            operation: One of `_OPERATIONS`.
            signature: Text that must be equal on all ranks, such as structure, dtypes and shapes.
            numbers: Numbers of this rank, such as sizes that may differ between ranks.

        Raises:
            CollectiveError: If ranks differ in operation, signature or number of values, or a rank is lost.
            StateError: If the process group has ended.
        """
        if len(numbers) <= MAX_HANDSHAKE_NUMBERS:
            return self._finish_handshake(self._start_handshake(operation, signature, numbers))
        # More numbers than slots: agree on the first ones, then send the rest in further all-gathers that all ranks
        # expect.
        rows = self._run_handshake(operation, f"{signature}#{len(numbers)}", numbers[:MAX_HANDSHAKE_NUMBERS])
        for start in range(MAX_HANDSHAKE_NUMBERS, len(numbers), MAX_HANDSHAKE_NUMBERS):
            more = self._run_handshake(operation, signature, numbers[start : start + MAX_HANDSHAKE_NUMBERS])
            rows = [row + extra for row, extra in zip(rows, more)]
        return rows

    def _start_handshake(self, operation: str, signature: str, numbers: Sequence[float]) -> PendingHandshake:
        """Start to exchange the description of a call, and this rank's numbers, without waiting for the other ranks.

        Args:
            operation: Name of the operation.
            signature: Description of the arguments. It must be equal on all ranks.
            numbers: Numbers of this rank, equally many on all ranks.

        Raises:
            CollectiveError: If there are more than `MAX_HANDSHAKE_NUMBERS` numbers.
            StateError: If the process group has ended.
        """
        self.ensure_connected(operation)
        if len(numbers) > MAX_HANDSHAKE_NUMBERS:
            raise CollectiveError(f"{len(numbers)} numbers in one handshake; the maximum is {MAX_HANDSHAKE_NUMBERS}")
        if self.group is None:
            self._attendance.count_collective()
        entry = self.ledger.record_entry(operation)
        self._log.record_entry(self.log_name, "numbers", operation, signature, len(numbers))
        slots = [float(_OPERATIONS.index(operation)), digest_text(signature), float(len(numbers)), *numbers]
        slots += [0.0] * (_NUM_HEADER_VALUES + MAX_HANDSHAKE_NUMBERS - len(slots))
        rows = torch.empty(self.world_size, _NUM_HEADER_VALUES + MAX_HANDSHAKE_NUMBERS, dtype=torch.float64)
        row = torch.tensor([slots], dtype=torch.float64)
        work = _all_gather_single(rows, row, group=self._cpu_group, async_op=True)
        # Keep a reference until the next call. A backend thread that drops the last reference needs the interpreter,
        # which may be shutting down.
        self._latest_buffers = (row, rows)
        return PendingHandshake(entry, signature, len(numbers), rows, work)

    def _finish_handshake(self, pending: PendingHandshake) -> list[list[float]]:
        """Wait for the other ranks' descriptions of a call, and return the numbers of all ranks, one list per rank.

        Args:
            pending: Handshake that `_start_handshake` has started.

        Raises:
            CollectiveError: If ranks are missing, or made a different call.
        """
        try:
            if pending.work is not None:
                pending.work.wait()
        except RuntimeError as error:  # the backend's message names a socket, not a cause
            raise CollectiveError(_describe_missing_ranks(pending.entry, error)) from error
        self._log.record_exit()
        self.ledger.record_exit(pending.entry)
        rows: list[list[float]] = pending.rows.tolist()
        if any(row[:_NUM_HEADER_VALUES] != rows[0][:_NUM_HEADER_VALUES] for row in rows):
            self._raise_mismatch(pending)
        return [row[_NUM_HEADER_VALUES : _NUM_HEADER_VALUES + pending.num_numbers] for row in rows]

    # ---------------------------------------------------------------- for a rank that left a batch early

    def list_ranks(self) -> list[int]:
        """Return the global ranks of the group."""
        return [self._get_global_rank(rank) for rank in range(self.world_size)]

    def join_with_neutral_values(self, step: RecordedCollective) -> None:
        """Join a collective of the other ranks with values that do not change its result, such as zeros in a sum.

        A rank that has left a batch early calls this, so that its peers can finish.

        Args:
            step: Collective as recorded in another rank's `CollectiveLog`.

        Raises:
            CollectiveError: If this kind of collective does not occur within a batch.
        """
        if step.operation == "in place":
            is_sum, src, descriptions = step.values
            zeros = [
                torch.zeros(numel, dtype=getattr(torch, dtype), device=self._choose_device(device_type))
                for numel, dtype, device_type in descriptions
            ]
            if is_sum:
                self.sum_in_place(zeros)
            else:
                self.broadcast_in_place(zeros, src)
            return
        operation, signature, count = step.values
        if operation not in _JOINABLE_OPERATIONS:
            raise CollectiveError(f"{operation} was called by the script in the middle of a batch")
        if operation != "objects":
            self._finish_handshake(self._start_handshake(operation, signature, [0.0] * count))
            return
        payload, _ = _pickle_object(None)
        rows = self._finish_handshake(self._start_handshake(operation, signature, [float(len(payload))]))
        self._gather_pickled(payload, None, [int(row[0]) for row in rows])

    def _choose_device(self, device_type: str) -> torch.device:
        """Return this process's device if it has this type, else the current device of this type."""
        own = self.runtime.device
        return own if own.type == device_type else torch.device(device_type)

    def _raise_mismatch(self, pending: PendingHandshake) -> None:
        """Raise a `CollectiveError` that lists the different calls of the ranks. Every rank must call it."""
        entry = pending.entry
        lines = self._all_gather_objects((entry.operation, entry.call_site, pending.signature, pending.num_numbers))
        calls = "\n".join(
            f"  rank {self._get_global_rank(rank)}: {operation} #{entry.sequence} at {site}"
            + (f" of {signature}" if signature else "")
            for rank, (operation, site, signature, _) in enumerate(lines)
        )
        error = CollectiveError(
            f"ranks called collectives that do not fit together:\n{calls}\nEvery rank must make the same calls in the same order, "
            "with equal structures, dtypes and shapes (dim 0 may differ in gather; pad_across_processes evens another out)"
        )
        # All ranks of the group raise this error, because they all have the same rows.
        error.is_on_all_ranks = self.world_size == self.runtime.world_size
        raise error

    def _all_gather_objects(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks in rank order, without a handshake before the exchange."""
        out: list[Any] = [None] * self.world_size
        dist.all_gather_object(out, obj, group=self._cpu_group)
        return out

    def get_group(self, tensor: torch.Tensor) -> dist.ProcessGroup | None:
        """Return the process group that transfers a tensor: the CPU group for CPU tensors, else the main group.

        None means torch's default group.
        """
        return self._cpu_group if tensor.device.type == "cpu" else self.group

    def _get_global_rank(self, rank: int) -> int:
        """Return the global rank of a rank of this group."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def _describe_tensors(tensors: Iterable[torch.Tensor]) -> str:
    """Return the dtypes and shapes of tensors as text, which must be equal on all ranks."""
    return "".join(f"|{tensor.dtype}{tuple(tensor.shape)}" for tensor in tensors)


def _view_bytes(data: torch.Tensor) -> memoryview:
    """Return the memory of a 1-d uint8 tensor on the CPU."""
    return memoryview(data.numpy())  # type: ignore[arg-type]


def _pickle_object(obj: Any) -> tuple[bytearray, Exception | None]:
    """Return a pair of (pickled object, None), or of (no bytes, error) if the object cannot be pickled.

    The error is returned, not raised, so that the rank can report it in the handshake first. Otherwise, the other ranks
    would wait in a collective that this rank never enters.
    """
    try:
        return bytearray(pickle.dumps(obj)), None
    except Exception as error:
        return bytearray(), error


def _describe_missing_ranks(entry: LedgerEntry, error: RuntimeError) -> str:
    """Return the error message for a handshake in which ranks are missing."""
    return (
        f"{entry.operation} at {entry.call_site}: not every rank made this call. A rank has ended, was lost, or does not make it. "
        f"Make the call on every rank, outside conditions on the rank ({str(error).partition('. ')[0]})"
    )


def pad_dim(tensor: torch.Tensor, dim: int, length: int, pad_index: float, pad_first: bool) -> torch.Tensor:
    """Return `tensor` padded to `length` along `dim`, or unchanged if it is long enough or has no such dimension.

    Args:
        tensor: Tensor to pad.
        dim: Dimension to pad.
        length: Length of the result along `dim`.
        pad_index: Value of the padding.
        pad_first: Whether to pad before the data instead of after it.
    """
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


def digest_text(text: str) -> float:
    """Return a 52-bit hash of `text` as a float, which ranks can exchange as a number without rounding."""
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 12)
