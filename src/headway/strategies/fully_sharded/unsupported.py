"""What sharded parameters cannot do: refused by the names of parameters, optimizers and hooks, instead of lost without a word.

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
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from headway.common.text import listed
from headway.errors import PrepareError, StateError, UnsupportedError
from headway.log import get_logger
from headway.strategies.fully_sharded import dtensors
from headway.strategies.fully_sharded import fsdp_state as gathered
from headway.weights.pieces import is_dtensor

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
        if assigned:
            self._refuse(
                assigned,
                "were given other values by `parameter.data = tensor` after prepare(), which changes nothing in a sharded "
                "parameter. Change them in place (parameter.data.mul_(0.5), torch.nn.init ...), or assign before prepare()",
            )
        records = list(gathered.records(self._model))
        names = {id(part): name for name, part, _, _ in self._parts}
        hooked = [record for record in records if record.sharded_param._backward_hooks]
        if hooked:
            self._refuse(
                _named(hooked, names),
                "have hooks made by Tensor.register_hook, which autograd never runs there: it sees gathered copies. Use "
                f"{_AFTERWARDS}",
            )
        written = [record for record in records if getattr(gathered.whole_parameter(record), "_version", 0)]
        if written:
            self._refuse(
                _named(written, names),
                "were changed in place while they were gathered (in a forward, or after one under torch.no_grad()): only copies "
                "were. Change them after a backward or before the first forward",
            )
        changed = [name for name, old, state in self._old if (p := old()) is not None and _state(p) != state]
        if changed:
            self._refuse(
                changed,
                "were used or changed through tensors from before prepare(), in whose place stand others now. Take them from the "
                "prepared model: model.parameters(), model.layer.weight",
            )

    def _refuse(self, names: list[str], what: str) -> None:
        raise StateError(f"{_several(names)} of {self._name}, which is sharded, {what}")


def _memory(tensor: torch.Tensor) -> int:
    """Which memory it is bound to, also where it has none to show (DTensors, fake tensors); `.data = other` binds another."""
    found: int = tensor.untyped_storage()._cdata
    return found


def _state(tensor: torch.Tensor) -> tuple[int, int, bool]:
    """What changes when it is written to, or when a loss is computed from it."""
    return _memory(tensor), tensor._version, tensor.grad is None


def _named(records: Iterable[object], names: dict[int, str]) -> list[str]:
    return [names.get(id(record.sharded_param), "?") for record in records]  # type: ignore[attr-defined]


def _several(names: list[str]) -> str:
    count = "1 parameter" if len(names) == 1 else f"{len(names)} parameters"
    return f"{count} ({listed(names)})"


_ELEMENTWISE = "use torch.optim.AdamW(fused=True) or another optimizer that works element by element"
_WHOLE_MATRICES = f"it needs whole matrices for means over rows and columns; {_ELEMENTWISE}"
_UNSHARDED_STATE = f"its state cannot be sharded; use torchao's AdamW8bit, or {_ELEMENTWISE}"
_REFUSED = {
    ("torch", "Adafactor"): _WHOLE_MATRICES,
    ("transformers", "Adafactor"): _WHOLE_MATRICES,
    ("torch", "Rprop"): f"it changes elements of gradients by a mask, which shards do not support; {_ELEMENTWISE}",
    ("torch", "SparseAdam"): f"it needs sparse gradients, and shards have none; {_ELEMENTWISE}",
    **dict.fromkeys((("torchao", name) for name in ("AdamW4bit", "Adam4bit", "AdamWFp8", "AdamFp8")), _UNSHARDED_STATE),
    (
        "torchao",
        "CPUOffloadOptimizer",
    ): "it is for one process; use ShardingOptions(cpu_offload=True) with torch's AdamW",
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


log = get_logger(__name__)


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
