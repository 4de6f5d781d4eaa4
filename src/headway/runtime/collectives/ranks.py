"""What a process asks and does as one rank among others: properties, decorators, order, exchange.

RNG states made equal on all ranks, through checked collectives.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeVar

import torch

from headway.errors import ConfigError
from headway.log import get_logger
from headway.runtime.collectives.checked import Collectives
from headway.runtime.collectives.tree import Tree, split
from headway.runtime.device import is_kind
from headway.runtime.process import ProcessRuntime, current
from headway.runtime.seed import digests, mix, read_states, reseed, write_states

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
        """Yield this process's part of `inputs`: see `headway.runtime.collectives.tree.split`."""
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


log = get_logger(__name__)

_KNOWN = ("python", "numpy", "torch", "device", "generator")
_VENDORS = frozenset({"npu", "mlu", "musa", "sdaa", "neuron"})
"""Kinds that Accelerate's scripts name also where the vendor's package, by which torch knows them, is not imported."""


def generator_names(rng_types: Sequence[str]) -> list[str]:
    """The generators by Headway's own names: "cuda", "xpu" and their like are "device".

    Raises:
        ConfigError: an unknown name.
    """
    names = ["device" if _is_device(str(name)) else str(name) for name in rng_types]
    for name in names:
        if name not in _KNOWN:
            raise ConfigError(f"unknown generator {name!r}; allowed: {', '.join(_KNOWN)}")
    return list(dict.fromkeys(names))


def _is_device(name: str) -> bool:
    return name in _VENDORS or (name not in ("cpu", "meta") and is_kind(name))


def synchronize_rng_states(rng_types: Sequence[str], generator: torch.Generator | None = None) -> None:
    """Give all ranks the random states of rank 0.

    Args:
        rng_types: any of "python", "numpy", "torch", "device" (or its kind, "cuda" say), "generator".
        generator: the generator that "generator" means.

    Raises:
        ConfigError: an unknown name, or "generator" without one.
        CollectiveError: other ranks do something else at this moment.
    """
    rng_types = generator_names(rng_types)
    if "generator" in rng_types and generator is None:
        raise ConfigError("rng_types names 'generator', but no generator was given; pass generator=, or leave it out")
    runtime = current()
    if runtime.world_size > 1:
        own = read_states(rng_types, generator) if runtime.is_main_process else None
        write_states(Collectives(runtime).broadcast_object(own), generator)


def share_rng_states(everyone: Collectives, index: int) -> list[str]:
    """Let ranks that read the same part of the data draw the same random numbers: dropout, noise, what a dataset draws.

    Streams that are alike on them already stay as they are; the others begin anew, at a seed of rank 0's and the part's number.

    Args:
        everyone: all ranks; each of them calls this.
        index: the number of the part that this rank reads.

    Returns:
        The generators that began anew.
    """
    rows = everyone.gather_numbers([float(index), float(torch.initial_seed() % (1 << 52)), *digests()])
    begun = []
    for place, name in enumerate(("python", "numpy", "torch")):
        first: dict[float, float] = {}
        if any(first.setdefault(row[0], row[2 + place]) != row[2 + place] for row in rows):
            reseed(name, mix(int(rows[0][1]), place, index))
            begun.append(name)
    if "torch" in begun:
        log.warning_once(
            "ranks that read the same part of the data had different RNG states: torch's are now seeded again, alike on these ranks. "
            "To seed ranks differently, call set_seed(seed, device_specific=True) after you create the Accelerator"
        )
    return begun
