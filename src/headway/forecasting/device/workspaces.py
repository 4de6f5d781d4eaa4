"""What recurrent layers keep and sums ask for on CUDA, by the rules of cuDNN, oneDNN and torch's reductions.

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
from torch._subclasses.fake_tensor import FakeTensor

_HALVES = (torch.float16, torch.bfloat16)
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

Sizes = Callable[[tuple[Any, ...]], list[int]]


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
