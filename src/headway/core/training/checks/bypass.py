"""Detection of training that bypasses the prepared objects, which runs without an error but gives wrong results.

Two checks use torch's hook for optimizer steps. The first step of each optimizer is examined in full. Before every
step, a few attribute comparisons detect whether it would use the gradients of an unfinished accumulation window. The
checks do not communicate with other ranks. Cases that may be legitimate cause one warning.
`logging.getLogger("headway.core.training.checks.bypass").setLevel("ERROR")` silences these warnings.

::

    which optimizer steps                               where             consequence
    any optimizer, inside a window of its parameters    everywhere        StateError
    an unprepared optimizer of a prepared model         sharded model     StateError: its parameters were replaced
                                                        fp16              StateError: gradients are still scaled
                                                        several ranks     a warning: no checkpoint holds its state
    an optimizer of parameters in no prepared model     several ranks     a warning: weights drift apart
    an optimizer of parameters that another prepared    everywhere        a warning: they are updated twice
    one has updated in the same window
    any, on batches of a DataLoader that is not         several ranks     a warning: every rank reads everything
    prepared; gather_for_metrics of such batches
"""

import gc
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler, Subset, SubsetRandomSampler, WeightedRandomSampler

from headway.core import extensions
from headway.core.runtime import process
from headway.core.training._torch import DataLoaderIterator, is_fake
from headway.core.training.prepared.objects import iterate_parameters
from headway.core.training.prepared.optimizer import StepWatch
from headway.core.training.prepared.registry import AcceleratorRegistration, AcceleratorRegistry, find_replaced_ids
from headway.core.training.step import TrainingStep
from headway.errors import StateError
from headway.log import get_logger

log = get_logger(__name__)

_SILENCE = f'logging.getLogger("{__name__}").setLevel("ERROR")'
_RANK_BLIND_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Sampler classes that ignore ranks, so that every rank reads all samples.

Other classes might take ranks into account.
"""
_MAX_SEARCHES = 4
"""Maximum number of searches for unprepared loaders. Each search goes through all Python objects of the process.

Whenever an Accelerator is created, this number of searches may be made again.
"""


class BypassDetector:
    """Detector of optimizers in this process that step without Headway's prepared objects.

    One detector serves all Accelerators of the process. It is released together with the process runtime.
    """

    def __init__(self) -> None:
        self._accelerators = process.current().scope.get_or_create(AcceleratorRegistry)
        self._num_searches = 0
        self._watch = StepWatch(self._accelerators, self._check_first_step)

    def join(self, step: TrainingStep) -> AcceleratorRegistration:
        """Register the Accelerator to which a training step belongs.

        The Accelerator stays registered until the returned object is freed.
        """
        self._num_searches = 0
        return self._accelerators.join(step)

    # ---------------------------------------------------------------- optimizers

    def _check_first_step(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        """Raise an error or warn if the first step of an optimizer bypasses the prepared objects.

        Args:
            optimizer: torch's own optimizer.
            has_closure: Whether the step has a closure, which computes new gradients.

        Raises:
            StateError: If the optimizer is not prepared, and `prepare()` has replaced its parameters. Also if its
                gradients still contain the loss scale of the Accelerator that prepared the model.
        """
        name, parameters = type(optimizer).__name__, list(iterate_parameters(optimizer))
        # Each Accelerator is represented by its training step.
        preparer, steps = self._accelerators.find_preparer(optimizer), self._accelerators.list_newest_first()
        replaced = [p for p in parameters if any(step.strategy.find_current(p) is not p for step in steps)]
        if preparer is None and replaced:
            raise StateError(
                f"{name} is not prepared, and {len(replaced)} of its {len(parameters)} parameters were replaced when prepare() "
                "sharded their model: its step changes nothing. Pass it to accelerator.prepare() together with the model, and call "
                "step() on what prepare() returned"
            )
        # Accelerators that prepared a model with some of these parameters.
        owners = [
            step for step in steps if not find_replaced_ids(step, parameters).isdisjoint(step.prepared.list_ids())
        ]
        for owner in owners:
            if owner is not preparer and _has_scaled_gradients(optimizer, owner):
                raise StateError(
                    f"{name} stepped on gradients that are multiplied by fp16's loss scale. Prepare it with the Accelerator that has "
                    "prepared its model, and call step() on what prepare() returned"
                )
        if preparer is not None and preparer.prepared.has_untrained_gradients():
            extensions.load("feature", "untrained_parameters")(preparer, self._accelerators)
        if preparer is not None and not has_closure:  # a closure opens a new window
            _warn_of_shared_parameters(optimizer, preparer)
        num_ranks = steps[-1].strategy.everyone.world_size if steps else 1
        if num_ranks == 1 or any(map(is_fake, parameters)):  # the optimizer of a forecast changes no weights
            return
        self.search_for_unprepared_loader(steps[-1])
        if preparer is not None:
            return
        if owners:
            log.warning_once(
                "%s is not prepared, but its model is: its updates are not counted, checkpoints lack its state, and it does not wait "
                "for accumulation windows. Prepare it, or silence this with %s",
                name,
                _SILENCE,
            )
        elif _may_diverge(steps) and not _is_reduced_elsewhere(optimizer):
            log.warning_once(
                "%s updates parameters of a model that is not prepared: each of the %d processes learns from its own gradients, and "
                "their weights drift apart. Pass model and optimizer to accelerator.prepare(). If you mean that (or "
                "average gradients yourself), silence this with %s",
                name,
                num_ranks,
                _SILENCE,
            )

    # ---------------------------------------------------------------- loaders

    def search_for_unprepared_loader(self, step: TrainingStep) -> None:
        """Warn if the current batch apparently came from a DataLoader that was not prepared.

        That is assumed if an iterator of a DataLoader is alive that reads all samples on every rank. Do nothing if all
        ranks share one data shard, if a prepared loader is being iterated, or after four searches.

        Args:
            step: Training step of the Accelerator that trains on the batch.
        """
        count = step.strategy.data_shard.count
        if count == 1 or step.windows.reads.loader is not None or self._num_searches >= _MAX_SEARCHES:
            return
        self._num_searches += 1
        iterator = next((obj for obj in gc.get_objects() if _is_iterator_over_all_samples(obj, count)), None)
        if iterator is not None:
            log.warning_once(
                "batches come from a DataLoader of %s that is not prepared: each of the %d processes reads all of its %d samples, "
                "so every sample is trained on and gathered %d times. Pass the loader to accelerator.prepare(). If each process "
                "has data of its own, silence this with %s",
                type(iterator._dataset).__name__,
                count,
                len(iterator._dataset),
                count,
                _SILENCE,
            )


def _warn_of_shared_parameters(optimizer: torch.optim.Optimizer, step: TrainingStep) -> None:
    """Warn if another prepared optimizer has just updated parameters that this one is about to update, too.

    Optimizers that update the same parameters in different windows, such as two phases of a training, are not reported.

    Args:
        optimizer: torch's own optimizer, before its first step.
        step: Training step of the Accelerator that has prepared it.
    """
    window = step.find_window_of_optimizer(optimizer)
    if window is None:
        return
    ids = {id(parameter) for parameter in iterate_parameters(optimizer)}
    for other in step.prepared.optimizers:
        if other.optimizer is optimizer or not other.has_stepped_in(window.number):
            continue
        num_shared = sum(id(parameter) in ids for parameter in iterate_parameters(other.optimizer))
        if num_shared:
            log.warning_once(
                "%s and %s both update %d parameters in one window, with the same gradients. Build each optimizer from its own "
                "parameters, or silence this with %s",
                type(other.optimizer).__name__,
                type(optimizer).__name__,
                num_shared,
                _SILENCE,
            )


def _may_diverge(steps: list[TrainingStep]) -> bool:
    """Whether weights might diverge between ranks if an optimizer trains parameters that belong to no prepared model.

    They might if no Accelerator has ever prepared a model. They also might if an Accelerator is in use: its
    accumulation window is unfinished, or it iterates over a loader and has begun to train on each batch read so far.
    Otherwise the step is probably part of something else, such as a separate baseline, and no warning is given.

    Args:
        steps: Training steps of all Accelerators of the process.
    """
    was_model_prepared = any(step.prepared.parameters or step.prepared.num_resets for step in steps)
    return not was_model_prepared or any(
        step.windows.is_unfinished or step.windows.reads.are_read_batches_used for step in steps
    )


def _has_scaled_gradients(optimizer: torch.optim.Optimizer, owner: TrainingStep) -> bool:
    """Whether an optimizer's gradients are still multiplied by the loss scale.

    They are if neither Headway nor the user has unscaled them. Only fp16 has a loss scale.

    Args:
        optimizer: Optimizer that is about to step.
        owner: Training step of the Accelerator that prepared the optimizer's model.
    """
    scaler = getattr(owner.precision, "scaler", None)
    return scaler is not None and scaler.is_enabled() and id(optimizer) not in scaler._per_optimizer_states


def _is_reduced_elsewhere(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something outside Headway reduces the optimizer's gradients over ranks.

    This is a DDP wrapper that the script created, or a sharding in which parameters are DTensors. All Python objects of
    the process are searched for DDP wrappers, so this is called only before a warning.
    """
    parameters = list(iterate_parameters(optimizer))
    if any(hasattr(p, "device_mesh") for p in parameters):
        return True
    ids = set(map(id, parameters))
    # `isinstance` would read `__class__` of every object, which runs code in proxies and lazy modules.
    engines = (obj for obj in gc.get_objects() if issubclass(type(obj), torch.nn.parallel.DistributedDataParallel))
    return any(not ids.isdisjoint(map(id, engine.parameters())) for engine in engines)


def _is_iterator_over_all_samples(obj: Any, num_ranks: int) -> bool:
    """Whether an object is an iterator of a map-style DataLoader that reads all samples on every rank.

    Its sampler ignores ranks, and its dataset is not a `Subset` whose size suggests that it is one rank's shard.

    Args:
        obj: Any Python object.
        num_ranks: Number of data shards.
    """
    if not issubclass(type(obj), DataLoaderIterator):
        return False
    sampler = getattr(obj._index_sampler, "sampler", obj._index_sampler)
    if type(sampler) not in _RANK_BLIND_SAMPLERS:
        return False
    dataset = obj._dataset
    if isinstance(dataset, Subset):
        # A subset of about 1 / num_ranks of the data is one rank's shard, e.g. range(rank, n, num_ranks).
        return abs(len(dataset) * num_ranks - len(dataset.dataset)) >= num_ranks  # type: ignore[arg-type]
    return hasattr(dataset, "__len__")
