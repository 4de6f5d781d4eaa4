"""Sums on CUDA: where few results are made of many values, blocks share a result, and meet in memory that is asked for.

The rules are those of torch's `Reduce.cuh` (`setReduceConfig`, `ReduceConfig.global_memory_size`). The gradient of a bias is such a
sum, and asks for more than the layer's own gradient now and then.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch

_THREADS, _WARP = 512, 32
"""Of a block at most; those that run in step."""
_FEWEST, _MOST = 16, 256
"""Values that a thread adds up."""
_VECTOR = 4

Sizes = Callable[[tuple[Any, ...]], list[int]]


def of_sums(processors: int, threads: int) -> dict[str, Sizes]:
    """Bytes that sums and means ask for beside their results, by operation.

    Args:
        processors: streaming multiprocessors of the device.
        threads: that one of them holds.
    """
    sizes = partial(_sizes, processors, threads)
    return {f"aten::{name}": sizes for name in ("sum", "mean")}


def _sizes(processors: int, threads: int, args: tuple[Any, ...]) -> list[int]:
    values: torch.Tensor = args[0]
    dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple | int) else ()
    wanted = {dims % values.dim()} if isinstance(dims, int) else {each % values.dim() for each in dims}
    reduced = wanted or set(range(values.dim()))
    size = _shared(values, reduced, processors * threads)
    return [size] if size else []


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
