"""Compute the scratch memory in which CUDA blocks combine partial sums, by the rules of torch's `Reduce.cuh`.

If a reduction has few results and each sums many values, several CUDA blocks compute a result together. They combine
their partial sums in scratch memory (`setReduceConfig` and `ReduceConfig.global_memory_size`). The gradient of a bias
is such a sum, and its scratch memory is sometimes larger than the gradient of the layer's weight.
"""

from functools import partial
from math import prod
from typing import Any

import torch

from headway.forecasting.device.copies import Sizes

_THREADS = 512
"""Maximum number of threads in a CUDA block."""
_WARP = 32
"""Number of threads in a warp."""
_FEWEST = 16
"""Minimum number of values that a thread sums."""
_MOST = 256
"""Maximum number of values that one thread sums before several blocks share the computation of a result."""
_VECTOR = 4
"""Maximum vector width: the number of values that a thread reads at once, or of results that it computes at once."""


def make_sum_rules(processors: int, threads: int) -> dict[str, Sizes]:
    """Return rules for the scratch memory that sums, means, variances and norms allocate after their results.

    The rules are a dict by operation. For integers, the memory includes a copy that is cast to int64.

    Args:
        processors: Number of streaming multiprocessors of the device.
        threads: Maximum number of resident threads per streaming multiprocessor.
    """
    sizes = partial(_size_sum, processors, threads)
    found: dict[str, Sizes] = {f"aten::{name}": sizes for name in ("sum", "mean")}
    # A variance has four parts: a mean, a sum of squares and two counts.
    found |= dict.fromkeys(
        (f"aten::{name}" for name in ("var", "std", "var_mean", "std_mean")), partial(sizes, parts=4)
    )
    return found | {"aten::linalg_vector_norm": lambda args: sizes((args[0], *args[2:]))}


def _size_sum(processors: int, threads: int, args: tuple[Any, ...], parts: int = 1) -> list[int]:
    values: torch.Tensor = args[0]
    dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple | int) else ()
    wanted = {dims % values.dim()} if isinstance(dims, int) else {each % values.dim() for each in dims}
    reduced = wanted or set(range(values.dim()))
    size = parts * _size_shared_memory(values, reduced, processors * threads)
    is_cast = not values.dtype.is_floating_point and values.dtype not in (
        torch.int64,
        torch.complex64,
        torch.complex128,
    )
    return [values.numel() * 8] * is_cast + [size, 512] * bool(size)  # 512 bytes of flags for finished blocks


def _size_shared_memory(values: torch.Tensor, reduced: set[int], places: int) -> int:
    """Return the bytes of scratch memory in which CUDA blocks combine their partial sums.

    Return 0 if no result needs more than one block.

    Args:
        values: Tensor to sum.
        reduced: Dimensions to sum over.
        places: Number of threads that can run on the device at once.
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
        vector = _choose_vector(kept, over)
        width //= vector
    elif runs_along and not kept and min(over)[0] == 1 and width > 128:
        width //= _VECTOR
    wide, high = _choose_block(width, height, _THREADS // vector)
    across, results = (wide, 1) if runs_along else (1, wide)
    each = -(-num_values // across)
    if each < min(high * _FEWEST, _MOST):
        return 0  # one row of threads computes a whole result
    each = -(-num_values // (across * high))
    blocks, target = -(-(num_results // vector) // results), places // (wide * high)
    if each < _MOST or blocks > target:
        return 0
    sharing = max(min(-(-target // blocks), -(-each // _FEWEST)), -(-each // _MOST))
    if sharing < 2:
        return 0
    item = 8 if values.dtype in (torch.float64, torch.int64, torch.int32, torch.bool) else 4
    return item * num_results * sharing * (1 if runs_along else wide * vector)


def _choose_vector(kept: list[tuple[int, int]], over: list[tuple[int, int]]) -> int:
    """Return the number of neighboring results that one thread computes at once.

    It is the largest power of two, at most `_VECTOR`, that divides the number of neighboring results and the strides of
    all other dimensions.

    Args:
        kept: Pairs of (stride, size) of the dimensions that are kept, in ascending order.
        over: Pairs of (stride, size) of the dimensions that are summed over.
    """
    vector = _VECTOR
    for number in (kept[0][1], *(stride for stride, _ in (*kept[1:], *over))):
        while number % vector:
            vector //= 2
    return vector


def _choose_block(width: int, height: int, most: int) -> tuple[int, int]:
    """Return the width and height, in threads, of the CUDA blocks of a reduction.

    Args:
        width: Number of values or results along the block's width.
        height: Number of values or results along the block's height.
        most: Maximum number of threads in a block.
    """
    wide, high = (min(most, 1 << (size.bit_length() - 1)) if size else 1 for size in (width, height))
    down = min(high, most // min(wide, _WARP))
    return min(wide, most // down), down
