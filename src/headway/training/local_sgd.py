"""Local SGD: processes make updates of their own, and their parameters are averaged every few steps.

Between two averages nothing of the model travels, neither gradients nor buffers (with `backward(weight=)` one number an update
does). A rank's gradient is weighed by its share of the
samples, as everywhere in Headway, so that the average is that of the whole batch also where ranks hold different amounts:
averaged after every step, plain SGD gives exactly what DDP gives. Optimizer state stays local.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch

from headway.errors import ConfigError, PrepareError, StateError
from headway.runtime.collectives.checked import Collectives
from headway.strategies.base import Strategy
from headway.training.weights import bucketed
from headway.training.windows import AccumulationWindows

_GROUP_BYTES = 256 << 20
"""How much is averaged at once: as much memory is needed beside the model."""


class LocalTraining:
    """What the ranks of a run have made of their own.

    Args:
        windows: counts what is trained.

    Attributes:
        blocks: the blocks that models are in.
        parted: models that were in one: their optimizers' states differ between the ranks from then on.
    """

    def __init__(self, windows: AccumulationWindows) -> None:
        self.blocks: dict[torch.nn.Module, LocalSGD] = {}
        self.parted: WeakSet[torch.nn.Module] = WeakSet()
        self._windows = windows
        self._interrupted: WeakKeyDictionary[torch.nn.Module, tuple[int, int, Callable[[], None]]] = WeakKeyDictionary()

    @property
    def num_windows(self) -> int:
        """Windows begun so far, on all ranks alike."""
        return self._windows.num_windows

    def interrupt(self, model: torch.nn.Module, num_steps: int, put_back: Callable[[], None]) -> None:
        """The run that is resumed was in a block of the model: the next one goes on from there, if nothing is trained before.

        Args:
            model: prepared; it has the mean of all ranks now.
            num_steps: of the block.
            put_back: gives the model this rank's own values.
        """
        self._interrupted[model] = self.num_windows, num_steps, put_back

    def enter(self, block: "LocalSGD") -> int:
        """A block begins; returns the steps that it has behind it."""
        self.blocks[block.model] = block
        self.parted.add(block.model)
        num_windows, num_steps, put_back = self._interrupted.pop(block.model, (-1, 0, lambda: None))
        if num_windows != self.num_windows:
            return 0
        put_back()
        return num_steps

    def leave(self, block: "LocalSGD") -> None:
        """It is over."""
        del self.blocks[block.model]


class LocalSGDRun(Protocol):
    """What local SGD needs of an Accelerator."""

    collectives: Collectives
    strategy: Strategy
    local_training: LocalTraining


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
    that is left by an exception averages nothing: the other ranks may never come. A run that is saved in a block goes on in it.

    Args:
        accelerator: the Accelerator that prepared the model.
        model: the prepared model.
        local_sgd_steps: calls of `step` between two averages, 1 or more.
        enabled: False: the block does nothing, and gradients travel as ever. One process needs no averages either.

    Raises:
        ConfigError: an impossible number of steps.
        UnsupportedError: on entering, under microbatching="auto" or a static graph.
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
        self._door = accelerator.collectives
        self._strategy = accelerator.strategy
        self._training = accelerator.local_training
        self._block: ExitStack | None = None
        self._begun = 0

    def __enter__(self) -> "LocalSGD":
        if self.enabled:
            self._block = ExitStack()
            self._block.enter_context(self._strategy.keep_local(self.model))
            self.num_steps, self._begun = self._training.enter(self), self._training.num_windows
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._block is None:
            return
        block, self._block = self._block, None
        block.close()
        self._training.leave(self)
        if kind is None:
            is_idle = not self.num_steps and self._training.num_windows == self._begun
            if not is_idle and (self.num_steps % self.local_sgd_steps or not self.num_steps):
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
        parameters = list(self.model.parameters())
        for parameter, mean in zip(parameters, means(parameters, self._door)):
            parameter.copy_(mean)


def means(values: Iterable[torch.Tensor], collectives: Collectives) -> Iterator[torch.Tensor]:
    """The mean over the ranks of each tensor, in the order given."""
    for group in bucketed(((each, each.nbytes) for each in values), _GROUP_BYTES):
        yield from collectives.reduce([each.detach() for each in group], "mean")
