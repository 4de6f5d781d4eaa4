"""Orders and shares of loaders as Accelerate makes them, so that a run under its name sees the same rows in the same updates.

On several processes a shuffling sampler gets a generator, seeded by a number that `prepare` draws; with
`use_seedable_sampler` the order of each epoch is that of (seed + epoch). Headway's loader keeps what each was drawn from, as
it does for every sampler of the user's.
"""

import copy
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from headway.config.run import DataLoaderConfiguration


class AccelerateLoading(DataLoaderConfiguration):
    """Headway's settings with Accelerate's decisions: streams are dispatched, and what is dispatched ends in equal parts."""

    def dispatches(self, is_stream: bool) -> bool:
        """Does the main process read such data for all?"""
        return is_stream if self.dispatch_batches is None else self.dispatch_batches

    @property
    def levels_dispatched(self) -> bool:
        """True."""
        return True

    @classmethod
    def of(cls, asked: DataLoaderConfiguration) -> "AccelerateLoading":
        """The same settings; a seedable order is left to `seeded`."""
        values = {field.name: getattr(asked, field.name) for field in fields(asked)}
        return cls(**{**values, "use_seedable_sampler": False})


class SeededSampler(Sampler[int]):
    """Accelerate's seedable order: each pass draws from a generator seeded by `seed` plus the epoch.

    Args:
        sampler: the user's; only how many items it draws, from how many, and whether with replacement is used of it.
        seed: of epoch 0.
    """

    def __init__(self, sampler: RandomSampler, seed: int) -> None:
        self.inner = copy.copy(sampler)
        self.generator = self.inner.generator = torch.Generator()
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The next pass is of this epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.seed + self.epoch)
        yield from self.inner

    def __len__(self) -> int:
        return len(self.inner)


def _sampler(loader: DataLoader[Any]) -> Any:
    """What draws single indices: the loader's sampler, or that in its batch sampler."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    outer = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    return getattr(outer, "sampler", None)


def give_generator(loader: DataLoader[Any]) -> None:
    """Give a sampler that lacks a generator one, seeded by a number from torch's global stream; other loaders are left alone."""
    sampler = _sampler(loader)
    if hasattr(sampler, "generator") and sampler.generator is None:
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))


def seeded(loader: DataLoader[Any], seed: int | None) -> DataLoader[Any]:
    """A loader like this one in Accelerate's seedable order; the same object where it does not shuffle.

    Args:
        loader: the user's, which stays as it is.
        seed: of epoch 0; None: what torch was seeded by.
    """
    sampler = _sampler(loader)
    if not isinstance(sampler, RandomSampler):
        return loader
    order = SeededSampler(sampler, torch.initial_seed() if seed is None else seed)
    made, values = copy.copy(loader), {}
    holder = "sampler" if isinstance(loader.sampler, BatchSampler) else "batch_sampler"
    values[holder] = copy.copy(getattr(loader, holder))
    values[holder].sampler = order
    vars(made).update({"sampler": order, **values})
    return made
