"""A backward through a sharded model through which another one has gone before: a gradient penalty's.

`torch.autograd.grad(..., create_graph=True)` runs FSDP's hooks, which free what was gathered. Of the graph that it makes, some nodes
have no hooks and read whole parameters, and others have the hooks that free a unit and reduce its gradients. On an accelerator,
whose nodes autograd runs in a thread of their own, those come before the unit's last gradient. So the backward that follows begins
with all units gathered, and reduces when it has ended.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from headway.log import get_logger
from headway.strategies.fully_sharded import fsdp_state as gathered

log = get_logger(__name__)


class SecondOrder:
    """Of one model.

    Args:
        model: sharded.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._has_graph = False
        self._hook = model.register_forward_hook(self._note)

    def _note(self, module: Any, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for each in tree_leaves(output):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    each.register_hook(self._look)  # type: ignore[no-untyped-call]

    def _look(self, grad: torch.Tensor) -> None:
        """A backward goes through the model: does it make a graph?"""
        self._has_graph |= torch.is_grad_enabled()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A backward of the loop's."""
        if not self._has_graph:
            yield
            return
        log.info_once(
            "a backward has gone through %s before its loss's: all of it is gathered", type(self._model).__name__
        )
        try:
            with gathered.kept_whole(self._model):
                yield
        finally:
            self._has_graph = False

    def release(self) -> None:
        """Look no longer."""
        self._hook.remove()
