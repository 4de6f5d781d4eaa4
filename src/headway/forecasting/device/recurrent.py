"""Trace recurrent modules on fake tensors as calls to cuDNN, and compute the memory that cuDNN and oneDNN allocate.

On CUDA, a whole recurrent module is one call to cuDNN. On a CPU, each layer of an LSTM is one call to oneDNN. A formula
fitted to measurements gives the memory that oneDNN keeps for backward, to a few percent. cuDNN reports its sizes only
on a GPU, so it is assumed to keep the gates, cells and outputs of every step.
"""

from collections.abc import Callable
from typing import Any

import torch

from headway.forecasting._torch import FakeTensor

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""cuDNN's mode number for each type of recurrent layer, by torch's name of the operation."""
_VALUES_KEPT = {0: 1, 1: 1, 2: 6, 3: 5}
"""Number of values that cuDNN is assumed to keep per time step and hidden unit, by cuDNN's mode number."""


def size_cudnn_reserve(args: tuple[Any, ...]) -> list[int]:
    """Return the minimum storage size in bytes of each result of `_cudnn_rnn`.

    Only the fourth result needs one: it is cuDNN's reserve buffer, which is empty in torch's fake implementation.

    Args:
        args: Arguments of `_cudnn_rnn`.
    """
    arguments = _name_arguments(torch.ops.aten._cudnn_rnn.default, args)
    if not arguments["train"]:
        return [0, 0, 0, 0, 0]
    tokens, num_directions = arguments["input"], 2 if arguments["bidirectional"] else 1
    num_units = _count_steps(tokens) * arguments["hidden_size"] * num_directions * arguments["num_layers"]
    return [0, 0, 0, num_units * _VALUES_KEPT[arguments["mode"]] * tokens.element_size(), 0]


def size_cudnn_workspace(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of each scratch tensor of cuDNN in a recurrent layer's forward.

    The scratch tensors are a copy of the inputs if these are batch-first, and a workspace for the gates of a layer.

    Args:
        args: Arguments of `_cudnn_rnn`.
    """
    arguments = _name_arguments(torch.ops.aten._cudnn_rnn.default, args)
    tokens = arguments["input"]
    gate_bytes = _count_steps(tokens) * arguments["hidden_size"] * 4 * tokens.element_size()
    return [tokens.nbytes, gate_bytes] if arguments["batch_first"] else [gate_bytes]


def size_cudnn_backward_workspace(args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of each scratch tensor of cuDNN in a recurrent layer's backward.

    The scratch tensors are copies of inputs and outputs if these are batch-first, and a workspace for the gates of a
    layer.

    Args:
        args: Arguments of `_cudnn_rnn_backward`.
    """
    arguments = _name_arguments(torch.ops.aten._cudnn_rnn_backward.default, args)
    tokens = arguments["input"]
    gate_bytes = _count_steps(tokens) * arguments["hidden_size"] * 4 * tokens.element_size()
    return [tokens.nbytes, arguments["output"].nbytes, gate_bytes] if arguments["batch_first"] else [gate_bytes]


def size_onednn_workspace(args: tuple[Any, ...]) -> list[int]:
    """Return the minimum storage size in bytes of each result of `mkldnn_rnn_layer`.

    Only the fourth result needs one: it is oneDNN's workspace, whose size was measured for 24 shapes.

    Args:
        args: Arguments of `mkldnn_rnn_layer`.
    """
    arguments = _name_arguments(torch.ops.aten.mkldnn_rnn_layer.default, args)
    hidden_size = arguments["hidden_size"]
    num_steps, batch_size, width = arguments["input"].shape
    # Numbers of float32 values. The factors of the states were fitted to the measurements.
    gates = num_steps * batch_size * 4 * hidden_size
    states = (num_steps + 1) * batch_size * (6 * max(width, hidden_size) + 5.25 * hidden_size)
    return [0, 0, 0, round((gates + states) * 4)]


def _name_arguments(operation: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Return the positional arguments of an operation by their names in its schema."""
    return {argument.name: value for argument, value in zip(operation._schema.arguments, args)}


def _count_steps(tokens: torch.Tensor) -> int:
    """Return the number of time steps of all samples together, for an input of shape (..., features)."""
    return tokens.numel() // tokens.shape[-1]


def override_recurrent_layers(library: torch.library.Library) -> None:
    """Make recurrent layers and cells of fake tensors use the same kernels as on CUDA.

    Args:
        library: Library of the aten namespace in which the overrides are registered. They end when it is destroyed.
    """
    library.impl("_cudnn_rnn_backward", _fake_cudnn_backward, "Meta")  # type: ignore[no-untyped-call]
    for name, mode in _MODES.items():
        library.impl(f"{name}.input", _make_layers(name, mode), "AutogradCPU")  # type: ignore[no-untyped-call]
    library.impl("_thnn_fused_gru_cell", _fake_gru_cell, "Meta")  # type: ignore[no-untyped-call]
    library.impl("_thnn_fused_gru_cell_backward", _fake_gru_cell_backward, "Meta")  # type: ignore[no-untyped-call]
    for name in ("gru_cell", "lstm_cell"):
        library.impl(name, _make_cell(name), "AutogradCPU")  # type: ignore[no-untyped-call]


def _fake_gru_cell(gates: torch.Tensor, _: torch.Tensor, state: torch.Tensor, *biases: Any) -> Any:
    """Return results like those of the kernel for a GRU cell: the new state, and a workspace of five values per unit."""
    return torch.empty_like(state), state.new_empty(len(gates), 5 * state.shape[1])


def _fake_gru_cell_backward(gradient: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> Any:
    """Return results like those of the backward kernel for a GRU cell.

    They are the gradients of both gate inputs, of the state, and of the two biases.
    """
    gates = [gradient.new_empty(len(gradient), 3 * gradient.shape[1]) for _ in range(2)]
    return *gates, torch.empty_like(gradient), *(gates[0].new_empty(gates[0].shape[1:]) for _ in range(2))


def _make_cell(name: str) -> Callable[..., Any]:
    """Return a function that computes one step of a recurrent cell, with all gates in one kernel, as on CUDA.

    The kernel saves the gates for backward. For real tensors, the step is computed as usual.

    Args:
        name: Name of the operation, "gru_cell" or "lstm_cell".
    """
    plain, fused = getattr(torch.ops.aten, name).default.decompose, getattr(torch.ops.aten, f"_thnn_fused_{name}")

    def run(tokens: torch.Tensor, state: Any, *weights: Any) -> Any:
        if not isinstance(tokens, FakeTensor):
            return plain(tokens, state, *weights)
        # An LSTM has a hidden state and a cell state. The kernel of a GRU takes its only state in place of the latter.
        hidden, cell = state if name == "lstm_cell" else (state, state)
        inputs = [tokens, hidden, cell, *weights]
        if torch.is_autocast_enabled("cpu"):
            inputs = [each if each is None else each.to(torch.get_autocast_dtype("cpu")) for each in inputs]
        tokens, hidden, cell, input_weight, hidden_weight, *biases = inputs
        results = fused(tokens @ input_weight.t(), hidden @ hidden_weight.t(), cell, *biases)
        return results[:2] if name == "lstm_cell" else results[0]

    return run


def _make_layers(name: str, mode: int) -> Callable[..., Any]:
    """Return a function that computes all layers of a recurrent module in one call to cuDNN, as on CUDA.

    Real tensors are computed as usual.

    Args:
        name: Name of the operation, such as "lstm".
        mode: cuDNN's mode number for the operation.
    """
    plain = getattr(torch.ops.aten, name).input.decompose

    def run(
        tokens: torch.Tensor,
        state: Any,
        weights: list[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        if not isinstance(tokens, FakeTensor):
            return plain(tokens, state, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first)
        hx, cx = state if mode == 2 else (state, None)
        # Each layer has two weights and two biases. LSTMs with projections have another weight.
        tensors_per_layer = 4 if has_biases else 2
        if len(weights) % tensors_per_layer:
            tensors_per_layer += 1
        if torch.is_autocast_enabled("cpu"):  # on CUDA, autocast casts inputs, states and weights to half precision
            dtype = torch.get_autocast_dtype("cpu")
            tokens, hx, cx = tokens.to(dtype), hx.to(dtype), None if cx is None else cx.to(dtype)
            weights = [each.to(dtype) for each in weights]
        buffer = weights[0].new_empty(0)
        hidden = hx.shape[-1] if cx is None else cx.shape[-1]
        projected = hx.shape[-1] if cx is not None and hx.shape[-1] != hidden else 0
        shape = (mode, hidden, projected, num_layers, batch_first, dropout, train, bidirectional)
        results = torch.ops.aten._cudnn_rnn(tokens, weights, tensors_per_layer, buffer, hx, cx, *shape, [], None)
        return results[:3] if mode == 2 else results[:2]

    return run


def _fake_cudnn_backward(*args: Any) -> Any:
    """Return fake gradients of the input, the states and the weights. The gradients of all weights share one buffer.

    Args:
        args: Arguments of `_cudnn_rnn_backward`.
    """
    tokens, weights, _, _, hx, cx = args[:6]
    flat = weights[0].new_empty(sum(each.numel() for each in weights))
    parts = [part.view(each.shape) for part, each in zip(flat.split([each.numel() for each in weights]), weights)]
    gradient = torch.empty_like(tokens, memory_format=torch.contiguous_format)
    return gradient, torch.empty_like(hx), torch.empty_like(cx if cx is not None else hx), parts
