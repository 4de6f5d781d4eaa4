"""Count the floating-point operations, memory traffic and kernel launches of a step, to estimate relative costs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from headway.forecasting._torch import tree_leaves
from headway.forecasting.device.devices import Device

LAUNCH_SECONDS = 5e-6
"""Seconds that the host needs to launch an operation in eager mode, which is the operation's minimum duration.

The value is assumed, not measured.
"""

_HALVES = (torch.float16, torch.bfloat16)
"""Dtypes whose matrix products run at the device's half-precision rate."""
_NO_KERNEL = ("aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::detach", "aten::_local_scalar_dense")
"""Prefixes of the names of operations that launch no kernel."""

# Of the attention kernels, torch's registry of FLOP formulas has only those of accelerators.
_CPU_ATTENTION_FLOPS: dict[str, Callable[..., int]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda query, key, value, *_: int(
        sdpa_flop_count(query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda grad, query, key, value, *_: int(
        sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]
    ),
}


def count_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the floating-point operations of a matrix product, convolution or attention, or 0 for other operations.

    Causal attention counts half of what torch's formulas give, because kernels skip the masked half.

    Args:
        func: Operation.
        args: Arguments of the operation.
        kwargs: Keyword arguments of the operation.
        result: Result of the operation.
    """
    if func._overloadpacket in flop_registry:
        counted = int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=result))
    else:
        formula = _CPU_ATTENTION_FLOPS.get(func._schema.name)
        counted = formula(*args) if formula is not None else 0
    if counted and _is_causal(func, args, kwargs):
        return counted // 2
    return counted


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an attention operation is causal.

    Args:
        func: Operation with an argument `is_causal`.
        args: Arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    names = [argument.name for argument in func._schema.arguments]
    return bool(dict(zip(names, args), **kwargs).get("is_causal", False))


@dataclass(frozen=True)
class StepWork:
    """Floating point operations, memory traffic and kernel launches of one or more operations.

    Attributes:
        flops: Floating point operations of matrix products, convolutions and attention.
        num_bytes: Bytes that the operations read and write.
        launches: Number of operations that launch a kernel.
        seconds: Lower bound of the duration, computed from the device's published rates. It is no forecast of the real
            time.
    """

    flops: int = 0
    num_bytes: int = 0
    launches: int = 0
    seconds: float = 0.0

    def __add__(self, other: "StepWork") -> "StepWork":
        return StepWork(
            self.flops + other.flops,
            self.num_bytes + other.num_bytes,
            self.launches + other.launches,
            self.seconds + other.seconds,
        )

    def __mul__(self, times: float) -> "StepWork":
        return StepWork(
            round(self.flops * times), round(self.num_bytes * times), round(self.launches * times), self.seconds * times
        )


class WorkCounter:
    """Counter of floating-point operations, memory traffic, kernel launches and minimum time, by phase of the step.

    The minimum time of an operation is the longest of three: its computing time, its memory time and its launch time on
    the host. The first follows from the device's rate for the dtype, the second from the memory bandwidth.

    Args:
        device: Device whose peak rates determine the minimum times.

    Attributes:
        by_phase: Work so far, by phase.
    """

    def __init__(self, device: Device) -> None:
        self._rates = device.rates
        self._has_bfloat16 = device.capability >= (8, 0)
        self.by_phase: dict[str, StepWork] = {}

    def add_operation(
        self, phase: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any
    ) -> None:
        """Add the work of an operation that has run to its phase.

        Views and other operations that launch no kernel are not counted.

        Args:
            phase: Phase of the step.
            func: Operation, an `OpOverload` of torch.
            args: Arguments of the operation.
            kwargs: Keyword arguments of the operation, or None.
            result: Result of the operation.
        """
        name = func._schema.name
        if func.is_view or name.startswith(_NO_KERNEL):
            return
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        unique = {id(each): each for each in tensors}.values()  # an in-place operation returns one of its arguments
        num_bytes = sum(each.numel() * each.element_size() for each in unique)
        flops = count_flops(func, args, kwargs or {}, result)
        compute_seconds = flops / self._get_rate(tensors) if flops else 0.0
        seconds = max(compute_seconds, num_bytes / self._rates.bandwidth, LAUNCH_SECONDS)
        self.by_phase[phase] = self.by_phase.get(phase, StepWork()) + StepWork(flops, num_bytes, 1, seconds)

    def _get_rate(self, tensors: list[torch.Tensor]) -> float:
        """Return the peak rate, in floating-point operations per second, for the dtype of an operation's tensors."""
        dtype = next((each.dtype for each in tensors if each.is_floating_point()), torch.float32)
        has_half_rate = dtype in _HALVES and (dtype == torch.float16 or self._has_bfloat16)
        return self._rates.half if has_half_rate else self._rates.full
