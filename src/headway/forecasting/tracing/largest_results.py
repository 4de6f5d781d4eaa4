"""Trace operations whose result sizes depend on values, which fake tensors do not have, with the largest possible sizes."""

from typing import Any

import torch

from headway.forecasting._torch import FakeTensor

aten = torch.ops.aten


def make_largest_result(func: Any, args: tuple[Any, ...]) -> Any:
    """Return the largest possible result of an operation whose result size depends on values.

    Return None for all other operations, and for tensors that are not fake.

    Args:
        func: Operation that is traced.
        args: Arguments of the operation.
    """
    if not args or not isinstance(args[0], FakeTensor):
        return None
    if func is aten.nonzero.default:
        return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.long)
    if func is aten.masked_select.default:
        return (args[0] * args[1]).flatten()
    if func is aten._unique2.default:
        indices = [args[0].new_empty(args[0].shape, dtype=torch.long) for _ in range(2)]
        return args[0].new_empty(args[0].numel()), *indices
    if func in (aten._ctc_loss.Tensor, aten._ctc_loss.default):
        steps, batch, targets = args[0].shape[0], args[0].shape[1], args[1]
        longest = targets.shape[1] if targets.dim() == 2 else targets.numel()
        return args[0].new_empty(batch), args[0].new_empty((batch, steps, 2 * longest + 1))
    if func in (aten._ctc_loss_backward.Tensor, aten._ctc_loss_backward.default):
        return torch.empty_like(args[1])
    return None


def expand_masks(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an indexing operation, with each boolean mask replaced by index tensors.

    The index tensors are as large as if the mask were true everywhere. Arguments of other operations, and arguments
    without masks or fake tensors, are returned unchanged.

    Args:
        func: Operation that is traced.
        args: Arguments of the operation.
    """
    if not args or not isinstance(args[0], FakeTensor):
        return args
    if func not in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default):
        return args
    if all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1]):
        return args
    indices: list[Any] = []
    for index in args[1]:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        indices += [index.new_empty(index.numel(), dtype=torch.long) for _ in index.shape] if is_mask else [index]
    return args[0], indices, *args[2:]
