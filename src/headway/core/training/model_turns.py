"""Alternating training of several sets of models, such as generator and discriminator, with separate gradients.

A backward inside `accumulate(generator)` trains only the generator. The gradients that it computes for the discriminator,
whose parameters another optimizer holds, are dropped. Two unfinished accumulation windows can share parameters, such as
an encoder that trains in both. The gradients of the window that is not current are then removed from these parameters,
and kept until the next micro-batch of that window, or until clip, step or zero_grad needs them.

An optimizer refers to parameters, but an accumulation window to models. A parameter identifies a model if no other
prepared model has it. Parameters that several models share do not identify any.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from headway.core.training.prepared.objects import iterate_parameters
from headway.core.training.run import Run
from headway.core.training.windows import AccumulationWindow, WindowStash

BACKWARD_AFTER_STEP = (
    "backward() came after step() or zero_grad() in one accumulate() block, whose window has several micro-batches: both wait for "
    "its end, and the gradients of the two losses would be mixed. Give each model a block of its own, `with "
    "accelerator.accumulate(d): ...`, then `with accelerator.accumulate(g): ...` (docs/several_models.md)"
)


@dataclass(frozen=True)
class OtherModels:
    """Models and parameters that do not train in an accumulation window, because they belong to other optimizers.

    Attributes:
        parameters: Parameters that only other optimizers train.
        models: Prepared models that have such parameters.
    """

    parameters: tuple[torch.nn.Parameter, ...] = ()
    models: tuple[torch.nn.Module, ...] = ()


_NONE = OtherModels()


class ModelTurns:
    """Record of which models train in which accumulation window, for loops that train several sets of models in turns.

    The training step uses it only if the run has several accumulation windows or several optimizers.

    Args:
        run: Run of the Accelerator.
    """

    def __init__(self, run: Run) -> None:
        self._windows = run.windows
        self._prepared = run.prepared
        self._strategy = run.strategy
        # Caches, and the counts of prepared objects for which they are valid.
        self._others_by_models: dict[frozenset[int], OtherModels] = {}  # by the IDs of the models that train
        self._model_ids: dict[int, set[int]] = {}  # by the ID of the optimizer that trains the models
        self._cached_counts: Any = None

    def forget_models(self) -> None:
        """Clear the cached lists of models, and of the parameters that each optimizer trains."""
        self._others_by_models = {}
        self._model_ids = {}
        self._cached_counts = None

    # ---------------------------------------------------------------- gradients

    @contextmanager
    def protect_other_models(self, block: AbstractContextManager[object]) -> Iterator[None]:
        """Return a context in which backward does not change the gradients of models that other optimizers train.

        Args:
            block: Context manager to enter inside the returned context.
        """
        parameters = self.find_other_models(self._windows.current.models).parameters
        gradients = self._strategy.stash_gradients(parameters)
        try:
            with block:
                yield
        finally:
            self._strategy.restore_gradients(gradients)

    def restore_window_gradients(self, window: AccumulationWindow) -> None:
        """Restore an accumulation window's gradients in its parameters.

        If other unfinished windows have gradients in some of these parameters, those gradients are first removed, and
        stored for their own windows.
        """
        for other in self._windows.find_pending_windows(window):
            already_stashed = {key for stash in other.stashed_gradients for key in stash.parameter_ids}
            own_ids = {id(p) for p in self._prepared.list_parameters_of(window)}
            shared = [
                p for p in self._prepared.list_parameters_of(other) if id(p) in own_ids and id(p) not in already_stashed
            ]
            if shared:
                stash = WindowStash(frozenset(map(id, shared)), self._strategy.stash_gradients(shared))
                other.stashed_gradients += (stash,)
        for stash in window.stashed_gradients:
            self._strategy.restore_gradients(stash.gradients)
        window.stashed_gradients = ()

    # ---------------------------------------------------------------- models that train together

    def find_window_of_optimizer(self, optimizer: torch.optim.Optimizer) -> AccumulationWindow | None:
        """Return the accumulation window in which an optimizer's models trained last, or None if there is none.

        Return the current window if no model owns any of the optimizer's parameters exclusively. As a side effect,
        restore the window's gradients in its parameters, because the caller is about to use them.

        Args:
            optimizer: torch's own optimizer.
        """
        self._refresh_cache()
        if id(optimizer) not in self._model_ids:
            self._model_ids[id(optimizer)] = self.find_owners(iterate_parameters(optimizer))
        return self._find_window(self._model_ids[id(optimizer)])

    def find_window_of_parameters(self, parameters: Iterable[torch.Tensor]) -> AccumulationWindow | None:
        """Return the accumulation window in which the models of these parameters trained last, or None.

        Return the current window if no model owns any of these parameters exclusively. As a side effect, restore the
        window's gradients in its parameters, because the caller is about to use them.
        """
        return self._find_window(self.find_owners(parameters))

    def _find_window(self, model_ids: set[int]) -> AccumulationWindow | None:
        """Return the accumulation window in which one of these models trained last, with its gradients restored.

        None if none of these models has trained yet.

        Args:
            model_ids: IDs of the models. If empty, return the current window.
        """
        window = self._windows.find_latest_window(model_ids) if model_ids else self._windows.current
        if window is not None:
            self.restore_window_gradients(window)
        return window

    def find_other_models(self, models: Sequence[torch.nn.Module]) -> OtherModels:
        """Return the models and parameters that must get no gradient in an accumulation window of `models`.

        If one optimizer holds parameters of two models, both train together, even if `models` contains only one of them.
        A parameter shared by several models does not have this effect. The result is empty if `models` is empty.
        """
        if not models:
            return _NONE
        self._refresh_cache()
        key = frozenset(map(id, models))
        if key not in self._others_by_models:
            self._others_by_models[key] = self._find_other_models(key)
        return self._others_by_models[key]

    def _refresh_cache(self) -> None:
        """Clear the cached lists if models or optimizers were prepared or released since the lists were computed."""
        prepared = self._prepared
        sizes = [len(group["params"]) for each in prepared.optimizers for group in each.optimizer.param_groups]
        counts = prepared.num_resets, len(prepared.models), sizes
        if counts != self._cached_counts:
            self.forget_models()
            self._cached_counts = counts

    def find_owners(self, parameters: Iterable[torch.Tensor]) -> set[int]:
        """Return the IDs of the models that own at least one of these parameters exclusively."""
        models_by_parameter: dict[int, list[int]] = {}  # IDs of models by the ID of the parameter
        for model_id, own in self._prepared.parameters.items():
            for p in own:
                models_by_parameter.setdefault(id(p), []).append(model_id)
        owners = set()
        for parameter in parameters:
            model_ids = models_by_parameter.get(id(parameter), [])
            if len(model_ids) == 1:
                owners.add(model_ids[0])
        return owners

    def _find_other_models(self, model_ids: frozenset[int]) -> OtherModels:
        """Return the models and parameters that must get no gradient while the models with these IDs train.

        This is `find_other_models` without its cache.
        """
        prepared = self._prepared
        # For each optimizer, its parameters and the IDs of the models that it trains.
        parameters_by_optimizer = [list(iterate_parameters(each.optimizer)) for each in prepared.optimizers]
        models_by_optimizer = [self.find_owners(parameters) for parameters in parameters_by_optimizer]
        together = _expand_by_optimizers(model_ids, models_by_optimizer)
        own_ids = {id(p) for model_id in together for p in prepared.parameters.get(model_id, ())}
        others_by_id: dict[int, torch.nn.Parameter] = {}
        for parameters, optimizer_models in zip(parameters_by_optimizer, models_by_optimizer):
            if not together.isdisjoint(optimizer_models):
                own_ids.update(map(id, parameters))
            elif optimizer_models:
                others_by_id.update((id(p), p) for p in parameters)
        other_parameters = {key: p for key, p in others_by_id.items() if key not in own_ids}
        other_models = [
            model for model in prepared.models if any(id(p) in other_parameters for p in prepared.parameters[id(model)])
        ]
        return OtherModels(tuple(other_parameters.values()), tuple(other_models))


def _expand_by_optimizers(model_ids: Iterable[int], models_by_optimizer: Sequence[set[int]]) -> set[int]:
    """Return the IDs of all models that train together with the given ones, and of these models themselves.

    Models that share an optimizer train together. So do models that share one with such a model, and so on.

    Args:
        model_ids: IDs of the models.
        models_by_optimizer: For each optimizer, the IDs of the models that it trains.
    """
    together = set(model_ids)
    previous_size = -1
    while len(together) != previous_size:
        previous_size = len(together)
        for optimizer_models in models_by_optimizer:
            if not together.isdisjoint(optimizer_models):
                together |= optimizer_models
    return together
