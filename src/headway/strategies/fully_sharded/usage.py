"""Which sharded parameters took part in an update's losses, on any rank.

FSDP sums zeros for a parameter that one rank did not use, so that all ranks send the same. But one that nobody used must have no
gradient, as on one process, or weight decay and momentum would act on it. So ranks tell each other what they used: at the first
update; and at each one, where the first has shown parameters that some rank did not use, or the options say that they change.
"""

from typing import Any

import torch

from headway.errors import StateError
from headway.runtime.collectives.checked import Collectives
from headway.strategies.fully_sharded import fsdp_state as gathered

_NUM_NAMES = 3


class ParameterUsage:
    """What the losses since a model's last update have used, here.

    Args:
        model: sharded.
        everyone: all ranks.
        changes: from update to update, other parameters take part.
    """

    def __init__(self, model: torch.nn.Module, everyone: Collectives, changes: bool) -> None:
        self._records = list(gathered.records(model))
        self._everyone = everyone
        self._asks = changes
        self._is_known = False
        self._is_settled = True
        self._hooks: dict[int, Any] = {}
        self._used: set[int] = set()
        self._fired: list[int] = []

    def watch(self) -> None:
        """Before a backward: note which whole parameters get a gradient."""
        if self._is_settled:
            # What an earlier backward has left (several, before one update) was used.
            self._used.clear()
            self._used.update(id(r) for r in self._records if r.sharded_param.grad is not None)
            self._fired.clear()
            self._is_settled = False
        if len(self._hooks) < len(self._records):
            for record in self._records:
                whole = gathered.whole_parameter(record)
                if id(record) not in self._hooks and whole is not None and whole.requires_grad:
                    note = _Note(self._used, self._fired, id(record))
                    self._hooks[id(record)] = whole.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def go_on(self) -> None:
        """A further backward belongs to the same window."""
        self._is_settled = False

    def forget(self) -> None:
        """The window failed: what it has used says nothing."""
        self._is_settled = True

    def snapshot(self) -> Any:
        """What `restore` needs to take a batch back."""
        return self._is_settled, self._asks, self._is_known, set(self._used), list(self._fired)

    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot, which stays good."""
        self._is_settled, self._asks, self._is_known, used, fired = snapshot
        self._used.clear()
        self._used.update(used)
        self._fired[:] = fired

    def settle(self) -> None:
        """After a window's last backward: parameters that no rank used have no gradient.

        Raises:
            StateError: others than at the first update took no part, on some rank; all ranks raise it.
        """
        if self._is_settled or not self._fired:
            return
        self._is_settled = True
        found = [record for record in self._records if record.sharded_param.requires_grad]
        if self._asks or not self._is_known:
            self._agree(found)
            return
        unused = [record for record in found if id(record) not in self._used]
        # What one rank alone sees is said on all of them: the others would wait for it in the next exchange.
        counts = [int(row[0]) for row in self._everyone.gather_numbers([float(len(unused))])]
        if any(counts):
            self._raise(unused, counts)

    def _raise(self, unused: list[Any], counts: list[int]) -> None:
        told = self._everyone.gather_objects([str(record._param_fqn) for record in unused[:_NUM_NAMES]])
        said = "; ".join(
            f"{count} on rank {rank} ({', '.join(names)}{', ...' if count > len(names) else ''})"
            for rank, (count, names) in enumerate(zip(counts, told))
            if count
        )
        raise StateError(
            f"parameters that took part in the first update's losses took no part in this one's: {said}. If the parameters in use "
            "change, pass kwargs_handlers=[ShardingOptions(find_unused_parameters=True)]"
        )

    def _agree(self, found: list[Any]) -> None:
        flags = torch.tensor([float(id(record) in self._used) for record in found])
        self._everyone.sum_in_place([flags])
        counts = flags.tolist()
        for record, count in zip(found, counts):
            if not count:
                record.sharded_param.grad = None
        # Where every rank used everything, it will go on doing so.
        self._asks = self._asks or any(count < self._everyone.world_size for count in counts)
        self._is_known = True

    def release(self) -> None:
        """Look no longer."""
        for hook in self._hooks.values():
            hook.remove()


class _Note:
    __slots__ = ("fired", "key", "used")

    def __init__(self, used: set[int], fired: list[int], key: int) -> None:
        self.used, self.fired, self.key = used, fired, key

    def __call__(self, parameter: torch.Tensor) -> None:
        self.used.add(self.key)
        if not self.fired:
            self.fired.append(self.key)
