"""Attention over sequences of which each rank holds a part: keys gathered, torch's ring, or heads for parts (Ulysses).

`WholeSequenceAttention` stands around a block's forward and takes the calls of torch's scaled_dot_product_attention, whoever
makes them; gradients of keys and values go back summed. Causal attention of a part falls into two pieces (`zigzag`), each of
which sees the keys up to its own end: no mask is made, and what lies above the diagonal is not computed. On accelerators torch's
own ring attention takes the causal calls (`ring`).

torch's own context parallelism for causal attention: keys and values travel while earlier ones are computed with.

torch has it for the kernels of accelerators (flash, memory-efficient and cuDNN attention) and not for the CPU's.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from headway.common.optional import Later
from headway.errors import DataError, PrepareError, UnsupportedError
from headway.log import get_logger
from headway.strategies.context import sequences
from headway.strategies.parts import extend
from headway.strategies.tensor.crossings import SplitAxis

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

Causal = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float | None], torch.Tensor]
"""Causal attention of parts of queries, keys and values, with a scale."""
RING_STEP = 64
"""Tokens of a rank: torch's ring takes a half at a time, and the memory-efficient kernel pads what it returns of one to 32."""


class WholeSequenceAttention(TorchFunctionMode):
    """A block in which attention sees the whole sequence.

    Args:
        axis: the ranks.
        ring: what computes causal attention without dropout, instead of gathering; None: nothing does.
        style: "ring", "ulysses" or "auto".

    Attributes:
        num_calls: how many calls were taken.
        is_open: blocks stand in it from here on.
    """

    def __init__(self, axis: SplitAxis, ring: Causal | None = None, style: str = "ring") -> None:
        super().__init__()
        self._axis, self._ring, self._style = axis, ring, style
        self.is_open = self._is_padded = False
        self.num_calls = 0

    def open(self, is_open: bool) -> None:
        """Blocks compute in it from here on, or not."""
        self.is_open = is_open

    def note_length(self, length: int) -> None:
        """How long sequences are, without what pads them."""
        self._is_padded = sequences.padded(length, self._axis) != length

    def forget_calls(self) -> None:
        """Count anew."""
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take calls of attention; all others pass."""
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.num_calls += 1
        return self._attend(*args, **kwargs)

    def _attend(
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
        query, key, value = _in_one_format(query, key, value)
        if self._goes_by_heads(query, key):
            return self._by_heads(query, key, value, attn_mask, dropout_p, is_causal, scale)
        is_plain = is_causal and attn_mask is None and not dropout_p and query.dim() == 4
        is_plain = is_plain and (enable_gqa or query.shape[1] == key.shape[1])
        if is_plain and self._ring is not None and query.shape[2] % RING_STEP == 0:
            return self._ring(query, key, value, scale)
        if is_plain and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
            found: torch.Tensor = _CausalOnCpu.apply(query, key, value, self._axis, scale)  # type: ignore[no-untyped-call]
            return found
        both = sequences.gather(torch.cat([key, value], -1), self._axis, -2)
        key, value = both[..., : key.shape[-1]], both[..., key.shape[-1] :]
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        if is_plain:
            return self._lower_right(query, key, value, options)
        if attn_mask is not None:
            length = self._length_of(attn_mask, query)
            key, value = key[..., :length, :], value[..., :length, :]
            options["is_causal"] = is_causal  # with a mask, an error of torch's
        elif is_causal:
            attn_mask = self._causal_mask(query, key)
        else:
            self._refuse_padding()
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)

    def _refuse_padding(self) -> None:
        if self._is_padded:
            raise DataError(
                "context parallelism had to pad the sequence, and attention that is not causal would see the padding; pad batches "
                f"to a multiple of {2 * self._axis.size} tokens, with an attention_mask"
            )

    def _goes_by_heads(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Ulysses, or the ring? Heads of keys that are fewer than the ranks are repeated."""
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
        # Of a part's tokens: queries, keys, values and outputs once, against keys and values to every rank.
        is_less = fits and heads + max(others, size) < size * others
        chosen = "ulysses" if is_less else "ring"
        log.info_once('cp_style="auto": %s, for %d heads (%d of keys) on %d ranks', chosen, heads, others, size)
        return is_less

    def _by_heads(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """Whole sequences of this rank's heads."""
        times = max(1, self._axis.size // key.shape[1])
        if times > 1:
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        options: dict[str, Any] = {"dropout_p": dropout, "scale": scale, "is_causal": is_causal}
        if mask is not None:
            length = self._length_of(mask, query)
            if mask.dim() == 4 and mask.shape[1] > 1:
                raise UnsupportedError(
                    'cp_style="ulysses" cannot divide an attention mask that differs by head; use cp_style="ring"'
                )
            mask = self._whole_rows(mask, query.shape[-2])
        elif not is_causal:
            self._refuse_padding()
        query, key, value = (sequences.to_heads(each, self._axis) for each in (query, key, value))
        if mask is not None:
            key, value = key[:, :, :length], value[:, :, :length]
        options["enable_gqa"] = query.shape[1] != key.shape[1]
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
        return sequences.to_parts(out, self._axis)

    def _whole_rows(self, mask: torch.Tensor, part: int) -> torch.Tensor:
        """A mask of all queries from this rank's rows of it."""
        if mask.dim() < 2 or mask.shape[-2] != part:
            return mask
        if mask.dtype == torch.bool:
            return sequences.gather(mask.to(torch.uint8), self._axis, -2).bool()
        return sequences.gather(mask, self._axis, -2)

    def _length_of(self, mask: torch.Tensor, query: torch.Tensor) -> int:
        """How many keys a mask is for; its rows must be this rank's part."""
        part, length = query.shape[-2], mask.shape[-1]
        is_whole = sequences.padded(length, self._axis) == part * self._axis.size
        if not is_whole or (mask.dim() > 1 and mask.shape[-2] not in (1, part)):
            raise UnsupportedError(
                f"an attention mask of shape {tuple(mask.shape)} does not fit a part of {part} of {part * self._axis.size} tokens: "
                "context parallelism understands masks that the model gives to its blocks; within a block use is_causal=True"
            )
        return length

    def _causal_mask(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        places = torch.arange(key.shape[-2], device=query.device)
        return sequences.part_of(places, self._axis, 0)[:, None] >= places

    def _lower_right(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Each piece of queries, to the keys up to its own end; torch's kernels know this form of mask."""
        from torch.nn.attention.bias import causal_lower_right

        found = []
        for part, start in _pieces(query, self._axis):
            end = start + part.shape[2]
            bias: Any = causal_lower_right(part.shape[2], end)
            ends = key[:, :, :end], value[:, :, :end]
            found.append(functional.scaled_dot_product_attention(part, *ends, attn_mask=bias, **options))
        return torch.cat(found, 2)


def _in_one_format(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As autocast would cast them: what travels is half as large."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device) and tensors[0].dtype != torch.float64:
        return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)
    return tensors


_KEY = "_headway_attention"


class SplitBlock:
    """Mixed in before a block's class: its forward runs in whole-sequence attention, also where it runs again in backward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The block's own forward, whose attention sees whole sequences."""
        run, attention = super().forward, self.__dict__.get(_KEY)  # type: ignore[misc]
        if attention is None or not attention.is_open:
            return run(*args, **kwargs)
        with attention:
            return run(*args, **kwargs)


def put_in(block: torch.nn.Module, attention: WholeSequenceAttention) -> None:
    """Let a block's forward run in this attention, in the place of an earlier one.

    Raises:
        PrepareError: its class cannot be extended.
    """
    if not isinstance(block, SplitBlock):
        if "forward" in block.__dict__:
            raise PrepareError(
                f"a block of class {type(block).__name__} has a forward of its own on the object (compiled or patched), which "
                "context parallelism cannot reach; take it off before prepare()"
            )
        extend(block, SplitBlock)
    block.__dict__[_KEY] = attention


def take_out(block: torch.nn.Module) -> None:
    """Take it away, and give the block its own class back; where another (FSDP's) is on top, it keeps an empty frame."""
    if not isinstance(block, SplitBlock):
        return
    if SplitBlock in type(block).__bases__:
        block.__class__ = type(block).__mro__[2]
    block.__dict__.pop(_KEY, None)


class _CausalOnCpu(torch.autograd.Function):
    """Causal attention of parts on a CPU; keys and values are gathered again in backward, so that only parts are kept.

    A piece of queries is two calls of the CPU's kernel, the earlier keys and the square on the diagonal, whose results are put
    together. Each call gives the logarithm of the sum that it divided by; with the sum of both, and the result of both, its
    backward gives its share of the gradients (as in ring attention: Liu et al., 2023). No mask of queries by keys is made.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, axis: SplitAxis, scale: float | None
    ) -> torch.Tensor:
        whole_key, whole_value = _whole(query, key, value, axis)
        found = [_forward(part, whole_key, whole_value, start, scale) for part, start in _pieces(query, axis)]
        out, sums = (torch.cat([pair[index] for pair in found], 2) for index in (0, 1))
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.axis, ctx.scale = axis, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, out, sums = ctx.saved_tensors
        axis = ctx.axis
        whole_key, whole_value = _whole(query, key, value, axis)
        of_key, of_value = torch.zeros_like(whole_key), torch.zeros_like(whole_value)
        of_query = []
        for place, (part, start) in enumerate(_pieces(query, axis)):
            end, step = start + part.shape[2], part.shape[2]
            mine = [each.narrow(2, place * step, step).contiguous() for each in (grad, out, sums)]
            total = torch.zeros_like(part)
            for begin, until, is_causal in ((start, end, True), (0, start, False)):
                if begin < until:
                    here = slice(begin, until)
                    keys, values = whole_key[:, :, here], whole_value[:, :, here]
                    more = _BACKWARD(mine[0], part, keys, values, *mine[1:], 0.0, is_causal, scale=ctx.scale)
                    total += more[0]
                    of_key[:, :, here] += more[1]
                    of_value[:, :, here] += more[2]
            of_query.append(total)
        both = torch.cat([_summed(of_key, key), _summed(of_value, value)], -1)
        both = sequences.scatter(both, axis, -2)
        return torch.cat(of_query, 2), both[..., : key.shape[-1]], both[..., key.shape[-1] :], None, None


def _pieces(query: torch.Tensor, axis: SplitAxis) -> list[tuple[torch.Tensor, int]]:
    """This rank's pieces, and where in the sequence they begin."""
    step = query.shape[2] // 2
    numbers = sequences.pieces_of(axis.rank, axis)
    return [(query.narrow(2, place * step, step), number * step) for place, number in enumerate(numbers)]


def _whole(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, axis: SplitAxis
) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys and values, with as many heads as there are queries; repeated here, they travel once."""
    both = sequences.gather(torch.cat([key, value], -1), axis, -2)
    times = query.shape[1] // key.shape[1]
    both = both if times == 1 else both.repeat_interleave(times, 1)
    return both[..., : key.shape[-1]], both[..., key.shape[-1] :]


def _summed(grad: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Over the heads that share a key."""
    times = grad.shape[1] // part.shape[1]
    return grad if times == 1 else grad.view(grad.shape[0], -1, times, *grad.shape[2:]).sum(2)


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of one piece of queries, and the logarithms of the sums."""
    end = start + query.shape[2]
    out, sums = _FORWARD(query, key[:, :, start:end], value[:, :, start:end], 0.0, True, scale=scale)[:2]
    if not start:
        return out, sums
    before, its_sums = _FORWARD(query, key[:, :, :start], value[:, :, :start], 0.0, False, scale=scale)[:2]
    total = torch.logaddexp(sums, its_sums)
    shares = [(each - total).exp().unsqueeze(-1) for each in (sums, its_sums)]
    return (out * shares[0] + before * shares[1]).to(query.dtype), total


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


def _is_sdpa(name: str) -> bool:
    """Is it what transformers calls sdpa, registered under another name?"""
    known: Any = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", {})
    return known.get(name) is not None and known.get(name) is known.get("sdpa")


def use_sdpa(model: torch.nn.Module) -> Callable[[], object] | None:
    """Let transformers' models compute attention by torch's function; returns what undoes it, if anything was done.

    Raises:
        PrepareError: they cannot.
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
