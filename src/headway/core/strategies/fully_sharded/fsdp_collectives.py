"""Recording of the collectives that torch's fully_shard starts, and functions to join collectives of other ranks.

FSDP starts collectives in hooks of the forward and the backward. Each all-gather of a unit, and each reduction of its
gradients, is recorded in the `CollectiveLedger` with the unit's name. So a report of a hang names the collective in
which a rank waits. If a batch might have to be run again, these collectives are also recorded in the `CollectiveLog`,
so that a rank can join them with `stand_in`. The public torch hooks for this are `set_custom_all_gather`,
`set_custom_reduce_scatter` and, after the all-reduce over replicas (HSDP), `set_all_reduce_hook`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from headway.core.runtime.collective_ledger import LedgerEntry
from headway.core.runtime.collective_log import CollectiveLog, RecordedCollective
from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.fully_sharded.fsdp_state import iterate_groups
from headway.core.weights.shards import get_dtype_name
from headway.errors import CollectiveError

PLACE = "fsdp"
"""Name under which the `CollectiveLog` records the collectives of FSDP's parameter groups."""

NUM_KEYS = 2
"""Number of leading values of such a record that identify the unit: number of the model, number of the unit."""

_GATHER, _SCATTER, _TOTAL = "gather", "scatter", "total"
_NAMES = {_GATHER: "all-gather", _SCATTER: "reduce-scatter", _TOTAL: "all-reduce"}
_ROOM = 32  # maximum characters of an operation's name in `headway.core.runtime.pulse`
_OPERATIONS = {"AVG": dist.ReduceOp.AVG, "SUM": dist.ReduceOp.SUM}


class FSDPUnit:
    """One of FSDP's parameter groups, whose collectives are recorded.

    Args:
        group: FSDP's parameter group.
        name: Name of the group's module.
        key: Pair of (number of the model, number of the unit in the model).
        everyone: Collectives over all ranks. Their `CollectiveLedger` records the unit's collectives.
    """

    def __init__(self, group: Any, name: str, key: tuple[int, int], everyone: Collectives) -> None:
        self.group = group
        self._key = key
        self._ledger = everyone.ledger
        self._trail = everyone.runtime.scope.get_or_create(CollectiveLog)
        self._names = {kind: name_operation(operation, name) for kind, operation in _NAMES.items()}
        self._total: LedgerEntry | None = None

    def record_start(self, kind: str, *how: Any) -> LedgerEntry:
        """Record the start of a collective of this unit, and return its ledger entry.

        Args:
            kind: Kind of collective: "gather", "scatter" or "total" (the all-reduce over replicas).
            how: Number of elements, dtype and operation of a reduction; empty for an all-gather.
        """
        entry = self._ledger.record_entry(self._names[kind])
        self._trail.record_entry(PLACE, kind, *self._key, *how)
        return entry

    def record_end(self, entry: LedgerEntry) -> None:
        """Record that a collective has ended or, on an accelerator, that it has been launched."""
        self._trail.record_exit()
        self._ledger.record_exit(entry)

    def record_total_start(self, output: torch.Tensor, op: str) -> None:
        """Record the start of the all-reduce over replicas that follows a reduce-scatter.

        Do nothing without replicas.
        """
        if self.group._is_hsdp and self.group.all_reduce_grads:
            self._total = self.record_start(_TOTAL, output.numel(), get_dtype_name(output.dtype), op)

    def record_total_end(self, output: torch.Tensor) -> None:
        """Record the end of the all-reduce over replicas."""
        if self._total is not None:
            self.record_end(self._total)
            self._total = None

    # ---------------------------------------------------------------- joining collectives of other ranks

    def ranks(self, kind: str) -> list[int]:
        """Return the ranks that take part in collectives of one kind: "gather", "scatter" or "total"."""
        return dist.get_process_group_ranks(self._get_process_group(kind))

    def _get_process_group(self, kind: str) -> Any:
        group = self.group
        if kind == _GATHER:
            return group._all_gather_process_group
        return group._reduce_scatter_process_group if kind == _SCATTER else group._all_reduce_process_group

    def stand_in(self, kind: str, how: Sequence[Any]) -> None:
        """Join a collective of other ranks with values that do not change its result.

        An all-gather gets this rank's shards, and a reduction gets zeros.

        Args:
            kind: Kind of collective: "gather", "scatter" or "total".
            how: Number of elements, dtype and operation of a reduction; empty for an all-gather.

        Raises:
            CollectiveError: If gradients are reduced by an operation for which zeros are not neutral.
        """
        group = self.group
        if kind == _GATHER:
            group.unshard()
            group._reset_iter_state()  # waits for the gather and frees its result
            return
        numel, dtype, op = how
        if op not in _OPERATIONS:
            raise CollectiveError(f"gradients are reduced by {op}, in which no rank can stand in with zeros")
        zeros = torch.zeros(numel, dtype=getattr(torch, dtype), device=group.device)
        if kind == _TOTAL:
            entry = self.record_start(_TOTAL, *how)
            dist.all_reduce(zeros, op=_OPERATIONS[op], group=self._get_process_group(kind))
            self.record_end(entry)
            return
        output = zeros.new_empty(numel // self._get_process_group(kind).size())
        group._reduce_scatter_comm.run(output, zeros, self._get_process_group(kind), _OPERATIONS[op])


class _CommHook:
    """Wrapper of one of FSDP's communication functions that records the start and end of each collective.

    Args:
        inner: FSDP's own function.
        unit: Unit that the collective belongs to.
    """

    def __init__(self, inner: Any, unit: FSDPUnit) -> None:
        self.inner: Any = inner.inner if isinstance(inner, _CommHook) else inner
        self.unit = unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate the output of the collective."""
        made: torch.Tensor = self.inner.allocate(size, dtype=dtype, device=device)
        return made


class AllGatherHook(_CommHook):
    """Communication hook that records the all-gather of a unit's parameters."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Run and record the all-gather, with torch's arguments."""
        entry = self.unit.record_start(_GATHER)
        work = self.inner(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)
        self.unit.record_end(entry)
        return work


class ReduceScatterHook(_CommHook):
    """Communication hook that records the reduce-scatter of a unit's gradients."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """Run the reduce-scatter with torch's arguments. Record it and the all-reduce over replicas that follows."""
        work = self.run(output_tensor, input_tensor, group, op, async_op)
        self.unit.record_total_start(output_tensor, _name_reduction(op))
        return work

    def run(self, output: torch.Tensor, given: torch.Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Run and record the reduce-scatter alone, without the all-reduce over replicas."""
        entry = self.unit.record_start(_SCATTER, given.numel(), get_dtype_name(given.dtype), _name_reduction(op))
        work = self.inner(output_tensor=output, input_tensor=given, group=group, op=op, async_op=async_op)
        self.unit.record_end(entry)
        return work


class CommHooks:
    """Registry of the communication hooks that record the collectives of all FSDP units of the sharded models.

    A rank that ran out of memory finds the unit of a recorded collective here, and joins that collective.

    Args:
        everyone: Collectives over all ranks.
    """

    def __init__(self, everyone: Collectives) -> None:
        self._everyone = everyone
        self._models: list[tuple[torch.nn.Module, list[FSDPUnit]]] = []

    def open(self, model: torch.nn.Module) -> None:
        """Install hooks that record a model's collectives. Nothing is recorded in torch versions without such hooks."""
        number, opened = len(self._models), []
        names = {id(module): name for name, module in model.named_modules()}
        for count, (module, group) in enumerate(iterate_groups(model)):
            unit = FSDPUnit(group, names[id(module)] or "the root", (number, count), self._everyone)
            opened.append(unit)
            if hasattr(module, "set_custom_all_gather"):
                module.set_custom_all_gather(AllGatherHook(group._all_gather_comm, unit))
                module.set_custom_reduce_scatter(ReduceScatterHook(group._reduce_scatter_comm, unit))
                if group._is_hsdp:
                    module.set_all_reduce_hook(unit.record_total_end)
        self._models.append((model, opened))

    def close(self, model: torch.nn.Module | None) -> None:
        """Forget the FSDP units of a model, or of all models if `model` is None.

        The numbers that identify the units of other models do not change.
        """
        self._models = [(one, [] if model is None or one is model else units) for one, units in self._models]

    def unit(self, step: RecordedCollective) -> FSDPUnit:
        """Return the FSDP unit of a collective that was recorded in the `CollectiveLog`."""
        model_number, unit_number = step.values[:NUM_KEYS]
        unit: FSDPUnit = self._models[model_number][1][unit_number]
        return unit


def name_operation(operation: str, unit: str) -> str:
    """Return a name for a unit's operation, short enough for the status that a process publishes.

    Long unit names are shortened at the start. The status is defined in `headway.core.runtime.pulse`.
    """
    room = _ROOM - len(operation) - 4
    return f"{operation} of {unit if len(unit) <= room else '..' + unit[2 - room :]}"


def _name_reduction(op: Any) -> str:
    """Return the name of a reduction operation, such as "SUM" or "AVG"."""
    return next((name for name, known in _OPERATIONS.items() if op == known), str(op))
