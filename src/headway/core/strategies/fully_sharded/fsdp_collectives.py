"""Recording of the collectives that torch's fully_shard starts, and functions to join collectives of other ranks.

FSDP starts collectives in hooks of the forward and the backward. Each all-gather of a unit, and each reduction of its
gradients, is recorded in the `CollectiveLedger` with the unit's name. So a report of a hang names the collective in
which a rank waits. If a batch might have to be run again, these collectives are also recorded in the `CollectiveLog`,
so that a rank can join them with `join_with_neutral_values`. The public torch hooks for this are `set_custom_all_gather`,
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
from headway.core.weights.tensor_bytes import get_dtype_name
from headway.errors import CollectiveError

LOG_NAME = "fsdp"
"""Name of a process group under which the `CollectiveLog` records the collectives of FSDP's parameter groups."""

NUM_KEY_VALUES = 2
"""Number of leading values of such a record that identify the unit: number of the model, number of the unit."""

_ALL_GATHER, _REDUCE_SCATTER, _ALL_REDUCE = "gather", "scatter", "total"
"""Kinds of collectives. The all-reduce over replicas follows a reduce-scatter (HSDP)."""

_NAMES = {_ALL_GATHER: "all-gather", _REDUCE_SCATTER: "reduce-scatter", _ALL_REDUCE: "all-reduce"}
_MAX_NAME_LENGTH = 32  # maximum characters of an operation's name in `headway.core.runtime.heartbeat_file`
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
        self._log = everyone.runtime.scope.get_or_create(CollectiveLog)
        self._names = {kind: name_operation(operation, name) for kind, operation in _NAMES.items()}
        self._all_reduce_entry: LedgerEntry | None = None

    def record_start(self, kind: str, *details: Any) -> LedgerEntry:
        """Record the start of a collective of this unit, and return its ledger entry.

        Args:
            kind: Kind of collective: "gather", "scatter" or "total" (the all-reduce over replicas).
            details: Number of elements, dtype and operation of a reduction; empty for an all-gather.
        """
        entry = self._ledger.record_entry(self._names[kind])
        self._log.record_entry(LOG_NAME, kind, *self._key, *details)
        return entry

    def record_end(self, entry: LedgerEntry) -> None:
        """Record that a collective has ended or, on an accelerator, that it has been launched."""
        self._log.record_exit()
        self._ledger.record_exit(entry)

    def record_all_reduce_start(self, output: torch.Tensor, op: str) -> None:
        """Record the start of the all-reduce over replicas that follows a reduce-scatter.

        Do nothing without replicas.
        """
        if self.group._is_hsdp and self.group.all_reduce_grads:
            self._all_reduce_entry = self.record_start(_ALL_REDUCE, output.numel(), get_dtype_name(output.dtype), op)

    def record_all_reduce_end(self, output: torch.Tensor) -> None:
        """Record the end of the all-reduce over replicas."""
        if self._all_reduce_entry is not None:
            self.record_end(self._all_reduce_entry)
            self._all_reduce_entry = None

    # ---------------------------------------------------------------- joining collectives of other ranks

    def list_ranks(self, kind: str) -> list[int]:
        """Return the global ranks that take part in collectives of one kind: "gather", "scatter" or "total"."""
        return dist.get_process_group_ranks(self._get_process_group(kind))

    def _get_process_group(self, kind: str) -> Any:
        """Return torch's process group for a kind of collective: all-gather, reduce-scatter or all-reduce."""
        if kind == _ALL_GATHER:
            return self.group._all_gather_process_group
        if kind == _REDUCE_SCATTER:
            return self.group._reduce_scatter_process_group
        return self.group._all_reduce_process_group

    def join_with_neutral_values(self, kind: str, details: Sequence[Any]) -> None:
        """Join a collective of other ranks with values that do not change its result.

        An all-gather gets this rank's shards, and a reduction gets zeros.

        Args:
            kind: Kind of collective: "gather", "scatter" or "total".
            details: Number of elements, dtype and operation of a reduction; empty for an all-gather.

        Raises:
            CollectiveError: If gradients are reduced by an operation for which zeros are not neutral.
        """
        group = self.group
        if kind == _ALL_GATHER:
            group.unshard()
            group._reset_iter_state()  # waits for the gather and frees its result
            return
        numel, dtype, op = details
        if op not in _OPERATIONS:
            raise CollectiveError(
                f"gradients are reduced by {op}, to which no rank can contribute zeros in place of a gradient"
            )
        zeros = torch.zeros(numel, dtype=getattr(torch, dtype), device=group.device)
        if kind == _ALL_REDUCE:
            entry = self.record_start(_ALL_REDUCE, *details)
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
        output: torch.Tensor = self.inner.allocate(size, dtype=dtype, device=device)
        return output


class AllGatherHook(_CommHook):
    """Communication hook that records the all-gather of a unit's parameters."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Run and record the all-gather, with torch's arguments."""
        entry = self.unit.record_start(_ALL_GATHER)
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
        self.unit.record_all_reduce_start(output_tensor, _name_reduction(op))
        return work

    def run(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """Run and record the reduce-scatter alone, without the all-reduce over replicas."""
        entry = self.unit.record_start(
            _REDUCE_SCATTER, input_tensor.numel(), get_dtype_name(input_tensor.dtype), _name_reduction(op)
        )
        work = self.inner(output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op)
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

    def install_hooks(self, model: torch.nn.Module) -> None:
        """Install hooks that record a model's collectives. Nothing is recorded in torch versions without such hooks."""
        model_number, units = len(self._models), []
        names = {id(module): name for name, module in model.named_modules()}
        for unit_number, (module, group) in enumerate(iterate_groups(model)):
            name = names[id(module)] or "the root"
            unit = FSDPUnit(group, name, (model_number, unit_number), self._everyone)
            units.append(unit)
            if hasattr(module, "set_custom_all_gather"):
                module.set_custom_all_gather(AllGatherHook(group._all_gather_comm, unit))
                module.set_custom_reduce_scatter(ReduceScatterHook(group._reduce_scatter_comm, unit))
                if group._is_hsdp:
                    module.set_all_reduce_hook(unit.record_all_reduce_end)
        self._models.append((model, units))

    def remove_units(self, model: torch.nn.Module) -> None:
        """Remove the FSDP units of a model from this registry. Its hooks stay installed.

        The numbers that identify the units of other models do not change.
        """
        self._models = [(each, [] if each is model else units) for each, units in self._models]

    def get_unit(self, step: RecordedCollective) -> FSDPUnit:
        """Return the FSDP unit of a collective that was recorded in the `CollectiveLog`."""
        model_number, unit_number = step.values[:NUM_KEY_VALUES]
        _, units = self._models[model_number]
        unit: FSDPUnit = units[unit_number]
        return unit


def name_operation(operation: str, unit: str) -> str:
    """Return a name for a unit's operation, short enough for the status that a process publishes.

    Long unit names are shortened at the start. The status is defined in `headway.core.runtime.heartbeat_file`.
    """
    max_length = _MAX_NAME_LENGTH - len(operation) - len(" of ")
    if len(unit) > max_length:
        unit = ".." + unit[2 - max_length :]
    return f"{operation} of {unit}"


def _name_reduction(op: Any) -> str:
    """Return the name of a reduction operation, such as "SUM" or "AVG"."""
    return next((name for name, known in _OPERATIONS.items() if op == known), str(op))
