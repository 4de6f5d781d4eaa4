"""Hooks and writes that a sharded layout would lose without a word: they are refused, by the parameters' names.

`prepare()` puts DTensors in the place of parameters, and FSDP shows gathered copies of them in and after a forward. What is
hung onto or written to a tensor that does not count is nowhere in the result.
"""

import weakref
from collections.abc import Iterable, Sequence

import torch

from headway.common.text import listed
from headway.errors import PrepareError, StateError
from headway.strategies.fully_sharded import fsdp_state as gathered
from headway.strategies.fully_sharded import gradients
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
            (name, p, _memory(p), id(gradients.local(p))) for name, p in model.named_parameters() if is_dtensor(p)
        ]

    def check(self) -> None:
        """An update is about to be made.

        Raises:
            StateError: something was hung onto, or written to, a tensor that does not count.
        """
        assigned = [
            name
            for name, part, memory, held in self._parts
            if _memory(part) != memory and id(gradients.local(part)) == held
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
