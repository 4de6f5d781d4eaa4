"""Several sets of models that learn in turn, a generator and a discriminator say: each window's gradients are its own.

A backward inside `accumulate(g)` belongs to g. What its loss leaves in models that other optimizers train, which it passed through,
is dropped; and where two windows in progress train some of the same parameters, the one that waits has its gradients set aside.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from headway.training.hooks import RunParts
from headway.training.prepared.objects import held_by
from headway.training.windows import AccumulationWindow

TWO_TURNS = (
    "backward() came after step() or zero_grad() in one accumulate() block, whose window has several micro-batches: both wait for "
    "its end, and the gradients of the two losses would be mixed. Give each model a block of its own, `with "
    "accelerator.accumulate(d): ...`, then `with accelerator.accumulate(g): ...` (docs/several_models.md)"
)


@dataclass(frozen=True)
class OtherModels:
    """What does not learn in a window.

    Attributes:
        parameters: those that other optimizers train.
        models: theirs.
    """

    parameters: tuple[torch.nn.Parameter, ...] = ()
    models: tuple[torch.nn.Module, ...] = ()


_NONE = OtherModels()


class ModelTurns:
    """Whose turn it is.

    Args:
        parts: of the run.
    """

    def __init__(self, parts: RunParts) -> None:
        self._windows, self._prepared, self._strategy = parts.windows, parts.prepared, parts.strategy
        self._others: dict[frozenset[int], OtherModels] = {}
        self._models: dict[int, set[int]] = {}
        self._known: Any = None

    def forget(self) -> None:
        """Let go of what is known of models and optimizers."""
        self._others, self._models, self._known = {}, {}, None

    # ---------------------------------------------------------------- gradients

    @contextmanager
    def spare_others(self, block: AbstractContextManager[object]) -> Iterator[None]:
        """A block, within another one, whose backward leaves nothing in models that do not learn in the current window."""
        others = self.others(self._windows.current.models).parameters
        kept = self._strategy.set_aside(others)
        try:
            with block:
                yield
        finally:
            self._strategy.put_back(kept)

    def take(self, window: AccumulationWindow) -> None:
        """Of windows that train some of the same parameters, let this one have its gradients in the tensors."""
        for other in self._windows.waiting_beside(window):
            away = {key for ids, _ in other.set_aside for key in ids}
            own = {id(p) for p in self._prepared.parameters_of(window)} - away
            shared = [p for p in self._prepared.parameters_of(other) if id(p) in own]
            if shared:
                other.set_aside += ((frozenset(map(id, shared)), self._strategy.set_aside(shared)),)
        for _, kept in window.set_aside:
            self._strategy.put_back(kept)
        window.set_aside = ()

    # ---------------------------------------------------------------- who learns with whom

    def window_of(self, optimizer: torch.optim.Optimizer) -> AccumulationWindow | None:
        """The window in which the models of an optimizer have learned last, at its turn now; None: in none."""
        self._look()
        if id(optimizer) not in self._models:
            self._models[id(optimizer)] = self.models_of(held_by(optimizer))
        return self._window(self._models[id(optimizer)])

    def window_with(self, parameters: Iterable[torch.Tensor]) -> AccumulationWindow | None:
        """The same for the models of these parameters."""
        return self._window(self.models_of(parameters))

    def _window(self, models: set[int]) -> AccumulationWindow | None:
        window = self._windows.latest(models) if models else self._windows.current
        if window is not None:
            self.take(window)
        return window

    def others(self, models: Sequence[torch.nn.Module]) -> OtherModels:
        """What does not learn in a window of these models: a backward in it must leave no gradient there.

        An optimizer that holds parameters of two models lets them learn together; a parameter that several models share does not.
        """
        if not models:
            return _NONE
        self._look()
        key = frozenset(map(id, models))
        if key not in self._others:
            self._others[key] = self._find_others(key)
        return self._others[key]

    def _look(self) -> None:
        """Is what is known still so?"""
        prepared = self._prepared
        sizes = [len(group["params"]) for each in prepared.optimizers for group in each.optimizer.param_groups]
        now = prepared.num_resets, len(prepared.models), sizes
        if now != self._known:
            self.forget()
            self._known = now

    def models_of(self, parameters: Iterable[torch.Tensor]) -> set[int]:
        """The ids of the models that some of these parameters belong to, and to no other model."""
        owners: dict[int, list[int]] = {}
        for model, own in self._prepared.parameters.items():
            for p in own:
                owners.setdefault(id(p), []).append(model)
        found = (owners.get(id(p), ()) for p in parameters)
        return {models[0] for models in found if len(models) == 1}

    def _find_others(self, models: frozenset[int]) -> OtherModels:
        held = [{id(p): p for p in held_by(each.optimizer)} for each in self._prepared.optimizers]
        links = [self.models_of(each.values()) for each in held]
        together, size = set(models), -1
        while len(together) != size:
            size = len(together)
            together.update(*(link for link in links if not together.isdisjoint(link)))
        own = {id(p) for model in together for p in self._prepared.parameters.get(model, ())}
        own.update(*(each for each, link in zip(held, links) if not together.isdisjoint(link)))
        apart = {id(p): p for each, link in zip(held, links) if link for p in each.values() if id(p) not in own}
        theirs = [
            model
            for model in self._prepared.models
            if any(id(p) in apart for p in self._prepared.parameters[id(model)])
        ]
        return OtherModels(tuple(apart.values()), tuple(theirs))
