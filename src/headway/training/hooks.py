"""Who hears of the moments of a training step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class StepHooks:
    """Who hears of a step's moments: lists of functions, empty while nothing is measured or watched.

    Attributes:
        before_learning: a micro-batch is about to begin, or a backward comes outside of any.
        before_begin: a micro-batch is about to begin.
        begun: it has, as (number of its window, its number in it).
        before_forward: a prepared model is about to be called, with these arguments; not within another call of it.
        before_backward: a loss is about to run backward.
        unweighed: a loss weighs 1, because nobody knows what it was taken over.
        reduced: a window's gradients are final.
        before_update: an optimizer is about to step on them.
        phases: the name of the phase that begins: "forward", "backward", "step".
    """

    before_learning: list[Callable[[], None]] = field(default_factory=list)
    before_begin: list[Callable[[], None]] = field(default_factory=list)
    begun: list[Callable[[int, int], None]] = field(default_factory=list)
    before_forward: list[Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], None]] = field(
        default_factory=list
    )
    before_backward: list[Callable[[], None]] = field(default_factory=list)
    unweighed: list[Callable[[], None]] = field(default_factory=list)
    reduced: list[Callable[[], None]] = field(default_factory=list)
    before_update: list[Callable[[], None]] = field(default_factory=list)
    phases: list[Callable[[str], None]] = field(default_factory=list)
