"""The Accelerators of one process, which now and then have to know of each other: whose model, whose loader is this?"""

import weakref
from collections.abc import Iterable

import torch

from headway.data.loader import PreparedLoader
from headway.training.prepared.objects import PreparedObjects
from headway.training.step import TrainingStep


def ids_in(step: TrainingStep, parameters: Iterable[torch.Tensor]) -> set[int]:
    """The ids of these parameters as they are since this step's strategy has set their model up."""
    return {id(step.strategy.current(parameter)) for parameter in parameters}


class AcceleratorRegistration:
    """Held by an Accelerator while it lives.

    Attributes:
        step: its step, which knows all the rest.
    """

    def __init__(self, step: TrainingStep) -> None:
        self.step = step


class AcceleratorRegistry:
    """All Accelerators of this process; hangs on the process runtime and goes with it.

    Attributes:
        members: in the order they were made, the same on every rank; some may be gone.
    """

    def __init__(self) -> None:
        self.members: list[weakref.ref[AcceleratorRegistration]] = []
        self._preparers: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[TrainingStep]]
        self._preparers = weakref.WeakKeyDictionary()

    def join(self, step: TrainingStep) -> AcceleratorRegistration:
        """An Accelerator with this step is made, and is known here as long as it holds what is returned."""
        membership = AcceleratorRegistration(step)
        # Another list: a hook may be going through the former one.
        self.members = [*(each for each in self.members if each() is not None), weakref.ref(membership)]
        return membership

    def newest_first(self) -> list[TrainingStep]:
        """Of all that are alive: in an order that is the same on every rank."""
        alive = [reference() for reference in reversed(self.members)]
        return [membership.step for membership in alive if membership is not None]

    def loader_beside(self, prepared: PreparedObjects) -> PreparedLoader | None:
        """For an Accelerator without loaders: the innermost one in iteration that another one has prepared."""
        if prepared.has_had_loader or len(self.members) < 2:
            return None
        return next((step.windows.active[-1] for step in self.newest_first() if step.windows.active), None)

    def owner_of(self, parameters: Iterable[torch.Tensor]) -> TrainingStep | None:
        """The step of the Accelerator that has prepared the models of all these parameters."""
        wanted = list(parameters)
        return next((step for step in self.newest_first() if ids_in(step, wanted) <= step.prepared.ids()), None)

    def note_prepared(self, optimizer: torch.optim.Optimizer, step: TrainingStep) -> None:
        """The Accelerator with this step has wrapped this optimizer of torch's."""
        self._preparers[optimizer] = weakref.ref(step)

    def preparer_of(self, optimizer: torch.optim.Optimizer) -> TrainingStep | None:
        """The step of the Accelerator that has wrapped it."""
        known = self._preparers.get(optimizer)
        return None if known is None else known()
