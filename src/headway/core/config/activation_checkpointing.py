"""Options of activation checkpointing. This module does not import torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.core.config.values import report_unknown_keywords
from headway.errors import ConfigError


@report_unknown_keywords
@dataclass(frozen=True)
class ActivationCheckpointing:
    """Options of activation checkpointing: which blocks recompute their activations, and which tensors are saved.

    As one of `kwargs_handlers`, they apply to all models that are prepared for training. A checkpointed block runs its
    forward again in backward (Chen et al. 2016, arXiv 1604.06174), with torch's non-reentrant checkpoint. Results do not
    change. `Accelerator.checkpoint_activations` enables it for one model.

    Attributes:
        every: Number n such that every n-th block is checkpointed, at least 1. 1 (the default): all blocks.
        policy: One of the following, or a policy function for torch's create_selective_checkpoint_contexts.
            "recompute" (the default): save only a block's inputs. "keep_matmul": also save outputs of matrix products,
            convolutions and fused attention. "keep_attention": also save outputs of fused attention. "keep_all":
            recompute nothing, which is allowed only with `offload`.
        offload: Whether to move saved activations to host memory until backward. No effect on a CPU. Default: False.
        blocks: Classes, class names or module names of the blocks. Empty (the default): the repeated blocks of the
            model.

    Raises:
        ConfigError: If a value is not allowed, or "keep_all" is given without `offload`.

    Example::

        options = ActivationCheckpointing(every=2, policy="keep_attention")
        accelerator = Accelerator(kwargs_handlers=[options])
    """

    every: int = 1
    policy: str | Callable[..., Any] = "recompute"
    offload: bool = False
    blocks: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        blocks = self.blocks
        object.__setattr__(self, "blocks", (blocks,) if isinstance(blocks, str | type) else tuple(blocks))
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(f"every={self.every!r}; give 1 to checkpoint all blocks, n for every n-th")
        allowed = ("recompute", "keep_matmul", "keep_attention", "keep_all")
        if not callable(self.policy) and self.policy not in allowed:
            raise ConfigError(f"policy={self.policy!r}; allowed: {', '.join(allowed)}, or a callable")
        if self.policy == "keep_all" and not self.offload:
            raise ConfigError("policy='keep_all' changes nothing without offload=True; give both, or another policy")
