"""What an Accelerator has prepared, in which order: the registry that the parts of a step look things up in."""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from headway.data.loader import PreparedLoader
from headway.training.windows import AccumulationWindow


class OptimizerEntry(Protocol):
    """What the registry tells of a prepared optimizer.

    Attributes:
        optimizer: torch's own.
        num_updates: how many of its steps happened.
        step_was_skipped: its last step at a closed window made no update.
        last_window_length: micro-batches of the window that its last update was made from.
    """

    optimizer: torch.optim.Optimizer
    num_updates: int
    step_was_skipped: bool
    last_window_length: int

    def resume(self, num_updates: int) -> None:
        """Go on from so many updates."""

    def snapshot(self) -> Any:
        """What `restore` needs to take a batch back."""

    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot, which stays good."""


class SchedulerEntry(Protocol):
    """What the registry tells of a prepared schedule.

    Attributes:
        scheduler: the user's.
        optimizers: those that it follows.
        rule: how it ticks for an update; it has a `name`.
        follows_optimizer: False: every call of step() is a tick.
    """

    scheduler: Any
    optimizers: Sequence[OptimizerEntry]
    rule: Any
    follows_optimizer: bool

    def go_by(self, rule: Any) -> None:
        """Tick by another rule from now on."""

    def seek(self, tick: int) -> None:
        """Go on from that tick."""

    def catch_up(self) -> None:
        """Updates so far count as ticked for."""


def held_by(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """The parameters of all groups of an optimizer of torch's."""
    return (p for group in optimizer.param_groups for p in group["params"])


class PreparedObjects:
    """The prepared objects of one Accelerator.

    Args:
        rest: brings a model into the state in which its names and parameters may be read.

    Attributes:
        models, optimizers, loaders, schedulers: in the order they were prepared.
        parameters: of each model, by its id, as they were when it was prepared.
        num_resets: how often everything was forgotten.
        has_had_loader: a loader has been prepared, forgotten or not.
    """

    def __init__(self, rest: Callable[[torch.nn.Module], None] | None = None) -> None:
        self._rest = rest
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[OptimizerEntry] = []
        self.loaders: list[PreparedLoader] = []
        self.schedulers: list[SchedulerEntry] = []
        self.parameters: dict[int, list[torch.nn.Parameter]] = {}
        self.num_resets = 0
        self.has_had_loader = False

    def add_model(self, model: torch.nn.Module) -> None:
        """A model learns, or is evaluated."""
        self.models.append(model)
        self.parameters[id(model)] = list(model.parameters())

    def at_rest(self) -> list[torch.nn.Module]:
        """The models, whose names and parameters may be read from here to their next forward."""
        for model in self.models if self._rest is not None else ():
            self._rest(model)  # type: ignore[misc]
        return self.models

    def add_loader(self, loader: PreparedLoader) -> None:
        """A loader gives batches."""
        self.loaders.append(loader)
        self.has_had_loader = True

    # ---------------------------------------------------------------- parameters

    def all_parameters(self) -> list[torch.nn.Parameter]:
        """Of all models, each once."""
        return list({id(p): p for parameters in self.parameters.values() for p in parameters}.values())

    def parameters_of(self, window: AccumulationWindow) -> Iterable[torch.nn.Parameter]:
        """Those that learn in the window: of its models, or of all where it has none."""
        models = [id(model) for model in window.models] or list(self.parameters)
        unique = {id(p): p for model in models for p in self.parameters.get(model, ())}
        return unique.values()

    def ids(self) -> set[int]:
        """Of all parameters."""
        return {id(p) for parameters in self.parameters.values() for p in parameters}

    def named(self, attribute: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that `attribute` ("named_parameters", "named_buffers") of each model gives, by names for a message."""
        several = len(self.models) > 1
        for number, model in enumerate(self.at_rest()):
            for name, tensor in getattr(model, attribute)():
                yield f"{type(model).__name__} {number}: {name}" if several else name, tensor

    # ---------------------------------------------------------------- the end

    def forget(self, kept: Container[int] = ()) -> None:
        """Let go of everything, or of all but the objects with those ids."""
        everything: tuple[list[Any], ...] = (self.models, self.optimizers, self.loaders, self.schedulers)
        for held in everything:
            held[:] = [each for each in held if id(each) in kept]
        self.parameters.clear()
        self.parameters.update({id(model): list(model.parameters()) for model in self.at_rest()})
        self.num_resets += 1
