"""Hooks into the training step: lists of functions, which are empty while nothing is measured or watched.

Guards, checks, meters and checkpoints append their functions when they are created, so that a disabled feature costs
nothing. Hooks of the loaders are defined in `headway.core.data.loader.LoaderEvents`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class StepHooks:
    """Lists of functions that are called at certain moments of a training step.

    A list is empty while no feature needs it. Functions in lists whose name begins with "before" may raise an error, to
    prevent the step that would follow. No hook receives the loss. Losses are passed to the run's only `StepGuard`
    (`headway.core.training.guard`).

    Attributes:
        before_learning: Called before a micro-batch begins, and before a standalone backward, which is outside any
            `accumulate` block.
        before_micro_batch: Called before a micro-batch begins, after `before_learning`.
        micro_batch_begun: Called after a micro-batch or a standalone backward has begun, with the number of its
            accumulation window and with its own number in that window. Both count from 1.
        before_forward: Called before a prepared model's outermost call, with the model and the call's arguments.
        before_backward: Called before the backward of a loss.
        unweighed: Called when a loss gets weight 1, because its number of items is unknown.
        gradients_final: Called when the gradients of an accumulation window are final, after its last micro-batch's first
            backward.
        gradients_changed: Called when a further backward of the last micro-batch has been added to final gradients.
        before_update: Called before an optimizer steps on final gradients.
        updated: Called with an optimizer and the number of its accumulation window, after the optimizer has made an
            update that no replay will undo.
        before_swap: Called before model weights are exchanged for averaged ones outside of an optimizer step.
        phases: Called with the name of the phase that begins: "forward", "backward" or "step". "forward" is everything
            before backward, such as loading the batch.
    """

    before_learning: list[Callable[[], None]] = field(default_factory=list)
    before_micro_batch: list[Callable[[], None]] = field(default_factory=list)
    micro_batch_begun: list[Callable[[int, int], None]] = field(default_factory=list)
    before_forward: list[Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], None]] = field(
        default_factory=list
    )
    before_backward: list[Callable[[], None]] = field(default_factory=list)
    unweighed: list[Callable[[], None]] = field(default_factory=list)
    gradients_final: list[Callable[[], None]] = field(default_factory=list)
    gradients_changed: list[Callable[[], None]] = field(default_factory=list)
    before_update: list[Callable[[], None]] = field(default_factory=list)
    updated: list[Callable[[torch.optim.Optimizer, int], None]] = field(default_factory=list)
    before_swap: list[Callable[[], None]] = field(default_factory=list)
    phases: list[Callable[[str], None]] = field(default_factory=list)
