"""What a step computes and moves, counted operation by operation: what a relative cost is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from headway.forecasting.device.devices import Device

LAUNCH = 5e-6
"""Seconds of host work for an operation in eager mode: what an operation takes at least. Assumed."""

_HALVES = (torch.float16, torch.bfloat16)
_NO_KERNEL = ("aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::detach", "aten::_local_scalar_dense")


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Floating point operations of an operation: a product of matrices, a convolution or attention; of others 0.

    Kernels skip the masked half of causal attention, which torch's formulas count.
    """
    if func._overloadpacket in flop_registry:
        counted = int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=result))
    else:
        formula = _OF_CPUS.get(func._schema.name)
        counted = formula(*args) if formula is not None else 0
    return counted // 2 if counted and _is_causal(func, args, kwargs) else counted


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    return bool(dict(zip(names, args), **kwargs).get("is_causal", False))


# torch's registry has the kernels of accelerators only.
_OF_CPUS: dict[str, Callable[..., int]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda query, key, value, *_: int(
        sdpa_flop_count(query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda grad, query, key, value, *_: int(
        sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]
    ),
}


@dataclass(frozen=True)
class StepWork:
    """What some operations have to do.

    Attributes:
        flops: floating point operations of products of matrices, convolutions and attention.
        num_bytes: read and written by operations.
        launches: operations that run a kernel.
        seconds: that all of it takes at the least by the device's published rates; not a forecast of time.
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
    """Counts the work of operations, by the phase of the step that they run in.

    Each operation counts for the longest of three: its floating point operations at the device's rate for their dtype, its bytes at
    the bandwidth of its memory, and what the host needs to launch it.

    Args:
        device: the target.

    Attributes:
        by_phase: so far.
    """

    def __init__(self, device: Device) -> None:
        self._rates = device.rates
        self._has_bfloat16 = device.capability >= (8, 0)
        self.by_phase: dict[str, StepWork] = {}

    def add(self, phase: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> None:
        """An operation has run."""
        name = func._schema.name
        if func.is_view or name.startswith(_NO_KERNEL):
            return
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        num_bytes = sum(each.numel() * each.element_size() for each in {id(each): each for each in tensors}.values())
        flops = flops_of(func, args, kwargs or {}, result)
        computing = flops / self._rate(tensors) if flops else 0.0
        seconds = max(computing, num_bytes / self._rates.bandwidth, LAUNCH)
        self.by_phase[phase] = self.by_phase.get(phase, StepWork()) + StepWork(flops, num_bytes, 1, seconds)

    def _rate(self, tensors: list[torch.Tensor]) -> float:
        dtype = next((each.dtype for each in tensors if each.is_floating_point()), torch.float32)
        is_quick = dtype in _HALVES and (dtype == torch.float16 or self._has_bfloat16)
        return self._rates.half if is_quick else self._rates.full
