"""Recognize additions of gradients that autograd would run in place if the tensors were not fake.

For tensor subclasses, such as fake tensors, autograd allocates a new tensor for the sum. In a real run, it adds to the
first gradient in place, so the trace must not count the sum's memory.
"""

from itertools import islice
from typing import Any

import torch

from headway.common.callsite import walk_stack
from headway.forecasting._torch import current_autograd_node, current_graph_task_id

_WRAPPERS = ("_fn", "inner", "__torch_dispatch__")
"""Names of the functions that call the tracker's dispatch method: torch's wrappers, and the method of a tensor subclass."""
_ADDITIONS = tuple(f"aten::{name}" for name in ("add", "scatter", "scatter_add", "index_add", "index_put"))
"""Names of the operations with which autograd can accumulate gradients."""
_IN_PLACE_IN_LOGITS_LOSS = ("aten::sub", "aten::mul", "aten::div")
"""Operations that torch's C++ code runs in place in the backward of binary cross-entropy with logits.

For tensor subclasses, such as fake tensors, torch allocates the results of these operations instead.
"""
_LOGITS_LOSS = "BinaryCrossEntropyWithLogitsBackward0"
"""Name of the autograd node of binary cross-entropy with logits."""


def is_sum_of_gradients(name: str, args: tuple[Any, ...], result: Any) -> bool:
    """Whether an operation sums two gradients of one tensor into a new tensor, but would run in place on plain tensors.

    The trace runs on fake tensors, for which autograd allocates a tensor in three cases that need none for plain
    tensors:

    - The engine sums two gradients of one tensor. For plain tensors, it adds in place if nothing else refers to the
      first gradient (`can_accumulate_inplace` in input_buffer.cpp).
    - The backward of an operation that selects values (gather, index, max, sort) adds its gradient to a tensor of zeros
      that it has just allocated (FunctionsManual.cpp).
    - The backward of binary cross-entropy with logits subtracts, multiplies and divides (FunctionsManual.cpp).

    Call this function from a method that `StorageTracker.__torch_dispatch__` calls, because it searches the stack.

    Args:
        name: Name of the operation.
        args: Arguments of the operation.
        result: Result of the operation.
    """
    if name not in _ADDITIONS and not (name in _IN_PLACE_IN_LOGITS_LOSS and _get_backward_name() == _LOGITS_LOSS):
        return False
    first = args[0]
    # The innermost three frames are this function, the tracker's method and its dispatch method.
    callers = (frame.f_code.co_name for frame in islice(walk_stack(), 3, None))
    caller = next(name for name in callers if name not in _WRAPPERS)
    return (
        current_graph_task_id() != -1
        and not torch.is_grad_enabled()
        and isinstance(first, torch.Tensor)
        and not first._is_view()
        and (first.shape, first.dtype) == (result.shape, result.dtype)
        and caller == "_engine_run_backward"  # rules out a user's autograd function that the engine calls
    )


def _get_backward_name() -> str:
    """Return the name of the autograd node whose backward is running, or "" if none is running."""
    return getattr(current_autograd_node(), "name", str)()
