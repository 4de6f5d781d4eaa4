"""What sharded parameters cannot do, and what is watched while they train: refused by names, instead of lost without a word.

Hooks and writes that a sharded layout would lose without a word: they are refused, by the parameters' names.

`prepare()` puts DTensors in the place of parameters, and FSDP shows gathered copies of them in and after a forward. What is
hung onto or written to a tensor that does not count is nowhere in the result.

Optimizers that do not work on sharded parameters, by name.

Most can: what they compute is computed element by element. Those below take means over rows and columns of a whole matrix, keep
their state in blocks of memory that know no DTensor, or step by an operation that torch has for whole tensors only; torch's own
errors in the first step say none of this. `tests/distributed/test_sharded_optimizers.py` runs those that work.

A backward through a sharded model through which another one has gone before: a gradient penalty's.

`torch.autograd.grad(..., create_graph=True)` runs FSDP's hooks, which free what was gathered. Of the graph that it makes, some nodes
have no hooks and read whole parameters, and others have the hooks that free a unit and reduce its gradients. On an accelerator,
whose nodes autograd runs in a thread of their own, those come before the unit's last gradient. So the backward that follows begins
with all units gathered, and reduces when it has ended.

Which sharded parameters took part in an update's losses, on any rank.

FSDP sums zeros for a parameter that one rank did not use, so that all ranks send the same. But one that nobody used must have no
gradient, as on one process, or weight decay and momentum would act on it. So ranks tell each other what they used: at the first
update; and at each one, where the first has shown parameters that some rank did not use, or the options say that they change.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from headway.common.text import listed
from headway.errors import PrepareError, StateError, UnsupportedError
from headway.log import get_logger
from headway.runtime.collectives.checked import Collectives
from headway.strategies.fully_sharded import dtensors
from headway.strategies.fully_sharded import fsdp_state as gathered
from headway.weights.pieces import is_dtensor

log = get_logger(__name__)

_AFTERWARDS = (
    "parameter.register_post_accumulate_grad_hook(fn) after prepare(), which finds this rank's part of the reduced gradient in "
    "parameter.grad"
)

Named = tuple[str, torch.Tensor]


def check_hooks(model: torch.nn.Module) -> None:
    """No parameter that is about to be replaced has a hook on its gradient.

    Raises:
        PrepareError: some have.
    """
    hooked = [name for name, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if hooked:
        raise PrepareError(
            f"{_several(hooked)} of {type(model).__name__} have hooks on their gradients, made before prepare(). Sharding "
            f"replaces these parameters, and the hooks would never run. Use {_AFTERWARDS}"
        )


class LostWrites:
    """Looks after the parameters of one model, those that were replaced and those that stand for them.

    Args:
        model: sharded, and at rest.
        replaced: the parameters from before, by name.
        name: what messages call the model.
    """

    def __init__(self, model: torch.nn.Module, replaced: Sequence[Named], name: str) -> None:
        self._model = model
        self._name = name
        self._old = [(name, weakref.ref(p), _state(p)) for name, p in replaced]
        self._parts = [
            (name, p, _memory(p), id(dtensors.local(p))) for name, p in model.named_parameters() if is_dtensor(p)
        ]

    def check(self) -> None:
        """An update is about to be made.

        Raises:
            StateError: something was hung onto, or written to, a tensor that does not count.
        """
        assigned = [
            name
            for name, part, memory, held in self._parts
            if _memory(part) != memory and id(dtensors.local(part)) == held
        ]
        self._refuse(
            assigned,
            "were given other values by `parameter.data = tensor` after prepare(), which changes nothing in a sharded "
            "parameter. Change them in place (parameter.data.mul_(0.5), torch.nn.init ...), or assign before prepare()",
        )
        records = list(gathered.records(self._model))
        names = {id(part): name for name, part, _, _ in self._parts}
        hooked = [record for record in records if record.sharded_param._backward_hooks]
        self._refuse(
            [names.get(id(record.sharded_param), "?") for record in hooked],
            f"have hooks made by Tensor.register_hook, which autograd never runs there: it sees gathered copies. Use {_AFTERWARDS}",
        )
        written = [record for record in records if getattr(gathered.whole_parameter(record), "_version", 0)]
        self._refuse(
            [names.get(id(record.sharded_param), "?") for record in written],
            "were changed in place while they were gathered (in a forward, or after one under torch.no_grad()): only copies "
            "were. Change them after a backward or before the first forward",
        )
        changed = [name for name, old, state in self._old if (p := old()) is not None and _state(p) != state]
        self._refuse(
            changed,
            "were used or changed through tensors from before prepare(), in whose place stand others now. Take them from the "
            "prepared model: model.parameters(), model.layer.weight",
        )

    def _refuse(self, names: list[str], what: str) -> None:
        if names:
            raise StateError(f"{_several(names)} of {self._name}, which is sharded, {what}")


def _memory(tensor: torch.Tensor) -> int:
    """Which memory it is bound to, also where it has none to show (DTensors, fake tensors); `.data = other` binds another."""
    found: int = tensor.untyped_storage()._cdata
    return found


def _state(tensor: torch.Tensor) -> tuple[int, int, bool]:
    """What changes when it is written to, or when a loss is computed from it."""
    return _memory(tensor), tensor._version, tensor.grad is None


def _several(names: list[str]) -> str:
    count = "1 parameter" if len(names) == 1 else f"{len(names)} parameters"
    return f"{count} ({listed(names)})"


_ELEMENTWISE = "use torch.optim.AdamW(fused=True) or another optimizer that works element by element"
_WHOLE_MATRICES = f"it needs whole matrices for means over rows and columns; {_ELEMENTWISE}"
_UNSHARDED_STATE = f"its state cannot be sharded; use torchao's AdamW8bit, or {_ELEMENTWISE}"
_ONE_PROCESS = "it is for one process; use ShardingOptions(cpu_offload=True) with torch's AdamW"
_REFUSED = {
    ("torch", "Adafactor"): _WHOLE_MATRICES,
    ("transformers", "Adafactor"): _WHOLE_MATRICES,
    ("torch", "Rprop"): f"it changes elements of gradients by a mask, which shards do not support; {_ELEMENTWISE}",
    ("torch", "SparseAdam"): f"it needs sparse gradients, and shards have none; {_ELEMENTWISE}",
    **dict.fromkeys((("torchao", name) for name in ("AdamW4bit", "Adam4bit", "AdamWFp8", "AdamFp8")), _UNSHARDED_STATE),
    ("torchao", "CPUOffloadOptimizer"): _ONE_PROCESS,
}
_NEVER_FUSED = ("SGD", "Adagrad")
"""Those whose fused step torch has for whole tensors only; Adam's and AdamW's know DTensors."""


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Can it step on parts?

    Raises:
        UnsupportedError: it cannot.
    """
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    for kind in type(optimizer).__mro__:
        package = kind.__module__.partition(".")[0]
        reason = _REFUSED.get((package, kind.__name__))
        if package == "bitsandbytes":
            reason = f"bitsandbytes does not support DTensor; use torchao's AdamW8bit, or {_ELEMENTWISE}"
        if (package, reason) == ("torch", None) and kind.__name__ in _NEVER_FUSED and is_fused:
            reason = (
                f"torch's fused step of {kind.__name__} does not support DTensor; use {kind.__name__}(foreach=True)"
            )
        if reason is not None:
            raise UnsupportedError(f"{type(optimizer).__name__} cannot train a sharded model: {reason}")


class SecondOrder:
    """Of one model.

    Args:
        model: sharded.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._has_graph = False
        self._hook = model.register_forward_hook(self._note)

    def _note(self, module: Any, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for each in tree_leaves(output):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    each.register_hook(self._look)  # type: ignore[no-untyped-call]

    def _look(self, grad: torch.Tensor) -> None:
        """A backward goes through the model: does it make a graph?"""
        self._has_graph |= torch.is_grad_enabled()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A backward of the loop's."""
        if not self._has_graph:
            yield
            return
        log.info_once(
            "a backward has gone through %s before its loss's: all of it is gathered", type(self._model).__name__
        )
        try:
            with gathered.kept_whole(self._model):
                yield
        finally:
            self._has_graph = False

    def release(self) -> None:
        """Look no longer."""
        self._hook.remove()


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
                    note = partial(_note, self._used, self._fired, id(record))
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
        if not any(counts):
            return
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


def _note(used: set[int], fired: list[int], key: int, parameter: torch.Tensor) -> None:
    """A gradient has come. No method: hooks live as long as parameters, and must not hold the rest."""
    used.add(key)
    if not fired:
        fired.append(key)
