"""find_executable_batch_size as scripts for Accelerate expect it: each attempt uses nine tenths of the previous batch size."""

from collections.abc import Callable
from typing import Any

from headway.memory import batch_size


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Any:
    """Call a function with a batch size that fits into memory, the same on all ranks.

    Args:
        function: takes the batch size first; None: a decorator is returned.
        starting_batch_size: of the first attempt.
        reduce_batch_size_fn: gives the next one; None: nine tenths of it (Headway's own takes half).
    """
    call: Any = batch_size.find_executable_batch_size
    return call(function, starting_batch_size, reduce_batch_size_fn or (lambda size: int(size * 0.9)))
