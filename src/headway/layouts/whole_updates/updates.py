"""Updates of sharded parameters by optimizers that read whole parameters.

Each parameter has an owner, which holds its optimizer state. In an update, gradients and parameters are gathered to
their owners, bucket by bucket. The owner calls the user's own optimizer, in which whole tensors have replaced the
shards, and sends the updated parameters back. While a bucket is updated, the next one is gathered.

Between updates, the optimizer's groups contain the sharded parameters, so schedulers, clipping and changes of groups
work as usual. On each rank, the optimizer's state contains entries only for the parameters that this rank owns, as
whole tensors.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.dry_run import is_dry_run
from headway.core.strategies.fully_sharded import dtensors
from headway.core.weights.pieces import is_dtensor
from headway.errors import UnsupportedError
from headway.layouts.low_bit import bitsandbytes
from headway.layouts.low_bit.states import keeps_low_bit_state, prepare_low_bit_shards
from headway.layouts.whole_updates import _torch, ownership, states
from headway.layouts.whole_updates.calls import CallCounters, read_numbers, replace_groups, write_numbers
from headway.layouts.whole_updates.kinds import TrialRefused, UpdateKind, find_known_kind, try_kind
from headway.layouts.whole_updates.transfers import Box, TensorPlan, Transfers, list_own_views, make_plan
from headway.log import get_logger

log = get_logger(__name__)

_CLOSURE = (
    "{name} reads whole parameters, which are sharded, and a closure would run the model while they are replaced. Call step() "
    "without a closure, or train with strategy='ddp'"
)

_REFERENCES = (
    "prepare() replaces parameters by shards, and the optimizer would keep the old ones. Let it read parameters from "
    "param_groups"
)


@dataclass
class _UpdatedOptimizer:
    """Data about one optimizer whose updates are made by `WholeUpdates`.

    Attributes:
        kind: Way in which the optimizer updates parameters.
        parameters: Sharded parameters of all groups at the time when the plans were made.
        owners: Rank that owns each parameter.
        plans: Plan of each parameter's transfer to its owner.
        is_dirty: Whether a load might have put states on ranks that do not own the parameters.
        has_gaps: Whether some rank owns no parameter of some group. After updates, the counters of such groups are
            copied to all ranks.
        calls_closure_first: Whether the optimizer's step calls a closure once, before it reads a parameter. True for
            known classes.
    """

    kind: UpdateKind
    calls_closure_first: bool
    parameters: list[torch.Tensor] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    plans: list[TensorPlan] = field(default_factory=list)
    is_dirty: bool = True
    has_gaps: bool = False


@runtime_checkable
class BoxPredictor(Protocol):
    """Interface of the collectives of a dry run, in which there are no other ranks to receive boxes from."""

    def predict_boxes(self, tensors: Sequence[torch.Tensor]) -> Sequence[Sequence[Sequence[Box]]]:
        """Return which parts of each tensor each rank will hold.

        `boxes[rank][index]` lists the boxes of `tensors[index]` on a rank. A box is a rectangular part of the tensor:
        its offsets and its shape.
        """


def choose_kind(optimizer: torch.optim.Optimizer, is_forced: bool = False) -> UpdateKind:
    """Return the way in which an optimizer updates sharded parameters.

    Args:
        optimizer: The user's optimizer.
        is_forced: Whether optimizers that work element by element receive whole parameters, too. Default: False.

    Raises:
        TrialRefused: If the optimizer cannot update sharded parameters.
    """
    kind = find_known_kind(optimizer) or try_kind(optimizer)
    is_fixed = kind is UpdateKind.TOGETHER or keeps_low_bit_state(optimizer) or isinstance(optimizer, torch.optim.LBFGS)
    return UpdateKind.OWNED if is_forced and not is_fixed else kind


def choose_owners(
    kind: UpdateKind, shapes: Sequence[Sequence[int]], num_ranks: int, known: Sequence[int | None] = ()
) -> list[int]:
    """Return the rank that owns each parameter of an optimizer.

    Args:
        kind: `UpdateKind.OWNED` or `UpdateKind.TOGETHER`. With the latter, rank 0 owns all parameters.
        shapes: Shapes of the full parameters.
        num_ranks: Number of ranks.
        known: Owners that were already chosen for the first parameters, and are kept. None for a parameter that has no
            owner. Default: ().
    """
    if kind is UpdateKind.TOGETHER:
        return [0] * len(shapes)
    return ownership.assign_owners(shapes, num_ranks, known)


class WholeUpdates:
    """Updates of sharded parameters for those of a strategy's optimizers that cannot step on DTensors.

    Args:
        everyone: Collectives over all ranks that have shards.
        is_forced: Whether optimizers that work element by element receive whole parameters, too. Default: False.
    """

    def __init__(self, everyone: Collectives, is_forced: bool = False) -> None:
        self._everyone = everyone
        self._is_forced = is_forced
        self._transfers = Transfers(everyone)
        self._adopted: weakref.WeakKeyDictionary[torch.optim.Optimizer, _UpdatedOptimizer] = weakref.WeakKeyDictionary()

    def take_over(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take over the updates of an optimizer if it cannot step on DTensors. Return whether they are taken over.

        Repeated calls return True and change nothing. In a forecast without values, only optimizers that are known to
        work on local shards are taken over.

        Args:
            optimizer: The user's optimizer.

        Raises:
            UnsupportedError: If the optimizer keeps its parameters, or their IDs, outside of its groups and state, or if
                updates of a copy change nothing. Also if it keeps low-bit states and needs norms of whole parameters.
        """
        if optimizer in self._adopted:
            return True
        name, is_low_bit = type(optimizer).__name__, keeps_low_bit_state(optimizer)
        try:
            known = find_known_kind(optimizer)
            if is_dry_run() and known is not UpdateKind.LOCAL:  # a trial needs values, and nothing is sent
                return False
            kind = choose_kind(optimizer, self._is_forced)
        except TrialRefused as error:
            advice = "Choose an optimizer that works element by element" if is_low_bit else _REFERENCES
            raise UnsupportedError(
                f"{name} cannot train a sharded model: {error}. {advice}, or train with strategy='ddp'"
            ) from error
        if kind is UpdateKind.DIRECT:
            return False
        self._adopted[optimizer] = _UpdatedOptimizer(kind, calls_closure_first=known is not None)
        if bitsandbytes.keeps_low_bit_state(optimizer):
            bitsandbytes.register_overrides(optimizer)
        if kind is not UpdateKind.LOCAL:
            optimizer.register_load_state_dict_post_hook(partial(_note_load, weakref.ref(self)))
        if kind is UpdateKind.TOGETHER:
            log.info_once(
                "%s updates each parameter by values of others, so rank 0 gathers all parameters and updates them alone",
                name,
            )
        else:
            log.info_once("%s updates sharded parameters %s", name, kind.value)
        return True

    def keeps_whole_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer's state consists of whole tensors, each on the rank that owns the parameter."""
        found = self._adopted.get(optimizer)
        return found is not None and found.kind is not UpdateKind.LOCAL

    def find_step(self, optimizer: torch.optim.Optimizer, closure: object) -> Callable[[], None] | None:
        """Return a function that updates an optimizer's parameters, or None if the optimizer's own step must be called.

        The result is None if the updates were not taken over. With a closure, it is also None if a trial has shown that
        the optimizer works element by element. Such an optimizer can step on DTensors. If a function is returned, the
        caller runs the closure before it.

        Args:
            optimizer: The user's optimizer.
            closure: Closure that the script passes to the step, or None.

        Raises:
            UnsupportedError: If there is a closure, and the optimizer reads whole parameters and might call the closure
                later than at the start of its step.
        """
        found = self._adopted.get(optimizer)
        is_local = found is not None and found.kind is UpdateKind.LOCAL
        if found is None or (closure is not None and is_local and not found.calls_closure_first):
            return None
        if closure is not None and not found.calls_closure_first:
            raise UnsupportedError(_CLOSURE.format(name=type(optimizer).__name__))
        return partial(self.call_optimizer, optimizer, "step")

    def call_optimizer(self, optimizer: torch.optim.Optimizer, method: str) -> None:
        """Call a method of an optimizer with plain tensors in place of its sharded parameters.

        Args:
            optimizer: The user's optimizer.
            method: Name of the method: "step", "train" or "eval".
        """
        found = self._adopted[optimizer]
        with torch.no_grad():
            if found.kind is UpdateKind.LOCAL:
                self._call_on_shards(optimizer, found, method)
            else:
                self._assign_owners(optimizer, found)
                self._gather_loaded_states(optimizer, found)
                self._call_on_owners(optimizer, found, method)

    # ---------------------------------------------------------------- on local shards

    def _call_on_shards(self, optimizer: torch.optim.Optimizer, found: _UpdatedOptimizer, method: str) -> None:
        """Call a method of an optimizer while its groups and state contain this rank's shards as plain tensors.

        Args:
            optimizer: The user's optimizer.
            found: Data about the optimizer.
            method: Name of the method: "step", "train" or "eval".
        """
        if found.is_dirty:
            found.is_dirty = False
            prepare_low_bit_shards(optimizer)
        is_bitsandbytes = bitsandbytes.keeps_low_bit_state(optimizer)
        plain: list[list[torch.Tensor]] = []
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        empty: list[tuple[torch.Tensor, tuple[int, int]]] = []
        for number, group in enumerate(optimizer.param_groups):
            plain.append([])
            for index, parameter in enumerate(group["params"]):
                plain[-1].append(self._make_plain(parameter) if is_dtensor(parameter) else parameter)
                if is_dtensor(parameter):
                    pairs.append((parameter, plain[-1][-1]))
                    local = plain[-1][-1]
                    if is_bitsandbytes and local.grad is not None and not local.numel():
                        local.grad = None  # kernels cannot run on empty tensors
                        empty.append((local, (number, index)))
        for parameter, local in pairs:
            if parameter in optimizer.state:
                optimizer.state[local] = states.unwrap_local_state(optimizer.state.pop(parameter))
        try:
            with replace_groups(optimizer, plain), torch.enable_grad():
                getattr(optimizer, method)()
                for local, place in empty:
                    bitsandbytes.complete_empty_state(optimizer, local, place)
        finally:
            for parameter, local in pairs:
                shard = dtensors.get_local_shard(parameter)
                if not shard.is_contiguous():  # bitsandbytes assigns a contiguous copy to `data`
                    shard.copy_(local)
                if local in optimizer.state:
                    optimizer.state[parameter] = states.wrap_local_state(optimizer.state.pop(local), parameter)

    def _make_plain(self, parameter: torch.Tensor) -> torch.nn.Parameter:
        """Return this rank's shard and its gradient as a plain parameter that shares their memory."""
        made = torch.nn.Parameter(dtensors.get_local_shard(parameter).detach(), parameter.requires_grad)
        grad = dtensors.complete_gradient(parameter)
        made.grad = None if grad is None else dtensors.get_local_shard(grad).detach()
        return made

    # ---------------------------------------------------------------- by owners

    def _assign_owners(self, optimizer: torch.optim.Optimizer, found: _UpdatedOptimizer) -> None:
        """Assign a rank as owner to each new parameter, and plan the transfers of all parameters.

        Other parameters keep their owner, which has their state. Do nothing if no parameter has been added or removed.
        """
        now = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if len(now) == len(found.parameters) and all(a is b for a, b in zip(now, found.parameters)):
            return
        known = {id(parameter): owner for parameter, owner in zip(found.parameters, found.owners)}
        boxes = self._gather_boxes(now)
        kept = [known.get(id(parameter)) for parameter in now]
        owners = choose_owners(found.kind, [p.shape for p in now], self._everyone.world_size, kept)
        found.plans = [
            make_plan(parameter, owner, [each[number] for each in boxes])
            for number, (parameter, owner) in enumerate(zip(now, owners))
        ]
        found.parameters, found.owners, first = now, owners, 0
        found.has_gaps = False
        for group in optimizer.param_groups:
            count = len(group["params"])
            found.has_gaps |= len(set(owners[first : first + count])) < self._everyone.world_size
            first += count

    def _gather_boxes(self, parameters: Sequence[torch.Tensor]) -> Sequence[Sequence[Sequence[Box]]]:
        """Return each rank's boxes of each parameter, as `boxes[rank][number]`."""
        if isinstance(self._everyone, BoxPredictor):
            return self._everyone.predict_boxes(parameters)
        return self._everyone.gather_objects([list(list_own_views(parameter)) for parameter in parameters])

    def _call_on_owners(self, optimizer: torch.optim.Optimizer, found: _UpdatedOptimizer, method: str) -> None:
        """Gather the parameters to their owners, call the optimizer, and scatter the results, bucket by bucket.

        While the optimizer updates a bucket, the next bucket is gathered and the previous one is scattered.

        Args:
            optimizer: The user's optimizer.
            found: Owners and plans of the optimizer's parameters.
            method: Name of the method to call.
        """
        grads = [dtensors.complete_gradient(parameter) for parameter in found.parameters]
        needs = [grad is not None or method != "step" for grad in grads]
        chosen = [number for number, is_needed in enumerate(needs) if is_needed]
        hooks = any(getattr(optimizer, name, None) for name in _torch.HOOKS)
        is_whole = found.kind is UpdateKind.TOGETHER or hooks
        parameters, owners = [found.parameters[n] for n in chosen], [found.owners[n] for n in chosen]
        limit = ownership.BUCKET_BYTES
        buckets = [chosen] if is_whole else [
            [chosen[n] for n in bucket] for bucket in ownership.assign_buckets(parameters, owners, limit)
        ]  # fmt: skip
        run = _OptimizerUpdate(self._transfers, self._everyone.rank, optimizer, found, grads, method)
        pending = run.start(buckets[0]) if chosen else None
        scattering: Callable[[], None] | None = None
        for number, bucket in enumerate(buckets if chosen else ()):
            following = run.start(buckets[number + 1]) if number + 1 < len(buckets) else None
            assert pending is not None
            finish = run.update(bucket, pending)
            if scattering is not None:
                scattering()
            pending, scattering = following, finish
        if scattering is not None:
            scattering()
        run.raise_first_error()
        if found.has_gaps and chosen and method == "step":
            self._copy_counters(optimizer, found, set(chosen))

    def _gather_loaded_states(self, optimizer: torch.optim.Optimizer, found: _UpdatedOptimizer) -> None:
        """Gather the sharded states of a loaded checkpoint to the ranks that own the parameters.

        The states are removed from all other ranks. Do nothing unless a load might have changed the state.
        """
        if not found.is_dirty:
            return
        rank = self._everyone.rank
        own = [len(states.list_spread(optimizer.state.get(parameter))) for parameter in found.parameters]
        told = self._everyone.gather_objects(own)
        for number, (parameter, plan) in enumerate(zip(found.parameters, found.plans)):
            state = optimizer.state.get(parameter)
            if all(each[number] for each in told):
                whole = iter([self._gather_state(each, plan) for each in states.list_spread(state)])
                if rank == plan.owner:
                    optimizer.state[parameter] = states.map_state(
                        lambda tensor, whole=whole: next(whole) if is_dtensor(tensor) else tensor,  # type: ignore[misc]
                        state,
                    )
            if rank != plan.owner:
                optimizer.state.pop(parameter, None)
        found.is_dirty = False

    def _gather_state(self, value: torch.Tensor, plan: TensorPlan) -> torch.Tensor | None:
        """Gather a sharded state tensor. Return the whole tensor on the owner of its parameter, and None elsewhere."""
        plans = [TensorPlan(plan.shape, value.dtype, plan.owner, plan.boxes, plan.senders)]
        return self._transfers.finish_gather(plans, self._transfers.start_gather(plans, [value]))[0]

    # ---------------------------------------------------------------- checkpoints

    def note_load(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer's state was loaded, if the optimizer's updates were taken over.

        Before the state is used again, it is gathered to the ranks that own the parameters.
        """
        found = self._adopted.get(optimizer)
        if found is not None:
            found.is_dirty = True

    @contextmanager
    def expose_state(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Return a context in which an optimizer's state covers the parameters of all ranks, for a checkpoint.

        States on other ranks are described by empty `ShardPiece` objects. All ranks must enter the context. It does
        nothing for an optimizer that was not taken over, or that works on local shards.

        Args:
            optimizer: Optimizer whose state is saved.
        """
        found = self._adopted.get(optimizer)
        if found is None or found.kind is UpdateKind.LOCAL:
            yield
            return
        with torch.no_grad():
            self._assign_owners(optimizer, found)
            self._gather_loaded_states(optimizer, found)
        rank, before = self._everyone.rank, dict(optimizer.state)
        own = {
            number: states.describe_state(optimizer.state[parameter])
            for number, (parameter, owner) in enumerate(zip(found.parameters, found.owners))
            if owner == rank and parameter in optimizer.state
        }
        told = self._everyone.gather_objects(own)
        shown: dict[Any, Any] = {}
        for number, (parameter, owner) in enumerate(zip(found.parameters, found.owners)):
            if number in told[owner]:
                held = before.get(parameter)
                shown[parameter] = states.make_pieces(told[owner][number], held, owner, rank)
        known = {id(parameter) for parameter in found.parameters}
        rest = {key: value for key, value in before.items() if id(key) not in known}
        try:
            optimizer.state.clear()
            optimizer.state.update({**shown, **rest})
            yield
        finally:
            optimizer.state.clear()
            optimizer.state.update(before)

    def _copy_counters(self, optimizer: torch.optim.Optimizer, found: _UpdatedOptimizer, updated: set[int]) -> None:
        """Copy the numbers in each group, such as step counts, from a rank that has updated a parameter of the group.

        Numbers in the optimizer's attributes are copied from the owner of the first updated parameter.

        Args:
            optimizer: The user's optimizer.
            found: Owners of the optimizer's parameters.
            updated: Indices of the updated parameters.
        """
        own = [read_numbers(group) for group in optimizer.param_groups], read_numbers(vars(optimizer))
        told, first = self._everyone.gather_objects(own), 0
        for number, group in enumerate(optimizer.param_groups):
            places = range(first, first + len(group["params"]))
            owner = next((found.owners[place] for place in places if place in updated), None)
            if owner is not None:
                write_numbers(group, told[owner][0][number])
            first += len(group["params"])
        write_numbers(vars(optimizer), told[found.owners[min(updated)]][1])


class _OptimizerUpdate:
    """One update by one optimizer, bucket by bucket.

    Args:
        transfers: Transfers between shards and owners.
        rank: Rank of this process.
        optimizer: The user's optimizer.
        found: Owners and plans of the optimizer's parameters.
        grads: Gradient of each parameter, or None.
        method: Name of the optimizer's method to call.
    """

    def __init__(
        self,
        transfers: Transfers,
        rank: int,
        optimizer: torch.optim.Optimizer,
        found: _UpdatedOptimizer,
        grads: Sequence[torch.Tensor | None],
        method: str,
    ) -> None:
        self._transfers = transfers
        self._rank = rank
        self._optimizer = optimizer
        self._found = found
        self._grads = grads
        self._method = method
        self._counters: CallCounters | None = None
        self._error: BaseException | None = None

    def _list_transfers(self, bucket: Sequence[int]) -> tuple[list[TensorPlan], list[torch.Tensor]]:
        """Return the plans and this rank's shards for a bucket.

        Both lists contain each parameter, followed by its gradient if it has one.
        """
        plans, shards = [], []
        for number in bucket:
            plan, grad = self._found.plans[number], self._grads[number]
            plans.append(plan)
            shards.append(self._found.parameters[number])
            if grad is not None:
                plans.append(TensorPlan(plan.shape, grad.dtype, plan.owner, plan.boxes, plan.senders))
                shards.append(grad)
        return plans, shards

    def start(self, bucket: Sequence[int]) -> Any:
        """Start to gather the parameters and gradients of a bucket."""
        return self._transfers.start_gather(*self._list_transfers(bucket))

    def update(self, bucket: Sequence[int], pending: Any) -> Callable[[], None]:
        """Call the optimizer for the parameters of a bucket that this rank owns, and start to send them back.

        An error is kept until all transfers have ended, so that other ranks do not wait for this one.

        Args:
            bucket: Indices of the parameters.
            pending: Return value of `start`.

        Returns:
            Function that copies the updated values into this rank's shards.
        """
        plans, _ = self._list_transfers(bucket)
        values = iter(self._transfers.finish_gather(plans, pending))
        whole: dict[int, torch.nn.Parameter | None] = {}
        for number in bucket:
            parameter, value = self._found.parameters[number], next(values)
            grad = next(values) if self._grads[number] is not None else None
            whole[number] = None if value is None else torch.nn.Parameter(value, parameter.requires_grad)
            made = whole[number]
            if made is not None:
                made.grad = grad
        try:
            self._call_optimizer(whole)
        except Exception as error:
            self._error = self._error or error
        parameters = [self._found.parameters[number] for number in bucket]
        chosen = [self._found.plans[number] for number in bucket]
        device = dtensors.get_local_shard(parameters[0]).device
        back = [None if made is None else made.detach() for made in whole.values()]
        sent = self._transfers.start_scatter(chosen, back, device)
        return partial(self._transfers.finish_scatter, chosen, sent, parameters)

    def _call_optimizer(self, whole: dict[int, torch.nn.Parameter | None]) -> None:
        """Call the optimizer's method while its groups and state contain whole parameters instead of shards.

        Args:
            whole: Whole parameters by index; None for those that other ranks own.
        """
        if not any(made is not None for made in whole.values()):
            return
        optimizer, first = self._optimizer, 0
        if self._counters is None:
            self._counters = CallCounters(optimizer)
        else:
            self._counters.rewind()
        groups: list[list[torch.Tensor]] = []
        for group in optimizer.param_groups:
            numbers = range(first, first + len(group["params"]))
            groups.append([made for number in numbers if (made := whole.get(number)) is not None])
            first += len(group["params"])
        pairs = [(self._found.parameters[number], made) for number, made in whole.items() if made is not None]
        for parameter, made in pairs:
            if parameter in optimizer.state:
                optimizer.state[made] = optimizer.state.pop(parameter)
        try:
            with replace_groups(optimizer, groups), torch.enable_grad():
                getattr(optimizer, self._method)()
        finally:
            for parameter, made in pairs:
                if made in optimizer.state:
                    optimizer.state[parameter] = optimizer.state.pop(made)

    def raise_first_error(self) -> None:
        """Raise the first error of this rank's updates, if any. Must be called after all transfers have ended.

        Other ranks go on to their next collective, and fail when this process ends.

        If this rank has updated nothing, its optimizer is marked as stepped, so that torch's schedulers do not warn.
        """
        if self._counters is None and self._method == "step":
            setattr(self._optimizer, _torch.WAS_CALLED, True)
        if self._error is not None:
            raise self._error


def _note_load(updates: "weakref.ref[WholeUpdates]", optimizer: torch.optim.Optimizer) -> None:
    """Record that an optimizer's state was loaded.

    This is a function with a weak reference, because a bound method would keep the strategy alive with the optimizer.
    """
    found = updates()
    if found is not None:
        found.note_load(optimizer)
