"""Updates of sharded parameters by optimizers that read full parameters.

Each parameter has an owner: the rank that updates it and keeps its optimizer state. In an update, gradients and
parameters are gathered to their owners, bucket by bucket. The owner calls the user's own optimizer, in which full
tensors have replaced the shards, and sends the updated parameters back. While a bucket is updated, the next one is
gathered.

Between updates, the optimizer's groups contain the sharded parameters, so schedulers, clipping and changes of groups
work as usual. On each rank, the optimizer's state contains entries only for the parameters that this rank owns, as
full tensors.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.dry_run import is_dry_run
from headway.core.strategies.fully_sharded import dtensors
from headway.core.strategies.fully_sharded.full_parameter_updates import FullParameterUpdates
from headway.core.weights.pieces import is_dtensor
from headway.errors import UnsupportedError
from headway.layouts.low_bit import bitsandbytes
from headway.layouts.low_bit.states import keeps_low_bit_state, prepare_low_bit_shards
from headway.layouts.whole_updates import _torch, ownership, states
from headway.layouts.whole_updates.calls import CallCounters, read_numbers, replace_groups, write_numbers
from headway.layouts.whole_updates.kinds import TrialRefused, UpdateKind, find_known_kind
from headway.layouts.whole_updates.transfers import (
    Box,
    PendingTransfer,
    TensorPlan,
    Transfers,
    list_local_views,
    make_plan,
)
from headway.layouts.whole_updates.trial import try_kind
from headway.log import get_logger

log = get_logger(__name__)

_CLOSURE_MESSAGE = (
    "{name} reads full parameters, which are sharded, and a closure would run the model while they are replaced. Call step() "
    "without a closure, or train with strategy='ddp'"
)

_REFERENCES_ADVICE = (
    "prepare() replaces parameters by shards, and the optimizer would keep the old ones. Let it read parameters from "
    "param_groups"
)


@dataclass
class _OptimizerRecord:
    """Data about one optimizer whose updates are made by `WholeUpdates`.

    Attributes:
        kind: Way in which the optimizer updates parameters.
        calls_closure_first: Whether the optimizer's step calls a closure once, before it reads a parameter. True for
            known classes.
        parameters: Sharded parameters of all groups, in order, at the time when the plans were made. Empty before the
            first update, and for the kind `LOCAL`.
        owners: Rank that owns each parameter, in the order of `parameters`.
        plans: Plan of each parameter's transfer to its owner, in the order of `parameters`.
        has_new_state: Whether the optimizer's state is new, or might have been loaded since the last update. A loaded
            state can be on ranks that do not own the parameters.
        copies_counters: Whether counters of groups are copied to all ranks after an update, because some rank owns no
            parameter of some group.
    """

    kind: UpdateKind
    calls_closure_first: bool
    parameters: list[torch.Tensor] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    plans: list[TensorPlan] = field(default_factory=list)
    has_new_state: bool = True
    copies_counters: bool = False


class _OptimizerNumbers(NamedTuple):
    """Numbers of an optimizer on one rank that its step can change, such as step counts.

    Attributes:
        by_group: Numbers in each parameter group, by the name of the option.
        attributes: Numbers in the optimizer's attributes, by name.
    """

    by_group: list[dict[str, Any]]
    attributes: dict[str, Any]


@runtime_checkable
class BoxPredictor(Protocol):
    """Interface of the collectives of a dry run, in which there are no other ranks to receive boxes from.

    A box is a rectangular part of a tensor: its offsets and its shape.
    """

    def predict_boxes(self, tensors: Sequence[torch.Tensor]) -> Sequence[Sequence[Sequence[Box]]]:
        """Return the boxes of each tensor that each rank will hold.

        `boxes[rank][index]` of the result lists the boxes of `tensors[index]` on a rank.
        """


def choose_kind(optimizer: torch.optim.Optimizer, is_forced: bool = False) -> UpdateKind:
    """Return the way in which an optimizer updates sharded parameters.

    Args:
        optimizer: The user's optimizer.
        is_forced: Whether optimizers that work element by element receive full parameters, too. Default: False.

    Raises:
        TrialRefused: If the optimizer cannot update sharded parameters.
    """
    kind = find_known_kind(optimizer) or try_kind(optimizer)
    # L-BFGS flattens all parameters into one vector, and low-bit states are made for shards.
    is_fixed = kind is UpdateKind.TOGETHER or keeps_low_bit_state(optimizer) or isinstance(optimizer, torch.optim.LBFGS)
    return UpdateKind.OWNED if is_forced and not is_fixed else kind


def choose_owners(
    kind: UpdateKind, shapes: Sequence[Sequence[int]], num_ranks: int, known_owners: Sequence[int | None] = ()
) -> list[int]:
    """Return the rank that owns each parameter of an optimizer.

    Args:
        kind: `UpdateKind.OWNED` or `UpdateKind.TOGETHER`. With the latter, rank 0 owns all parameters.
        shapes: Shapes of the full parameters.
        num_ranks: Number of ranks.
        known_owners: Owners that were already chosen for the first parameters, and are kept. None for a parameter that
            has no owner. Default: ().
    """
    if kind is UpdateKind.TOGETHER:
        return [0] * len(shapes)
    return ownership.assign_owners(shapes, num_ranks, known_owners)


class WholeUpdates(FullParameterUpdates):
    """Updates of sharded parameters for those of a strategy's optimizers that cannot step on DTensors.

    Args:
        everyone: Collectives over all ranks that have shards.
        is_forced: Whether optimizers that work element by element receive full parameters, too. Default: False.
    """

    def __init__(self, everyone: Collectives, is_forced: bool = False) -> None:
        self._everyone = everyone
        self._is_forced = is_forced
        self._transfers = Transfers(everyone)
        self._records: weakref.WeakKeyDictionary[torch.optim.Optimizer, _OptimizerRecord] = weakref.WeakKeyDictionary()

    def take_over(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take over the updates of an optimizer if it cannot step on DTensors. Return whether they are taken over.

        Repeated calls return True and change nothing. In a forecast without values, only optimizers that are known to
        work on local shards are taken over.

        Args:
            optimizer: The user's optimizer.

        Raises:
            UnsupportedError: If the optimizer keeps its parameters, or their IDs, outside of its groups and state, or if
                updates of a copy change nothing. Also if it keeps low-bit states and needs norms of full parameters.
        """
        if optimizer in self._records:
            return True
        name, is_low_bit = type(optimizer).__name__, keeps_low_bit_state(optimizer)
        try:
            known_kind = find_known_kind(optimizer)
            if is_dry_run() and known_kind is not UpdateKind.LOCAL:  # a trial needs values, and nothing is sent
                return False
            kind = choose_kind(optimizer, self._is_forced)
        except TrialRefused as error:
            advice = "Choose an optimizer that works element by element" if is_low_bit else _REFERENCES_ADVICE
            raise UnsupportedError(
                f"{name} cannot train a sharded model: {error}. {advice}, or train with strategy='ddp'"
            ) from error
        if kind is UpdateKind.DIRECT:
            return False
        self._records[optimizer] = _OptimizerRecord(kind, calls_closure_first=known_kind is not None)
        if bitsandbytes.keeps_low_bit_state(optimizer):
            bitsandbytes.register_overrides(optimizer)
        if kind is not UpdateKind.LOCAL:
            optimizer.register_load_state_dict_post_hook(partial(_record_load, weakref.ref(self)))
        if kind is UpdateKind.TOGETHER:
            log.info_once(
                "%s updates each parameter by values of others, so rank 0 gathers all parameters and updates them alone",
                name,
            )
        else:
            log.info_once("%s updates sharded parameters %s", name, kind.value)
        return True

    def keeps_whole_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer's state consists of full tensors, each on the rank that owns the parameter."""
        record = self._records.get(optimizer)
        return record is not None and record.kind is not UpdateKind.LOCAL

    def find_step(self, optimizer: torch.optim.Optimizer, closure: object) -> Callable[[], None] | None:
        """Return a function that updates an optimizer's parameters, or None if the optimizer's own step must be called.

        The result is None if the updates were not taken over. With a closure, it is also None if a trial has shown that
        the optimizer works element by element. Such an optimizer can step on DTensors. If a function is returned, the
        caller runs the closure before it.

        Args:
            optimizer: The user's optimizer.
            closure: Closure that the script passes to the step, or None.

        Raises:
            UnsupportedError: If there is a closure, and the optimizer reads full parameters and might call the closure
                later than at the start of its step.
        """
        record = self._records.get(optimizer)
        is_local = record is not None and record.kind is UpdateKind.LOCAL
        if record is None or (closure is not None and is_local and not record.calls_closure_first):
            return None
        if closure is not None and not record.calls_closure_first:
            raise UnsupportedError(_CLOSURE_MESSAGE.format(name=type(optimizer).__name__))
        return partial(self.call_optimizer, optimizer, "step")

    def call_optimizer(self, optimizer: torch.optim.Optimizer, method: str) -> None:
        """Call a method of an optimizer with plain tensors in place of its sharded parameters.

        Args:
            optimizer: The user's optimizer.
            method: Name of the method: "step", "train" or "eval".
        """
        record = self._records[optimizer]
        with torch.no_grad():
            if record.kind is UpdateKind.LOCAL:
                self._call_on_shards(optimizer, record, method)
            else:
                self._assign_owners(optimizer, record)
                self._gather_loaded_states(optimizer, record)
                self._call_on_owners(optimizer, record, method)

    # ---------------------------------------------------------------- on local shards

    def _call_on_shards(self, optimizer: torch.optim.Optimizer, record: _OptimizerRecord, method: str) -> None:
        """Call a method of an optimizer while its groups and state contain this rank's shards as plain tensors.

        Args:
            optimizer: The user's optimizer.
            record: Data about the optimizer.
            method: Name of the method: "step", "train" or "eval".
        """
        if record.has_new_state:
            record.has_new_state = False
            prepare_low_bit_shards(optimizer)
        is_bitsandbytes = bitsandbytes.keeps_low_bit_state(optimizer)
        groups: list[list[torch.Tensor]] = []
        pairs: list[tuple[torch.Tensor, torch.nn.Parameter]] = []  # (DTensor, plain parameter with its shard)
        # Pairs of (plain parameter without elements, position in the optimizer).
        empty_shards: list[tuple[torch.nn.Parameter, bitsandbytes.GroupPosition]] = []
        for group_index, group in enumerate(optimizer.param_groups):
            groups.append([])
            for index, parameter in enumerate(group["params"]):
                if not is_dtensor(parameter):
                    groups[-1].append(parameter)
                    continue
                plain = self._make_plain_parameter(parameter)
                groups[-1].append(plain)
                pairs.append((parameter, plain))
                if is_bitsandbytes and plain.grad is not None and not plain.numel():
                    plain.grad = None  # bitsandbytes' kernels cannot run on empty tensors
                    empty_shards.append((plain, bitsandbytes.GroupPosition(group_index, index)))
        for parameter, plain in pairs:
            if parameter in optimizer.state:
                optimizer.state[plain] = states.unwrap_local_state(optimizer.state.pop(parameter))
        try:
            with replace_groups(optimizer, groups), torch.enable_grad():
                getattr(optimizer, method)()
                for plain, position in empty_shards:
                    bitsandbytes.count_empty_step(optimizer, plain, position)
        finally:
            for parameter, plain in pairs:
                shard = dtensors.get_local_shard(parameter)
                if not shard.is_contiguous():  # bitsandbytes assigns a contiguous copy to `data`
                    shard.copy_(plain)
                if plain in optimizer.state:
                    optimizer.state[parameter] = states.wrap_local_state(optimizer.state.pop(plain), parameter)

    def _make_plain_parameter(self, parameter: torch.Tensor) -> torch.nn.Parameter:
        """Return this rank's shard of a DTensor and of its gradient as a plain parameter that shares their memory."""
        plain = torch.nn.Parameter(dtensors.get_local_shard(parameter).detach(), parameter.requires_grad)
        grad = dtensors.complete_gradient(parameter)
        plain.grad = None if grad is None else dtensors.get_local_shard(grad).detach()
        return plain

    # ---------------------------------------------------------------- by owners

    def _assign_owners(self, optimizer: torch.optim.Optimizer, record: _OptimizerRecord) -> None:
        """Assign a rank as owner to each new parameter, and plan the transfers of all parameters.

        Other parameters keep their owner, which has their state. Do nothing if the parameters are those of the last
        call. All ranks must call this method.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if len(parameters) == len(record.parameters) and all(a is b for a, b in zip(parameters, record.parameters)):
            return
        owner_by_id = {id(parameter): owner for parameter, owner in zip(record.parameters, record.owners)}
        known_owners = [owner_by_id.get(id(parameter)) for parameter in parameters]
        owners = choose_owners(record.kind, [p.shape for p in parameters], self._everyone.world_size, known_owners)
        boxes = self._gather_boxes(parameters)
        record.plans = [
            make_plan(parameter, owner, [boxes_of_rank[index] for boxes_of_rank in boxes])
            for index, (parameter, owner) in enumerate(zip(parameters, owners))
        ]
        record.parameters, record.owners = parameters, owners
        record.copies_counters = any(
            len({owners[index] for index in indices}) < self._everyone.world_size
            for indices in _list_group_indices(optimizer)
        )

    def _gather_boxes(self, parameters: Sequence[torch.Tensor]) -> Sequence[Sequence[Sequence[Box]]]:
        """Return each rank's boxes of each parameter, as `boxes[rank][index of the parameter]`."""
        if isinstance(self._everyone, BoxPredictor):
            return self._everyone.predict_boxes(parameters)
        return self._everyone.gather_objects([list(list_local_views(parameter)) for parameter in parameters])

    def _call_on_owners(self, optimizer: torch.optim.Optimizer, record: _OptimizerRecord, method: str) -> None:
        """Gather the parameters to their owners, call the optimizer, and scatter the results, bucket by bucket.

        While the optimizer updates a bucket, the next bucket is gathered and the previous one is scattered. Parameters
        without a gradient are left out of a step. An optimizer with step hooks updates all parameters in one call, so
        that the hooks run once.

        Args:
            optimizer: The user's optimizer.
            record: Owners and plans of the optimizer's parameters.
            method: Name of the method to call.
        """
        grads = [dtensors.complete_gradient(parameter) for parameter in record.parameters]
        updated = [index for index, grad in enumerate(grads) if grad is not None or method != "step"]
        buckets = self._choose_buckets(optimizer, record, updated)
        update = _OptimizerUpdate(self._transfers, self._everyone.rank, optimizer, record, grads, method)
        gather = update.start_gather(buckets[0]) if buckets else None
        finish_previous: Callable[[], None] | None = None
        for number, bucket in enumerate(buckets):
            assert gather is not None
            next_gather = update.start_gather(buckets[number + 1]) if number + 1 < len(buckets) else None
            finish_bucket = update.update_bucket(bucket, gather)
            if finish_previous is not None:
                finish_previous()
            gather, finish_previous = next_gather, finish_bucket
        if finish_previous is not None:
            finish_previous()
        update.raise_first_error()
        if record.copies_counters and updated and method == "step":
            self._copy_counters(optimizer, record, set(updated))

    def _choose_buckets(
        self, optimizer: torch.optim.Optimizer, record: _OptimizerRecord, updated: list[int]
    ) -> list[list[int]]:
        """Return the indices of the parameters in each bucket of an update. Buckets are not empty.

        Args:
            optimizer: The user's optimizer.
            record: Owners of the optimizer's parameters.
            updated: Indices of the parameters to update.
        """
        if not updated:
            return []
        if record.kind is UpdateKind.TOGETHER or any(getattr(optimizer, name, None) for name in _torch.STEP_HOOKS):
            return [updated]
        parameters = [record.parameters[index] for index in updated]
        owners = [record.owners[index] for index in updated]
        buckets = ownership.assign_buckets(parameters, owners, ownership.BUCKET_BYTES)
        return [[updated[position] for position in bucket] for bucket in buckets]

    def _gather_loaded_states(self, optimizer: torch.optim.Optimizer, record: _OptimizerRecord) -> None:
        """Gather the sharded states of a loaded checkpoint to the ranks that own the parameters.

        The states are removed from all other ranks. Do nothing unless a load might have changed the state.
        """
        if not record.has_new_state:
            return
        rank = self._everyone.rank
        num_dtensors = [len(states.list_dtensors(optimizer.state.get(parameter))) for parameter in record.parameters]
        num_dtensors_by_rank = self._everyone.gather_objects(num_dtensors)
        for index, (parameter, plan) in enumerate(zip(record.parameters, record.plans)):
            state = optimizer.state.get(parameter)
            # If a rank has no DTensors of a state, the state is not sharded: its owner already has full tensors.
            if all(nums[index] for nums in num_dtensors_by_rank):
                full_tensors = iter([self._gather_state(tensor, plan) for tensor in states.list_dtensors(state)])
                if rank == plan.owner:
                    optimizer.state[parameter] = states.map_state(partial(_replace_dtensor, full_tensors), state)
            if rank != plan.owner:
                optimizer.state.pop(parameter, None)
        record.has_new_state = False

    def _gather_state(self, value: torch.Tensor, plan: TensorPlan) -> torch.Tensor | None:
        """Gather a sharded state tensor. Return the full tensor on the owner of its parameter, and None elsewhere.

        Args:
            value: State tensor, sharded like its parameter.
            plan: Plan of the parameter's transfer to its owner.
        """
        plans = [TensorPlan(plan.shape, value.dtype, plan.owner, plan.boxes, plan.senders)]
        return self._transfers.finish_gather(plans, self._transfers.start_gather(plans, [value]))[0]

    # ---------------------------------------------------------------- checkpoints

    def record_load(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer's state was loaded, if the optimizer's updates were taken over.

        Before the state is used again, it is gathered to the ranks that own the parameters.
        """
        record = self._records.get(optimizer)
        if record is not None:
            record.has_new_state = True

    @contextmanager
    def expose_state(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Return a context in which an optimizer's state covers the parameters of all ranks, for a checkpoint.

        States on other ranks are described by empty `ShardPiece` objects. All ranks must enter the context. On exit,
        the optimizer has its own state again. The context does nothing for an optimizer that was not taken over, or that
        works on local shards.

        Args:
            optimizer: Optimizer whose state is saved.
        """
        record = self._records.get(optimizer)
        if record is None or record.kind is UpdateKind.LOCAL:
            yield
            return
        with torch.no_grad():
            self._assign_owners(optimizer, record)
            self._gather_loaded_states(optimizer, record)
        rank, original_state = self._everyone.rank, dict(optimizer.state)
        descriptions = {
            index: states.describe_state(optimizer.state[parameter])
            for index, (parameter, owner) in enumerate(zip(record.parameters, record.owners))
            if owner == rank and parameter in optimizer.state
        }
        descriptions_by_rank = self._everyone.gather_objects(descriptions)
        exposed_state: dict[Any, Any] = {}
        for index, (parameter, owner) in enumerate(zip(record.parameters, record.owners)):
            if index in descriptions_by_rank[owner]:
                description = descriptions_by_rank[owner][index]
                exposed_state[parameter] = states.make_pieces(description, original_state.get(parameter), owner, rank)
        # Some optimizers keep entries for other keys than parameters. They are saved as they are.
        parameter_ids = {id(parameter) for parameter in record.parameters}
        exposed_state |= {key: value for key, value in original_state.items() if id(key) not in parameter_ids}
        try:
            optimizer.state.clear()
            optimizer.state.update(exposed_state)
            yield
        finally:
            optimizer.state.clear()
            optimizer.state.update(original_state)

    def _copy_counters(self, optimizer: torch.optim.Optimizer, record: _OptimizerRecord, updated: set[int]) -> None:
        """Copy the numbers in each group, such as step counts, from a rank that has updated a parameter of the group.

        Numbers in the optimizer's attributes are copied from the owner of the first updated parameter.

        Args:
            optimizer: The user's optimizer.
            record: Owners of the optimizer's parameters.
            updated: Indices of the updated parameters.
        """
        numbers = _OptimizerNumbers(
            [read_numbers(group) for group in optimizer.param_groups], read_numbers(vars(optimizer))
        )
        numbers_by_rank: list[_OptimizerNumbers] = self._everyone.gather_objects(numbers)
        for group_index, indices in enumerate(_list_group_indices(optimizer)):
            owner = next((record.owners[index] for index in indices if index in updated), None)
            if owner is not None:
                write_numbers(optimizer.param_groups[group_index], numbers_by_rank[owner].by_group[group_index])
        first_owner = record.owners[min(updated)]
        write_numbers(vars(optimizer), numbers_by_rank[first_owner].attributes)


class _OptimizerUpdate:
    """One update by one optimizer, bucket by bucket. A bucket is given as the indices of its parameters.

    Args:
        transfers: Transfers between shards and owners.
        rank: Rank of this process.
        optimizer: The user's optimizer.
        record: Owners and plans of the optimizer's parameters.
        grads: Gradient of each parameter, or None.
        method: Name of the optimizer's method to call.
    """

    def __init__(
        self,
        transfers: Transfers,
        rank: int,
        optimizer: torch.optim.Optimizer,
        record: _OptimizerRecord,
        grads: Sequence[torch.Tensor | None],
        method: str,
    ) -> None:
        self._transfers = transfers
        self._rank = rank
        self._optimizer = optimizer
        self._record = record
        self._grads = grads
        self._method = method
        self._counters: CallCounters | None = None
        self._error: BaseException | None = None

    def _list_transfers(self, bucket: Sequence[int]) -> tuple[list[TensorPlan], list[torch.Tensor]]:
        """Return the plans and this rank's shards for a bucket.

        Both lists contain each parameter, followed by its gradient if it has one.
        """
        plans, shards = [], []
        for index in bucket:
            plan, grad = self._record.plans[index], self._grads[index]
            plans.append(plan)
            shards.append(self._record.parameters[index])
            if grad is not None:
                plans.append(TensorPlan(plan.shape, grad.dtype, plan.owner, plan.boxes, plan.senders))
                shards.append(grad)
        return plans, shards

    def start_gather(self, bucket: Sequence[int]) -> PendingTransfer:
        """Start to gather the parameters and gradients of a bucket to their owners."""
        return self._transfers.start_gather(*self._list_transfers(bucket))

    def update_bucket(self, bucket: Sequence[int], gather: PendingTransfer) -> Callable[[], None]:
        """Call the optimizer for the parameters of a bucket that this rank owns, and start to send them back.

        An error is kept until all transfers have ended, so that other ranks do not wait for this one.

        Args:
            bucket: Indices of the parameters.
            gather: Return value of `start_gather`.

        Returns:
            Function that waits for the updated values and copies them into this rank's shards.
        """
        plans, _ = self._list_transfers(bucket)
        values = iter(self._transfers.finish_gather(plans, gather))
        full_parameters: dict[int, torch.nn.Parameter] = {}  # those that this rank owns, by index
        for index in bucket:
            value = next(values)
            grad = next(values) if self._grads[index] is not None else None
            if value is not None:
                full_parameters[index] = torch.nn.Parameter(value, self._record.parameters[index].requires_grad)
                full_parameters[index].grad = grad
        try:
            self._call_optimizer(full_parameters)
        except Exception as error:
            self._error = self._error or error
        shards = [self._record.parameters[index] for index in bucket]
        plans = [self._record.plans[index] for index in bucket]
        device = dtensors.get_local_shard(shards[0]).device
        results = [full_parameters[index].detach() if index in full_parameters else None for index in bucket]
        scatter = self._transfers.start_scatter(plans, results, device)
        return partial(self._transfers.finish_scatter, plans, scatter, shards)

    def _call_optimizer(self, full_parameters: dict[int, torch.nn.Parameter]) -> None:
        """Call the optimizer's method while its groups and state contain full parameters instead of shards.

        Do nothing if this rank owns none of the parameters.

        Args:
            full_parameters: Full parameters that this rank owns, by index.
        """
        if not full_parameters:
            return
        optimizer = self._optimizer
        if self._counters is None:
            self._counters = CallCounters(optimizer)
        else:
            self._counters.rewind()
        groups = [
            [full_parameters[index] for index in indices if index in full_parameters]
            for indices in _list_group_indices(optimizer)
        ]
        pairs = [(self._record.parameters[index], full_parameter) for index, full_parameter in full_parameters.items()]
        for parameter, full_parameter in pairs:
            if parameter in optimizer.state:
                optimizer.state[full_parameter] = optimizer.state.pop(parameter)
        try:
            with replace_groups(optimizer, groups), torch.enable_grad():
                getattr(optimizer, self._method)()
        finally:
            for parameter, full_parameter in pairs:
                if full_parameter in optimizer.state:
                    optimizer.state[parameter] = optimizer.state.pop(full_parameter)

    def raise_first_error(self) -> None:
        """Raise the first error of this rank's updates, if any. Must be called after all transfers have ended.

        Other ranks go on to their next collective, and fail when this process ends.

        If this rank owned no parameter of the step, its optimizer is marked as stepped, so that torch's schedulers do
        not warn.
        """
        if self._counters is None and self._method == "step":
            setattr(self._optimizer, _torch.STEP_MARK, True)
        if self._error is not None:
            raise self._error


def _record_load(updates_reference: "weakref.ref[WholeUpdates]", optimizer: torch.optim.Optimizer) -> None:
    """Record that an optimizer's state was loaded.

    This is a function with a weak reference, because a bound method would keep the strategy alive with the optimizer.
    """
    updates = updates_reference()
    if updates is not None:
        updates.record_load(optimizer)


def _list_group_indices(optimizer: torch.optim.Optimizer) -> list[range]:
    """Return, for each parameter group, the indices of its parameters in the list of the parameters of all groups."""
    ranges, start = [], 0
    for group in optimizer.param_groups:
        ranges.append(range(start, start + len(group["params"])))
        start += len(group["params"])
    return ranges


def _replace_dtensor(full_tensors: Iterator[torch.Tensor | None], tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the next full tensor in place of a DTensor, and other tensors unchanged.

    None if the next full tensor is None, as it is on ranks that do not own the state.
    """
    return next(full_tensors) if is_dtensor(tensor) else tensor
