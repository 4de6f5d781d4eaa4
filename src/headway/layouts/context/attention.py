"""Attention over sequences that are sharded across ranks: all-gathered keys, torch's ring attention, or Ulysses.

`WholeSequenceAttention` is active during a block's forward and intercepts all calls of torch's
`scaled_dot_product_attention`. Gradients of keys and values are summed over the ranks. Ulysses uses all-to-all
collectives: each rank then computes some of the heads for full sequences.

A rank's shard consists of two contiguous chunks of the sequence, one from each half (see `sequences`). In causal
attention, each chunk attends to the keys up to its own end. No mask is allocated, and nothing above the diagonal is
computed.

On accelerators, torch's own ring attention (`RingAttention`) computes the causal calls, and on a CPU `CausalOnCpu`.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from headway.core.strategies.blocks import extend_class
from headway.errors import DataError, PrepareError, UnsupportedError
from headway.layouts.context import sequences
from headway.layouts.context.cpu_attention import CausalOnCpu, split_chunks
from headway.layouts.context.ring_attention import RING_STEP
from headway.layouts.tensor.crossings import SplitAxis
from headway.log import get_logger

Causal = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float | None], torch.Tensor]
"""Function of (queries, keys, values, scale or None) that computes causal attention on this rank's sequence shard."""


class WholeSequenceAttention(TorchFunctionMode):
    """Torch function mode that makes attention calls on a sequence shard attend to the full sequence.

    Args:
        axis: Mesh axis of context parallelism.
        ring: Function that computes causal attention without dropout. None: all-gather keys and values. Default: None.
        style: Exchange between ranks: "ring" shards attention by queries, "ulysses" by heads, and "auto" chooses the
            one that sends less. Default: "ring".

    Attributes:
        num_calls: Number of attention calls since the last `reset_calls`.
        is_active: Whether blocks run their forward in this mode.
    """

    def __init__(self, axis: SplitAxis, ring: Causal | None = None, style: str = "ring") -> None:
        super().__init__()
        self._axis = axis
        self._ring = ring
        self._style = style
        self.is_active = False
        self._is_padded = False
        self.num_calls = 0

    def set_active(self, is_active: bool) -> None:
        """Enable or disable this mode for later forward passes of the model's blocks.

        Args:
            is_active: Whether to enable the mode.
        """
        self.is_active = is_active

    def set_length(self, length: int) -> None:
        """Record whether the sequences of the next forward must be padded.

        Args:
            length: Length of the full sequences in tokens, without padding.
        """
        self._is_padded = sequences.pad_length(length, self._axis) != length

    def reset_calls(self) -> None:
        """Reset the number of attention calls to 0."""
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and replace calls of `scaled_dot_product_attention`. Run all other functions unchanged."""
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.num_calls += 1
        return self._compute_attention(*args, **kwargs)

    def _compute_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Return the attention of this rank's queries to the full sequence, or of this rank's heads with Ulysses.

        The arguments are those of torch's `scaled_dot_product_attention`, for this rank's sequence shard. A mask has
        this rank's rows and all columns.

        Raises:
            UnsupportedError: If the numbers of queries and keys differ, or if the mask or the heads cannot be divided.
            DataError: If the sequence is padded, and the attention is neither causal nor masked.
        """
        if query.shape[-2] != key.shape[-2]:
            raise UnsupportedError(
                f"context parallelism shards queries and keys alike, but attention has {query.shape[-2]} queries and "
                f"{key.shape[-2]} keys on this rank (cross attention, or a KV cache); use fsdp or tp for this model"
            )
        query, key, value = _cast_to_autocast(query, key, value)
        if self._should_split_heads(query, key):
            return self._attend_by_heads(query, key, value, attn_mask, dropout_p, is_causal, scale)
        is_plain_causal = (
            is_causal
            and attn_mask is None
            and not dropout_p
            and query.dim() == 4
            and (enable_gqa or query.shape[1] == key.shape[1])
        )
        if is_plain_causal and self._ring is not None and query.shape[2] % RING_STEP == 0:
            return self._ring(query, key, value, scale)
        if is_plain_causal and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
            output: torch.Tensor = CausalOnCpu.apply(query, key, value, self._axis, scale)  # type: ignore[no-untyped-call]
            return output
        # All other cases gather the keys and values of the full sequence, in one collective.
        keys_and_values = sequences.gather_sequence(torch.cat([key, value], -1), self._axis, -2)
        key, value = torch.split(keys_and_values, [key.shape[-1], value.shape[-1]], -1)
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        if is_plain_causal:
            return self._attend_lower_right(query, key, value, options)
        if attn_mask is not None:
            length = self._find_mask_length(attn_mask, query)
            key, value = key[..., :length, :], value[..., :length, :]
            options["is_causal"] = is_causal  # if it is True, torch raises an error, as without context parallelism
        elif is_causal:
            attn_mask = self._make_causal_mask(query, key)
        else:
            self._check_not_padded()
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)

    def _check_not_padded(self) -> None:
        """Raise `DataError` if the sequence is padded."""
        if self._is_padded:
            raise DataError(
                "context parallelism had to pad the sequence, and attention that is not causal would see the padding; pad batches "
                f"to a multiple of {2 * self._axis.size} tokens, with an attention_mask"
            )

    def _should_split_heads(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Whether to shard this attention call by heads (Ulysses) instead of by queries.

        If there are fewer key heads than ranks, they are repeated. The number of ranks must then be a multiple of the
        number of key heads.

        Raises:
            UnsupportedError: If the style is "ulysses" and the heads cannot be divided among the ranks.
        """
        if self._style == "ring":
            return False
        size = self._axis.size
        heads, key_heads = (query.shape[1], key.shape[1]) if query.dim() == 4 else (1, 1)
        fits = heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0)
        if self._style == "ulysses":
            if not fits:
                raise UnsupportedError(
                    f'cp_style="ulysses" gives each of the {size} ranks as many heads, and attention has {heads}, with {key_heads} '
                    'heads of keys; use a number of ranks that divides both, or cp_style="ring"'
                )
            return True
        # Ulysses sends queries, keys, values and outputs once; the ring sends keys and values to every rank.
        # Both sums are in units of one head of one rank's tokens. Fewer key heads than ranks are repeated.
        sends_less = fits and heads + max(key_heads, size) < size * key_heads
        style = "ulysses" if sends_less else "ring"
        log.info_once('cp_style="auto": %s, for %d heads (%d of keys) on %d ranks', style, heads, key_heads, size)
        return sends_less

    def _attend_by_heads(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """Compute attention over full sequences for this rank's heads.

        The arguments are those of torch's `scaled_dot_product_attention`, for all heads and this rank's sequence shard.

        Returns:
            Attention output of all heads for this rank's sequence shard.

        Raises:
            UnsupportedError: If the mask differs by head.
            DataError: If there is no mask although the sequence was padded and attention is not causal.
        """
        num_repeats = max(1, self._axis.size // key.shape[1])  # so that each rank gets at least one key head
        if num_repeats > 1:
            key, value = key.repeat_interleave(num_repeats, 1), value.repeat_interleave(num_repeats, 1)
        options: dict[str, Any] = {"dropout_p": dropout, "scale": scale, "is_causal": is_causal}
        if mask is not None:
            length = self._find_mask_length(mask, query)
            if mask.dim() == 4 and mask.shape[1] > 1:
                raise UnsupportedError(
                    'cp_style="ulysses" cannot divide an attention mask that differs by head; use cp_style="ring"'
                )
            mask = self._gather_mask_rows(mask, query.shape[-2])
        elif not is_causal:
            self._check_not_padded()
        query, key, value = (sequences.exchange_for_heads(tensor, self._axis) for tensor in (query, key, value))
        if mask is not None:
            key, value = key[:, :, :length], value[:, :, :length]
        options["enable_gqa"] = query.shape[1] != key.shape[1]
        output = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
        return sequences.exchange_for_shards(output, self._axis)

    def _gather_mask_rows(self, mask: torch.Tensor, num_queries: int) -> torch.Tensor:
        """Return the attention mask for all queries, all-gathered from the ranks.

        A mask without a dimension for queries is returned unchanged.

        Args:
            mask: Mask for this rank's queries.
            num_queries: Number of this rank's queries.
        """
        if mask.dim() < 2 or mask.shape[-2] != num_queries:
            return mask
        if mask.dtype == torch.bool:
            return sequences.gather_sequence(mask.to(torch.uint8), self._axis, -2).bool()
        return sequences.gather_sequence(mask, self._axis, -2)

    def _find_mask_length(self, mask: torch.Tensor, query: torch.Tensor) -> int:
        """Return the number of keys that a mask covers.

        Raises:
            UnsupportedError: If the mask's rows do not match this rank's sequence shard.
        """
        num_queries, length = query.shape[-2], mask.shape[-1]
        covers_sequence = sequences.pad_length(length, self._axis) == num_queries * self._axis.size
        if not covers_sequence or (mask.dim() > 1 and mask.shape[-2] not in (1, num_queries)):
            raise UnsupportedError(
                f"an attention mask of shape {tuple(mask.shape)} does not fit a part of {num_queries} of "
                f"{num_queries * self._axis.size} tokens. "
                "Context parallelism supports masks that the model passes to its blocks. Within a block, use is_causal=True"
            )
        return length

    def _make_causal_mask(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return a boolean mask of this rank's queries by all keys, with True where a query may attend to a key."""
        positions = torch.arange(key.shape[-2], device=query.device)
        return sequences.split_sequence(positions, self._axis, 0)[:, None] >= positions

    def _attend_lower_right(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Compute causal attention separately for the two chunks of the sequence that this rank holds.

        Each chunk attends to the keys up to its own end. The mask is torch's `causal_lower_right`, which torch's
        kernels apply without allocating a mask.

        Args:
            query: Queries of this rank's sequence shard.
            key: Keys of the full sequence.
            value: Values of the full sequence.
            options: Other keyword arguments of `scaled_dot_product_attention`.
        """
        from torch.nn.attention.bias import causal_lower_right

        outputs = []
        for chunk, start in split_chunks(query, self._axis):
            end = start + chunk.shape[2]
            mask: Any = causal_lower_right(chunk.shape[2], end)
            outputs.append(
                functional.scaled_dot_product_attention(
                    chunk, key[:, :, :end], value[:, :, :end], attn_mask=mask, **options
                )
            )
        return torch.cat(outputs, 2)


def _cast_to_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors in autocast's dtype if autocast is enabled, so that less data is communicated."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device) and tensors[0].dtype != torch.float64:
        return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)
    return tensors


_KEY = "_headway_attention"
"""Key in the `__dict__` of a block under which its `WholeSequenceAttention` is stored."""


class SplitBlock:
    """Mixin for a transformer block's class under context parallelism.

    If the block's `WholeSequenceAttention` is enabled, the block's forward runs attention over full sequences. This
    includes recomputation by activation checkpointing.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's original forward with attention over full sequences."""
        original_forward, attention = super().forward, self.__dict__.get(_KEY)  # type: ignore[misc]
        if attention is None or not attention.is_active:
            return original_forward(*args, **kwargs)
        with attention:
            return original_forward(*args, **kwargs)


def install_attention(block: torch.nn.Module, attention: WholeSequenceAttention) -> None:
    """Make a block's forward use the given attention mode. A mode that was installed before is replaced.

    Args:
        block: Block of the model.
        attention: Attention mode to use.

    Raises:
        PrepareError: If the block's class cannot be extended, or `forward` was assigned on the block instance.
    """
    if not isinstance(block, SplitBlock):
        if "forward" in block.__dict__:
            raise PrepareError(
                f"a block of class {type(block).__name__} has a forward of its own on the object (compiled or patched), which "
                "context parallelism cannot use; remove that forward before prepare()"
            )
        extend_class(block, SplitBlock)
    block.__dict__[_KEY] = attention


def remove_attention(block: torch.nn.Module) -> None:
    """Restore the block's class, so that its forward no longer uses an attention mode.

    If another class (FSDP's) was mixed in after `install_attention`, the mixin stays but does nothing.
    """
    if not isinstance(block, SplitBlock):
        return
    if SplitBlock in type(block).__bases__:
        block.__class__ = type(block).__mro__[2]  # the original class, after `SplitBlock`
    block.__dict__.pop(_KEY, None)


log = get_logger(__name__)


def _is_sdpa(name: str) -> bool:
    """Whether the name refers to the attention function that transformers registers as "sdpa"."""
    functions: Any = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", {})
    return functions.get(name) is not None and functions.get(name) is functions.get("sdpa")


def use_sdpa(model: torch.nn.Module) -> Callable[[], object] | None:
    """Make a transformers model compute attention with torch's `scaled_dot_product_attention`.

    Args:
        model: Model to change. Models other than those of transformers are not changed.

    Returns:
        Function that restores the previous attention, or None if nothing was changed.

    Raises:
        PrepareError: If the model does not support this function, or uses an attention implementation other than
            "eager".
    """
    config: Any = getattr(model, "config", None)
    implementation = getattr(config, "_attn_implementation", None)
    set_implementation: Any = getattr(model, "set_attn_implementation", None)
    if implementation in (None, "sdpa") or set_implementation is None or _is_sdpa(implementation):
        return None
    if implementation != "eager":
        raise PrepareError(
            f"{type(model).__name__} has attn_implementation={implementation!r}; for context parallelism, load it with 'sdpa'"
        )
    try:
        set_implementation("sdpa")
    except ValueError as error:
        raise PrepareError(
            f"{type(model).__name__} only has eager attention, which context parallelism cannot split: {error}"
        ) from error
    log.info_once("context parallelism: %s now computes attention with sdpa instead of eagerly", type(model).__name__)
    return partial(set_implementation, implementation)
