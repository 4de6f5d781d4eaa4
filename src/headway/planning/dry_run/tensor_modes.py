"""Torch modes of a dry run: real tensors keep their values, and `torch.chunk` is fast for thousands of ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from headway.forecasting.device.kernels import make_grouped_product
from headway.planning._torch import TorchDispatchMode, is_fake, tree_leaves, unset_fake_temporarily


class RealTensorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode for use within a fake mode. An operation whose inputs are all real returns real tensors.

    A fake mode alone would remove the values of all tensors, even of those whose values are needed, such as RNG states.
    All other operations run in the fake mode, including those without input tensors.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not tensors or any(map(is_fake, tensors)):
            # torch's fake kernel of _grouped_mm accepts only bfloat16.
            grouped_product = make_grouped_product(func, args)
            return func(*args, **kwargs) if grouped_product is None else grouped_product
        with unset_fake_temporarily():
            return func(*args, **kwargs)


class SharedChunks(TorchFunctionMode):
    """Torch function mode that makes `torch.chunk` fast for any number of chunks if a tensor has no values.

    `fully_shard` splits each parameter twice into one chunk per rank, and uses only the chunk of this rank. With 16,384
    ranks, this takes nine tenths of the preparation time. Chunks of equal shape cannot be distinguished without values,
    so all of them are one shared tensor. The list still has one entry per rank, because `fully_shard` pads it with
    empty chunks.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.chunk and _has_no_values(args):
            return _make_chunks(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _has_no_values(args: tuple[Any, ...]) -> bool:
    """Whether an operation's first argument is a fake or meta tensor with dimensions."""
    tensor = args[0] if args else None
    return isinstance(tensor, torch.Tensor) and (is_fake(tensor) or tensor.is_meta) and tensor.dim() > 0


def _make_chunks(tensor: torch.Tensor, chunks: int, dim: int = 0) -> list[torch.Tensor]:
    """Return the chunks that `torch.chunk` returns, followed by empty chunks up to the requested number.

    All chunks of equal shape are the same tensor object.
    """
    size = tensor.size(dim)
    length = -(-size // chunks)
    num_full, rest = divmod(size, length) if length else (0, 0)
    all_chunks = [tensor.narrow(dim, 0, length)] * num_full
    if rest:
        all_chunks.append(tensor.narrow(dim, size - rest, rest))
    return all_chunks + [tensor.narrow(dim, 0, 0)] * (chunks - len(all_chunks))
