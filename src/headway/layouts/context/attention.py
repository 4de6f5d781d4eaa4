"""Attention over sequences that are sharded across ranks: all-gathered keys, torch's ring attention, or Ulysses.

`WholeSequenceAttention` is active during a block's forward and intercepts all calls of torch's
`scaled_dot_product_attention`. Gradients of keys and values are summed over the ranks. Ulysses uses all-to-all
collectives: each rank then computes some of the heads for full sequences.

A rank's shard consists of two contiguous pieces of the sequence, one from each half (see `sequences`). In causal
attention, each piece attends to the keys up to its own end. No mask is allocated, and nothing above the diagonal is
computed.

On accelerators, torch's own ring attention (`RingAttention`) computes the causal calls. It sends keys and values to the
next rank while it computes with the previous ones. torch supports it for the kernels of accelerators (flash,
memory-efficient and cuDNN attention) and not for those of the CPU.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from headway.common.optional import LazyModule
from headway.core.strategies.blocks import extend_class
from headway.errors import DataError, PrepareError, UnsupportedError
from headway.layouts.context import sequences
from headway.layouts.context._torch import (
    RING_MODULE,
    RING_NAMES,
    flash_attention_on_cpu,
    flash_attention_on_cpu_backward,
)
from headway.layouts.tensor.crossings import SplitAxis
from headway.log import get_logger

Causal = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float | None], torch.Tensor]
"""Function of (queries, keys, values, scale or None) that computes causal attention on this rank's sequence shard."""
RING_STEP = 64
"""Number that must divide the number of tokens per rank for torch's ring attention to be used.

The ring computes half a shard at a time, and the memory-efficient kernel pads one of its results to a multiple of 32.
"""


class WholeSequenceAttention(TorchFunctionMode):
    """Torch function mode that makes attention calls on a sequence shard attend to the full sequence.

    Args:
        axis: Mesh axis of context parallelism.
        ring: Function that computes causal attention without dropout. None: all-gather keys and values. Default: None.
        style: Exchange between ranks: "ring" shards attention by queries, "ulysses" by heads, and "auto" chooses the
            one that sends less. Default: "ring".

    Attributes:
        num_calls: Number of attention calls since the last `reset_calls`.
        is_open: Whether blocks run their forward in this mode.
    """

    def __init__(self, axis: SplitAxis, ring: Causal | None = None, style: str = "ring") -> None:
        super().__init__()
        self._axis = axis
        self._ring = ring
        self._style = style
        self.is_open = False
        self._is_padded = False
        self.num_calls = 0

    def set_active(self, is_open: bool) -> None:
        """Enable or disable this mode for later forward passes of the model's blocks.

        Args:
            is_open: Whether to enable the mode.
        """
        self.is_open = is_open

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
        if query.shape[-2] != key.shape[-2]:
            raise UnsupportedError(
                f"context parallelism cuts queries and keys alike, but attention has {query.shape[-2]} queries and "
                f"{key.shape[-2]} keys on this rank (cross attention, or a cache of keys); use fsdp or tp for this model"
            )
        query, key, value = _cast_to_autocast(query, key, value)
        if self._should_split_heads(query, key):
            return self._attend_by_heads(query, key, value, attn_mask, dropout_p, is_causal, scale)
        is_plain = is_causal and attn_mask is None and not dropout_p and query.dim() == 4
        is_plain = is_plain and (enable_gqa or query.shape[1] == key.shape[1])
        if is_plain and self._ring is not None and query.shape[2] % RING_STEP == 0:
            return self._ring(query, key, value, scale)
        if is_plain and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
            found: torch.Tensor = _CausalOnCpu.apply(query, key, value, self._axis, scale)  # type: ignore[no-untyped-call]
            return found
        both = sequences.gather_sequence(torch.cat([key, value], -1), self._axis, -2)
        key, value = both[..., : key.shape[-1]], both[..., key.shape[-1] :]
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        if is_plain:
            return self._attend_lower_right(query, key, value, options)
        if attn_mask is not None:
            length = self._find_mask_length(attn_mask, query)
            key, value = key[..., :length, :], value[..., :length, :]
            options["is_causal"] = is_causal  # with a mask, torch raises an error
        elif is_causal:
            attn_mask = self._make_causal_mask(query, key)
        else:
            self._refuse_padding()
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)

    def _refuse_padding(self) -> None:
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
        heads, others = (query.shape[1], key.shape[1]) if query.dim() == 4 else (1, 1)
        fits = heads % size == 0 and (others % size == 0 or size % others == 0)
        if self._style == "ulysses":
            if not fits:
                raise UnsupportedError(
                    f'cp_style="ulysses" gives each of the {size} ranks as many heads, and attention has {heads}, with {others} '
                    'heads of keys; use a number of ranks that divides both, or cp_style="ring"'
                )
            return True
        # Ulysses sends queries, keys, values and outputs once; the ring sends keys and values to every rank.
        is_less = fits and heads + max(others, size) < size * others
        chosen = "ulysses" if is_less else "ring"
        log.info_once('cp_style="auto": %s, for %d heads (%d of keys) on %d ranks', chosen, heads, others, size)
        return is_less

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
        """
        times = max(1, self._axis.size // key.shape[1])
        if times > 1:
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        options: dict[str, Any] = {"dropout_p": dropout, "scale": scale, "is_causal": is_causal}
        if mask is not None:
            length = self._find_mask_length(mask, query)
            if mask.dim() == 4 and mask.shape[1] > 1:
                raise UnsupportedError(
                    'cp_style="ulysses" cannot divide an attention mask that differs by head; use cp_style="ring"'
                )
            mask = self._gather_mask_rows(mask, query.shape[-2])
        elif not is_causal:
            self._refuse_padding()
        query, key, value = (sequences.exchange_for_heads(each, self._axis) for each in (query, key, value))
        if mask is not None:
            key, value = key[:, :, :length], value[:, :, :length]
        options["enable_gqa"] = query.shape[1] != key.shape[1]
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
        return sequences.exchange_for_parts(out, self._axis)

    def _gather_mask_rows(self, mask: torch.Tensor, part: int) -> torch.Tensor:
        """Return the attention mask for all queries, all-gathered from the ranks.

        A mask without a dimension for queries is returned unchanged.

        Args:
            mask: Mask for this rank's queries.
            part: Number of this rank's queries.
        """
        if mask.dim() < 2 or mask.shape[-2] != part:
            return mask
        if mask.dtype == torch.bool:
            return sequences.gather_sequence(mask.to(torch.uint8), self._axis, -2).bool()
        return sequences.gather_sequence(mask, self._axis, -2)

    def _find_mask_length(self, mask: torch.Tensor, query: torch.Tensor) -> int:
        """Return the number of keys that a mask covers.

        Raises:
            UnsupportedError: If the mask's rows do not match this rank's sequence shard.
        """
        part, length = query.shape[-2], mask.shape[-1]
        is_whole = sequences.pad_length(length, self._axis) == part * self._axis.size
        if not is_whole or (mask.dim() > 1 and mask.shape[-2] not in (1, part)):
            raise UnsupportedError(
                f"an attention mask of shape {tuple(mask.shape)} does not fit a part of {part} of {part * self._axis.size} tokens. "
                "Context parallelism supports masks that the model passes to its blocks. Within a block, use is_causal=True"
            )
        return length

    def _make_causal_mask(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        places = torch.arange(key.shape[-2], device=query.device)
        return sequences.split_sequence(places, self._axis, 0)[:, None] >= places

    def _attend_lower_right(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Compute causal attention separately for the two pieces of the sequence that this rank holds.

        Each piece attends to the keys up to its own end. The mask is torch's `causal_lower_right`, which torch's
        kernels apply without allocating a mask.

        Args:
            query: Queries of this rank's sequence shard.
            key: Keys of the full sequence.
            value: Values of the full sequence.
            options: Other keyword arguments of `scaled_dot_product_attention`.
        """
        from torch.nn.attention.bias import causal_lower_right

        found = []
        for part, start in _split_pieces(query, self._axis):
            end = start + part.shape[2]
            bias: Any = causal_lower_right(part.shape[2], end)
            ends = key[:, :, :end], value[:, :, :end]
            found.append(functional.scaled_dot_product_attention(part, *ends, attn_mask=bias, **options))
        return torch.cat(found, 2)


def _cast_to_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors in autocast's dtype if autocast is enabled, so that less data is communicated."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device) and tensors[0].dtype != torch.float64:
        return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)
    return tensors


_KEY = "_headway_attention"


class SplitBlock:
    """Mixin for a transformer block's class under context parallelism.

    If the block's `WholeSequenceAttention` is enabled, the block's forward runs attention over full sequences. This
    includes recomputation by activation checkpointing.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's original forward with attention over full sequences."""
        run, attention = super().forward, self.__dict__.get(_KEY)  # type: ignore[misc]
        if attention is None or not attention.is_open:
            return run(*args, **kwargs)
        with attention:
            return run(*args, **kwargs)


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
        block.__class__ = type(block).__mro__[2]
    block.__dict__.pop(_KEY, None)


class _CausalOnCpu(torch.autograd.Function):
    """Autograd function for causal attention of a rank's queries on a CPU.

    Keys and values are all-gathered in forward and again in backward. Between forward and backward, only this rank's
    shard is saved. A rank's queries are two pieces of the sequence. Each piece takes two calls of the CPU's kernel:
    one for the earlier keys, one for the square on the diagonal. Their outputs are merged with the log-sum-exp that
    each call returns. The backward of each call gets the merged log-sum-exp and the merged output, and so computes
    this call's share of the gradients (as in ring attention: Liu et al., 2023). No mask of queries by keys is
    allocated.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, axis: SplitAxis, scale: float | None
    ) -> torch.Tensor:
        whole_key, whole_value = _gather_keys_and_values(query, key, value, axis)
        found = [
            _attend_piece(part, whole_key, whole_value, start, scale) for part, start in _split_pieces(query, axis)
        ]
        out, sums = (torch.cat([pair[index] for pair in found], 2) for index in (0, 1))
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.axis, ctx.scale = axis, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, out, sums = ctx.saved_tensors
        axis = ctx.axis
        whole_key, whole_value = _gather_keys_and_values(query, key, value, axis)
        of_key, of_value = torch.zeros_like(whole_key), torch.zeros_like(whole_value)
        of_query = []
        for place, (part, start) in enumerate(_split_pieces(query, axis)):
            end, step = start + part.shape[2], part.shape[2]
            mine = [each.narrow(2, place * step, step).contiguous() for each in (grad, out, sums)]
            total = torch.zeros_like(part)
            for begin, until, is_causal in ((start, end, True), (0, start, False)):
                if begin < until:
                    here = slice(begin, until)
                    keys, values = whole_key[:, :, here], whole_value[:, :, here]
                    more = flash_attention_on_cpu_backward(
                        mine[0], part, keys, values, *mine[1:], 0.0, is_causal, scale=ctx.scale
                    )
                    total += more[0]
                    of_key[:, :, here] += more[1]
                    of_value[:, :, here] += more[2]
            of_query.append(total)
        both = torch.cat([_sum_over_heads(of_key, key), _sum_over_heads(of_value, value)], -1)
        both = sequences.reduce_scatter_sequence(both, axis, -2)
        return torch.cat(of_query, 2), both[..., : key.shape[-1]], both[..., key.shape[-1] :], None, None


def _split_pieces(query: torch.Tensor, axis: SplitAxis) -> list[tuple[torch.Tensor, int]]:
    """Split this rank's queries into the two contiguous pieces of the sequence that the rank holds.

    Returns:
        Pairs of (piece of the queries, index of the piece's first token in the sequence).
    """
    step = query.shape[2] // 2
    numbers = sequences.find_pieces(axis.rank, axis)
    return [(query.narrow(2, place * step, step), number * step) for place, number in enumerate(numbers)]


def _gather_keys_and_values(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, axis: SplitAxis
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of the full sequence, with heads repeated to match the queries.

    Heads are repeated after the gather, so that each head is sent only once.
    """
    both = sequences.gather_sequence(torch.cat([key, value], -1), axis, -2)
    times = query.shape[1] // key.shape[1]
    both = both if times == 1 else both.repeat_interleave(times, 1)
    return both[..., : key.shape[-1]], both[..., key.shape[-1] :]


def _sum_over_heads(grad: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return the gradient of keys or values, summed over the query heads that share a key head.

    Args:
        grad: Gradient with one head per query head.
        part: Keys or values of this rank, with fewer heads.
    """
    times = grad.shape[1] // part.shape[1]
    return grad if times == 1 else grad.view(grad.shape[0], -1, times, *grad.shape[2:]).sum(2)


def _attend_piece(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the causal attention output of queries that are contiguous in the sequence, and its log-sum-exp.

    Args:
        query: Contiguous queries, [rows, heads, tokens, head dim].
        key: Keys of the full sequence.
        value: Values of the full sequence.
        start: Position of the first query in the sequence.
        scale: Factor for the scores; None for torch's default.
    """
    end = start + query.shape[2]
    out, sums = flash_attention_on_cpu(query, key[:, :, start:end], value[:, :, start:end], 0.0, True, scale=scale)[:2]
    if not start:
        return out, sums
    before, its_sums = flash_attention_on_cpu(query, key[:, :, :start], value[:, :, :start], 0.0, False, scale=scale)[
        :2
    ]
    total = torch.logaddexp(sums, its_sums)
    shares = [(each - total).exp().unsqueeze(-1) for each in (sums, its_sums)]
    return (out * shares[0] + before * shares[1]).to(query.dtype), total


attention = LazyModule(RING_MODULE)

log = get_logger(__name__)
_KINDS = ("cuda",)
"""Device types whose attention kernels torch's ring attention supports."""


class RingDispatcher:
    """Registry of the models in this process that use torch's ring attention.

    torch has one attention dispatcher and one rotation method per process. Both are restored when the last model stops
    using the ring.
    """

    def __init__(self) -> None:
        self._held: list[RingAttention] = []
        self._before: Any = None

    def add_ring(self, ring: "RingAttention", rotation: str) -> None:
        """Register a model's ring attention, and enable torch's dispatcher for it.

        Args:
            ring: Ring attention of a model.
            rotation: How keys and values are exchanged: "allgather" or "alltoall".
        """
        if not self._held:
            self._before = attention._cp_options.rotate_method
        attention.set_rotate_method(rotation)
        attention._enable_context_parallel_dispatcher()
        self._held.append(ring)

    def remove_ring(self, ring: "RingAttention") -> None:
        """Unregister a model's ring attention.

        When no ring attention is left in the process, torch's dispatcher and rotation method are restored.
        """
        if ring not in self._held:
            return
        self._held.remove(ring)
        if not self._held:
            attention._cp_options.rotate_method = self._before
            attention._disable_context_parallel_dispatcher()


def find_ring_attention(mesh: Any, rotation: str, known: RingDispatcher) -> "RingAttention | None":
    """Return torch's causal ring attention, or None if it is not available.

    It is not available if torch has no kernel for the device, or if this torch version lacks one of `RING_NAMES`.

    Args:
        mesh: One-dimensional DeviceMesh of the ranks.
        rotation: How keys and values are exchanged: "allgather" or "alltoall".
        known: Registry of this process's ring attentions.
    """
    if mesh.device_type not in _KINDS:
        if rotation == "alltoall":
            log.warning_once(
                "cp_comm_strategy='alltoall' is torch's ring attention, which has no kernel for %s: keys and values are gathered",
                mesh.device_type,
            )
        return None
    missing = [name for name in RING_NAMES if not hasattr(attention, name)]
    if missing:
        log.warning_once(
            "torch %s lacks %s: keys and values are gathered instead of torch's ring attention",
            torch.__version__,
            ", ".join(missing),
        )
        return None
    return RingAttention(mesh, rotation, known)


class RingAttention:
    """torch's ring attention on the ranks of one mesh axis.

    Args:
        mesh: One-dimensional DeviceMesh of the ranks.
        rotation: How keys and values are exchanged: "allgather" or "alltoall".
        known: Registry of this process's ring attentions.
    """

    def __init__(self, mesh: Any, rotation: str, known: RingDispatcher) -> None:
        self._mesh = mesh
        self._known = known
        kind = attention._ContextParallel
        self._style = kind(seq_dim=2, attention_type=kind.AttentionType.SDPA)
        known.add_ring(self, rotation)

    def release(self) -> None:
        """Remove this ring attention from the registry. The last removal in the process restores torch's dispatcher."""
        self._known.remove_ring(self)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Return the causal attention of this rank's queries to the full sequence.

        Args:
            query: Queries of this rank, [rows, heads, tokens, head dim], in the order of torch's head-tail balancer.
            key: Keys of this rank, with as many heads as the queries or a divisor of that number.
            value: Values of this rank, with as many heads as the keys.
            scale: Factor for the scores; None for torch's default.
        """
        times = query.shape[1] // key.shape[1]
        if times > 1:
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        given = {"is_causal": True, "scale": scale}
        args, kwargs = self._style.sdpa_input_fn(None, (query, key, value), given, self._mesh)
        out = functional.scaled_dot_product_attention(*args, **kwargs)
        found: torch.Tensor = self._style.sdpa_output_fn(None, None, out, self._mesh)
        return found


def _is_sdpa(name: str) -> bool:
    """Whether the name refers to the attention function that transformers registers as "sdpa"."""
    known: Any = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", {})
    return known.get(name) is not None and known.get(name) is known.get("sdpa")


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
    now = getattr(config, "_attn_implementation", None)
    switch: Any = getattr(model, "set_attn_implementation", None)
    if now in (None, "sdpa") or switch is None or _is_sdpa(now):
        return None
    if now != "eager":
        raise PrepareError(
            f"{type(model).__name__} has attn_implementation={now!r}; for context parallelism, load it with 'sdpa'"
        )
    try:
        switch("sdpa")
    except ValueError as error:
        raise PrepareError(
            f"{type(model).__name__} only has eager attention, which context parallelism cannot split: {error}"
        ) from error
    log.info_once("context parallelism: %s now computes attention with sdpa instead of eagerly", type(model).__name__)
    return partial(switch, now)
