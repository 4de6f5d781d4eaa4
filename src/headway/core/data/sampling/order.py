"""Order of an epoch's samples: drawn as torch's own samplers draw it, and reproducible from saved state.

`SampleOrder` is the interface. `LoadingRules.choose_order` chooses one of its implementations for each loader:

- `PureOrder`: sequential reading and seedable shuffling. The order is a function of (seed, epoch).
- `DrawnOrder`: torch's plain shuffling. At the start of a pass, it draws the seed that torch's sampler would draw. The
  order is a function of this seed, which is saved. So a resumed pass can start at any position.
- `SamplerOrder` (`sampler_order.py`): any other sampler, used as it is. A resumed pass draws from the sampler again.

torch's loader draws a base seed for its workers (even if there are none), and its sampler draws a seed for a shuffled
order. Headway draws both in the same way (the base seed by `loader_generator.BaseSeed`), so that later random numbers
are equal to those of a plain loop. A resumed pass draws neither again.
"""

from collections.abc import Iterator, Sequence, Sized
from typing import Any, Protocol

import numpy
import torch
from torch.utils.data import RandomSampler

from headway.core.data.feeds.protocol import State
from headway.core.data.sampling.loader_generator import LoaderGenerator
from headway.core.data.sampling.rng import Broadcast
from headway.core.runtime.seed import mix_seed


class SampleOrder(Protocol):
    """Interface of objects that determine the order in which an epoch reads the items of a sampler.

    An item is the index of a sample, or a batch of indices.
    """

    def set_seed(self, seed: int) -> None:
        """Set the seed from which later orders are computed. No effect if the order does not depend on a seed."""

    def draw_ahead(self) -> None:
        """Draw the epoch's random numbers early, when `iter()` is called on the loader.

        It is called if the loader has workers, because torch's loader then draws them at that time, and if this process
        reads for all ranks.
        """

    def draw_order(self, epoch: int) -> Sequence[Any] | Iterator[Any]:
        """Return the order of an epoch, drawing the random numbers that it needs.

        Args:
            epoch: Number of the epoch.

        Returns:
            Sequence of items if any position can be reached directly, else an iterator over items.
        """

    def __len__(self) -> int:
        """Return the number of items in an epoch: samples, or batches if a batch sampler yields lists of indices."""

    def state(self, is_running: bool) -> State:
        """Return the state from which the order of the current epoch can be drawn again.

        If no epoch is in progress, return the state for the next epoch.

        Args:
            is_running: Whether an epoch is in progress.
        """

    def state_after_break(self) -> State:
        """Return the state for the next epoch, after the current one was left early (by `break`).

        It is empty if the next epoch needs no saved state.
        """

    def load_state(self, state: State) -> None:
        """Load the state that `state` returned. The next epoch is drawn from it.

        An empty state discards the state that was loaded before.
        """


def draw_permutation(length: int, seed: int) -> numpy.ndarray[Any, Any]:
    """Return the shuffled order of `length` samples as an int64 array: torch.randperm, seeded by `seed`."""
    generator = torch.Generator()
    generator.manual_seed(seed)
    # Convert to an array: slicing one costs a tenth of slicing a tensor.
    return torch.randperm(length, generator=generator).numpy()


class PureOrder:
    """Order that is sequential, or shuffled without replacement as a function of (seed, epoch).

    Args:
        items: Object whose length is the number of samples, such as a sampler. The length may change between epochs.
        is_shuffled: Whether to shuffle. Otherwise the order is sequential.
        seed: Seed of the shuffling.
    """

    def __init__(self, items: Sized, is_shuffled: bool, seed: int) -> None:
        self.items = items
        self.is_shuffled = is_shuffled
        self.seed = seed

    def set_seed(self, seed: int) -> None:
        """Set the seed of the shuffling from the next epoch on."""
        self.seed = seed

    def draw_ahead(self) -> None:
        """Do nothing, because this order draws no random numbers."""

    def draw_order(self, epoch: int) -> Sequence[int]:
        """Return the order of `epoch` as a sequence that can be sliced.

        Args:
            epoch: Number of the epoch.
        """
        length = len(self.items)
        return draw_permutation(length, mix_seed(self.seed, epoch)) if self.is_shuffled else range(length)  # type: ignore[return-value]

    def __len__(self) -> int:
        return len(self.items)

    def state(self, is_running: bool) -> State:
        """Return an empty state, because seed and epoch determine the order."""
        return {}

    def state_after_break(self) -> State:
        """Return the state to save after an epoch was left early, for example by `break`.

        It is empty, because seed and epoch determine the next order.
        """
        return {}

    def load_state(self, state: State) -> None:
        """Do nothing, because the order has no state."""


def is_plain_shuffling(sampler: Any) -> bool:
    """Whether a sampler shuffles like `DataLoader(..., shuffle=True)` without a generator.

    Such a sampler is a RandomSampler over the complete dataset, without replacement, that draws from the global
    generator.
    """
    is_plain = type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is None
    return is_plain and sampler.num_samples == len(sampler.data_source)


class DrawnOrder:
    """Order that is shuffled without replacement. Each pass draws a new seed, as torch's RandomSampler does.

    Args:
        items: Object whose length is the number of samples, such as a sampler. The length may change between epochs.
        stream: Random number stream to draw the seed from.
        broadcast: Function that returns rank 0's seed on every rank; None if this process draws alone.

    Attributes:
        items: Object whose length is the number of samples.
    """

    def __init__(self, items: Sized, stream: LoaderGenerator, broadcast: Broadcast | None) -> None:
        self.items = items
        self._stream = stream
        self._broadcast = broadcast
        self._current_seed: int | None = None  # of the current pass
        self._next_seed: int | None = None  # drawn ahead for the next pass
        self._loaded_seed: int | None = None  # loaded for the next pass

    def set_seed(self, seed: int) -> None:
        """Do nothing, because each pass draws its own seed."""

    def draw_ahead(self) -> None:
        """Draw the seed of the next pass now, unless a resumed pass already has one."""
        if self._loaded_seed is None:
            self._next_seed = self._stream.draw_seed()

    def draw_order(self, epoch: int) -> Sequence[int]:
        """Return the order of the epoch as a sequence that can be sliced.

        Args:
            epoch: Number of the epoch. It does not affect the order.
        """
        seed = self._next_seed if self._loaded_seed is None else self._loaded_seed
        if seed is None:
            seed = self._stream.draw_seed()
        self._next_seed = self._loaded_seed = None
        # A resumed pass must call this collective as well. Otherwise, a rank that does not resume would wait for it.
        self._current_seed = seed if self._broadcast is None else self._broadcast(seed)
        return draw_permutation(len(self.items), self._current_seed)  # type: ignore[return-value]

    def __len__(self) -> int:
        return len(self.items)

    def state(self, is_running: bool) -> State:
        """Return {"drawn": seed of the current pass} or, between passes, the seed of the next pass if it is known.

        The next seed is known if a saved seed was loaded, or if an iterator was created but its first batch has not
        been requested. If no seed is known, return an empty state.

        Args:
            is_running: Whether a pass is in progress.
        """
        if is_running:
            seed = self._current_seed
        else:
            seed = self._loaded_seed if self._next_seed is None else self._next_seed
        return {} if seed is None else {"drawn": seed}

    def state_after_break(self) -> State:
        """Return the state to save after a pass was left early, for example by `break`.

        It is empty, because the next pass draws a new seed.
        """
        return {}

    def load_state(self, state: State) -> None:
        """Load the seed that `state` returned. It shuffles the next pass.

        Args:
            state: Saved state. An empty state discards a seed that was loaded before.
        """
        self._loaded_seed = state.get("drawn")
        self._next_seed = None


def describe_order(order: Any) -> str:
    """Return a phrase that describes an order, such as "by WeightedRandomSampler" or "in the order of the data".

    Args:
        order: `SampleOrder` of a loader.
    """
    if isinstance(order, PureOrder):
        if order.is_shuffled:
            return "shuffled by seed and epoch"
        # A dataset whose order depends on its arguments, such as a Mixture, describes them.
        describe = getattr(getattr(order.items, "data_source", None), "describe_order", None)
        return "in the order of the data" if describe is None else f"in the order of {describe()}"
    if isinstance(order, DrawnOrder):
        return "shuffled by a number that each pass draws"
    return f"by {type(getattr(order, 'sampler', order)).__name__}"


def get_length(items: Any) -> int | None:
    """Return the number of items of an object, or None if it has no length."""
    try:
        return len(items)
    except TypeError:
        return None
