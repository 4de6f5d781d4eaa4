"""One rank of a run of any size, in this process alone: torch's fake process group, in which nothing is sent."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.errors import StateError


@contextmanager
def pretend(num_ranks: int, rank: int) -> Iterator[None]:
    """A block in which this process is one rank of so many; collectives return at once, with nothing in them.

    Raises:
        StateError: this process has a group of its own, which is not touched.
    """
    if dist.is_initialized():
        raise StateError(
            "a plan, or a forecast of a layout, needs a process that has not joined a process group; call headway.plan() or "
            "headway.forecast() before you create an Accelerator, or run `headway plan` or `headway estimate`"
        )
    # Registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class OneOfEach(TorchFunctionMode):
    """torch.chunk of a tensor without values, in a time that does not grow with the number of chunks.

    `fully_shard` cuts each parameter into one chunk for each rank, twice, and takes the chunk of this rank: with 16,384 ranks that
    is nine tenths of a preparation. Chunks of one shape have nothing else to tell them apart on the meta device, so one tensor
    stands for all of them (nor do fake ones). The list is as long as there are ranks, as `fully_shard` makes it by adding empty ones.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.chunk and _has_no_values(args):
            return _chunks(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class RealStaysReal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within a fake mode: what is made of real tensors alone is real.

    A fake mode alone takes the values of all tensors, also of those that are no part of the model and whose values are read, such as
    the state of random streams.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not tensors or any(map(is_fake, tensors)):
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _has_no_values(args: tuple[Any, ...]) -> bool:
    return (
        bool(args) and isinstance(args[0], torch.Tensor) and (is_fake(args[0]) or args[0].is_meta) and args[0].dim() > 0
    )


def _chunks(tensor: torch.Tensor, chunks: int, dim: int = 0) -> list[torch.Tensor]:
    size = tensor.size(dim)
    length = -(-size // chunks)
    whole, rest = divmod(size, length) if length else (0, 0)
    found = [tensor.narrow(dim, 0, length)] * whole
    if rest:
        found.append(tensor.narrow(dim, size - rest, rest))
    return found + [tensor.narrow(dim, 0, 0)] * (chunks - len(found))
