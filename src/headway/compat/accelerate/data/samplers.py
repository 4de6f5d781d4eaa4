"""Accelerate's sampler and loader classes, for scripts that construct them directly.

`prepare` uses none of them, because it splits the sample order of any sampler itself (`headway.core.data`).
"""

import math
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from headway.common.optional import require
from headway.errors import ConfigError


class SeedableRandomSampler(RandomSampler):
    """Random sampler whose order depends only on a seed and the epoch. Each complete pass increments the epoch.

    Args:
        args, kwargs: Arguments of RandomSampler.
        data_seed: Seed. None: torch's initial seed.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator(torch.get_default_device())
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch number, which determines the order of the next pass."""
        self.epoch = epoch


class BatchSamplerShard(BatchSampler):
    """Batch sampler that yields one process's share of the batches of another batch sampler.

    With n processes, the share is every n-th batch, or one part of each batch if `split_batches` is set.

    Args:
        batch_sampler: Batch sampler for all processes.
        num_processes: Number of processes among which the batches are split. Default: 1.
        process_index: Index of this process. Default: 0.
        split_batches: Whether each process gets a part of each batch. Default: False.
        even_batches: Whether to fill the last batches with samples from the beginning, so that all processes get the
            same number of full batches. Default: True.

    Raises:
        ConfigError: If `split_batches` is set and the batch size cannot be divided evenly among the processes.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]  # it may have none
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        if split_batches and (self.batch_size is None or self.batch_size % num_processes):
            raise ConfigError(
                f"split_batches with a batch size of {self.batch_size}; give one that {num_processes} processes can split evenly"
            )

    @property
    def total_length(self) -> int:
        """Number of batches that the original batch sampler yields for all processes together."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        total = len(self.batch_sampler)
        if self.split_batches:
            return total
        rounds, rest = divmod(total, self.num_processes)
        if not rest or self.drop_last:
            return rounds
        return rounds + int(self.even_batches or self.process_index < rest)

    def __iter__(self) -> Iterator[list[Any]]:
        return self._iterate_parts() if self.split_batches else self._iterate_batches()

    def _iterate_parts(self) -> Iterator[list[Any]]:
        """Yield this process's part of each batch. With `even_batches`, fill the last batch from the first."""
        size = self.batch_size // self.num_processes
        part = slice(size * self.process_index, size * (self.process_index + 1))
        first_batch: list[Any] | None = None
        batch: list[Any] = []
        for batch in self.batch_sampler:
            first_batch = list(batch) if first_batch is None else first_batch
            if len(batch) == self.batch_size:
                yield batch[part]
        if self.drop_last or not first_batch or len(batch) >= self.batch_size:
            return
        last_batch = [*batch, *islice(cycle(first_batch), self.batch_size)] if self.even_batches else batch
        if last_batch[part]:
            yield last_batch[part]

    def _is_full(self, batch: list[Any]) -> bool:
        return self.batch_size is None or len(batch) == self.batch_size

    def _iterate_batches(self) -> Iterator[list[Any]]:
        """Yield every n-th batch for n processes. With `even_batches`, all processes get equally many full batches."""
        first_batches: list[list[Any]] = []
        own_batch: list[Any] | None = None  # this process's batch in the current round of one batch per process
        batch: list[Any] = []
        count = 0
        for batch in self.batch_sampler:
            if count < self.num_processes:
                first_batches.append(list(batch))
            position = count % self.num_processes
            count += 1
            if position == self.process_index:
                own_batch = batch
            # Hold the own batch back until the round is complete, because the last round may have to be filled.
            if position == self.num_processes - 1 and self._is_full(batch):
                assert own_batch is not None
                yield own_batch
                own_batch = None
        if self.drop_last or not first_batches:
            return
        if not self.even_batches:
            if own_batch:
                yield own_batch
            return
        if own_batch and self._is_full(own_batch):
            yield own_batch
        yield from self._fill_last(first_batches, batch, count)

    def _fill_last(self, first_batches: list[list[Any]], last_batch: list[Any], count: int) -> Iterator[list[Any]]:
        """Yield this process's batches of the last global batch, filled with samples from the beginning.

        Args:
            first_batches: First batches of the epoch, one per process.
            last_batch: Last batch of the epoch. It can be incomplete.
            count: Number of batches in the epoch.
        """
        if self.batch_size is None:
            batches = iter(first_batches * self.num_processes)
            for position in range(count, math.ceil(count / self.num_processes) * self.num_processes):
                batch = next(batches)
                if position % self.num_processes == self.process_index:
                    yield batch
            return
        num_incomplete = 0 if self._is_full(last_batch) else 1  # fill the short batch first
        fill_samples = cycle(row for batch in first_batches for row in batch)
        incomplete = list(last_batch) if num_incomplete else []
        for position in range(count - num_incomplete, math.ceil(count / self.num_processes) * self.num_processes):
            batch = [*incomplete, *islice(fill_samples, self.batch_size - len(incomplete))]
            incomplete = []
            if position % self.num_processes == self.process_index:
                yield batch


class IterableDatasetShard(IterableDataset[Any]):
    """Iterable dataset that yields one process's shard of another iterable dataset.

    A shard consists of batches of consecutive samples. If the dataset has a `generator` and no method `set_epoch`, each
    pass first seeds the generator with the epoch number.

    Args:
        dataset: Iterable dataset that yields the same samples on all processes.
        batch_size: Batch size of one process, or of all processes together if `split_batches` is set. Default: 1.
        drop_last: Whether to drop an incomplete last global batch. False (the default): fill it with samples from the
            beginning.
        num_processes: Number of processes among which the samples are split. Default: 1.
        process_index: Index of this process. Default: 0.
        split_batches: Whether `batch_size` is the size of all processes together. Default: False.

    Raises:
        ConfigError: If `split_batches` is set and the batch size cannot be divided evenly among the processes.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1 and batch_size % num_processes:
            raise ConfigError(
                f"split_batches with a batch size of {batch_size}; give one that {num_processes} processes can split evenly"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch number of the next pass, also on the dataset if it has a method `set_epoch`."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        rounds = len(self.dataset) / (self.batch_size * self.num_processes)
        return (math.floor(rounds) if self.drop_last else math.ceil(rounds)) * self.batch_size

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if not hasattr(self.dataset, "set_epoch") and isinstance(generator, torch.Generator):
            generator.manual_seed(self.epoch)
        samples_per_process = self.batch_size // self.num_processes if self.split_batches else self.batch_size
        samples_per_block = self.batch_size if self.split_batches else self.batch_size * self.num_processes
        share = slice(self.process_index * samples_per_process, (self.process_index + 1) * samples_per_process)
        samples = iter(self.dataset)
        first_block: list[Any] | None = None
        while block := list(islice(samples, samples_per_block)):
            first_block = first_block or list(block)
            if len(block) < samples_per_block:
                if self.drop_last:
                    return
                block += islice(cycle(first_block), samples_per_block - len(block))
            yield from block[share]


class SkipBatchSampler(BatchSampler):
    """Batch sampler that skips its first batches in every pass.

    Args:
        batch_sampler: Original batch sampler.
        skip_batches: Number of batches to skip. Default: 0.
    """

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.sampler = getattr(batch_sampler, "sampler", batch_sampler)
        self.skip_batches = skip_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]  # it may have none
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    def __iter__(self) -> Iterator[list[Any]]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    @property
    def total_length(self) -> int:
        """Number of batches of the original sampler, including skipped batches."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)


class SkipDataLoader(DataLoader[Any]):
    """DataLoader that reads and discards its first batches in every pass.

    In contrast, `skip_first_batches` skips batches in one pass only, without reading them.

    Args:
        dataset, kwargs: Arguments of DataLoader.
        skip_batches: Number of batches to skip. Default: 0.
        use_stateful_dataloader: Whether torchdata's StatefulDataLoader reads the data and provides the state. Default:
            False.

    Raises:
        OptionalDependencyMissing: If `use_stateful_dataloader` is set and torchdata is not installed.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.skip_batches = skip_batches
        self._reader: Any = None
        if use_stateful_dataloader:
            module = require("torchdata.stateful_dataloader", "use_stateful_dataloader=True needs", "headway[stateful]")
            self._reader = module.StatefulDataLoader(dataset, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of torchdata's StatefulDataLoader, which contains the position in the data.

        Call it only on a loader with `use_stateful_dataloader=True`.
        """
        return self._reader.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position in the data from a state that `state_dict` returned.

        Call it only on a loader with `use_stateful_dataloader=True`.
        """
        self._reader.load_state_dict(state_dict)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__() if self._reader is None else iter(self._reader)
        return islice(batches, self.skip_batches, None)

    def __len__(self) -> int:
        return super().__len__() - self.skip_batches


def get_sampler(dataloader: Any) -> Any:
    """Return the sampler that a loader's batch sampler uses, or None if the batch sampler has none."""
    batch_sampler = dataloader.sampler if isinstance(dataloader.sampler, BatchSampler) else dataloader.batch_sampler
    return getattr(batch_sampler, "sampler", None)
