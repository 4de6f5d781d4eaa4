"""What CUDA's kernels ask for while they run: copies, recurrent layers and sums, by the rules of torch, cuDNN and oneDNN.

Most kernels take any strides. Norms, softmax, pooling and some others first copy an argument that is not contiguous, such as a
gradient that comes through a transpose: `expect_contiguous()` and `contiguous()` in `aten/src/ATen/native`. Which arguments, and
whether before or after the results, was read from the history of torch's allocator. RMSNorm is one kernel there.

Recurrent layers are one call of cuDNN on CUDA, on a CPU one of oneDNN for each layer of an LSTM. What oneDNN keeps was measured, and
holds within some percent. cuDNN says what it keeps on a card only, so it is assumed: gates, cells and outputs of every step.

Where a sum has few results of many values, blocks share a result, and meet in memory that is asked for (torch's `Reduce.cuh`:
`setReduceConfig`, `ReduceConfig.global_memory_size`). The gradient of a bias is such a sum, and asks for more than the layer's own
gradient now and then.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor

Sizes = Callable[[tuple[Any, ...]], list[int]]


def _copies(*places: int, like: int | None = None) -> Sizes:
    """Bytes of those of these arguments that are not contiguous.

    Args:
        places: of the arguments.
        like: of the argument in whose memory format images are to lie, channels last or not; None: contiguous, whatever they are.
    """

    def sizes(args: tuple[Any, ...]) -> list[int]:
        wanted = torch.contiguous_format if like is None else suggest_memory_format(args[like])
        return [args[each].nbytes for each in places if not args[each].is_contiguous(memory_format=wanted)]

    return sizes


COPIES_BEFORE: dict[str, Sizes] = {
    "aten::native_layer_norm": _copies(0),
    "aten::native_layer_norm_backward": _copies(1),
    "aten::native_group_norm_backward": _copies(0, 1),
    "aten::_cdist_forward": _copies(0, 1),
    "aten::_cdist_backward": _copies(1, 2),
    "aten::_adaptive_avg_pool2d": _copies(0, like=0),
    **dict.fromkeys(("aten::_adaptive_avg_pool3d", "aten::median"), _copies(0)),
    "aten::roll": lambda args: (
        [args[0].nbytes] if len(args) < 3 or len(args[2]) > 1 else _copies(0)(args)
    ),  # one by one
}
"""Bytes asked for before the results, by operation."""

_COPIED_AFTER = (
    "_softmax", "_log_softmax", "_log_softmax_backward_data", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "topk",
    "native_group_norm", "native_layer_norm_backward", "im2col", "col2im", "reflection_pad1d", "reflection_pad1d_backward",
    "reflection_pad2d", "reflection_pad2d_backward", "upsample_nearest1d_backward", "upsample_linear1d_backward",
    "upsample_nearest3d_backward", "upsample_trilinear3d_backward", "_upsample_bilinear2d_aa", "_upsample_bilinear2d_aa_backward",
    "_upsample_bicubic2d_aa", "_upsample_bicubic2d_aa_backward", "avg_pool3d_backward", "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d", "adaptive_max_pool2d_backward", "max_pool3d_with_indices_backward",
)  # fmt: skip
"""Whose first argument is copied."""

COPIES_AFTER: dict[str, Sizes] = {
    **{f"aten::{name}": _copies(0) for name in _COPIED_AFTER},
    **{f"aten::upsample_{each}2d_backward": _copies(0, like=0) for each in ("nearest", "bilinear", "bicubic")},
    **{f"aten::{each}": _copies(0, like=0) for each in ("upsample_nearest2d", "max_pool2d_with_indices", "avg_pool2d")},
    **{f"aten::{each}_backward": _copies(1, 0, like=1) for each in ("max_pool2d_with_indices", "avg_pool2d")},
    "aten::_adaptive_avg_pool2d_backward": _copies(0, like=0),
}
"""Bytes asked for after the results, by operation."""


_CONVOLUTIONS = {"aten::convolution": 0, "aten::convolution_backward": 1}
"""Where their inputs are among their arguments: weights, a bias or its size, strides, paddings and the rest follow."""


def is_slow(name: str, args: tuple[Any, ...]) -> bool:
    """Is it a convolution in bfloat16 that torch computes as a product of matrices, below capability 8.0 as cuDNN has none there?

    Depthwise ones have kernels of their own (`select_conv_backend` in `aten/src/ATen/native/Convolution.cpp`).
    """
    given = args[_CONVOLUTIONS[name] :] if name in _CONVOLUTIONS else ()
    return bool(given) and given[0].dtype is torch.bfloat16 and given[8] == 1


def _slow(name: str) -> tuple[Sizes, Sizes]:
    """Before its results, copies of what is not contiguous; after them, all that one sample's places are made of (im2col)."""
    first = _CONVOLUTIONS[name]

    def columns(args: tuple[Any, ...]) -> list[int]:
        inputs, weight, _, strides, paddings, dilations, is_transposed = args[first : first + 7]
        widths, places = weight.shape[2:], inputs.shape[2:]
        if not is_slow(name, args) or (not first and prod((*widths, *strides)) == 1 and not any(paddings)):
            return []
        if not is_transposed:
            each = zip(places, widths, strides, paddings, dilations)
            places = [(size + 2 * pad - apart * (wide - 1) - 1) // step + 1 for size, wide, step, pad, apart in each]
        return [weight.numel() // len(weight) * prod(places) * 2]

    return lambda args: _copies(*range(first + 1))(args) if is_slow(name, args) else [], columns


SLOW_BEFORE, SLOW_AFTER = ({name: _slow(name)[index] for name in _CONVOLUTIONS} for index in (0, 1))
"""The same of convolutions below capability 8.0."""


class _RMSNorm(torch.autograd.Function):
    """What `_fused_rms_norm` of fake tensors asks for and keeps; a CPU has no such kernel."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor | None, dims: int) -> torch.Tensor:
        """Of so many last dimensions; the roots are kept in float32."""
        rows = inputs.contiguous()
        result = torch.empty_like(rows)
        roots = rows.new_empty(prod(rows.shape[:-dims]), dtype=torch.float32)
        ctx.save_for_backward(inputs, weight, roots)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Gradients of inputs and weight."""
        inputs, weight, _ = ctx.saved_tensors
        rows = inputs.contiguous()
        found = torch.empty_like(rows), torch.empty_like(weight) if ctx.needs_input_grad[1] else None, None
        gradients[0].contiguous()
        return found


def rms_norm(
    inputs: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> Any:
    """One kernel where torch's `rms_norm` takes it on CUDA: weights of the inputs' dtype, and no channels that come last."""
    is_plain = suggest_memory_format(inputs) == torch.contiguous_format
    if isinstance(inputs, FakeTensor) and is_plain and (weight is None or weight.dtype == inputs.dtype):
        return _RMSNorm.apply(inputs, weight, len(shape))  # type: ignore[no-untyped-call]
    return torch.ops.aten.rms_norm.default.decompose(inputs, shape, weight, eps)


_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""As cuDNN numbers them."""
_KEPT = {0: 1, 1: 1, 2: 6, 3: 5}
"""Values of a step that cuDNN is assumed to keep, for each hidden one."""


def kept_by_cudnn(args: tuple[Any, ...]) -> list[int]:
    """Bytes behind the results of `_cudnn_rnn`: the fourth is its reserve, which torch's shapes leave at 0."""
    tokens, mode, hidden, layers, train, two_ways = args[0], args[6], args[7], args[9], args[12], args[13]
    values = tokens.numel() // tokens.shape[-1] * hidden * (2 if two_ways else 1) * layers
    return [0, 0, 0, values * _KEPT[mode] * tokens.element_size() if train else 0, 0]


def asked_by_cudnn(args: tuple[Any, ...]) -> list[int]:
    """A copy of inputs whose first dimension is the batch, and a workspace: the gates of a layer."""
    tokens, hidden = args[0], args[7]
    gates = tokens.numel() // tokens.shape[-1] * hidden * 4 * tokens.element_size()
    return [tokens.nbytes, gates] if args[10] else [gates]


def asked_by_cudnn_backward(args: tuple[Any, ...]) -> list[int]:
    """The same for gradients."""
    tokens, hidden = args[0], args[11]
    gates = tokens.numel() // tokens.shape[-1] * hidden * 4 * tokens.element_size()
    return [tokens.nbytes, args[6].nbytes, gates] if args[14] else [gates]


def kept_by_onednn(args: tuple[Any, ...]) -> list[int]:
    """Bytes behind the results of `mkldnn_rnn_layer`: the fourth is its workspace, measured over 24 shapes."""
    tokens, hidden = args[0], args[10]
    steps, batch, width = tokens.shape
    states = (steps + 1) * batch * (6 * max(width, hidden) + 5.25 * hidden)
    return [0, 0, 0, round((steps * batch * 4 * hidden + states) * 4)]


def override(library: torch.library.Library) -> None:
    """Let recurrent layers of fake tensors call cuDNN.

    Args:
        library: of aten; what is registered goes with it.
    """
    library.impl("_cudnn_rnn_backward", _backward, "Meta")  # type: ignore[no-untyped-call]
    for name, mode in _MODES.items():
        library.impl(f"{name}.input", _layers(name, mode), "AutogradCPU")  # type: ignore[no-untyped-call]
    library.impl("_thnn_fused_gru_cell", _gru_cell, "Meta")  # type: ignore[no-untyped-call]
    library.impl("_thnn_fused_gru_cell_backward", _gru_cell_backward, "Meta")  # type: ignore[no-untyped-call]
    for name in ("gru_cell", "lstm_cell"):
        library.impl(name, _cell(name), "AutogradCPU")  # type: ignore[no-untyped-call]


def _gru_cell(gates: torch.Tensor, _: torch.Tensor, state: torch.Tensor, *biases: Any) -> Any:
    return torch.empty_like(state), state.new_empty(len(gates), 5 * state.shape[1])


def _gru_cell_backward(gradient: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> Any:
    gates = [gradient.new_empty(len(gradient), 3 * gradient.shape[1]) for _ in range(2)]
    return *gates, torch.empty_like(gradient), *(gates[0].new_empty(gates[0].shape[1:]) for _ in range(2))


def _cell(name: str) -> Callable[..., Any]:
    """One kernel for all gates of a step, which keeps them."""
    plain, fused = getattr(torch.ops.aten, name).default.decompose, getattr(torch.ops.aten, f"_thnn_fused_{name}")

    def run(tokens: torch.Tensor, state: Any, *weights: Any) -> Any:
        if not isinstance(tokens, FakeTensor):
            return plain(tokens, state, *weights)
        given = [tokens, *(state if name == "lstm_cell" else [state] * 2), *weights]
        if torch.is_autocast_enabled("cpu"):
            given = [each if each is None else each.to(torch.get_autocast_dtype("cpu")) for each in given]
        found = fused(given[0] @ given[3].t(), given[1] @ given[4].t(), given[2], *given[5:])
        return found[:2] if name == "lstm_cell" else found[0]

    return run


def _layers(name: str, mode: int) -> Callable[..., Any]:
    plain = getattr(torch.ops.aten, name).input.decompose

    def run(
        tokens: torch.Tensor,
        state: Any,
        weights: list[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        two_ways: bool,
        batch_first: bool,
    ) -> Any:
        if not isinstance(tokens, FakeTensor):
            return plain(tokens, state, weights, has_biases, num_layers, dropout, train, two_ways, batch_first)
        hx, cx = state if mode == 2 else (state, None)
        stride = (4 if has_biases else 2) + (len(weights) % (4 if has_biases else 2) != 0)
        if torch.is_autocast_enabled("cpu"):  # as on CUDA, where all of it goes to half precision
            dtype = torch.get_autocast_dtype("cpu")
            tokens, hx, cx = tokens.to(dtype), hx.to(dtype), None if cx is None else cx.to(dtype)
            weights = [each.to(dtype) for each in weights]
        buffer = weights[0].new_empty(0)
        hidden = hx.shape[-1] if cx is None else cx.shape[-1]
        projected = hx.shape[-1] if cx is not None and hx.shape[-1] != hidden else 0
        shape = (mode, hidden, projected, num_layers, batch_first, dropout, train, two_ways)
        found = torch.ops.aten._cudnn_rnn(tokens, weights, stride, buffer, hx, cx, *shape, [], None)
        return found[:3] if mode == 2 else found[:2]

    return run


def _backward(*args: Any) -> Any:
    """Shapes of gradients: of the input, of the states, and of the weights, which lie in one buffer."""
    tokens, weights, _, _, hx, cx = args[:6]
    flat = weights[0].new_empty(sum(each.numel() for each in weights))
    parts = [part.view(each.shape) for part, each in zip(flat.split([each.numel() for each in weights]), weights)]
    gradient = torch.empty_like(tokens, memory_format=torch.contiguous_format)
    return gradient, torch.empty_like(hx), torch.empty_like(cx if cx is not None else hx), parts


_THREADS, _WARP = 512, 32
"""Of a block at most; those that run in step."""
_FEWEST, _MOST = 16, 256
"""Values that a thread adds up."""
_VECTOR = 4


def of_sums(processors: int, threads: int) -> dict[str, Sizes]:
    """Bytes that sums, means and norms ask for after their results, by operation; numbers that are not floating become int64 first.

    Args:
        processors: streaming multiprocessors of the device.
        threads: that one of them holds.
    """
    sizes = partial(_sizes, processors, threads)
    found: dict[str, Sizes] = {f"aten::{name}": sizes for name in ("sum", "mean")}
    # Of a variance: a mean, a sum of squares and two counts.
    found |= dict.fromkeys(
        (f"aten::{name}" for name in ("var", "std", "var_mean", "std_mean")), partial(sizes, parts=4)
    )
    return found | {"aten::linalg_vector_norm": lambda args: sizes((args[0], *args[2:]))}


def _sizes(processors: int, threads: int, args: tuple[Any, ...], parts: int = 1) -> list[int]:
    values: torch.Tensor = args[0]
    dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple | int) else ()
    wanted = {dims % values.dim()} if isinstance(dims, int) else {each % values.dim() for each in dims}
    reduced = wanted or set(range(values.dim()))
    size = parts * _shared(values, reduced, processors * threads)
    is_cast = not values.dtype.is_floating_point and values.dtype not in (
        torch.int64,
        torch.complex64,
        torch.complex128,
    )
    return [values.numel() * 8] * is_cast + [size, 512] * bool(size)  # and flags of the blocks that are done


def _shared(values: torch.Tensor, reduced: set[int], places: int) -> int:
    """Bytes of the memory in which blocks meet; 0: each result is one block's.

    Args:
        values: to be summed up.
        reduced: over these dimensions.
        places: threads that the device holds at once.
    """
    over = [(values.stride(dim), values.shape[dim]) for dim in reduced if values.shape[dim] > 1]
    kept = sorted((values.stride(dim), values.shape[dim]) for dim in range(values.dim()) if dim not in reduced)
    kept = [each for each in kept if each[1] > 1]
    num_results, num_values = prod(size for _, size in kept), prod(size for _, size in over)
    if not over or not num_values:
        return 0
    runs_along = not kept or min(over)[0] < kept[0][0]
    width, height, vector = (num_values, num_results, 1) if runs_along else (num_results, num_values, 1)
    if not runs_along and kept[0][0] == 1:
        vector = _vector(kept, over)
        width //= vector
    elif runs_along and not kept and min(over)[0] == 1 and width > 128:
        width //= _VECTOR
    wide, high = _block(width, height, _THREADS // vector)
    across, results = (wide, 1) if runs_along else (1, wide)
    each = -(-num_values // across)
    if each < min(high * _FEWEST, _MOST):
        return 0  # every row of threads has a result of its own
    each = -(-num_values // (across * high))
    blocks, target = -(-(num_results // vector) // results), places // (wide * high)
    if each < _MOST or blocks > target:
        return 0
    sharing = max(min(-(-target // blocks), -(-each // _FEWEST)), -(-each // _MOST))
    if sharing < 2:
        return 0
    item = 8 if values.dtype in (torch.float64, torch.int64, torch.int32, torch.bool) else 4
    return item * num_results * sharing * (1 if runs_along else wide * vector)


def _vector(kept: list[tuple[int, int]], over: list[tuple[int, int]]) -> int:
    """Results that a thread makes side by side."""
    vector = _VECTOR
    for number in (kept[0][1], *(stride for stride, _ in (*kept[1:], *over))):
        while number % vector:
            vector //= 2
    return vector


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    """Threads of a block, along and across."""
    wide, high = (min(most, 1 << (size.bit_length() - 1)) if size else 1 for size in (width, height))
    down = min(high, most // min(wide, _WARP))
    return min(wide, most // down), down
