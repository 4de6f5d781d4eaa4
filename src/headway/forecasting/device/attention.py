"""Attention: the kernel that a device takes, by torch's own rules, and what its backward asks for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

FLASH_MAX_HEAD = 256
HALVES = (torch.float16, torch.bfloat16)


def flash_backward(args: tuple[Any, ...]) -> list[int]:
    """A row of sums for each query, and the gradient of queries in float32."""
    query = args[1]
    samples, heads, length, width = query.shape
    padded, wide = -(-length // 128) * 128, -(-width // 32) * 32
    copies = [*_as_kernels_read(args[0]), *_as_kernels_read(args[4])]
    return [*copies, samples * heads * padded * 4, samples * heads * padded * wide * 4, *grouped_gradients(args)]


def _as_kernels_read(tensor: torch.Tensor) -> list[int]:
    """A copy of what does not lie by samples, tokens and heads."""
    return [] if tensor.transpose(1, 2).is_contiguous() else [tensor.nbytes]


def grouped_gradients(args: tuple[Any, ...]) -> list[int]:
    """Gradients of grouped heads are those of all heads until they are summed up."""
    query, key = args[1], args[2]
    samples, heads, _, width = query.shape
    return [samples * heads * key.shape[2] * width * key.element_size()] * 2 if key.shape[1] != heads else []


def efficient_backward(args: tuple[Any, ...]) -> list[int]:
    """A row of sums for each query, in float32 those of a product made before; then gradients in float32, in blocks with a lock each.

    Of wide heads in half precision also the gradients of keys and values.
    """
    query, key = args[1], args[2]
    samples, heads, length, width = query.shape
    is_half = query.dtype in HALVES
    rows = samples * heads * length * 4
    high = 128 if is_half and width > 64 else 64
    wide = 128 if 64 < width <= 128 else 64
    blocks, across = samples * heads * -(-length // high), -(-width // wide)
    room = blocks * across * (high * wide * 4 + 16)
    if is_half and width > 128:
        room += samples * heads * 2 * -(-key.shape[2] // 128) * 128 * -(-width // 128) * 128 * 4
    product = [rows] if is_half else [query.nbytes, rows, rows, -rows, -query.nbytes]
    return [*_as_kernels_read(args[0]), *product, room]


@dataclass(frozen=True)
class AttentionKernel:
    """How attention is computed, as `torch._fused_sdp_choice` chooses on CUDA.

    Attributes:
        capability: of the device.
        version: of torch.
    """

    capability: tuple[int, int]
    version: tuple[int, ...]

    def kernel(
        self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, p: float, causal: bool, trains: bool
    ) -> str:
        """ "cudnn", "flash", "efficient" or "math"."""
        width, is_half = query.shape[-1], query.dtype in HALVES
        if (
            query.dim() != 4
            or width != key.shape[-1]
            or 0 in query.shape
            or query.dtype not in (*HALVES, torch.float32)
        ):
            return "math"
        if is_half and self._takes_cudnn(width, mask, p, trains):
            return "cudnn"
        has_tensor_cores = self.capability >= (8, 0)
        fits = width <= FLASH_MAX_HEAD and not (causal and query.shape[2] != key.shape[2])
        if has_tensor_cores and is_half and mask is None and fits:
            return "flash"
        aligned = 16 // query.element_size() if has_tensor_cores or is_half else 1
        is_refused = query.shape[1] != key.shape[1] and self.version < (2, 14)
        if width % aligned or is_refused or (query.dtype == torch.bfloat16 and not has_tensor_cores):
            return "math"
        return "efficient"

    def _takes_cudnn(self, width: int, mask: torch.Tensor | None, p: float, trains: bool) -> bool:
        if self.capability not in ((9, 0), (10, 0)) or width % 8 or width > FLASH_MAX_HEAD:
            return False
        if mask is not None and mask.requires_grad:
            return False
        has_dropout = p > 0 and self.version >= (2, 12)
        return not has_dropout and not (trains and 128 < width < FLASH_MAX_HEAD and self.version >= (2, 14))


TRACED = FakeTensor, FunctionalTensor
"""Tensors without values; the second kind stands for the first while torch.compile traces."""


def attention(choice: AttentionKernel | None) -> Callable[..., Any]:
    """Attention of fake tensors by the kernel that the target takes.

    Args:
        choice: CUDA's; None: a CPU, whose fused kernel torch would not take for a fake tensor.
    """
    aten = torch.ops.aten

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        p: float = 0.0,
        causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        trains = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        if not isinstance(query, TRACED):
            kernel = "plain"
        elif choice is None:
            kernel = _kernel_of_cpu(query, key, value, mask, p, enable_gqa)
        elif any(each.stride(-1) != 1 for each in (query, key, value)):
            kernel = "math"
        else:
            kernel = choice.kernel(query, key, mask, p, causal, trains)
            if kernel == "flash" and value.shape[-1] != key.shape[-1]:
                kernel = "efficient"
        if kernel == "plain":
            plain = aten.scaled_dot_product_attention.default.decompose
            return plain(query, key, value, mask, p, causal, scale=scale, enable_gqa=enable_gqa)
        if kernel == "efficient" and mask is not None:
            mask = _prepared(mask, query, key)
        mask = _added(mask, query)
        if kernel == "math":
            math = aten._scaled_dot_product_attention_math
            return math(query, key, value, mask, p, causal, None, scale=scale, enable_gqa=enable_gqa)[0]
        if kernel == "cpu":
            fused = aten._scaled_dot_product_flash_attention_for_cpu
            return fused(query, key, value, p, causal, attn_mask=mask, scale=scale)[0]
        if kernel == "flash":
            width = query.shape[-1]
            pad = torch.nn.functional.pad
            query, key, value = (pad(each, (0, -width % 8)) if width % 8 else each for each in (query, key, value))
            scale = width**-0.5 if scale is None else scale
            return aten._scaled_dot_product_flash_attention(query, key, value, p, causal, False, scale=scale)[0][
                ..., :width
            ]
        fused = getattr(aten, f"_scaled_dot_product_{kernel}_attention")
        return fused(query, key, value, mask, trains, p, causal, scale=scale)[0]

    return attend


def _kernel_of_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, p: float, enable_gqa: bool
) -> str:
    """ "cpu", "math" or "plain"."""
    is_alike = query.dim() == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1]
    has_heads = query.dim() == 4 and (query.shape[1] == key.shape[1] or enable_gqa)
    is_aligned = all(each.stride(-1) == 1 for each in (query, key, value))
    if not (is_alike and has_heads and is_aligned) or p > 0:
        return "plain"
    return "math" if mask is not None and mask.requires_grad else "cpu"


def _added(mask: Any, query: torch.Tensor) -> Any:
    """A mask of bools becomes one to add."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _prepared(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask to add, its rows aligned to 16 bytes, as the memory-efficient kernel wants them."""
    mask = _added(mask, query)
    length = key.shape[2]
    if mask.shape[-1] == length and length % 8:
        mask = torch.nn.functional.pad(mask, (0, -length % 8))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], length)
