"""Half precision for scripts: autocast in the run's precision, gradient scalers, outputs as float32."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from headway.compat.accelerate.data.batches import convert_to_fp32
from headway.compat.accelerate.layouts import DistributedType
from headway.compat.accelerate.state import AcceleratorState
from headway.runtime.device import detect

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: Any = None
) -> AbstractContextManager[Any]:
    """torch.autocast in the run's precision, or nothing.

    Args:
        native_amp: False: nothing.
        autocast_kwargs: an `AutocastKwargs`.
    """
    if not native_amp:
        return nullcontext()
    state = AcceleratorState()
    options = {} if autocast_kwargs is None else autocast_kwargs.to_kwargs()
    return torch.autocast(state.device.type, _DTYPES.get(state.mixed_precision), **options)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> Any:
    """A gradient scaler for this machine's accelerator ("cuda" where there is none), or for sharded gradients.

    Args:
        distributed_type: DistributedType.FSDP for sharded ones.
        kwargs: for the scaler.
    """
    if distributed_type == DistributedType.FSDP:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(**kwargs)
    kind = detect().kind
    return torch.amp.GradScaler("cuda" if kind == "cpu" else kind, **kwargs)


def get_fsdp2_grad_scaler(**kwargs: Any) -> Any:
    """A gradient scaler for parameters that `fully_shard` has sharded: torch's usual one."""
    return get_grad_scaler(**kwargs)


class ConvertOutputsToFp32:
    """A forward function whose half-precision outputs are converted; it can be pickled where the function can.

    Args:
        model_forward: the function.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        from functools import update_wrapper

        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))
