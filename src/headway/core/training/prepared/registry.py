"""Registry of the Accelerators of a process, to find which one prepared a model, optimizer or loader."""

import weakref
from collections.abc import Callable, Iterable

import torch

from headway.core.data.loader import PreparedLoader
from headway.core.training.prepared.objects import PreparedObjects
from headway.core.training.step import TrainingStep


def find_replaced_ids(step: TrainingStep, parameters: Iterable[torch.Tensor]) -> set[int]:
    """Return the IDs of the parameters that replaced `parameters` when their model was sharded.

    A parameter that was not replaced contributes its own ID.

    Args:
        step: Training step whose strategy set up the model.
        parameters: Parameters that the script may still refer to.
    """
    return {id(step.strategy.find_current(parameter)) for parameter in parameters}


class PreparationListeners(list[Callable[[torch.nn.Module, TrainingStep], None]]):
    """Functions that this process calls with each newly prepared model and the training step of its Accelerator."""


class AcceleratorRegistration:
    """Registration of one Accelerator in an `AcceleratorRegistry`.

    The registration ends when the Accelerator, which holds this object, is freed.

    Attributes:
        step: Training step of the Accelerator.
    """

    def __init__(self, step: TrainingStep) -> None:
        self.step = step


class AcceleratorRegistry:
    """Registry of all Accelerators of this process. It is released together with the process runtime.

    Attributes:
        members: Weak references to registrations, in order of creation. The order is equal on every rank. A reference
            returns None after its Accelerator has been freed.
    """

    def __init__(self) -> None:
        self.members: list[weakref.ref[AcceleratorRegistration]] = []
        # By torch's own optimizer: the training step of the Accelerator that wrapped it.
        self._preparers: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[TrainingStep]]
        self._preparers = weakref.WeakKeyDictionary()

    def join(self, step: TrainingStep) -> AcceleratorRegistration:
        """Register the Accelerator to which a training step belongs.

        The Accelerator stays registered until the returned object is freed.
        """
        registration = AcceleratorRegistration(step)
        # Build a new list, because a hook may be iterating over the old one.
        self.members = [*(each for each in self.members if each() is not None), weakref.ref(registration)]
        return registration

    def list_newest_first(self) -> list[TrainingStep]:
        """Return the training steps of all live Accelerators, newest first. The order is equal on every rank."""
        registrations = [reference() for reference in reversed(self.members)]
        return [registration.step for registration in registrations if registration is not None]

    def find_other_loader(self, prepared: PreparedObjects) -> PreparedLoader | None:
        """Return the innermost loader that another Accelerator of this process is iterating over.

        Return None if there is no such loader, or if the requesting Accelerator has ever had a loader.

        Args:
            prepared: Prepared objects of the requesting Accelerator.
        """
        if prepared.has_had_loader or len(self.members) < 2:
            return None
        for step in self.list_newest_first():
            active_loaders = step.windows.reads.active_loaders
            if active_loaders:
                return active_loaders[-1]
        return None

    def find_owner(self, parameters: Iterable[torch.Tensor]) -> TrainingStep | None:
        """Return the training step of the Accelerator that prepared the models of all these parameters.

        Return the newest if there are several, and None if no single Accelerator prepared all of them.
        """
        parameter_list = list(parameters)
        for step in self.list_newest_first():
            if find_replaced_ids(step, parameter_list) <= step.prepared.list_ids():
                return step
        return None

    def record_preparer(self, optimizer: torch.optim.Optimizer, step: TrainingStep) -> None:
        """Record which Accelerator has wrapped a torch optimizer.

        Args:
            optimizer: torch's own optimizer.
            step: Training step of the Accelerator.
        """
        self._preparers[optimizer] = weakref.ref(step)

    def find_preparer(self, optimizer: torch.optim.Optimizer) -> TrainingStep | None:
        """Return the training step of the Accelerator that wrapped the optimizer, or None if none wrapped it.

        If the optimizer is an attribute of a wrapped optimizer, as in wrappers that average or clip, the Accelerator
        that wrapped the outer one counts.
        """
        reference = self._preparers.get(optimizer)
        if reference is None:
            for outer, outer_reference in self._preparers.items():
                if any(value is optimizer for value in vars(outer).values()):
                    reference = outer_reference
                    break
        return None if reference is None else reference()
