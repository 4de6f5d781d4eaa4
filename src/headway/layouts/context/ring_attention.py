"""`RingAttention`: torch's own ring attention for causal calls on accelerators.

It sends keys and values to the next rank while it computes with the previous ones. torch supports it for the kernels of
accelerators (flash, memory-efficient and cuDNN attention) and not for those of the CPU.
"""

from typing import Any

import torch
from torch.nn import functional

from headway.common.optional import LazyModule
from headway.layouts.context._torch import RING_MODULE, RING_NAMES
from headway.log import get_logger

log = get_logger(__name__)

torch_attention = LazyModule(RING_MODULE)
RING_STEP = 64
"""Number that must divide the number of tokens per rank for torch's ring attention to be used.

The ring computes half a shard at a time, and the memory-efficient kernel pads one of its results to a multiple of 32.
"""

_RING_DEVICE_TYPES = ("cuda",)
"""Device types whose attention kernels torch's ring attention supports."""


class RingDispatcher:
    """Registry of the models in this process that use torch's ring attention.

    torch has one attention dispatcher and one rotation method per process. Both are restored when the last model stops
    using the ring.
    """

    def __init__(self) -> None:
        self._rings: list[RingAttention] = []
        self._original_rotation: Any = None

    def add_ring(self, ring: "RingAttention", rotation: str) -> None:
        """Register a model's ring attention, and enable torch's dispatcher for it.

        Args:
            ring: Ring attention of a model.
            rotation: How keys and values are exchanged: "allgather" or "alltoall".
        """
        if not self._rings:
            self._original_rotation = torch_attention._cp_options.rotate_method
        torch_attention.set_rotate_method(rotation)
        torch_attention._enable_context_parallel_dispatcher()
        self._rings.append(ring)

    def remove_ring(self, ring: "RingAttention") -> None:
        """Unregister a model's ring attention.

        When no ring attention is left in the process, torch's dispatcher and rotation method are restored.
        """
        if ring not in self._rings:
            return
        self._rings.remove(ring)
        if not self._rings:
            torch_attention._cp_options.rotate_method = self._original_rotation
            torch_attention._disable_context_parallel_dispatcher()


def find_ring_attention(mesh: Any, rotation: str, dispatcher: RingDispatcher) -> "RingAttention | None":
    """Return torch's causal ring attention, or None if it is not available.

    It is not available if torch has no kernel for the device, or if this torch version lacks one of `RING_NAMES`.

    Args:
        mesh: One-dimensional DeviceMesh of the ranks.
        rotation: How keys and values are exchanged: "allgather" or "alltoall".
        dispatcher: Registry of this process's ring attentions.
    """
    if mesh.device_type not in _RING_DEVICE_TYPES:
        if rotation == "alltoall":
            log.warning_once(
                "cp_comm_strategy='alltoall' is torch's ring attention, which has no kernel for %s: keys and values are gathered",
                mesh.device_type,
            )
        return None
    missing = [name for name in RING_NAMES if not hasattr(torch_attention, name)]
    if missing:
        log.warning_once(
            "torch %s lacks %s: keys and values are gathered instead of torch's ring attention",
            torch.__version__,
            ", ".join(missing),
        )
        return None
    return RingAttention(mesh, rotation, dispatcher)


class RingAttention:
    """torch's ring attention on the ranks of one mesh axis.

    Args:
        mesh: One-dimensional DeviceMesh of the ranks.
        rotation: How keys and values are exchanged: "allgather" or "alltoall".
        dispatcher: Registry of this process's ring attentions.
    """

    def __init__(self, mesh: Any, rotation: str, dispatcher: RingDispatcher) -> None:
        self._mesh = mesh
        self._dispatcher = dispatcher
        torch_style = torch_attention._ContextParallel
        self._style = torch_style(seq_dim=2, attention_type=torch_style.AttentionType.SDPA)
        dispatcher.add_ring(self, rotation)

    def release(self) -> None:
        """Stop using the ring. Does nothing if this was already done.

        When the last `RingAttention` in the process is released, torch's context-parallel attention is disabled, and its
        rotation method is restored.
        """
        self._dispatcher.remove_ring(self)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Return the causal attention of this rank's queries to the full sequence.

        Args:
            query: Queries of this rank, [rows, heads, tokens, head dim], in the order of torch's head-tail balancer.
            key: Keys of this rank, with as many heads as the queries or a divisor of that number.
            value: Values of this rank, with as many heads as the keys.
            scale: Factor for the scores; None for torch's default.
        """
        num_repeats = query.shape[1] // key.shape[1]
        if num_repeats > 1:
            key, value = key.repeat_interleave(num_repeats, 1), value.repeat_interleave(num_repeats, 1)
        options = {"is_causal": True, "scale": scale}
        # torch's style converts the tensors to DTensors, for which its dispatcher runs the ring, and back.
        args, kwargs = self._style.sdpa_input_fn(None, (query, key, value), options, self._mesh)
        output = functional.scaled_dot_product_attention(*args, **kwargs)
        local_output: torch.Tensor = self._style.sdpa_output_fn(None, None, output, self._mesh)
        return local_output
