"""Local SGD: each process updates its own copy of the model, and parameters are averaged every few steps.

Between two averages, neither gradients nor buffers are communicated. The only communication is one number per update if
`backward` gets a `weight`. A rank's gradient is weighted by its fraction of the samples, as everywhere in Headway. So
the average of the ranks' gradients is the gradient of the global batch, even if ranks have different numbers of
samples. If parameters are averaged after every step, plain SGD gives exactly the result of DDP. Optimizer state stays
local.
"""

from contextlib import ExitStack
from typing import Any, Protocol

import torch

from headway.common import scope
from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.base import Strategy
from headway.core.training.local_blocks import LocalTraining, iterate_averages
from headway.errors import ConfigError, PrepareError, StateError, UnsupportedError
from headway.extras.moving_average import ModelAverages


class LocalSGDRun(Protocol):
    """Interface of the Accelerator's run, with the parts that `LocalSGD` uses.

    Attributes:
        collectives: Collectives over all ranks.
        strategy: Strategy of the run.
        local_training: Registry of the `LocalSGD` blocks in progress.
    """

    collectives: Collectives
    strategy: Strategy
    local_training: LocalTraining


class LocalSGD:
    """Context in which processes train separately, and average their parameters every `local_sgd_steps` steps.

    Gradients are not reduced over processes (Stich 2018, arXiv 1805.09767). Optimizer states stay different. Enter it on
    every rank, with the layout "ddp"::

        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    ...
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()

    On exit, parameters are averaged once more if needed, and all ranks receive rank 0's buffers. If an exception ends
    the block, nothing is averaged, because the other ranks might never take part. A run that is saved inside a block
    continues inside the block when it is resumed.

    Args:
        accelerator: Accelerator that prepared the model.
        model: Prepared model.
        local_sgd_steps: Number of calls of `step` between two averages, at least 1, equal on all ranks.
        enabled: Whether to train locally. If False, gradients are reduced as usual. Default: True.

    Attributes:
        enabled: Whether processes train separately in the block. Always False in a single-process run.
        num_steps: Number of calls of `step` so far. In a resumed block, those before the resume count too.
        local_sgd_steps: Number of calls of `step` between two averages.
        model: Prepared model.

    Raises:
        ConfigError: If the number of steps is not an integer of at least 1.
        PrepareError: If the model is not a `torch.nn.Module`.
        UnsupportedError: On entering the block, if the run uses microbatching="auto", a static graph or a layout other
            than "ddp", or if the model has a `headway.ExponentialMovingAverage`.
    """

    def __init__(
        self, accelerator: LocalSGDRun, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if isinstance(local_sgd_steps, bool) or not isinstance(local_sgd_steps, int) or local_sgd_steps < 1:
            raise ConfigError(f"local_sgd_steps={local_sgd_steps!r}; give how many steps are local, 1 or more")
        if not isinstance(model, torch.nn.Module):
            raise PrepareError(f"LocalSGD got a {type(model).__name__} as its model; give the prepared model")
        self.enabled = enabled and accelerator.collectives.world_size > 1
        self.num_steps = 0
        self.local_sgd_steps = local_sgd_steps
        self.model = model
        self._collectives = accelerator.collectives
        self._strategy = accelerator.strategy
        self._local_training = accelerator.local_training
        self._block: ExitStack | None = None  # contexts to leave at the end of the block; None outside of it
        self._first_window = 0

    def __enter__(self) -> "LocalSGD":
        if self.enabled:
            if scope.get_or_create(ModelAverages).has_any(self.model):
                raise UnsupportedError(
                    "LocalSGD cannot be combined with ExponentialMovingAverage: in its block the ranks have different weights, so "
                    "their averages would differ. Leave one of them out"
                )
            self._block = ExitStack()
            self._block.enter_context(self._strategy.keep_local(self.model))
            self.num_steps = self._local_training.begin_block(self)
            self._first_window = self._local_training.num_windows
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._block is None:
            return
        block, self._block = self._block, None
        block.close()
        self._local_training.end_block(self)
        if kind is None:
            has_trained = self.num_steps > 0 or self._local_training.num_windows != self._first_window
            # A loop that never calls step() has not averaged, either.
            is_averaged = self.num_steps > 0 and self.num_steps % self.local_sgd_steps == 0
            if has_trained and not is_averaged:
                self._average_parameters()
            self._strategy.reduce_gradients()  # buffers follow rank 0, as after any update

    def step(self) -> None:
        """Count one step, and average parameters over the processes after every `local_sgd_steps` steps.

        Call it on every rank, after the optimizer's step. Each call counts, also inside an accumulation window, so choose
        `local_sgd_steps` as a multiple of the accumulation steps. If `enabled` is False, only count the step.

        Raises:
            StateError: If called outside the `with LocalSGD(...)` block while `enabled` is True.
        """
        if self.enabled and self._block is None:
            raise StateError("LocalSGD.step() was called outside its block; write `with LocalSGD(...) as local_sgd:`")
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average_parameters()

    @torch.no_grad()
    def _average_parameters(self) -> None:
        """Replace the parameters on all ranks by their mean over the ranks."""
        parameters = list(self.model.parameters())
        for parameter, mean in zip(parameters, iterate_averages(parameters, self._collectives)):
            parameter.copy_(mean)
