"""What torch's fully_shard keeps inside, and the exchanges that it makes: the one file that reads its private state.

Between two backwards that do not reduce, a gradient lies whole in FSDP's own records, and `parameter.grad` is None. Autograd sees
the whole parameters, not those that the module tree shows at rest. Both are reached from here.

The exchanges that FSDP makes on its own, in hooks of the forward and the backward: seen here, and stood in for.

Each unit's gather and each reduction of its gradients is entered into the ledger by the unit's name, so that a report of a hang
says in which one a rank waits; and, while a batch is in hand that may be run again, into its trail. torch's public hooks are
`set_custom_all_gather`, `set_custom_reduce_scatter` and, for the sum over replicas (HSDP), the hook that comes after it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from headway.common.optional import Later
from headway.config.parallelism import ShardingOptions
from headway.errors import CollectiveError, PrepareError, UnsupportedError
from headway.runtime.collective_log import CollectiveLog, LedgerEntry, Step
from headway.runtime.collectives.checked import Collectives
from headway.weights.shards import dtype_name

fsdp = Later("torch.distributed.fsdp")


def shards(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules of a model that are units, the model itself among them."""
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            yield module


def units(model: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    """(module, its group of parameters that are gathered together), each group once."""
    seen: set[int] = set()
    for module in shards(model):
        for group in _groups_of(module):
            if id(group) not in seen:
                seen.add(id(group))
                yield module, group


def groups(model: torch.nn.Module) -> list[Any]:
    """FSDP's groups of parameters."""
    return [group for _, group in units(model)]


def _groups_of(module: torch.nn.Module) -> list[Any]:
    """The groups of one unit."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    # Older torch has one group a unit, or none.
    found = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return list(filter(None, found))


def prepare_to_gather(model: torch.nn.Module) -> None:
    """Let FSDP find its root and its streams, as the first forward does: what comes before it could gather nothing."""
    if isinstance(model, fsdp.FSDPModule):
        model._get_fsdp_state()._lazy_init()


def records(model: torch.nn.Module) -> Iterator[Any]:
    """FSDP's record of each sharded parameter."""
    for group in groups(model):
        yield from group.fsdp_params


def whole_parameter(record: Any) -> torch.Tensor | None:
    """The parameter that autograd sees; None before it was gathered for the first time."""
    return getattr(record, "_unsharded_param", None)


def sum_unused_too(model: torch.nn.Module) -> None:
    """Whoever uses a parameter, and whoever does not: all ranks send the same. Older torch has no switch for it."""
    for module in shards(model):
        if hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True, recurse=False)  # type: ignore[operator]


def reshard(model: torch.nn.Module) -> None:
    """Let the module tree show shards again: nothing is gathered any more."""
    for module in shards(model):
        module.reshard()  # type: ignore[operator]


def prefetch(units: list[Any], options: ShardingOptions) -> None:
    """Tell each unit, in the order of the tree, which ones to gather ahead."""
    for index, unit in enumerate(units):
        if options.forward_prefetch:
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + options.forward_prefetch])
        if options.backward_prefetch:
            unit.set_modules_to_backward_prefetch(units[max(0, index - options.backward_prefetch) : index][::-1])


@contextmanager
def unsynchronised(model: Any) -> Iterator[None]:
    """A block whose backwards leave gradients whole."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def add_forward_methods(model: Any, names: Iterable[str]) -> None:
    """Let these methods gather parameters as forward does.

    Raises:
        PrepareError: the model has no such method.
    """
    for name in names:
        if not callable(getattr(model, name, None)):
            raise PrepareError(
                f"ShardingOptions(forward_methods=...) names {name!r}, but {type(model).__name__} has no such method"
            )
        fsdp.register_fsdp_forward_method(model, name)


def hold(model: Any, is_held: bool = True) -> None:
    """Backwards leave parameters gathered and gradients whole: stages go back and forth between micro-batches."""
    model.set_requires_gradient_sync(not is_held)
    model.set_reshard_after_backward(not is_held)
    model.set_is_last_backward(not is_held)


def reduce_held(model: torch.nn.Module, everyone: Collectives) -> None:
    """Sum the gradients that a window has left whole; a parameter that no rank has used is left out.

    Args:
        model: sharded, and held.
        everyone: all ranks that hold it.
    """
    learning = [record for record in records(model) if record.sharded_param.requires_grad]
    for group in groups(model):
        group.post_backward()  # what zero bubble has left beside the sums
    flags = torch.tensor([float(bool(held_gradients([record]))) for record in learning])
    everyone.sum_in_place([flags])
    for record, count in zip(learning, flags.tolist()):
        if count and not held_gradients([record]):
            whole: Any = whole_parameter(record)
            whole.grad = torch.zeros_like(whole)
            record.to_accumulated_grad_if_needed()
    hold(model, False)
    _reduce(model)
    hold(model)


def held_gradients(found: Iterable[Any]) -> list[torch.Tensor]:
    """Those of these records that were not reduced."""
    pairs = ((record.unsharded_accumulated_grad, getattr(whole_parameter(record), "grad", None)) for record in found)
    return [grad for pair in pairs for grad in pair if grad is not None]


def _reduce(model: torch.nn.Module) -> None:
    for group in groups(model):
        group.post_backward()
    for unit in list(shards(model))[:1]:  # of all units
        unit._get_fsdp_state()._root_post_backward_final_callback()  # type: ignore[operator]


def leave_forward(model: torch.nn.Module, output: Any) -> Any:
    """What follows the root's forward, where that was left before its end."""
    return model._get_fsdp_state()._post_forward(model, (), output)  # type: ignore[operator]


def seen(model: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """These parts as autograd sees them."""
    whole = {id(record.sharded_param): whole_parameter(record) for record in records(model)}
    return [parameter if (found := whole.get(id(parameter))) is None else found for parameter in parameters]


@contextmanager
def kept_whole(model: torch.nn.Module) -> Iterator[None]:
    """A backward for which all units are gathered beforehand, and whose gradients are reduced afterwards, if at all."""
    units: list[Any] = list(shards(model))
    reductions = [(group, group.reduce_grads, group.all_reduce_grads) for group in groups(model)]
    for unit in units:
        unit.unshard()
        unit.set_reshard_after_backward(False, recurse=False)
        unit.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
        for group, *before in reductions:
            group.reduce_grads, group.all_reduce_grads = before
        _reduce(model)
    finally:
        for group, *before in reductions:
            group.reduce_grads, group.all_reduce_grads = before
        for unit in units:
            unit.set_reshard_after_backward(True, recurse=False)
            unit.reshard()


Waiting = tuple[Any, torch.Tensor | None, torch.Tensor | None]
"""A record, and the gradient that waits there to be reduced: in the number format of the reduction, or as autograd left it."""


def take_gradients(model: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> list[Waiting]:
    """Take out the gradients of these parts that have not been reduced, those of this model."""
    wanted, taken = set(map(id, parameters)), []
    for record in records(model):
        if id(record.sharded_param) in wanted:
            whole = whole_parameter(record)
            taken.append((record, record.unsharded_accumulated_grad, None if whole is None else whole.grad))
    give_gradients((record, None, None) for record, _, _ in taken)
    return taken


def give_gradients(taken: Iterable[Waiting]) -> None:
    """Put gradients that have not been reduced in the place of those that are there."""
    for record, accumulated, grad in taken:
        record.unsharded_accumulated_grad = accumulated
        whole = whole_parameter(record)
        if whole is not None:
            whole.grad = grad


def forget_gradients(model: torch.nn.Module) -> None:
    """Drop what an interrupted forward or backward has left, and gradients that have not been reduced.

    Raises:
        UnsupportedError: this torch cannot.
    """
    if isinstance(model, fsdp.FSDPModule):
        if not hasattr(model, "reset_iter_state"):
            raise UnsupportedError(
                f"continuing after a failed window with a sharded model needs torch 2.13, but this is torch {torch.__version__}: the "
                "parameters that the interrupted forward gathered cannot be freed; end the run, and resume from a checkpoint"
            )
        if model._get_fsdp_state()._is_root is not None:  # before its first forward, nothing is in flight
            model.reset_iter_state()
    for record in records(model):
        record.unsharded_accumulated_grad = None
        whole = whole_parameter(record)
        if whole is not None:
            whole.grad = None


PLACE = "fsdp"
"""What a batch's trail calls the groups of FSDP."""

_GATHER, _SCATTER, _TOTAL = "gather", "scatter", "total"
_NAMES = {_GATHER: "all-gather", _SCATTER: "reduce-scatter", _TOTAL: "all-reduce"}
_ROOM = 32  # the pulse's, for the name of an operation
_OPERATIONS = {"AVG": dist.ReduceOp.AVG, "SUM": dist.ReduceOp.SUM}


class FSDPUnit:
    """One of FSDP's groups of parameters, and what notes its exchanges.

    Args:
        group: FSDP's record of it.
        name: of its module.
        key: (number of the model, number of the unit).
        everyone: all ranks; its ledger takes the entries.
    """

    def __init__(self, group: Any, name: str, key: tuple[int, int], everyone: Collectives) -> None:
        self.group = group
        self._key = key
        self._ledger = everyone.ledger
        self._trail = everyone.runtime.scope.own(CollectiveLog)
        self._names = {kind: named(operation, name) for kind, operation in _NAMES.items()}
        self._total: LedgerEntry | None = None

    def enter(self, kind: str, *how: Any) -> LedgerEntry:
        """This exchange begins."""
        entry = self._ledger.record(self._names[kind])
        self._trail.note(PLACE, kind, *self._key, *how)
        return entry

    def leave(self, entry: LedgerEntry) -> None:
        """It is over, or with an accelerator's engine on its way."""
        self._trail.passed()
        self._ledger.leave(entry)

    def await_total(self, output: torch.Tensor, op: str) -> None:
        """Gradients have been scattered; where the shards have replicas, FSDP sums over them next."""
        if self.group._is_hsdp and self.group.all_reduce_grads:
            self._total = self.enter(_TOTAL, output.numel(), dtype_name(output.dtype), op)

    def note_total(self, output: torch.Tensor) -> None:
        """They are summed over the replicas."""
        if self._total is not None:
            self.leave(self._total)
            self._total = None

    # ---------------------------------------------------------------- standing in

    def ranks(self, kind: str) -> list[int]:
        """Who takes part in it."""
        return dist.get_process_group_ranks(self._process_group(kind))

    def _process_group(self, kind: str) -> Any:
        group = self.group
        if kind == _GATHER:
            return group._all_gather_process_group
        return group._reduce_scatter_process_group if kind == _SCATTER else group._all_reduce_process_group

    def stand_in(self, kind: str, how: Sequence[Any]) -> None:
        """Take part: this rank's own parts in gathers, so that what the others compute stays right; zeros in sums.

        Raises:
            CollectiveError: gradients are combined in a way that needs this rank's numbers.
        """
        group = self.group
        if kind == _GATHER:
            group.unshard()
            group._reset_iter_state()  # waits for it, and frees what came
            return
        numel, dtype, op = how
        if op not in _OPERATIONS:
            raise CollectiveError(f"gradients are reduced by {op}, in which no rank can stand in with zeros")
        zeros = torch.zeros(numel, dtype=getattr(torch, dtype), device=group.device)
        if kind == _TOTAL:
            entry = self.enter(_TOTAL, *how)
            dist.all_reduce(zeros, op=_OPERATIONS[op], group=self._process_group(kind))
            self.leave(entry)
            return
        output = zeros.new_empty(numel // self._process_group(kind).size())
        group._reduce_scatter_comm.run(output, zeros, self._process_group(kind), _OPERATIONS[op])


class _CommHook:
    """FSDP's own way of an exchange, with an entry before and after it."""

    def __init__(self, inner: Any, unit: FSDPUnit) -> None:
        self.inner: Any = inner.inner if isinstance(inner, _CommHook) else inner
        self.unit = unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Where it arrives."""
        made: torch.Tensor = self.inner.allocate(size, dtype=dtype, device=device)
        return made


class AllGatherHook(_CommHook):
    """The gathering of a unit's parameters."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """As torch calls it."""
        entry = self.unit.enter(_GATHER)
        work = self.inner(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)
        self.unit.leave(entry)
        return work


class ReduceScatterHook(_CommHook):
    """The reduction of a unit's gradients, of which each rank gets its part."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """As torch calls it."""
        work = self.run(output_tensor, input_tensor, group, op, async_op)
        self.unit.await_total(output_tensor, _operation(op))
        return work

    def run(self, output: torch.Tensor, given: torch.Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Without what follows it."""
        entry = self.unit.enter(_SCATTER, given.numel(), dtype_name(given.dtype), _operation(op))
        work = self.inner(output_tensor=output, input_tensor=given, group=group, op=op, async_op=async_op)
        self.unit.leave(entry)
        return work


class CommHooks:
    """All units of the models that are sharded.

    Args:
        everyone: all ranks.
    """

    def __init__(self, everyone: Collectives) -> None:
        self._everyone = everyone
        self._models: list[tuple[torch.nn.Module, list[FSDPUnit]]] = []

    def open(self, model: torch.nn.Module) -> None:
        """See a model's exchanges from now on; a torch without these hooks shows none."""
        number, opened = len(self._models), []
        names = {id(module): name for name, module in model.named_modules()}
        for count, (module, group) in enumerate(units(model)):
            unit = FSDPUnit(group, names[id(module)] or "the root", (number, count), self._everyone)
            opened.append(unit)
            if hasattr(module, "set_custom_all_gather"):
                module.set_custom_all_gather(AllGatherHook(group._all_gather_comm, unit))
                module.set_custom_reduce_scatter(ReduceScatterHook(group._reduce_scatter_comm, unit))
                if group._is_hsdp:
                    module.set_all_reduce_hook(unit.note_total)
        self._models.append((model, opened))

    def close(self, model: torch.nn.Module | None) -> None:
        """Forget a model, or all; the numbers of the others stay."""
        self._models = [(one, [] if model is None or one is model else units) for one, units in self._models]

    def unit(self, step: Step) -> FSDPUnit:
        """The unit of an exchange."""
        return self._models[step[2]][1][step[3]]


def named(operation: str, unit: str) -> str:
    """A name that fits into the pulse, from its unit's end."""
    room = _ROOM - len(operation) - 4
    return f"{operation} of {unit if len(unit) <= room else '..' + unit[2 - room :]}"


def _operation(op: Any) -> str:
    """SUM, AVG or another one, by name."""
    return next((name for name, known in _OPERATIONS.items() if op == known), str(op))
