"""Does a model compute the same when its sequences are cut? A few tokens of its first batch, whole and cut, beside each other.

What would make it differ without an error: positions made within a block, which would begin at 0 on every rank; attention or
convolutions past that function; a loss that is neither a mean nor a sum over tokens; labels that are shifted within the model.
"""

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from headway.config.parallelism import TensorParallelOptions
from headway.errors import UnsupportedError
from headway.runtime.collectives import tree

ADVICE = (
    "Needed are: positions that are added before the first block or given to each block (as rotary embeddings or position_ids), "
    "attention by torch.nn.functional.scaled_dot_product_attention, no other exchange between tokens, and a loss that is a mean or "
    "a sum over labels of the shape (rows, tokens), in an argument that TorchContextParallelConfig(labels=...) names; else use fsdp "
    "or tp"
)
_EXACT_LOSS, _EXACT, _TF32, _HALF = 5e-5, 2e-4, 1e-2, 5e-2
"""How far results may lie apart, as a share of the largest."""


def check_options(tensor: TensorParallelOptions, num_parts: int) -> None:
    """Can sequences be cut beside these options of tensor parallelism?

    Args:
        tensor: the options.
        num_parts: into how many parts sequences are cut.

    Raises:
        UnsupportedError: they cannot.
    """
    given = [name for name in ("sequence_parallel", "loss_parallel") if num_parts > 1 and getattr(tensor, name)]
    if given:
        raise UnsupportedError(
            f"context parallelism (cp={num_parts}) cuts sequences itself, which does not work with TensorParallelOptions("
            f"{', '.join(f'{name}=True' for name in given)}); drop {' and '.join(given)}, or cp"
        )


def few(
    args: tuple[Any, ...], kwargs: dict[str, Any], num_tokens: int, labels: Collection[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first tokens of two rows of what a model is given; padding is taken for text, and ignored labels for class 0."""
    first = next((each for each in tree.tensors((args, kwargs)) if each.dim() > 1), None)
    if first is None:
        return args, kwargs
    num_rows, length = first.shape[:2]

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            return leaf
        is_rows = leaf.shape[0] == num_rows
        if num_rows > 1:
            leaf = leaf[:2] if is_rows else leaf
        elif is_rows and leaf.dim() > 1:
            leaf = torch.cat([leaf, leaf])
        for dim in range(1 if leaf.dim() > 1 or is_rows else 0, leaf.dim()):
            if leaf.shape[dim] == length:
                leaf = leaf.narrow(dim, 0, min(num_tokens, length))
        return leaf

    args, kwargs = tree.map_leaves(cut, args), tree.map_leaves(cut, kwargs)
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        kwargs["attention_mask"] = torch.ones_like(mask)
    for name in labels:
        label = kwargs.get(name)
        if isinstance(label, torch.Tensor) and label.dtype != torch.bool:
            kwargs[name] = label.clamp(min=0)
    return args, kwargs


def has_values(tensor: torch.Tensor) -> bool:
    """Not so in a plan, which compares shapes alone."""
    return not is_fake(tensor)


def ignore_some(kwargs: dict[str, Any], labels: Collection[str], ignored: int) -> dict[str, Any]:
    """Let the first row have fewer labels than the others, and the ranks' parts of it unlike numbers.

    A loss that is a mean over each row, or that ignores what is counted here, is another one in parts then.

    Args:
        kwargs: from `few`.
        labels: which of them are labels.
        ignored: what takes the labels' place.
    """
    found = dict(kwargs)
    for name in labels:
        label = found[name]
        if label.is_floating_point() or label.dtype == torch.bool:
            continue
        largest = int(label.max()) if has_values(label) else 0
        label = label.masked_fill(label == ignored, largest if largest != ignored else int(ignored == 0))
        label[0, : max(1, label.shape[1] // 4)] = ignored
        found[name] = label
    return found


@contextmanager
def at_rest(model: torch.nn.Module) -> Iterator[None]:
    """A block in which the model is evaluated."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def difference(whole: Any, cut: Any, is_exact: bool, is_loss_joined: bool = False) -> str:
    """What differs, in words; "": nothing does.

    Args:
        whole, cut: the model's outputs.
        is_exact: they were computed in float32.
        is_loss_joined: losses of parts were put together. A wrong mean over tokens is near the right one: the losses of a model
            that knows nothing are all alike.
    """
    pairs = [list(tree.tensors(each)) for each in (whole, cut)]
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in pairs]
    if shapes[0] != shapes[1]:
        return f"its outputs have the shapes {shapes[1]} when it is cut, and {shapes[0]} when it is not"
    for one, other in zip(*pairs):
        if not one.is_floating_point() or not one.numel() or not has_values(one):
            continue
        one, other = one.float(), other.float()
        apart = float((one - other).abs().nan_to_num(0.0).max())
        largest = float(one.abs().nan_to_num(0.0).max())
        odd = bool((one.isnan() != other.isnan()).any())
        allowed = _allowed(one.device, is_exact)
        if is_loss_joined and not one.dim() and allowed == _EXACT:
            allowed = _EXACT_LOSS
        if odd or apart > allowed * max(largest, math.ulp(1.0)):
            what = "its loss" if not one.dim() else f"an output of the shape {tuple(one.shape)}"
            return f"{what} differs by {apart:.2g} (the largest value is {largest:.2g}) from that of the whole sequence"
    return ""


def _allowed(device: torch.device, is_exact: bool) -> float:
    if not is_exact:
        return _HALF
    is_tf32 = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return _TF32 if is_tf32 else _EXACT
