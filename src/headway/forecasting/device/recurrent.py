"""Recurrent layers: on CUDA one call of cuDNN, on a CPU one of oneDNN for each layer of an LSTM; what each keeps for backward.

What oneDNN keeps was measured, and holds within some percent. cuDNN says what it keeps on a card only, so it is assumed: gates, cells
and outputs of every step.
"""

from collections.abc import Callable
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
