"""Alternating training of several sets of models, such as generator and discriminator, with separate gradients.

A backward inside `accumulate(g)` trains only g. Gradients that it computes for models of other optimizers are dropped.
Two unfinished accumulation windows can share parameters. The gradients of the window that is not current are then
removed from these parameters, and kept until the next micro-batch of that window.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from headway.core.training.prepared.objects import iterate_parameters
from headway.core.training.run import Run
from headway.core.training.windows import AccumulationWindow

TWO_TURNS = (
    "backward() came after step() or zero_grad() in one accumulate() block, whose window has several micro-batches: both wait for "
    "its end, and the gradients of the two losses would be mixed. Give each model a block of its own, `with "
    "accelerator.accumulate(d): ...`, then `with accelerator.accumulate(g): ...` (docs/several_models.md)"
)


@dataclass(frozen=True)
class OtherModels:
    """Models and parameters that do not train in an accumulation window.

    Attributes:
        parameters: Parameters that other optimizers train.
        models: Models of these parameters.
    """

    parameters: tuple[torch.nn.Parameter, ...] = ()
    models: tuple[torch.nn.Module, ...] = ()


_NONE = OtherModels()


class ModelTurns:
    """Bookkeeping of which models train in which accumulation window.

    Used by loops that train several sets of models in turns.

    Args:
        run: Run of the Accelerator.
    """

    def __init__(self, run: Run) -> None:
        self._windows = run.windows
        self._prepared = run.prepared
        self._strategy = run.strategy
        self._others: dict[frozenset[int], OtherModels] = {}
        self._models: dict[int, set[int]] = {}
        self._known: Any = None

    def forget_models(self) -> None:
        """Clear the cached lists of models, and of the parameters that each optimizer trains."""
        self._others = {}
        self._models = {}
        self._known = None

    # ---------------------------------------------------------------- gradients

    @contextmanager
    def spare_others(self, block: AbstractContextManager[object]) -> Iterator[None]:
        """Return a context in which backward leaves no gradients in models that another window trains.

        Args:
            block: Context manager to enter inside the returned context.
        """
        others = self.find_others(self._windows.current.models).parameters
        kept = self._strategy.stash_gradients(others)
        try:
            with block:
                yield
        finally:
            self._strategy.restore_gradients(kept)

    def put_in_place(self, window: AccumulationWindow) -> None:
        """Restore an accumulation window's gradients in its parameters.

        If other unfinished windows have gradients in some of these parameters, those gradients are first removed, and
        stored for their own windows.
        """
        for other in self._windows.find_waiting(window):
            away = {key for ids, _ in other.set_aside for key in ids}
            own = {id(p) for p in self._prepared.list_parameters_of(window)} - away
            shared = [p for p in self._prepared.list_parameters_of(other) if id(p) in own]
            if shared:
                other.set_aside += ((frozenset(map(id, shared)), self._strategy.stash_gradients(shared)),)
        for _, kept in window.set_aside:
            self._strategy.restore_gradients(kept)
        window.set_aside = ()

    # ---------------------------------------------------------------- models that train together

    def find_window_of(self, optimizer: torch.optim.Optimizer) -> AccumulationWindow | None:
        """Return the accumulation window in which an optimizer's models trained last, or None if there is none.

        Return the current window if no model owns any of the optimizer's parameters exclusively. Gradients that were
        removed from the window's parameters are restored.
        """
        self._refresh_cache()
        if id(optimizer) not in self._models:
            self._models[id(optimizer)] = self.find_models_of(iterate_parameters(optimizer))
        return self._find_window(self._models[id(optimizer)])

    def find_window_with(self, parameters: Iterable[torch.Tensor]) -> AccumulationWindow | None:
        """Return the accumulation window in which the models of these parameters trained last, or None.

        Return the current window if no model owns any of these parameters exclusively. Gradients that were removed
        from the window's parameters are restored.
        """
        return self._find_window(self.find_models_of(parameters))

    def _find_window(self, models: set[int]) -> AccumulationWindow | None:
        window = self._windows.find_latest(models) if models else self._windows.current
        if window is not None:
            self.put_in_place(window)
        return window

    def find_others(self, models: Sequence[torch.nn.Module]) -> OtherModels:
        """Return the models and parameters that must get no gradient in an accumulation window of `models`.

        If one optimizer holds parameters of two models, both train together. A parameter shared by several models
        does not have this effect.
        """
        if not models:
            return _NONE
        self._refresh_cache()
        key = frozenset(map(id, models))
        if key not in self._others:
            self._others[key] = self._find_others(key)
        return self._others[key]

    def _refresh_cache(self) -> None:
        """Clear the cached lists if models or optimizers were prepared or released since the lists were computed."""
        prepared = self._prepared
        sizes = [len(group["params"]) for each in prepared.optimizers for group in each.optimizer.param_groups]
        now = prepared.num_resets, len(prepared.models), sizes
        if now != self._known:
            self.forget_models()
            self._known = now

    def find_models_of(self, parameters: Iterable[torch.Tensor]) -> set[int]:
        """Return the IDs of the models that own at least one of these parameters exclusively."""
        owners: dict[int, list[int]] = {}
        for model, own in self._prepared.parameters.items():
            for p in own:
                owners.setdefault(id(p), []).append(model)
        found = (owners.get(id(p), ()) for p in parameters)
        return {models[0] for models in found if len(models) == 1}

    def _find_others(self, models: frozenset[int]) -> OtherModels:
        held = [{id(p): p for p in iterate_parameters(each.optimizer)} for each in self._prepared.optimizers]
        links = [self.find_models_of(each.values()) for each in held]
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
