"""Notices training that bypasses the prepared objects, which looks right and is not.

An optimizer's first step is looked at once, through torch's own hook for steps; every step must not fall into a window
in progress, which is a few attribute checks. Nothing here asks other ranks. What cannot be told apart from a legitimate
use is said once, as a warning; `logging.getLogger("headway.training.unprepared").setLevel("ERROR")` silences this file.

::

    what steps                                          where             what follows
    any optimizer, inside a window of its parameters    everywhere        StateError
    an optimizer that is not prepared, its model is     fp16              StateError
                                                        several ranks     a warning: no checkpoint holds its state
    an optimizer of parameters in no prepared model     several ranks     a warning: weights drift apart
    any, on batches of a DataLoader that is not         several ranks     a warning: every rank reads everything
    prepared; gather_for_metrics of such batches
"""

import gc
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import (
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.hooks import RemovableHandle

from headway.data.loader import PreparedLoader
from headway.errors import StateError
from headway.log import get_logger

if TYPE_CHECKING:
    from headway.training.accumulation import Accumulation

log = get_logger(__name__)

_SILENCE = f'logging.getLogger("{__name__}").setLevel("ERROR")'
_WHOLE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that know nothing of ranks; one of another class may."""
_MOST_LOOKS = 4
"""How often the process's objects are gone through for each Accelerator: some scripts have an optimizer per parameter."""

_lookouts: "tuple[weakref.ref[Lookout], ...]" = ()
"""In the order they were made, the same on every rank."""
_hook: RemovableHandle | None = None
_prepared: "weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Accumulation]]" = weakref.WeakKeyDictionary()
_num_looks = 0
_seen: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()


def note_prepared(optimizer: torch.optim.Optimizer, accumulation: "Accumulation") -> None:
    """The Accelerator with these windows has wrapped this optimizer of torch's."""
    _prepared[optimizer] = weakref.ref(accumulation)


def loader_elsewhere(accumulation: "Accumulation") -> PreparedLoader | None:
    """For an Accelerator without loaders: the innermost one in iteration that another one of this process has prepared."""
    if accumulation.has_loader or len(_lookouts) < 2:
        return None
    return next((other.active[-1] for other in _newest_first() if other.active), None)


def owner_of(parameters: Iterable[torch.Tensor]) -> "Accumulation | None":
    """The windows of the Accelerator that has prepared the models of all these parameters."""
    wanted = {id(parameter) for parameter in parameters}
    return next((each for each in _newest_first() if wanted <= _owned(each)), None)


def _newest_first() -> list["Accumulation"]:
    """Of all Accelerators alive: in an order that is the same on every rank."""
    alive = [itself() for itself in reversed(_lookouts)]
    return [lookout.accumulation for lookout in alive if lookout is not None]


def _owned(accumulation: "Accumulation") -> set[int]:
    """The ids of all parameters of its prepared models."""
    return {id(p) for parameters in accumulation.parameters.values() for p in parameters}


def _look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # One hook for all Accelerators, which stays when one of them is collected: torch goes through its hooks meanwhile.
    for itself in _lookouts:
        lookout = itself()
        if lookout is not None:
            lookout.before_step(optimizer)


class Lookout:
    """Watches the optimizers of this process on behalf of one Accelerator.

    Args:
        accumulation: its windows.
    """

    def __init__(self, accumulation: "Accumulation") -> None:
        self.accumulation = accumulation
        self._is_several = accumulation.strategy.data_shard.count > 1
        global _num_looks, _lookouts, _hook
        _num_looks = 0
        _lookouts = (*(each for each in _lookouts if each() is not None), weakref.ref(self))
        if _hook is None:
            _hook = register_optimizer_step_pre_hook(_look)

    def release(self) -> None:
        """Look no longer."""
        global _lookouts, _hook
        _lookouts = tuple(each for each in _lookouts if each() not in (None, self))
        if not _lookouts and _hook is not None:
            _hook.remove()
            _hook = None

    # ---------------------------------------------------------------- optimizers

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of this process is about to step.

        Raises:
            StateError: on a part of a window's gradient, or on gradients that are scaled.
        """
        if self.accumulation.is_partial and not _ids(optimizer).isdisjoint(self.accumulation.current_ids()):
            raise StateError(
                f"{type(optimizer).__name__} stepped inside an accumulation window, on a part of its gradient. Only an optimizer "
                "that the same Accelerator has prepared waits for the window's end: prepare it together with its model, and call "
                "step() on what prepare() returned"
            )
        if optimizer not in _seen:
            _seen.add(optimizer)
            self._judge(optimizer)

    def _judge(self, optimizer: torch.optim.Optimizer) -> None:
        """The first step of an optimizer."""
        name, ids = type(optimizer).__name__, _ids(optimizer)
        preparer = _prepared[optimizer]() if optimizer in _prepared else None
        owners = [each for each in _newest_first() if not ids.isdisjoint(_owned(each))]
        for owner in owners:
            if owner is not preparer and _sees_scaled(optimizer, owner):
                raise StateError(
                    f"{name} stepped on gradients that are multiplied by fp16's loss scale. Prepare it with the Accelerator that has "
                    "prepared its model, and call step() on what prepare() returned"
                )
        if not self._is_several:
            return
        self.look_for_loader()
        if preparer is not None:
            return
        if owners:
            log.warning_once(
                "%s is not prepared, but its model is: its updates are not counted, checkpoints lack its state, and it does not wait "
                "for accumulation windows. Prepare it, or silence this with %s", name, _SILENCE,
            )  # fmt: skip
        elif self._may_drift() and not _is_reduced_elsewhere(optimizer):
            log.warning_once(
                "%s updates parameters of a model that is not prepared: each of the %d processes learns from its own gradients, and "
                "their weights drift apart. Pass model and optimizer to accelerator.prepare(). If you mean that (or "
                "average gradients yourself), silence this with %s",
                name, self.accumulation.strategy.data_shard.count, _SILENCE,
            )  # fmt: skip

    def _may_drift(self) -> bool:
        """Is no model prepared at all, or did accelerator.backward run for this step?"""
        every = _newest_first()
        is_nothing_prepared = not any(each.parameters or each.num_resets for each in every)
        return is_nothing_prepared or any(each.is_unfinished for each in every)

    # ---------------------------------------------------------------- loaders

    def look_for_loader(self) -> None:
        """Warn where the batch in hand can only come from a DataLoader that is not prepared."""
        global _num_looks
        is_known = bool(self.accumulation.active) or loader_elsewhere(self.accumulation) is not None
        if not self._is_several or is_known or _num_looks >= _MOST_LOOKS:
            return
        _num_looks += 1
        found = next((obj for obj in gc.get_objects() if _reads_everything(obj, self._count)), None)
        if found is not None:
            dataset = found._dataset
            log.warning_once(
                "batches come from a DataLoader of %s that is not prepared: each of the %d processes reads all of its %d samples, "
                "so every sample is trained on and gathered %d times. Pass the loader to accelerator.prepare(). If each process "
                "has data of its own, silence this with %s",
                type(dataset).__name__, self._count, len(dataset), self._count, _SILENCE,
            )  # fmt: skip

    @property
    def _count(self) -> int:
        return self.accumulation.strategy.data_shard.count


def _ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _sees_scaled(optimizer: torch.optim.Optimizer, owner: "Accumulation") -> bool:
    """Are the gradients multiplied by a loss scale that nobody, not even the user by hand, has divided out?"""
    scaler = getattr(owner.precision, "scaler", None)
    return scaler is not None and scaler.is_enabled() and id(optimizer) not in scaler._per_optimizer_states


def _is_reduced_elsewhere(optimizer: torch.optim.Optimizer) -> bool:
    """Does an engine of the user's own reduce these gradients? Asked once, before a warning."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
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
        # A part such as one process's own: range(rank, n, world_size), say.
        return abs(len(dataset) * num_ranks - len(dataset.dataset)) >= num_ranks  # type: ignore[arg-type]
    return hasattr(dataset, "__len__")
