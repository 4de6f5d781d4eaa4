"""Compute the scratch memory in which CUDA blocks combine partial sums, by the rules of torch's `Reduce.cuh`.

If a reduction has few results and each sums many values, several CUDA blocks compute a result together. They combine
their partial sums in scratch memory (`setReduceConfig` and `ReduceConfig.global_memory_size`). The gradient of a bias
is such a sum, and its scratch memory is sometimes larger than the gradient of the layer's weight.
"""

from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch

from headway.forecasting.device.copies import Sizes

_MAX_BLOCK_THREADS = 512
"""Maximum number of threads in a CUDA block."""
_WARP_THREADS = 32
"""Number of threads in a warp."""
_MIN_THREAD_VALUES = 16
"""Minimum number of values that a thread sums."""
_MAX_THREAD_VALUES = 256
"""Maximum number of values that one thread sums before several blocks share the computation of a result."""
_MAX_VECTOR = 4
"""Maximum vector width: the number of values that a thread reads at once, or of results that it computes at once."""


def make_sum_rules(processors: int, threads: int) -> dict[str, Sizes]:
    """Return rules for the scratch memory that sums, means, variances and norms allocate after their results.

    The rules are a dict by operation. For integers, the memory includes a copy that is cast to int64.

    Args:
        processors: Number of streaming multiprocessors of the device.
        threads: Maximum number of resident threads per streaming multiprocessor.
    """
    sizes = partial(_size_sum, processors, threads)
    rules: dict[str, Sizes] = {f"aten::{name}": sizes for name in ("sum", "mean")}
    # A variance has four parts: a mean, a sum of squares and two counts.
    rules |= dict.fromkeys(
        (f"aten::{name}" for name in ("var", "std", "var_mean", "std_mean")), partial(sizes, parts=4)
    )
    return rules | {"aten::linalg_vector_norm": lambda args: sizes((args[0], *args[2:]))}


class _Dimension(NamedTuple):
    """Dimension of a tensor that is summed.

    Attributes:
        stride: Stride in elements. The first field, so that dimensions are sorted by it.
        size: Number of elements along the dimension.
    """

    stride: int
    size: int


def _size_sum(processors: int, threads: int, args: tuple[Any, ...], parts: int = 1) -> list[int]:
    """Return the bytes of each scratch tensor of a sum, in the order of requests.

    Args:
        processors: Number of streaming multiprocessors of the device.
        threads: Maximum number of resident threads per streaming multiprocessor.
        args: Arguments of the operation: the tensor, and the dimensions to sum over. All dimensions if there are none.
        parts: Number of values that make up a partial result. Default: 1.
    """
    values: torch.Tensor = args[0]
    dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple | int) else ()
    summed_dims = {dim % values.dim() for dim in ((dims,) if isinstance(dims, int) else dims)}
    summed_dims = summed_dims or set(range(values.dim()))
    num_bytes = parts * _size_block_scratch(values, summed_dims, processors * threads)
    is_integer = not values.dtype.is_floating_point and not values.dtype.is_complex
    scratch = [values.numel() * 8] if is_integer and values.dtype != torch.int64 else []
    if num_bytes:
        scratch += [num_bytes, 512]  # the second one has a flag for each finished block
    return scratch


def _size_block_scratch(values: torch.Tensor, summed_dims: set[int], max_threads: int) -> int:
    """Return the bytes of scratch memory, in global memory, in which CUDA blocks combine their partial sums.

    Return 0 if no result needs more than one block. The steps are those of `setReduceConfig` in `Reduce.cuh`.

    Args:
        values: Tensor to sum.
        summed_dims: Indices of the dimensions to sum over.
        max_threads: Number of threads that can run on the device at once.
    """
    dimensions = [_Dimension(values.stride(dim), values.shape[dim]) for dim in range(values.dim())]
    summed = sorted(each for dim, each in enumerate(dimensions) if dim in summed_dims and each.size > 1)
    kept = sorted(each for dim, each in enumerate(dimensions) if dim not in summed_dims and each.size > 1)
    if any(each.size == 0 for each in dimensions) or not summed:
        return 0
    num_results, num_values = prod(each.size for each in kept), prod(each.size for each in summed)
    block = _choose_block(kept, summed, num_results, num_values)
    blocks_per_result = _count_blocks_per_result(block, num_results, num_values, max_threads)
    if blocks_per_result < 2:
        return 0
    # Sums of int32 and bool are accumulated in int64.
    itemsize = 8 if values.dtype in (torch.float64, torch.int64, torch.int32, torch.bool) else 4
    sums_per_result = 1 if block.is_width_summed else block.width * block.results_per_thread
    return itemsize * num_results * blocks_per_result * sums_per_result


class _ThreadBlock(NamedTuple):
    """CUDA block of a reduction.

    Attributes:
        width: Number of threads along the width. They read neighboring values.
        height: Number of threads along the height.
        is_width_summed: Whether the threads along the width read values of one result. False: each of them computes
            other results.
        results_per_thread: Number of neighboring results that one thread computes at once.
    """

    width: int
    height: int
    is_width_summed: bool
    results_per_thread: int


def _choose_block(kept: list[_Dimension], summed: list[_Dimension], num_results: int, num_values: int) -> _ThreadBlock:
    """Return the CUDA block of a reduction.

    Args:
        kept: Dimensions that are kept, in ascending order of stride.
        summed: Dimensions that are summed over, in ascending order of stride. At least one.
        num_results: Number of results.
        num_values: Number of values that each result sums.
    """
    is_width_summed = not kept or summed[0].stride < kept[0].stride
    width, height = (num_values, num_results) if is_width_summed else (num_results, num_values)
    results_per_thread = 1
    if not is_width_summed and kept[0].stride == 1:
        results_per_thread = _choose_vector(kept, summed)
        width //= results_per_thread
    elif not kept and summed[0].stride == 1 and width > 128:
        width //= _MAX_VECTOR  # a thread reads several neighboring values at once
    block_width, block_height = _choose_block_size(width, height, _MAX_BLOCK_THREADS // results_per_thread)
    return _ThreadBlock(block_width, block_height, is_width_summed, results_per_thread)


def _count_blocks_per_result(block: _ThreadBlock, num_results: int, num_values: int, max_threads: int) -> int:
    """Return the number of CUDA blocks that share the computation of each result.

    Args:
        block: CUDA block of the reduction.
        num_results: Number of results.
        num_values: Number of values that each result sums.
        max_threads: Number of threads that can run on the device at once.
    """
    values_per_row, results_per_block = (block.width, 1) if block.is_width_summed else (1, block.width)
    if _divide_up(num_values, values_per_row) < min(block.height * _MIN_THREAD_VALUES, _MAX_THREAD_VALUES):
        return 1  # one row of threads computes a whole result
    values_per_thread = _divide_up(num_values, values_per_row * block.height)
    num_blocks = _divide_up(num_results // block.results_per_thread, results_per_block)
    max_blocks = max_threads // (block.width * block.height)
    if values_per_thread < _MAX_THREAD_VALUES or num_blocks > max_blocks:
        return 1
    # As many blocks as fill the device, within the limits for the number of values that a thread sums.
    most_useful = min(_divide_up(max_blocks, num_blocks), _divide_up(values_per_thread, _MIN_THREAD_VALUES))
    return max(most_useful, _divide_up(values_per_thread, _MAX_THREAD_VALUES))


def _divide_up(number: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(-number // divisor)


def _choose_vector(kept: list[_Dimension], summed: list[_Dimension]) -> int:
    """Return the number of neighboring results that one thread computes at once.

    It is the largest power of two, at most `_MAX_VECTOR`, that divides the number of neighboring results and the strides of
    all other dimensions.

    Args:
        kept: Dimensions that are kept, in ascending order of stride.
        summed: Dimensions that are summed over.
    """
    vector = _MAX_VECTOR
    for number in (kept[0].size, *(each.stride for each in (*kept[1:], *summed))):
        while number % vector:
            vector //= 2
    return vector


def _choose_block_size(width: int, height: int, max_threads: int) -> tuple[int, int]:
    """Return the width and height, in threads, of the CUDA blocks of a reduction.

    Both are powers of two.

    Args:
        width: Number of values or results along the block's width.
        height: Number of values or results along the block's height.
        max_threads: Maximum number of threads in a block.
    """
    max_width, max_height = (min(max_threads, _round_to_power(size)) for size in (width, height))
    block_height = min(max_height, max_threads // min(max_width, _WARP_THREADS))
    return min(max_width, max_threads // block_height), block_height


def _round_to_power(number: int) -> int:
    """Return the largest power of two that is at most `number`, or 1 for 0."""
    return 1 << (number.bit_length() - 1) if number else 1
