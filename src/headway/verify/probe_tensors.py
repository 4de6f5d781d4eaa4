"""Tensors of a batch that `LeakProbe` recognizes (labels, masks, positions), and changed copies of them."""

from collections.abc import Mapping
from typing import Any

import torch


def change_values(tensor: torch.Tensor, index: tuple[Any, ...]) -> torch.Tensor:
    """Return a copy of a tensor whose values at one index are changed.

    Integers change by 1 and stay in the tensor's range of values. Negative integers are unchanged, because labels with
    the value -100 are ignored.

    Args:
        tensor: Tensor to copy.
        index: Index of the values to change.
    """
    changed = tensor.clone()
    part = changed[index]
    if tensor.is_floating_point() or tensor.is_complex():
        changed[index] = part * -1.5 + 0.7
    elif tensor.dtype == torch.bool:
        changed[index] = ~part
    else:
        low, high = max(0, int(tensor.min())), int(tensor.max())
        lowered = part - 1 if high > low else part
        values = torch.where(part >= high, lowered, part + 1).clamp(low, max(low, high))
        changed[index] = torch.where(part < 0, part, values)  # -100 marks labels that the loss ignores
    return changed


def replace_tensor(tree: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    """Return a copy of nested collections in which one tensor is replaced by another."""
    if tree is old:
        return new
    if isinstance(tree, Mapping):
        return {key: replace_tensor(value, old, new) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(replace_tensor(each, old, new) for each in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(replace_tensor(each, old, new) for each in tree)
    return tree


def find_labels(inputs: list[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor | None:
    """Return the input that contains the labels, or None if there is no such input.

    Each label must equal the token at its position, or be negative, which means that the loss ignores it.
    """
    for each in inputs:
        if each is tokens or each.shape != tokens.shape or each.is_floating_point() or is_mask(each):
            continue
        known = each >= 0
        if bool(known.any()) and bool((each == tokens)[known].all()):
            return each
    return None


def are_labels(tensor: torch.Tensor, tokens: torch.Tensor) -> bool:
    """Whether integers of a batch are the labels of a model that predicts the next token.

    They are the tokens with one more token at the end, the next tokens, or a copy of the tokens in which some are
    negative, which means that the loss ignores them.

    Args:
        tensor: Integers in two dimensions that are no mask.
        tokens: Input tokens of the model.
    """
    num_rows, length = tokens.shape
    if tensor.shape == (num_rows, length + 1) and torch.equal(tensor[:, :-1], tokens):
        return True
    if tensor.shape != tokens.shape or tensor is tokens or is_positions(tensor, tokens):
        return False
    is_counted = tensor >= 0
    if is_counted.float().mean() < 0.5:
        return False
    is_next_token = tensor[:, :-1][is_counted[:, :-1]] == tokens[:, 1:][is_counted[:, :-1]]
    if bool(is_next_token.float().mean() > 0.95):
        return True
    return not torch.equal(tensor, tokens) and bool((tensor == tokens)[is_counted].all())


def is_mask(tensor: torch.Tensor) -> bool:
    """Whether a tensor contains only the integers 0 and 1, or bools."""
    if tensor.dtype == torch.bool:
        return True
    return not tensor.is_floating_point() and tensor.numel() > 0 and int(tensor.min()) >= 0 and int(tensor.max()) <= 1


def is_positions(tensor: torch.Tensor, tokens: torch.Tensor) -> bool:
    """Whether a tensor has the shape of `tokens` and contains positions that count up from 0 in each document."""
    if tensor.shape != tokens.shape or tensor.is_floating_point() or tensor.ndim != 2 or tensor.shape[1] < 2:
        return False
    steps = tensor[:, 1:] - tensor[:, :-1]
    return bool(((steps == 1) | (tensor[:, 1:] == 0)).all()) and bool((tensor[:, 0] == 0).all())
