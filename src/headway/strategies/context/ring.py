"""torch's own context parallelism for causal attention: keys and values travel while earlier ones are computed with.

torch has it for the kernels of accelerators (flash, memory-efficient and cuDNN attention) and not for the CPU's.
"""

from typing import Any

import torch
from torch.nn import functional

from headway.common.optional import Later
from headway.log import get_logger

attention = Later("torch.distributed.tensor.experimental._attention")

log = get_logger(__name__)
_KINDS = ("cuda",)
"""Devices whose kernels torch's ring attention knows."""
_NEEDED = (
    "_ContextParallel", "_enable_context_parallel_dispatcher", "_disable_context_parallel_dispatcher", "_cp_options",
    "set_rotate_method",
)  # fmt: skip


class RingDispatcher:
    """Those in use, and how keys and values travelled before: torch has one dispatcher and one way for the whole process."""

    def __init__(self) -> None:
        self._held: list[RingAttention] = []
        self._before: Any = None

    def enter(self, ring: "RingAttention", rotation: str) -> None:
        """Let torch's attention be a ring that sends in this way."""
        if not self._held:
            self._before = attention._cp_options.rotate_method
        attention.set_rotate_method(rotation)
        attention._enable_context_parallel_dispatcher()
        self._held.append(ring)

    def leave(self, ring: "RingAttention") -> None:
        """The last ring leaves torch as it was."""
        if ring not in self._held:
            return
        self._held.remove(ring)
        if not self._held:
            attention._cp_options.rotate_method = self._before
            attention._disable_context_parallel_dispatcher()


def find(mesh: Any, rotation: str, known: RingDispatcher) -> "RingAttention | None":
    """Causal attention by torch's ring; None where it has no kernel, or where this torch has another form of it.

    Args:
        mesh: the ranks, a DeviceMesh of one dimension.
        rotation: "allgather" or "alltoall": how keys and values travel.
        known: the process's rings.
    """
    if mesh.device_type not in _KINDS:
        if rotation == "alltoall":
            log.warning_once(
                "cp_comm_strategy='alltoall' is torch's ring attention, which has no kernel for %s: keys and values are gathered",
                mesh.device_type,
            )
        return None
    missing = [name for name in _NEEDED if not hasattr(attention, name)]
    if missing:
        log.warning_once(
            "torch %s lacks %s: keys and values are gathered instead of torch's ring attention",
            torch.__version__,
            ", ".join(missing),
        )
        return None
    return RingAttention(mesh, rotation, known)


class RingAttention:
    """torch's ring attention on the ranks of one axis.

    Args:
        mesh: the ranks.
        rotation: how keys and values travel.
        known: the process's rings.
    """

    def __init__(self, mesh: Any, rotation: str, known: RingDispatcher) -> None:
        self._mesh, self._known = mesh, known
        kind = attention._ContextParallel
        self._style = kind(seq_dim=2, attention_type=kind.AttentionType.SDPA)
        known.enter(self, rotation)

    def release(self) -> None:
        """Stop using torch's."""
        self._known.leave(self)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Causal attention of this rank's parts, which lie as torch's head-tail balancer lays them."""
        times = query.shape[1] // key.shape[1]
        if times > 1:
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        given = {"is_causal": True, "scale": scale}
        args, kwargs = self._style.sdpa_input_fn(None, (query, key, value), given, self._mesh)
        out = functional.scaled_dot_product_attention(*args, **kwargs)
        found: torch.Tensor = self._style.sdpa_output_fn(None, None, out, self._mesh)
        return found
