"""Local SGD: processes make updates of their own, and their parameters are averaged every few steps.

Between two averages nothing of the model travels, neither gradients nor buffers (with `backward(weight=)` one number an update
does). A rank's gradient is weighed by its share of the
samples, as everywhere in Headway, so that the average is that of the whole batch also where ranks hold different amounts:
averaged after every step, plain SGD gives exactly what DDP gives. Optimizer state stays local.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from headway.collectives.door import Collectives
from headway.errors import ConfigError, PrepareError, StateError
from headway.strategies.base import Strategy

_GROUP_BYTES = 256 << 20
"""How much is averaged at once: as much memory is needed beside the model."""


class Run(Protocol):
    """What local SGD needs of an Accelerator."""

    collectives: Collectives
    strategy: Strategy


class LocalSGD:
    """A block in which gradients stay on their process, and parameters are averaged every `local_sgd_steps` steps.

    ::

        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    ...
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()

    On leaving the block parameters are averaged once more where that is needed, and all ranks take rank 0's buffers. A block
    that is left by an exception averages nothing: the other ranks may never come.

    Args:
        accelerator: the Accelerator that prepared the model.
        model: the prepared model.
        local_sgd_steps: calls of `step` between two averages, 1 or more.
        enabled: False: the block does nothing, and gradients travel as ever. One process needs no averages either.

    Raises:
        ConfigError: an impossible number of steps.
        UnsupportedError: on entering, under microbatching="auto" or a static graph.
    """

    def __init__(self, accelerator: Run, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if isinstance(local_sgd_steps, bool) or not isinstance(local_sgd_steps, int) or local_sgd_steps < 1:
            raise ConfigError(f"local_sgd_steps={local_sgd_steps!r}; give how many steps are local, 1 or more")
        if not isinstance(model, torch.nn.Module):
            raise PrepareError(f"LocalSGD got a {type(model).__name__} as its model; give the prepared model")
        self.enabled = enabled and accelerator.collectives.world_size > 1
        self.num_steps = 0
        self.local_sgd_steps = local_sgd_steps
        self.model = model
        self._door = accelerator.collectives
        self._strategy = accelerator.strategy
        self._block: ExitStack | None = None

    def __enter__(self) -> "LocalSGD":
        if self.enabled:
            self._block = ExitStack()
            self._block.enter_context(self._strategy.keep_local(self.model))
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._block is None:
            return
        block, self._block = self._block, None
        block.close()
        if kind is None:
            if self.num_steps % self.local_sgd_steps or not self.num_steps:
                self._average()
            self._strategy.reduce_gradients()  # buffers follow rank 0, as after any update

    def step(self) -> None:
        """One step is done: every `local_sgd_steps` of them parameters are averaged over the processes.

        Raises:
            StateError: outside the block.
        """
        if self.enabled and self._block is None:
            raise StateError("LocalSGD.step() was called outside its block; write `with LocalSGD(...) as local_sgd:`")
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        for group in _groups(list(self.model.parameters())):
            for parameter, mean in zip(group, self._door.reduce([each.detach() for each in group], "mean")):
                parameter.copy_(mean)


def _groups(parameters: list[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    group: list[torch.nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if group and size + parameter.nbytes > _GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(parameter)
        size += parameter.nbytes
    if group:
        yield group
