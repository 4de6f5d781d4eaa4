"""Placeholders for optimizers and schedulers that an engine's configuration defines. This file does not import torch.

`prepare` recognizes placeholders by these classes and asks the strategy for the real objects. Engines derive their own
classes, such as `headway.DummyOptim`.
"""


class Placeholder:
    """Base class of objects that `prepare` replaces with real optimizers and schedulers.

    Attributes:
        defined_by: Configuration that defines the real object, for messages.
        engine: Name of the strategy that reads this configuration, for messages.
    """

    defined_by: str
    engine: str


class OptimizerPlaceholder(Placeholder):
    """Placeholder for an optimizer that the engine's configuration defines."""


class SchedulerPlaceholder(Placeholder):
    """Placeholder for a scheduler that the engine's configuration defines."""
