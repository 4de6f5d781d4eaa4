"""Arguments and comparisons for the dry run of context parallelism.

The dry run computes a few tokens of the first batch, with full and with sharded sequences, and compares the results.
It detects these errors, which would otherwise stay silent:

- positions that are created within a block, and would begin at 0 on every rank
- attention or convolutions outside of torch's attention function
- a loss that is neither a mean nor a sum over tokens
- labels that are shifted within the model

In a forecast on fake tensors, values do not exist, and only shapes are compared.
"""

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headway.core.runtime.collectives import tree
from headway.core.training.evaluation_mode import use_evaluation_mode
from headway.layouts.context._torch import is_fake
from headway.layouts.context.split_labels import is_class

ADVICE = (
    "It needs positions that are added before the first block or given to each block (such as rotary embeddings or position_ids), "
    "attention by torch.nn.functional.scaled_dot_product_attention, no other exchange between tokens, and a loss that is a mean or "
    "a sum over labels of the shape (rows, tokens), in an argument that TorchContextParallelConfig(labels=...) names; else use fsdp "
    "or tp"
)
# Largest accepted differences between results, as fractions of the largest value.
_LOSS_TOLERANCE = 5e-5
"""Tolerance for losses in float32."""
_FLOAT32_TOLERANCE = 2e-4
"""Tolerance for other outputs in float32."""
_TF32_TOLERANCE = 1e-2
"""Tolerance if matrix products use TF32."""
_HALF_TOLERANCE = 5e-2
"""Tolerance in half precision."""


def shorten_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], num_tokens: int, labels: Collection[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the model's arguments reduced to two rows and to the first tokens, for a dry run.

    A single row is repeated. The attention mask is set to ones, so padding counts as text. Negative labels, such as
    ignored ones, become class 0. Without a tensor of at least two dimensions, the arguments are returned unchanged.

    Args:
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        num_tokens: Largest number of tokens per row.
        labels: Names of arguments that are labels.
    """
    first = next((tensor for tensor in tree.list_tensors((args, kwargs)) if tensor.dim() > 1), None)
    if first is None:
        return args, kwargs
    num_rows, length = first.shape[:2]

    def shorten_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            return leaf
        return _shorten_tensor(leaf, num_rows, length, num_tokens)

    short_args = tree.map_leaves(shorten_leaf, args)
    short_kwargs = tree.map_leaves(shorten_leaf, kwargs)
    mask = short_kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        short_kwargs["attention_mask"] = torch.ones_like(mask)
    for name in labels:
        label = short_kwargs.get(name)
        if isinstance(label, torch.Tensor) and label.dtype != torch.bool:
            short_kwargs[name] = label.clamp(min=0)
    return short_args, short_kwargs


def _shorten_tensor(tensor: torch.Tensor, num_rows: int, length: int, num_tokens: int) -> torch.Tensor:
    """Return a tensor reduced to two rows and to the first tokens. A matrix with a single row gets the row twice.

    Args:
        tensor: Tensor with at least one dimension. Its first dimension is that of rows if it has `num_rows` entries.
        num_rows: Number of rows of the batch.
        length: Number of tokens per row. Each later dimension of this length is reduced, such as both of a mask.
        num_tokens: Largest number of tokens to keep.
    """
    has_rows = tensor.shape[0] == num_rows
    shortened = tensor
    if has_rows and num_rows > 1:
        shortened = tensor[:2]
    elif has_rows and tensor.dim() > 1:
        shortened = torch.cat([tensor, tensor])
    first_token_dim = 1 if tensor.dim() > 1 or has_rows else 0
    for dim in range(first_token_dim, shortened.dim()):
        if shortened.shape[dim] == length:
            shortened = shortened.narrow(dim, 0, min(num_tokens, length))
    return shortened


def ignore_some_labels(kwargs: dict[str, Any], labels: Collection[str], ignored: int) -> dict[str, Any]:
    """Return the arguments of a dry run with the first labels of the first row set to the ignored label.

    Rows and sequence shards then have different numbers of labels that are not ignored. The dry run thus detects a loss
    that is a mean per row, or that ignores other labels. Such a loss differs between full and sharded sequences.

    Args:
        kwargs: Arguments from `shorten_arguments`.
        labels: Names of arguments that are labels.
        ignored: Label that the loss ignores.
    """
    changed = dict(kwargs)
    for name in labels:
        label = changed[name]
        if not is_class(label):
            continue
        # Labels that are ignored already get another class, so that only the labels set below are ignored.
        other_class = 0 if is_fake(label) else int(label.max())
        if other_class == ignored:
            other_class = 1 if ignored == 0 else 0
        changed[name] = label.masked_fill(label == ignored, other_class)
        changed[name][0, : max(1, label.shape[1] // 4)] = ignored
    return changed


@contextmanager
def enter_evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Return a context in which the model is in evaluation mode, without gradients."""
    with use_evaluation_mode(model), torch.no_grad():
        yield


def describe_difference(full_output: Any, split_output: Any, is_exact: bool, is_loss_joined: bool = False) -> str:
    """Return a description of the first difference between two outputs, or "" if they agree.

    The tolerance for losses is narrower if `is_loss_joined`. An untrained model has similar losses for all tokens, so a
    mean over the wrong tokens is close to the correct one.

    Args:
        full_output: Output of the model for full sequences.
        split_output: Output of the model for sharded sequences.
        is_exact: Whether outputs were computed in float32.
        is_loss_joined: Whether the losses of the shards were combined. Default: False.
    """
    full_tensors, split_tensors = list(tree.list_tensors(full_output)), list(tree.list_tensors(split_output))
    full_shapes = [tuple(tensor.shape) for tensor in full_tensors]
    split_shapes = [tuple(tensor.shape) for tensor in split_tensors]
    if full_shapes != split_shapes:
        return f"its outputs have the shapes {split_shapes} with sharded sequences, and {full_shapes} with full ones"
    for full_tensor, split_tensor in zip(full_tensors, split_tensors):
        if not full_tensor.is_floating_point() or not full_tensor.numel() or is_fake(full_tensor):
            continue
        full, split = full_tensor.float(), split_tensor.float()
        difference = float((full - split).abs().nan_to_num(0.0).max())
        largest = float(full.abs().nan_to_num(0.0).max())
        has_other_nans = bool((full.isnan() != split.isnan()).any())
        tolerance = _choose_tolerance(full.device, is_exact)
        if is_loss_joined and not full.dim() and tolerance == _FLOAT32_TOLERANCE:
            tolerance = _LOSS_TOLERANCE
        if has_other_nans or difference > tolerance * max(largest, math.ulp(1.0)):
            name = "its loss" if not full.dim() else f"an output of the shape {tuple(full.shape)}"
            return f"{name} differs by {difference:.2g} (the largest value is {largest:.2g}) from that of the full sequence"
    return ""


def _choose_tolerance(device: torch.device, is_exact: bool) -> float:
    """Return the accepted relative difference between outputs that are not losses.

    Args:
        device: Device on which the outputs were computed.
        is_exact: Whether they were computed in float32.
    """
    if not is_exact:
        return _HALF_TOLERANCE
    is_tf32 = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return _TF32_TOLERANCE if is_tf32 else _FLOAT32_TOLERANCE
