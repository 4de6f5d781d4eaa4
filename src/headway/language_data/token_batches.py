"""Batch sampler whose batches have about equal numbers of tokens. The lengths of the samples must be known."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import Sampler

from headway.core.data.sampling.order import draw_permutation
from headway.core.runtime.seed import mix_seed
from headway.errors import ConfigError, DataError
from headway.log import get_logger

log = get_logger(__name__)

_UPDATES_PER_WINDOW = 64
"""Approximate number of updates whose samples are sorted together by length. A window has at least `_SMALLEST_WINDOW` samples."""
_SMALLEST_WINDOW = 1024

TOO_LONG = ("error", "drop", "alone")


class TokenBatchSampler(Sampler[list[int]]):
    """Batch sampler whose batches have at most a given number of tokens, counting padding.

    The plan of an epoch is a function of the lengths, the seed and the epoch, so every rank computes the same plan.
    Samples are shuffled, sorted by length within windows of about 64 updates (at least 1,024 samples), and divided into
    batches. The batches are then shuffled. A batch's number of tokens is its number of samples times the length of its
    longest sample.

    With `global_batch_tokens`, an optimizer update consists of `batches_per_update` batches over all ranks, and has
    about `global_batch_tokens` tokens. The number of batches in an epoch is a multiple of `batches_per_update`: some
    batches are cut in two if necessary. With `gradient_accumulation_steps=sampler.count_steps(num_processes)`, the
    updates do not depend on the number of ranks, and no sample is repeated to give every rank a batch.

    Pass the sampler as `batch_sampler=` to a DataLoader, and prepare the DataLoader. At each step of the prepared
    loader, every rank gets one batch. For a loss that is an exact mean over tokens, call `accelerator.backward(loss,
    weight=num_tokens, reduction="sum")`.

    Example::

        sampler = TokenBatchSampler(lengths, tokens_per_batch=4096, global_batch_tokens=32768)
        accelerator = Accelerator(gradient_accumulation_steps=sampler.count_steps(num_processes))
        loader = accelerator.prepare(DataLoader(dataset, batch_sampler=sampler, collate_fn=pad))

    Args:
        lengths: Number of tokens in each sample, 1 or more, in the order of the dataset.
        tokens_per_batch: Largest number of tokens in a batch of one rank, counting padding.
        global_batch_tokens: Largest number of tokens in an update over all ranks, a multiple of `tokens_per_batch`.
            Default: `tokens_per_batch`.
        shuffle: Whether to shuffle the samples and the batches. Default: True.
        seed: Seed of the shuffling, 0 or more. Default: 0.
        max_samples: Largest number of samples in a batch. None (the default): no limit.
        too_long: Treatment of a sample with more than `tokens_per_batch` tokens: "error" (the default) raises an error,
            "drop" leaves the sample out, and "alone" gives it a batch of its own, which then exceeds `tokens_per_batch`.

    Attributes:
        batches_per_update: Number of batches in an update, over all ranks.
        epoch: Index of the current epoch, from 0, which `set_epoch` selects.
        num_dropped: Number of samples that are longer than a batch and left out.

    Raises:
        ConfigError: If an argument is out of range, or `global_batch_tokens` is not a multiple of `tokens_per_batch`.
        DataError: If there are no lengths, a length is below 1, or a sample is too long.
    """

    def __init__(
        self,
        lengths: Iterable[int],
        tokens_per_batch: int,
        *,
        global_batch_tokens: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        max_samples: int | None = None,
        too_long: str = "error",
    ) -> None:
        self.lengths = read_lengths(lengths)
        for name, value in (
            ("tokens_per_batch", tokens_per_batch),
            ("global_batch_tokens", global_batch_tokens),
            ("max_samples", max_samples),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r}; give a whole number, 1 or more")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ConfigError(f"seed={seed!r}; give a whole number, 0 or more")
        if too_long not in TOO_LONG:
            raise ConfigError(f"too_long={too_long!r}; give one of {', '.join(map(repr, TOO_LONG))}")
        if global_batch_tokens is not None and global_batch_tokens % tokens_per_batch:
            raise ConfigError(
                f"global_batch_tokens={global_batch_tokens} is not a multiple of tokens_per_batch={tokens_per_batch}; an update "
                "consists of whole batches"
            )
        self.batches_per_update = (global_batch_tokens or tokens_per_batch) // tokens_per_batch
        self.tokens_per_batch = tokens_per_batch
        self.max_samples = max_samples
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        is_too_long = self.lengths > self.tokens_per_batch
        if too_long == "error" and is_too_long.any():
            index = int(numpy.flatnonzero(is_too_long)[0])
            raise DataError(
                f"sample {index} has {self.lengths[index]} tokens, and a batch at most {self.tokens_per_batch} "
                f"({int(is_too_long.sum())} samples are longer); split or truncate them, give larger batches, or pass "
                "too_long='drop' or 'alone'"
            )
        self._kept = numpy.flatnonzero(~is_too_long) if too_long == "drop" else numpy.arange(len(self.lengths))
        self.num_dropped = len(self.lengths) - len(self._kept)
        if self.num_dropped:
            log.info("%d of %d samples are longer than a batch and left out", self.num_dropped, len(self.lengths))
        if not len(self._kept):
            raise DataError(f"all {len(self.lengths)} samples have more tokens than a batch ({self.tokens_per_batch})")
        self._plan: tuple[int, list[list[int]]] | None = None  # epoch, and its batches

    def set_epoch(self, epoch: int) -> None:
        """Select an epoch. A prepared loader calls this method before each pass."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.plan_epoch())

    def __len__(self) -> int:
        """Return the number of batches in the current epoch, over all ranks."""
        return len(self.plan_epoch())

    def plan_epoch(self) -> list[list[int]]:
        """Return the batches of the current epoch, over all ranks. Each batch is a list of sample indices.

        Raises:
            DataError: If there are too few samples to fill all batches of the last update.
        """
        if self._plan is None or self._plan[0] != self.epoch:
            self._plan = self.epoch, self._build_plan()
        return self._plan[1]

    def count_steps(self, num_processes: int) -> int:
        """Return the `gradient_accumulation_steps` for which an update has about `global_batch_tokens` tokens.

        Args:
            num_processes: Number of ranks that read different data: `accelerator.num_data_shards`.

        Raises:
            ConfigError: If the batches of an update cannot be shared evenly among the ranks.
        """
        if self.batches_per_update % num_processes:
            raise ConfigError(
                f"the {self.batches_per_update} batches of an update cannot be shared evenly among {num_processes} processes; give a "
                "global_batch_tokens that is a multiple of tokens_per_batch * processes"
            )
        return self.batches_per_update // num_processes

    def measure_padding(self) -> float:
        """Return the fraction of the current epoch's tokens that is padding.

        Batches are padded to their longest sample.
        """
        plan = self.plan_epoch()
        padded = sum(len(batch) * int(self.lengths[batch].max()) for batch in plan)
        return 1 - sum(int(self.lengths[batch].sum()) for batch in plan) / padded

    def _build_plan(self) -> list[list[int]]:
        """Return the batches of the epoch as lists of sample indices.

        Samples of similar length are put into the same batch: the order is cut into windows, and each window is sorted by
        length. Then the batches are shuffled.
        """
        order = self._kept
        if self.shuffle:
            order = order[draw_permutation(len(order), mix_seed(self.seed, self.epoch))]
        mean_length = max(1.0, float(self.lengths[order].mean()))
        tokens_per_window = _UPDATES_PER_WINDOW * self.batches_per_update * self.tokens_per_batch
        window = max(int(tokens_per_window / mean_length), _SMALLEST_WINDOW)
        batches: list[list[int]] = []
        for start in range(0, len(order), window):
            samples = order[start : start + window]
            batches += self._split_into_batches(samples[numpy.argsort(-self.lengths[samples], kind="stable")])
        if self.shuffle:
            batch_order = draw_permutation(len(batches), mix_seed(self.seed, self.epoch, 1))
            batches = [batches[index] for index in batch_order]
        return self._complete_updates(batches)

    def _complete_updates(self, batches: list[list[int]]) -> list[list[int]]:
        """Cut some batches in two, so that the number of batches is a multiple of `batches_per_update`.

        The largest of the last `batches_per_update` batches is cut. If these have one sample each, the largest of all
        batches is cut.

        Raises:
            DataError: If batches are missing, but no batch has two samples.
        """
        num_missing = -len(batches) % self.batches_per_update
        for _ in range(num_missing):
            start_of_last = max(0, len(batches) - self.batches_per_update)
            largest = max(range(start_of_last, len(batches)), key=lambda index: len(batches[index]))
            if len(batches[largest]) < 2:
                largest = max(range(len(batches)), key=lambda index: len(batches[index]))
            batch = batches[largest]
            if len(batch) < 2:
                raise DataError(
                    f"{len(self._kept)} samples do not fill the {self.batches_per_update} batches of an update; give more samples, "
                    "or a smaller global_batch_tokens"
                )
            # Every other sample, so that both halves have about the same lengths.
            batches[largest : largest + 1] = [batch[::2], batch[1::2]]
        return batches

    def _split_into_batches(self, indices: Any) -> list[list[int]]:
        """Divide samples into batches. The samples must be sorted by decreasing length.

        The first sample of a batch is then its longest one, to which the others are padded.
        """
        batches: list[list[int]] = []
        lengths = self.lengths[indices].tolist()
        start = 0
        while start < len(lengths):
            size = max(1, self.tokens_per_batch // lengths[start])
            if self.max_samples is not None:
                size = min(size, self.max_samples)
            batches.append(indices[start : start + size].tolist())
            start += size
        return batches


def read_lengths(lengths: Iterable[int]) -> Any:
    """Convert lengths to a one-dimensional int64 array.

    Raises:
        DataError: If `lengths` is empty, or a length is not a whole number of at least 1.
    """
    if isinstance(lengths, torch.Tensor):
        lengths = lengths.tolist()
    values = numpy.asarray(lengths if isinstance(lengths, numpy.ndarray | list) else list(lengths))
    if values.ndim != 1 or not len(values):
        raise DataError("there are no lengths; give the number of tokens of each sample")
    is_integer = values.dtype.kind in "iu"
    if not is_integer or values.min() < 1:
        invalid = values[values < 1] if is_integer else values
        raise DataError(f"a sample has {invalid.tolist()[0]!r} tokens; give whole numbers, 1 or more")
    return values.astype(numpy.int64)
