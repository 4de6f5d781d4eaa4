"""Optimizer states in few bits (torchao's AdamW8bit, AdamW4bit, AdamWFp8): saved as float32 values, quantised again when loaded.

Their blocks run over a rank's part as if it had no rows, so codes and scales fit no other layout; the values they stand for fit all.
"""

from typing import Any

import torch

from headway.common.optional import Later
from headway.weights.pieces import held, is_dtensor

dtensor = Later("torch.distributed.tensor")

_SIGNED = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}
"""The states that are kept in few bits, and whether their values have signs."""


def is_quantised(tensor: Any) -> bool:
    """Is it one of torchao's, which looks like its values and holds codes?"""
    return isinstance(tensor, torch.Tensor) and type(tensor).__module__.startswith("torchao.optim.")


def values_of(state: Any) -> Any:
    """A parameter's state, with quantised tensors as the float32 values that they stand for, cut as they were."""
    if isinstance(state, dict):
        return {name: values_of(value) for name, value in state.items()}
    if not isinstance(state, torch.Tensor):
        return state
    local: Any = state._local_tensor if is_dtensor(state) else state
    if not is_quantised(local):
        return state
    values = local.dequantize(torch.float32)
    if not is_dtensor(state):
        return values
    given = {"run_check": False, "shape": state.shape, "stride": state.stride()}
    return dtensor.DTensor.from_local(values, state.device_mesh, state.placements, **given)


def quantise(optimizer: torch.optim.Optimizer) -> None:
    """Put loaded values into few bits again, where this optimizer keeps them so."""
    make: Any = getattr(optimizer, "_new_buffer", None)
    if make is None or not any(kind.__module__.startswith("torchao.optim.") for kind in type(optimizer).__mro__):
        return
    for parameter, state in optimizer.state.items():
        for name, is_signed in _SIGNED.items():
            if name in state:
                buffer = make(parameter, is_signed)
                local = buffer._local_tensor if is_dtensor(buffer) else buffer
                if is_quantised(local):
                    local.copy_(held(state[name]))
                    state[name] = buffer
