"""Choose a device's attention kernel by torch's rules, and compute the scratch memory of the kernel's backward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headway.forecasting._torch import FakeTensor, FunctionalTensor

FLASH_MAX_HEAD = 256
"""Largest head size that FlashAttention supports."""
HALVES = (torch.float16, torch.bfloat16)
"""Half-precision dtypes, for which fused attention kernels exist."""

TRACED = FakeTensor, FunctionalTensor
"""Types of tensors without values. `FunctionalTensor` wraps fake tensors while `torch.compile` traces."""


def size_flash_backward(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of each scratch tensor in FlashAttention's backward.

    The scratch tensors are, in this order:

    - copies of the outgoing gradient and of the result, if the kernel needs contiguous copies
    - the row sums
    - the gradient of the query in float32
    - two more for grouped-query attention (see `size_grouped_gradients`)

    Args:
        args: Arguments of the backward operation.
    """
    output_grad, query, outputs = args[0], args[1], args[4]
    samples, heads, length, head_size = query.shape
    padded_length, padded_head_size = -(-length // 128) * 128, -(-head_size // 32) * 32
    row_sum_bytes = samples * heads * padded_length * 4
    query_grad_bytes = row_sum_bytes * padded_head_size
    copies = [*_size_copy(output_grad), *_size_copy(outputs)]
    return [*copies, row_sum_bytes, query_grad_bytes, *size_grouped_gradients(args)]


def _size_copy(tensor: torch.Tensor) -> list[int]:
    """Return the size in bytes of a contiguous copy of a tensor, as a list that is empty if the kernel needs no copy.

    No copy is needed if the tensor's memory is ordered by samples, tokens and heads.
    """
    return [] if tensor.transpose(1, 2).is_contiguous() else [tensor.nbytes]


def size_grouped_gradients(args: tuple[Any, ...]) -> list[int]:
    """Return a list with the bytes of the key and value gradients of grouped-query attention, before they are summed.

    Before the sum over each group, these gradients have as many heads as the query. The list is empty if query and key
    have the same number of heads.

    Args:
        args: Arguments of the backward operation.
    """
    query, key = args[1], args[2]
    samples, heads, _, head_size = query.shape
    if key.shape[1] == heads:
        return []
    return [samples * heads * key.shape[2] * head_size * key.element_size()] * 2


def size_efficient_backward(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of each scratch tensor in the backward of memory-efficient attention, in the order of requests.

    - One tensor has a row sum for each query. In float32, the sums are computed from temporary tensors. In the result,
      negative sizes mean that these are freed.
    - Gradients are accumulated in float32 blocks, each with a lock. Heads wider than 128 in half precision also need
      such blocks for the gradients of keys and values.

    Args:
        args: Arguments of the backward operation.
    """
    query, key = args[1], args[2]
    samples, heads, length, head_size = query.shape
    is_half = query.dtype in HALVES
    row_sum_bytes = samples * heads * length * 4
    # In half precision, the kernel itself computes the row sums. In float32, torch multiplies and sums before the kernel.
    row_sums = [row_sum_bytes]
    if not is_half:
        row_sums = [query.nbytes, row_sum_bytes, row_sum_bytes, -row_sum_bytes, -query.nbytes]
    block_height = 128 if is_half and head_size > 64 else 64
    block_width = 128 if 64 < head_size <= 128 else 64
    num_blocks = samples * heads * -(-length // block_height) * -(-head_size // block_width)
    accumulator_bytes = num_blocks * (block_height * block_width * 4 + 16)  # 16 bytes for the lock of each block
    if is_half and head_size > 128:
        padded_length, padded_head_size = -(-key.shape[2] // 128) * 128, -(-head_size // 128) * 128
        accumulator_bytes += 2 * samples * heads * padded_length * padded_head_size * 4
    return [*_size_copy(args[0]), *row_sums, accumulator_bytes]


@dataclass(frozen=True)
class AttentionRules:
    """Rules by which torch chooses an attention kernel on a CUDA device, as in `torch._fused_sdp_choice`.

    They assume that no kernel is disabled, for example by `torch.nn.attention.sdpa_kernel`.

    Attributes:
        capability: Compute capability of the device.
        version: Major and minor version of torch.
    """

    capability: tuple[int, int]
    version: tuple[int, ...]

    def choose_kernel(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        p: float,
        causal: bool,
        needs_grad: bool,
    ) -> str:
        """Return the name of the kernel for an attention call: "cudnn", "flash", "efficient" or "math".

        Args:
            query: Query, of shape (batch, heads, tokens, head size).
            key: Key, of shape (batch, heads, tokens, head size).
            mask: Attention mask, or None.
            p: Dropout probability.
            causal: Whether the attention is causal.
            needs_grad: Whether query, key or value needs a gradient.
        """
        head_size, is_half = query.shape[-1], query.dtype in HALVES
        if (
            query.dim() != 4
            or head_size != key.shape[-1]
            or 0 in query.shape
            or query.dtype not in (*HALVES, torch.float32)
        ):
            return "math"
        if is_half and self._can_use_cudnn(head_size, mask, p, needs_grad):
            return "cudnn"
        is_ampere_or_later = self.capability >= (8, 0)
        # Causal FlashAttention aligns the last query with the last key. torch's causal mask aligns the first ones.
        is_causal_cross_attention = causal and query.shape[2] != key.shape[2]
        can_use_flash = is_ampere_or_later and is_half and mask is None and head_size <= FLASH_MAX_HEAD
        if can_use_flash and not is_causal_cross_attention:
            return "flash"
        # Matrix products on tensor cores need rows that are aligned to 16 bytes. Before 8.0, only half precision uses them.
        alignment = 16 // query.element_size() if is_ampere_or_later or is_half else 1
        has_unsupported_groups = query.shape[1] != key.shape[1] and self.version < (2, 14)
        has_unsupported_dtype = query.dtype == torch.bfloat16 and not is_ampere_or_later
        if head_size % alignment or has_unsupported_groups or has_unsupported_dtype:
            return "math"
        return "efficient"

    def _can_use_cudnn(self, head_size: int, mask: torch.Tensor | None, p: float, needs_grad: bool) -> bool:
        """Whether torch would choose cuDNN's attention kernel for half-precision inputs.

        Args:
            head_size: Head size.
            mask: Attention mask, or None.
            p: Dropout probability.
            needs_grad: Whether query, key or value needs a gradient.
        """
        if self.capability not in ((9, 0), (10, 0)) or head_size % 8 or head_size > FLASH_MAX_HEAD:
            return False
        if mask is not None and mask.requires_grad:
            return False
        refuses_dropout = p > 0 and self.version >= (2, 12)
        refuses_head_size = needs_grad and 128 < head_size < FLASH_MAX_HEAD and self.version >= (2, 14)
        return not refuses_dropout and not refuses_head_size


def make_attention(rules: AttentionRules | None) -> Callable[..., Any]:
    """Return an attention function that traces fake tensors through the kernel that the target device would use.

    The function has the signature of torch's `scaled_dot_product_attention`. It computes real tensors as usual.

    Args:
        rules: Rules that choose the kernel on a CUDA device, or None for a CPU. For a CPU, the returned function
            selects the fused kernel itself, because torch would not select it for fake tensors.
    """
    aten = torch.ops.aten

    def compute_attention(
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
        needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        if not isinstance(query, TRACED):
            kernel = "plain"
        elif rules is None:
            kernel = _choose_cpu_kernel(query, key, value, mask, p, enable_gqa)
        elif any(each.stride(-1) != 1 for each in (query, key, value)):
            kernel = "math"  # all fused kernels need a contiguous last dimension
        else:
            kernel = rules.choose_kernel(query, key, mask, p, causal, needs_grad)
            if kernel == "flash" and value.shape[-1] != key.shape[-1]:
                kernel = "efficient"
        if kernel == "plain":  # let torch choose
            plain = aten.scaled_dot_product_attention.default.decompose
            return plain(query, key, value, mask, p, causal, scale=scale, enable_gqa=enable_gqa)
        if kernel == "efficient" and mask is not None:
            mask = _align_mask(mask, query, key)
        mask = _make_additive_mask(mask, query)
        if kernel == "math":
            math = aten._scaled_dot_product_attention_math
            return math(query, key, value, mask, p, causal, None, scale=scale, enable_gqa=enable_gqa)[0]
        if kernel == "cpu":
            fused = aten._scaled_dot_product_flash_attention_for_cpu
            return fused(query, key, value, p, causal, attn_mask=mask, scale=scale)[0]
        if kernel == "flash":
            return _compute_flash(query, key, value, p, causal, scale)
        # "cudnn" and "efficient" have the same arguments.
        fused = getattr(aten, f"_scaled_dot_product_{kernel}_attention")
        return fused(query, key, value, mask, needs_grad, p, causal, scale=scale)[0]

    return compute_attention


def _compute_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, p: float, causal: bool, scale: float | None
) -> torch.Tensor:
    """Compute attention with FlashAttention's operation, which needs a head size that is a multiple of 8.

    The arguments are those of torch's `scaled_dot_product_attention`. Other head sizes are padded.
    """
    head_size = query.shape[-1]
    if scale is None:
        scale = head_size**-0.5  # of the unpadded size
    if head_size % 8:
        padding = (0, -head_size % 8)
        query, key, value = (torch.nn.functional.pad(each, padding) for each in (query, key, value))
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    output: torch.Tensor = flash(query, key, value, p, causal, False, scale=scale)[0]
    return output[..., :head_size]


def _choose_cpu_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, p: float, enable_gqa: bool
) -> str:
    """Return the name of the attention kernel for a CPU: "cpu" (fused), "math", or "plain" if torch is to choose.

    The choice is left to torch if there is dropout, or if the fused kernel does not support the shapes or strides.
    """
    if query.dim() != 4 or p > 0:
        return "plain"
    has_equal_head_sizes = query.shape[-1] == key.shape[-1] == value.shape[-1]
    has_supported_groups = query.shape[1] == key.shape[1] or enable_gqa
    has_contiguous_heads = all(each.stride(-1) == 1 for each in (query, key, value))
    if not (has_equal_head_sizes and has_supported_groups and has_contiguous_heads):
        return "plain"
    return "math" if mask is not None and mask.requires_grad else "cpu"


def _make_additive_mask(mask: Any, query: torch.Tensor) -> Any:
    """Convert a boolean attention mask to one that is added to the scores. Other masks are returned unchanged."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _align_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return an additive mask whose rows start at multiples of 16 bytes, as the memory-efficient kernel requires.

    It is expanded to the shape (batch, heads, query tokens, key tokens).
    """
    mask = _make_additive_mask(mask, query)
    length = key.shape[2]
    if mask.shape[-1] == length and length % 8:
        mask = torch.nn.functional.pad(mask, (0, -length % 8))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], length)
