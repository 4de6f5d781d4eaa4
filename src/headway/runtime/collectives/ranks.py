"""What a process asks and does as one rank among others: properties, decorators, order, exchange."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeVar

import torch

from headway.errors import ConfigError
from headway.runtime.collectives.checked import Collectives
from headway.runtime.collectives.cut import split
from headway.runtime.collectives.tree import Tree
from headway.runtime.process import ProcessRuntime

Function = TypeVar("Function", bound=Callable[..., Any])


class RankAware:
    """The rank-aware half of the Accelerator; it knows nothing of models.

    Args:
        runtime: this process.
        collectives: with the other ranks.
    """

    def __init__(self, runtime: ProcessRuntime, collectives: Collectives) -> None:
        self.runtime = runtime
        self.collectives = collectives
        self._is_triggered = False

    @property
    def _readers(self) -> Collectives:
        """One rank of each part of the data: what they hold counts once."""
        return self.collectives

    # ---------------------------------------------------------------- who am I

    @property
    def device(self) -> torch.device:
        """The device this process computes on."""
        return self.runtime.device

    @property
    def num_processes(self) -> int:
        """How many processes the run has."""
        return self.runtime.world_size

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return self.runtime.rank

    @property
    def local_process_index(self) -> int:
        """This process's rank on its machine."""
        return self.runtime.local_rank

    @property
    def is_main_process(self) -> bool:
        """Is this rank 0?"""
        return self.runtime.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Is this the first process of its machine?"""
        return self.runtime.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Is this the highest rank?"""
        return self.runtime.is_last_process

    @property
    def use_distributed(self) -> bool:
        """Are there several processes?"""
        return self.runtime.world_size > 1

    # ---------------------------------------------------------------- who does what

    def print(self, *args: Any, **kwargs: Any) -> None:
        """print(), once per machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def on_main_process(self, function: Function | None = None) -> Any:
        """Decorator: run on rank 0 only; the other ranks get None."""
        return self._only(function, lambda rank, _: rank == 0)

    def on_local_main_process(self, function: Function | None = None) -> Any:
        """Decorator: run on the first process of each machine only; the others get None."""
        return self._only(function, lambda _, local: local == 0)

    def on_last_process(self, function: Function | None = None) -> Any:
        """Decorator: run on the highest rank only; the others get None."""
        last = self.num_processes - 1
        return self._only(function, lambda rank, _: rank == last)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Any:
        """Decorator: run on rank `process_index` only; the others get None."""
        wanted = self._index(process_index, self.num_processes, "process_index")
        return self._only(function, lambda rank, _: rank == wanted)

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Any:
        """Decorator: run on that local rank of each machine only; the others get None."""
        wanted = self._index(local_process_index, self.runtime.local_world_size, "local_process_index")
        return self._only(function, lambda _, local: local == wanted)

    @staticmethod
    def _index(index: int | None, count: int, name: str) -> int:
        if index is None or not 0 <= index < count:
            raise ConfigError(f"{name}={index!r}; give a number from 0 to {count - 1}")
        return index

    def _only(self, function: Function | None, passes: Callable[[int, int], bool]) -> Any:
        if function is None:  # used as @accelerator.on_...(): called with options first
            return partial(self._only, passes=passes)

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if passes(self.process_index, self.local_process_index) else None

        return run

    def wait_for_everyone(self) -> None:
        """Wait until every process is here."""
        self.collectives.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Rank 0 runs the block first; the others begin when it has left it, even by an exception."""
        yield from self._first(self.is_main_process)

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The first process of each machine runs the block first."""
        yield from self._first(self.is_local_main_process)

    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if is_first:
                self.wait_for_everyone()

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this process's part of `inputs`: see `headway.runtime.collectives.cut.split`."""
        yield split(inputs, self.num_processes, self.process_index, apply_padding)

    def set_trigger(self) -> None:
        """Make the next `check_trigger` true on every rank."""
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Has any rank called `set_trigger` since the last check? Call it on every rank."""
        answer = self.collectives.reduce_numbers([float(self._is_triggered)], "max")[0] > 0
        if answer:
            self._is_triggered = False
        return answer

    # ---------------------------------------------------------------- exchange

    def gather(self, tensor: Tree) -> Tree:
        """Every rank's tensors, concatenated along dim 0 in rank order (a 0-d tensor counts as one row).

        First dimensions may differ between ranks. Nested structures keep their shape.
        """
        return self.collectives.gather(tensor)

    def reduce(self, tensor: Tree, reduction: str = "sum", scale: float = 1.0) -> Tree:
        """Combine tensors over ranks: "sum", "mean", "max" or "min", times `scale`. Equal shapes on all ranks."""
        return self.collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Tree, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Tree:
        """Pad tensors along `dim` to the longest of all ranks, so that they can be gathered."""
        return self.collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def reduce_mean(self, total: torch.Tensor | float, weight: torch.Tensor | float) -> torch.Tensor:
        """The exact mean over all ranks: sum of `total` / sum of `weight`; a 0-d float64 tensor on the CPU.

        Args:
            total: this rank's sum (of losses, of correct answers).
            weight: over how many items. NaN where all ranks' weights are zero.
        """
        sums = self._readers.reduce_numbers([float(total), float(weight)])
        return torch.tensor(sums[0] / sums[1] if sums[1] else float("nan"), dtype=torch.float64)
