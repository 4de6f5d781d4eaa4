"""Notices training that bypasses the prepared objects, which looks right and is not.

An optimizer's first step is looked at once, through torch's own hook for steps; every step must not fall into a window
in progress, which is a few attribute checks. Nothing here asks other ranks. What cannot be told apart from a legitimate
use is said once, as a warning; `logging.getLogger("headway.training.checks.bypass").setLevel("ERROR")` silences this file.

::

    what steps                                          where             what follows
    any optimizer, inside a window of its parameters    everywhere        StateError
    an optimizer that is not prepared, its model is     sharded since     StateError: it holds what was replaced
                                                        fp16              StateError
                                                        several ranks     a warning: no checkpoint holds its state
    an optimizer of parameters in no prepared model     several ranks     a warning: weights drift apart
    any, on batches of a DataLoader that is not         several ranks     a warning: every rank reads everything
    prepared; gather_for_metrics of such batches
"""

import gc
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils.data import RandomSampler, SequentialSampler, Subset, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from headway.errors import StateError
from headway.log import get_logger
from headway.runtime import process
from headway.training.prepared.objects import held_by
from headway.training.prepared.optimizer import StepWatch
from headway.training.prepared.registry import AcceleratorRegistration, AcceleratorRegistry, ids_in
from headway.training.step import TrainingStep

log = get_logger(__name__)

_SILENCE = f'logging.getLogger("{__name__}").setLevel("ERROR")'
_WHOLE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that know nothing of ranks; one of another class may."""
_MOST_LOOKS = 4
"""How often the process's objects are gone through for each Accelerator: some scripts have an optimizer per parameter."""


class BypassDetector:
    """Watches the optimizers of this process on behalf of all its Accelerators; hangs on the process runtime."""

    def __init__(self) -> None:
        self._neighbours = process.current().scope.own(AcceleratorRegistry)
        self._num_looks = 0
        self._watch = StepWatch(self._neighbours, self._judge)

    def join(self, step: TrainingStep) -> AcceleratorRegistration:
        """An Accelerator with this step is made, and is known as long as it holds what is returned."""
        self._num_looks = 0
        return self._neighbours.join(step)

    # ---------------------------------------------------------------- optimizers

    def _judge(self, optimizer: torch.optim.Optimizer) -> None:
        """The first step of an optimizer.

        Raises:
            StateError: on parameters that were replaced, or on gradients that are scaled.
        """
        name, parameters = type(optimizer).__name__, list(held_by(optimizer))
        preparer, steps = self._neighbours.preparer_of(optimizer), self._neighbours.newest_first()
        stale = [p for p in parameters if any(step.strategy.current(p) is not p for step in steps)]
        if preparer is None and stale:
            raise StateError(
                f"{name} is not prepared, and {len(stale)} of its {len(parameters)} parameters were replaced when prepare() sharded "
                "their model: its step changes nothing. Pass it to accelerator.prepare() together with the model, and call step() on "
                "what prepare() returned"
            )
        owners = [step for step in steps if not ids_in(step, parameters).isdisjoint(step.prepared.ids())]
        for owner in owners:
            if owner is not preparer and _sees_scaled(optimizer, owner):
                raise StateError(
                    f"{name} stepped on gradients that are multiplied by fp16's loss scale. Prepare it with the Accelerator that has "
                    "prepared its model, and call step() on what prepare() returned"
                )
        num_ranks = steps[-1].strategy.everyone.world_size if steps else 1
        if num_ranks == 1 or any(map(is_fake, parameters)):  # a forecast's optimizer trains nothing
            return
        self.look_for_loader(steps[-1])
        if preparer is not None:
            return
        if owners:
            log.warning_once(
                "%s is not prepared, but its model is: its updates are not counted, checkpoints lack its state, and it does not wait "
                "for accumulation windows. Prepare it, or silence this with %s",
                name,
                _SILENCE,
            )
        elif _may_drift(steps) and not _is_reduced_elsewhere(optimizer):
            log.warning_once(
                "%s updates parameters of a model that is not prepared: each of the %d processes learns from its own gradients, and "
                "their weights drift apart. Pass model and optimizer to accelerator.prepare(). If you mean that (or "
                "average gradients yourself), silence this with %s",
                name,
                num_ranks,
                _SILENCE,
            )

    # ---------------------------------------------------------------- loaders

    def look_for_loader(self, step: TrainingStep) -> None:
        """Warn where the batch in hand of this Accelerator can only come from a DataLoader that is not prepared."""
        count = step.strategy.data_shard.count
        if count == 1 or step.windows.loader is not None or self._num_looks >= _MOST_LOOKS:
            return
        self._num_looks += 1
        found = next((obj for obj in gc.get_objects() if _reads_everything(obj, count)), None)
        if found is not None:
            log.warning_once(
                "batches come from a DataLoader of %s that is not prepared: each of the %d processes reads all of its %d samples, "
                "so every sample is trained on and gathered %d times. Pass the loader to accelerator.prepare(). If each process "
                "has data of its own, silence this with %s",
                type(found._dataset).__name__,
                count,
                len(found._dataset),
                count,
                _SILENCE,
            )


def _may_drift(steps: list[TrainingStep]) -> bool:
    """Is no model prepared at all, or did accelerator.backward run for this step?"""
    is_nothing_prepared = not any(step.prepared.parameters or step.prepared.num_resets for step in steps)
    return is_nothing_prepared or any(step.windows.is_unfinished or step.windows.is_in_hand for step in steps)


def _sees_scaled(optimizer: torch.optim.Optimizer, owner: TrainingStep) -> bool:
    """Are the gradients multiplied by a loss scale that nobody, not even the user by hand, has divided out?"""
    scaler = getattr(owner.precision, "scaler", None)
    return scaler is not None and scaler.is_enabled() and id(optimizer) not in scaler._per_optimizer_states


def _is_reduced_elsewhere(optimizer: torch.optim.Optimizer) -> bool:
    """Does an engine of the user's own reduce these gradients? Asked once, before a warning."""
    parameters = list(held_by(optimizer))
    if any(hasattr(p, "device_mesh") for p in parameters):
        return True
    wanted = set(map(id, parameters))
    engines = (obj for obj in gc.get_objects() if issubclass(type(obj), torch.nn.parallel.DistributedDataParallel))
    return any(not wanted.isdisjoint(map(id, engine.parameters())) for engine in engines)


def _reads_everything(obj: Any, num_ranks: int) -> bool:
    """Is it an iteration of a plain DataLoader over indices, by a sampler that knows nothing of ranks?"""
    if not issubclass(type(obj), _BaseDataLoaderIter):
        return False
    sampler = getattr(obj._index_sampler, "sampler", obj._index_sampler)
    if type(sampler) not in _WHOLE:
        return False
    dataset = obj._dataset
    if isinstance(dataset, Subset):
        # A part such as one process's own, e.g. range(rank, n, world_size).
        return abs(len(dataset) * num_ranks - len(dataset.dataset)) >= num_ranks  # type: ignore[arg-type]
    return hasattr(dataset, "__len__")
