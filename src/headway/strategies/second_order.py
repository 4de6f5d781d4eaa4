"""A backward through a sharded model through which another one has gone before: a gradient penalty's.

`torch.autograd.grad(..., create_graph=True)` runs FSDP's hooks, which free what was gathered. The graph that it makes has no hooks,
and reads whole parameters in the backward that follows: that one begins with all units gathered again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headway.log import get_logger
from headway.strategies import gathered

log = get_logger(__name__)


class SecondOrder:
    """Of one model.

    Args:
        model: sharded.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._has_run = False
        self._hook = model.register_forward_hook(self._note)

    def _note(self, *_: Any) -> None:
        self._has_run = torch.is_grad_enabled()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A backward of the loop's."""
        is_second = self._has_run and not gathered.awaits_backward(self._model)
        if is_second:
            log.info_once(
                "a backward has gone through %s before its loss's: all of it is gathered", type(self._model).__name__
            )
            gathered.gather(self._model)
        try:
            yield
        finally:
            self._has_run = gathered.awaits_backward(self._model)
            if is_second:
                gathered.reshard(self._model)

    def release(self) -> None:
        """Look no longer."""
        self._hook.remove()
