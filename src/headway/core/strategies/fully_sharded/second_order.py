"""Second-order gradients through a sharded model, such as a gradient penalty needs.

The first backward, `torch.autograd.grad(..., create_graph=True)`, runs FSDP's hooks, which free gathered parameters. In
the second backward, through the same forward, some nodes of the graph read unsharded parameters but have no hooks that
gather them. Other nodes have hooks that free a unit and reduce its gradients. On an accelerator, where autograd uses a
separate thread, these hooks run before the unit's last gradient is computed. Before the second backward, all units are
therefore gathered, and gradients are reduced only after it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headway.core.strategies.blocks import get_class_name
from headway.core.strategies.fully_sharded import fsdp_state
from headway.core.strategies.output_tensors import list_output_tensors
from headway.log import get_logger

log = get_logger(__name__)


class SecondOrder:
    """Detector of a backward with `create_graph=True` through a sharded model, before the training loop's own backward.

    Args:
        model: Sharded model.

    Attributes:
        has_graph: Whether a backward has created a graph since the training loop's last backward. The loop's next
            backward must then run in the context `keep_gathered`.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.has_graph = False
        self._hook = model.register_forward_hook(self._watch_outputs)

    def _watch_outputs(self, module: Any, args: Any, output: Any) -> None:
        """Register a hook on each output that requires grad. It is a forward hook of a module.

        A view also gets a hook on its base, because the view loses its own hook if it is changed in place.
        """
        if torch.is_grad_enabled():
            for output_tensor in list_output_tensors(output):
                for each in (output_tensor, output_tensor._base):
                    if each is not None and each.requires_grad:
                        each.register_hook(self._record_graph)  # type: ignore[no-untyped-call]

    def _record_graph(self, grad: torch.Tensor) -> None:
        """Record whether the current backward through the model creates a graph."""
        self.has_graph |= torch.is_grad_enabled()

    @contextmanager
    def keep_gathered(self) -> Iterator[None]:
        """Return the context of the training loop's backward, in which all FSDP units are gathered."""
        log.info_once(
            "a backward ran through %s before that of its loss, so all its parameters are kept unsharded",
            get_class_name(self._model),
        )
        try:
            with fsdp_state.keep_gathered(self._model):
                yield
        finally:
            self.has_graph = False

    def release(self) -> None:
        """Remove the hook from the model."""
        self._hook.remove()
