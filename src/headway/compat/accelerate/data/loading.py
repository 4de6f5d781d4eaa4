"""How loaders order, read and share out under `import accelerate`: as Accelerate's do, so that a run sees the same batches.

A seedable order is torch's shuffling by a generator that each epoch seeds with the seed and its number. Without it, one
process shuffles as plain torch; several share a generator, seeded once when the loader is prepared. Batches are fetched one
ahead. What one process reads for all ranks (streams, unless `dispatch_batches=False`) ends in batches of equal size.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import RandomSampler

from headway.compat.accelerate.data.loaders import ShardRules
from headway.config.run import DataLoaderConfiguration
from headway.data.feeds import State
from headway.data.sampling.order import LoaderGenerator, RandomSource, SampleOrder, permutation


class SeededShuffle:
    """torch's RandomSampler by a generator that epoch `n` seeds with `seed + n`.

    Args:
        sampler: the user's.
        seed: of epoch 0.
    """

    def __init__(self, sampler: RandomSampler, seed: int) -> None:
        self._sampler = sampler
        self._seed = seed

    def reseed(self, seed: int) -> None:
        """Nothing: `load_state` brings the seed of a run that is resumed."""

    def open(self) -> None:
        """Nothing is drawn."""

    def draw(self, epoch: int) -> Sequence[int] | Iterator[int]:
        """The epoch's order, sliceable where every sample comes once."""
        sampler, seed = self._sampler, (self._seed + epoch) % (1 << 63)
        length = len(sampler.data_source)
        if not sampler.replacement and sampler.num_samples == length:
            return permutation(length, seed)  # type: ignore[return-value]
        return iter(_with_generator(sampler, torch.Generator().manual_seed(seed)))

    def __len__(self) -> int:
        return len(self._sampler)

    def state(self, is_running: bool) -> State:
        """The seed."""
        return {"shuffled_by": self._seed}

    def load_state(self, state: State) -> None:
        """Shuffle by the seed of the run that is resumed."""
        self._seed = state.get("shuffled_by", self._seed)


class AccelerateRules(ShardRules):
    """Orders, draws and ends of streams as Accelerate's loaders have them."""

    reads_ahead = True
    leaves_workers = True
    opens_late = True
    parts_streams = False

    def order_of(self, sampler: Any, draws: RandomSource) -> SampleOrder:
        """The order that a sampler or batch sampler stands for."""
        if type(sampler) is RandomSampler:
            if draws.config.use_seedable_sampler:
                return SeededShuffle(sampler, _first_seed(draws))
            if draws.agree is not None and sampler.generator is None:
                sampler = _with_generator(sampler, torch.Generator().manual_seed(_draw()))
        elif (
            draws.agree is not None
            and not draws.config.use_seedable_sampler
            and getattr(sampler, "generator", sampler) is None
        ):
            sampler = copy.copy(sampler)  # such as torch's WeightedRandomSampler
            sampler.generator = torch.Generator().manual_seed(_draw())
        # Seedable is only torch's own shuffling; another sampler draws from the streams that it finds.
        config = replace(draws.config, use_seedable_sampler=False)
        return super().order_of(sampler, replace(draws, config=config, stream=LoaderGenerator()))

    def is_apart(self, config: DataLoaderConfiguration) -> bool:
        """Never: torch's loader below draws its base seed, whatever orders it."""
        return False

    def spreads(self, config: DataLoaderConfiguration, is_stream: bool) -> bool:
        """Where Accelerate's main process reads for all."""
        return bool(config.dispatch_batches) or (is_stream and config.dispatch_batches is None)


def _first_seed(draws: RandomSource) -> int:
    seed = torch.initial_seed() if draws.config.data_seed is None else draws.config.data_seed
    return seed if draws.agree is None else int(draws.agree(seed))


def _with_generator(sampler: RandomSampler, generator: torch.Generator) -> RandomSampler:
    # The sampler holds None where it follows its data's length.
    num_samples = sampler._num_samples
    return RandomSampler(sampler.data_source, sampler.replacement, num_samples, generator=generator)


def _draw() -> int:
    return int(torch.empty((), dtype=torch.int64).random_().item())
