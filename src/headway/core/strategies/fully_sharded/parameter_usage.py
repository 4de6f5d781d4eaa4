"""Record of which sharded parameters took part in the losses of an update, on any rank.

FSDP reduces zeros for a parameter that one rank did not use, so that all ranks send messages of the same size. A
parameter that no rank used must have no gradient, as on one process. Otherwise weight decay and momentum would change
it. So at the first update, ranks exchange which parameters they used. They repeat this at each update if some rank did
not use a parameter in the first one, or if the options require it.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.fully_sharded import fsdp_state
from headway.errors import StateError

_NUM_NAMES = 3
"""Number of unused parameters that an error names for each rank."""


@dataclass
class _WindowUsage:
    """Parameters that the losses of the current accumulation window have used. Hooks on the parameters change it.

    Attributes:
        used: IDs of FSDP's records of the used parameters.
        has_backward: Whether a parameter got a gradient in a backward of this window.
    """

    used: set[int] = field(default_factory=set)
    has_backward: bool = False


class UsageSnapshot(NamedTuple):
    """Copy of a `ParameterUsage` record, from which it is restored when a batch is run again.

    Attributes:
        is_complete: Whether the next backward starts a new record.
        exchanges_usage: Whether ranks exchange which parameters they used at each update.
        has_agreed: Whether ranks have exchanged this at least once.
        used: IDs of FSDP's records of the parameters that the window's losses have used so far.
        has_backward: Whether a parameter got a gradient in a backward of the window.
    """

    is_complete: bool
    exchanges_usage: bool
    has_agreed: bool
    used: frozenset[int]
    has_backward: bool


class ParameterUsage:
    """Record of which parameters of a sharded model took part in the losses on this rank since the last update.

    Args:
        model: Sharded model.
        everyone: Collectives over all ranks.
        can_change: Whether the set of used parameters can change between updates, as `find_unused_parameters` declares.
    """

    def __init__(self, model: torch.nn.Module, everyone: Collectives, can_change: bool) -> None:
        self._records = list(fsdp_state.iterate_records(model))
        self._groups_without_dtypes = fsdp_state.list_groups(model)
        self._everyone = everyone
        self._exchanges_usage = can_change  # whether ranks exchange which parameters they used at each update
        self._has_agreed = False
        self._is_complete = True  # whether the next backward starts a new record
        self._hooks: dict[int, Any] = {}
        self._window = _WindowUsage()  # always the same object, because hooks refer to it

    def watch_backward(self) -> None:
        """Before a backward, start to record which gathered parameters get a gradient in it."""
        self._groups_without_dtypes = fsdp_state.set_missing_gradient_dtypes(self._groups_without_dtypes)
        if self._is_complete:
            # Gradients left by earlier backwards of this update show that these parameters were used.
            self._window.used = {id(record) for record in self._records if record.sharded_param.grad is not None}
            self._window.has_backward = False
            self._is_complete = False
        if len(self._hooks) < len(self._records):
            for record in self._records:
                gathered = fsdp_state.get_gathered_parameter(record)
                if id(record) not in self._hooks and gathered is not None and gathered.requires_grad:
                    hook = partial(_record_use, self._window, id(record))
                    handle = gathered.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                    self._hooks[id(record)] = handle

    def expect_backward(self) -> None:
        """Prepare for a further backward of the accumulation window.

        The parameters that this backward uses are added to the record.
        """
        self._is_complete = False

    def discard_window(self) -> None:
        """Discard the record of an accumulation window that failed."""
        self._is_complete = True

    def snapshot(self) -> "UsageSnapshot":
        """Return a copy of the record, which `restore` needs to undo a batch."""
        return UsageSnapshot(
            is_complete=self._is_complete,
            exchanges_usage=self._exchanges_usage,
            has_agreed=self._has_agreed,
            used=frozenset(self._window.used),
            has_backward=self._window.has_backward,
        )

    def restore(self, snapshot: "UsageSnapshot") -> None:
        """Restore the record of used parameters from a snapshot, which can be restored several times."""
        self._is_complete = snapshot.is_complete
        self._exchanges_usage = snapshot.exchanges_usage
        self._has_agreed = snapshot.has_agreed
        self._window.used = set(snapshot.used)
        self._window.has_backward = snapshot.has_backward

    def remove_unused_gradients(self) -> None:
        """Remove the gradients of parameters that no rank used, after the last backward of an accumulation window.

        If every rank used every parameter at the first update, later updates must do so, too. Otherwise, or with
        `find_unused_parameters`, ranks exchange which parameters they used at each update. Do nothing if no parameter
        got a gradient on this rank.

        Raises:
            StateError: On all ranks, if a rank did not use a parameter, although every rank used every parameter at the
                first update. Never with `find_unused_parameters`.
        """
        if self._is_complete or not self._window.has_backward:
            return
        self._is_complete = True
        trainable = [record for record in self._records if record.sharded_param.requires_grad]
        if self._exchanges_usage or not self._has_agreed:
            self._agree_on_usage(trainable)
        else:
            self._check_all_used(trainable)

    def _agree_on_usage(self, trainable: list[Any]) -> None:
        """Exchange which parameters each rank used, and remove the gradients of those that no rank used.

        Args:
            trainable: FSDP's records of the trainable parameters.
        """
        flags = torch.tensor([float(id(record) in self._window.used) for record in trainable])
        self._everyone.sum_in_place([flags])
        counts = flags.tolist()
        for record, count in zip(trainable, counts):
            if not count:
                record.sharded_param.grad = None
        # If every rank used every parameter, assume that this does not change.
        self._exchanges_usage = self._exchanges_usage or any(count < self._everyone.world_size for count in counts)
        self._has_agreed = True

    def _check_all_used(self, trainable: list[Any]) -> None:
        """Raise an error if a rank did not use all parameters. This is a collective.

        Args:
            trainable: FSDP's records of the trainable parameters.

        Raises:
            StateError: On all ranks, because the others would wait for a failed rank in the next collective.
        """
        unused = [record for record in trainable if id(record) not in self._window.used]
        counts = [int(row[0]) for row in self._everyone.gather_numbers([float(len(unused))])]
        if not any(counts):
            return
        names_by_rank = self._everyone.gather_objects([str(record._param_fqn) for record in unused[:_NUM_NAMES]])
        descriptions = "; ".join(
            f"{count} on rank {rank} ({', '.join(names)}{', ...' if count > len(names) else ''})"
            for rank, (count, names) in enumerate(zip(counts, names_by_rank))
            if count
        )
        raise StateError(
            f"parameters that took part in the first update's losses took no part in this one's: {descriptions}. "
            "If the parameters in use change, pass kwargs_handlers=[ShardingOptions(find_unused_parameters=True)]"
        )

    def release(self) -> None:
        """Remove all hooks from the model."""
        for hook in self._hooks.values():
            hook.remove()


def _record_use(window: _WindowUsage, key: int, parameter: torch.Tensor) -> None:
    """Record that a parameter got a gradient, which shows that the loss used it. A hook on the parameter calls this.

    It is a plain function, because hooks live as long as parameters and must not keep other objects alive.

    Args:
        window: Record of the current accumulation window.
        key: ID of FSDP's record of the parameter.
        parameter: The gathered parameter.
    """
    window.used.add(key)
    window.has_backward = True
