"""`RankAware`, the base class of the Accelerator with the methods that depend on ranks but not on models."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, wraps
from typing import Any, TypeVar

import torch

from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.collectives.tree import Tree, split_inputs
from headway.core.runtime.longer_timeouts import extend_timeouts, request_longer_timeout
from headway.core.runtime.process import NO_TIMEOUT, ProcessRuntime
from headway.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])


class RankAware:
    """Base class of the Accelerator with the methods that depend on ranks but not on models.

    It offers rank properties, decorators that run a function on some ranks only, context managers in which some ranks
    run first, and collectives.

    Args:
        runtime: Runtime of this process.
        collectives: Collectives with the other ranks.
    """

    def __init__(self, runtime: ProcessRuntime, collectives: Collectives) -> None:
        self.runtime = runtime
        self.collectives = collectives
        self._is_triggered = False

    @property
    def _shard_readers(self) -> Collectives:
        """Collectives over one rank of each data shard.

        Ranks that read the same data shard compute equal values, so only one of them is counted.
        """
        return self.collectives

    @property
    def _split_position(self) -> tuple[int, int]:
        """Index of this rank's part in `split_between_processes`, and the number of parts: one per rank."""
        return self.process_index, self.num_processes

    # ---------------------------------------------------------------- properties of this rank

    @property
    def device(self) -> torch.device:
        """Device that this process computes on, such as `cuda:1`. Prepared models and batches are moved to it."""
        return self.runtime.device

    @property
    def num_processes(self) -> int:
        """Number of processes in the run, on all machines (the world size)."""
        return self.runtime.world_size

    @property
    def process_index(self) -> int:
        """Rank of this process among all processes, from 0."""
        return self.runtime.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine, from 0."""
        return self.runtime.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this process is rank 0."""
        return self.runtime.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this process has local rank 0, the lowest rank on its machine."""
        return self.runtime.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this process has the highest rank."""
        return self.runtime.is_last_process

    @property
    def use_distributed(self) -> bool:
        """Whether the run has more than one process."""
        return self.runtime.world_size > 1

    # ---------------------------------------------------------------- decorators and order

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Call Python's `print` with these arguments, on local rank 0 of each machine only. No rank waits."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def on_main_process(self, function: Function | None = None) -> Any:
        """Decorate a function so that it runs on rank 0 only and returns None on the other ranks.

        The other ranks do not wait for rank 0, so the function must contain no collective. Call the decorated function
        on every rank or on some.

        Args:
            function: Function to decorate. None (the default): return the decorator.

        Example::

            @accelerator.on_main_process
            def report(loss):
                print(f"loss {loss:.3f}")
        """
        return self._limit_to_ranks(function, lambda rank, _: rank == 0)

    def on_local_main_process(self, function: Function | None = None) -> Any:
        """Decorate a function so that it runs on local rank 0 of each machine only and returns None on other ranks.

        The other ranks do not wait, so the function must contain no collective.

        Args:
            function: Function to decorate. None (the default): return the decorator.
        """
        return self._limit_to_ranks(function, lambda _, local: local == 0)

    def on_last_process(self, function: Function | None = None) -> Any:
        """Decorate a function so that it runs on the highest rank only and returns None on the others.

        The other ranks do not wait, so the function must contain no collective.

        Args:
            function: Function to decorate. None (the default): return the decorator.
        """
        last = self.num_processes - 1
        return self._limit_to_ranks(function, lambda rank, _: rank == last)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Any:
        """Decorate a function so that it runs on one rank only and returns None on the others.

        Args:
            function: Function to decorate. None (the default): return the decorator.
            process_index: Rank among all processes that runs it, from 0. Required, although the default is None.

        Raises:
            ConfigError: If `process_index` is missing or is not a rank of the run.
        """
        selected = self._check_index(process_index, self.num_processes, "process_index")
        return self._limit_to_ranks(function, lambda rank, _: rank == selected)

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Any:
        """Decorate a function so that it runs on one local rank of each machine only and returns None on the others.

        Args:
            function: Function to decorate. None (the default): return the decorator.
            local_process_index: Local rank that runs it, from 0. Required, although the default is None.

        Raises:
            ConfigError: If `local_process_index` is missing or is not a local rank of this machine.
        """
        selected = self._check_index(local_process_index, self.runtime.local_world_size, "local_process_index")
        return self._limit_to_ranks(function, lambda _, local: local == selected)

    @staticmethod
    def _check_index(index: int | None, count: int, name: str) -> int:
        """Return a given rank or local rank if it is in range.

        Args:
            index: Rank to check. None if the caller gave none, which is an error.
            count: Number of ranks, or of local ranks.
            name: Name of the argument, for the message.

        Raises:
            ConfigError: If the index is None or out of range.
        """
        if index is None or not 0 <= index < count:
            raise ConfigError(f"{name}={index!r}; give a number from 0 to {count - 1}")
        return index

    def _limit_to_ranks(self, function: Function | None, should_run: Callable[[int, int], bool]) -> Any:
        """Decorate a function so that it returns None on some ranks without running.

        Args:
            function: Function to decorate; None to return the decorator.
            should_run: Function of the rank and the local rank that returns whether to run on this process.
        """
        if function is None:  # used as @accelerator.on_...(options), which returns the decorator
            return partial(self._limit_to_ranks, should_run=should_run)

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if should_run(self.process_index, self.local_process_index) else None

        return run

    def wait_for_everyone(self) -> None:
        """Wait until every process has called this method (a barrier). A single process does not wait.

        Only the host waits. Work that is queued on an accelerator is not awaited.

        Raises:
            CollectiveError: If another rank calls a different collective instead, has failed, or does not call in time.
            StateError: If the process group has ended.
        """
        self.collectives.barrier()

    @contextmanager
    def main_process_first(self, timeout: float | timedelta | None = None) -> Iterator[None]:
        """Return a context manager whose `with` block runs on rank 0 first, for example to fill a cache of data.

        Every rank must enter it. The other ranks enter the block after rank 0 has left it, even if rank 0 has left it
        with an error. The block must contain no collective.

        Args:
            timeout: Time that the other ranks wait for rank 0, in seconds or as a timedelta. 0: without a limit. None
                (the default): the run's timeout, which is 10 minutes unless `--timeout` sets it. A time shorter than
                the run's timeout has no effect.

        Raises:
            ConfigError: If `timeout` is negative or not a number.

        Example::

            with accelerator.main_process_first(timeout=7200):
                dataset = download_and_tokenize()  # the other ranks find the files in the cache
        """
        yield from self._run_first(self.is_main_process, timeout)

    @contextmanager
    def local_main_process_first(self, timeout: float | timedelta | None = None) -> Iterator[None]:
        """Return a context manager whose `with` block runs first on local rank 0 of each machine.

        Every rank must enter it. The other ranks enter the block after every local rank 0 has left it, even if one has
        left it with an error. The block must contain no collective. Use it if machines do not share a disk.

        Args:
            timeout: Time that the other ranks wait for the local rank 0 of each machine, in seconds or as a timedelta.
                0: without a limit. None (the default): the run's timeout, which is 10 minutes unless `--timeout` sets
                it. A time shorter than the run's timeout has no effect.

        Raises:
            ConfigError: If `timeout` is negative or not a number.
        """
        yield from self._run_first(self.is_local_main_process, timeout)

    def _run_first(self, is_first: bool, timeout: float | timedelta | None) -> Iterator[None]:
        """Yield once, on the first ranks before all others. This is the body of a context manager.

        Args:
            is_first: Whether this rank is one of the first. The other ranks wait until these have left the `with` block.
            timeout: Time that the other ranks wait, in seconds or as a timedelta. 0: without a limit. None: the run's
                timeout.

        Raises:
            ConfigError: If `timeout` is negative or not a number.
        """
        extension = 0.0 if timeout is None else self._compute_extension(timeout)
        if extension:
            extend_timeouts(extension)
        if not is_first:
            self.wait_for_everyone()
        try:
            with request_longer_timeout(extension if is_first else 0.0):
                yield
        finally:
            if is_first:
                self.wait_for_everyone()

    def _compute_extension(self, timeout: float | timedelta) -> float:
        """Return the number of seconds by which a time limit exceeds the run's timeout. 0.0 if it does not.

        Args:
            timeout: Time limit in seconds or as a timedelta. 0: without a limit.

        Raises:
            ConfigError: If `timeout` is negative or not a number.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
            raise ConfigError(
                f"timeout={timeout!r} must be a time in seconds, 0 (without a limit), a timedelta, or None"
            )
        limit = min(float(seconds), NO_TIMEOUT.total_seconds()) if seconds else NO_TIMEOUT.total_seconds()
        return max(0.0, limit - self.runtime.timeout.total_seconds())

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Return a context manager that yields this process's part of `inputs`, for inference without a DataLoader.

        Items are divided into consecutive parts, one per data shard. Under `ddp` and `fsdp`, each rank has its own part,
        in rank order. Ranks that hold parts of one model replica, as under `tp`, `cp` and `pp`, get equal parts. If the
        items cannot be divided evenly, the first parts get one item more; with fewer items than parts, some parts are
        empty. No rank communicates or waits. Every rank must pass equal inputs.

        `gather_for_metrics` joins the results and counts those of each data shard once. `gather` joins those of every
        rank, so that ranks with equal parts repeat results.

        Args:
            inputs: List, tuple, tensor, NumPy array, Hugging Face Dataset, or a dict of these with equal lengths.
                Tensors and arrays are split along dimension 0.
            apply_padding: Whether to pad all parts to one length by repeating the last item, so that results can be
                gathered. Remove the repeated results after the gather. `gather_for_metrics` needs no padding along
                dimension 0. Default: False.

        Yields:
            The part, with the type of `inputs`. A dict contains the part of each value.

        Raises:
            DataError: If the type is not supported, or the values of a dict differ in length.

        Example::

            with accelerator.split_between_processes(["a", "b", "c"]) as prompts:
                ...  # of 2 processes, rank 0 gets ["a", "b"], rank 1 gets ["c"]
        """
        index, count = self._split_position
        yield split_inputs(inputs, count, index, apply_padding)

    def set_trigger(self) -> None:
        """Make the next `check_trigger` return True on every rank. Any rank may call it, without waiting."""
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Return whether any rank has called `set_trigger` since the last True result, and reset the trigger.

        It is a collective, so call it on every rank.
        """
        was_triggered = self.collectives.reduce_numbers([float(self._is_triggered)], "max")[0] > 0
        if was_triggered:
            self._is_triggered = False
        return was_triggered

    # ---------------------------------------------------------------- exchange

    def gather(self, tensor: Tree) -> Tree:
        """Concatenate the tensors of all ranks along dim 0 in rank order. A 0-d tensor counts as one row.

        First dimensions may differ between ranks. A nested structure keeps its nesting. All ranks must call this.

        Args:
            tensor: Tensor or nested structure of tensors.

        Raises:
            CollectiveError: If ranks differ in structure, in dtype, or in any dimension except the first.
            CallError: If an entry is not a tensor. Inside a container, None is also allowed.
        """
        return self.collectives.gather(tensor)

    def reduce(self, tensor: Tree, reduction: str = "sum", scale: float = 1.0) -> Tree:
        """Combine tensors over all ranks, element by element. All ranks must call this with equal shapes.

        "mean" divides by the number of ranks, whatever the number of samples on each. `reduce_mean` weights ranks.

        Args:
            tensor: Tensor or nested structure of tensors.
            reduction: "sum", "mean", "max" or "min". The sum of booleans is the number of True values. The mean of
                integers is a float tensor. Default: "sum".
            scale: Factor by which the result is multiplied. Default: 1.0.

        Returns:
            New tensors without a graph, on every rank, in the structure of `tensor` and on its device.

        Raises:
            ConfigError: If the reduction is unknown.
            CollectiveError: If ranks differ in structure, dtype or shape.
            CallError: If an entry is not a tensor. Inside a container, None is also allowed.
        """
        return self.collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Tree, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Tree:
        """Pad tensors along one dimension to the largest length on any rank, so that they can be gathered.

        All ranks must call this. Dimension 0 needs no padding for `gather` and `gather_for_metrics`.

        Args:
            tensor: Tensor or nested structure of tensors. A tensor without dimension `dim` is returned unchanged.
            dim: Dimension to pad; negative numbers count from the end. Default: 0.
            pad_index: Value of the padding. Default: 0.
            pad_first: Whether to pad before the data instead of after it. Default: False.

        Returns:
            Padded tensors, in the structure of `tensor` and on its device. A tensor with the largest length is not
            copied.

        Raises:
            CollectiveError: If ranks differ in structure, dtype or number of dimensions.
            CallError: If an entry is not a tensor. Inside a container, None is also allowed.
        """
        return self.collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def reduce_mean(self, total: torch.Tensor | float, weight: torch.Tensor | float) -> torch.Tensor:
        """Return the exact mean over all ranks: the sum of `total` divided by the sum of `weight`.

        All ranks must call this. Of ranks that read the same data shard, only one is counted.

        Args:
            total: Sum over this rank's items, for example of losses or correct answers.
            weight: Number of items in the sum.

        Returns:
            A 0-d float64 tensor on the CPU, equal on all ranks. It is NaN if `weight` is zero on all ranks.

        Example::

            accuracy = accelerator.reduce_mean((predictions == targets).sum(), targets.numel())
        """
        sums = self._shard_readers.reduce_numbers([float(total), float(weight)])
        return torch.tensor(sums[0] / sums[1] if sums[1] else float("nan"), dtype=torch.float64)
