"""In which order an epoch's samples come: a pure function of (seed, epoch), or the user's own sampler, reproducibly.

torch's plain shuffling and sequential reading become `PureOrder`: any position of any epoch can be computed. Every
other sampler is kept as the user gave it (`SamplerOrder`): it draws from its own generators or, where it has none,
from global random streams that are seeded for the epoch and swapped in only while it draws. So all ranks see one order,
the training's own random numbers stay untouched, and an epoch can be drawn again.
"""

from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any, Protocol

import numpy
import torch
from torch.utils.data import RandomSampler, SequentialSampler

from headway.data.randomness import Agree, GlobalStreams, OwnGenerators, decode, encode
from headway.runtime.seed import mix

_CHUNK = 64
"""Items taken from a sampler at a time: swapping all global streams costs about 0.1 ms."""


class Order(Protocol):
    """The order of an epoch's samples, or of its batches.

    Attributes:
        seed: what the order, with the epoch, is a function of.
    """

    seed: int

    def draw(self, epoch: int) -> Sequence[Any] | Iterator[Any]:
        """The whole order of `epoch`: a sequence where any position can be reached, an iterator elsewhere."""

    def __len__(self) -> int:
        """How many items it has."""

    def state(self, is_running: bool) -> dict[str, Any]:
        """What is needed to draw the epoch in progress (else the next one) again."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Draw the next epoch from this state."""


def permutation(length: int, seed: int, epoch: int) -> numpy.ndarray[Any, Any]:
    """The shuffled order of `length` samples: torch.randperm, seeded by seed and epoch."""
    generator = torch.Generator()
    generator.manual_seed(mix(seed, epoch))
    # As an array, because slicing one costs a tenth of slicing a tensor.
    return torch.randperm(length, generator=generator).numpy()


class PureOrder:
    """Sequential or shuffled without replacement.

    Args:
        items: what has a length (which may change between epochs).
        is_shuffled: shuffled, or one after the other.
        seed: of the shuffling.
    """

    def __init__(self, items: Sized, is_shuffled: bool, seed: int) -> None:
        self.items = items
        self.is_shuffled = is_shuffled
        self.seed = seed

    @classmethod
    def of(cls, sampler: Any, seed: int, is_seedable: bool) -> "PureOrder | None":
        """The pure order that stands for one of torch's samplers; None where there is none."""
        if type(sampler) is SequentialSampler:
            return cls(sampler, False, seed)
        is_plain = type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is None
        if is_seedable and is_plain and sampler.num_samples == len(sampler.data_source):
            return cls(sampler, True, seed)
        return None

    def draw(self, epoch: int) -> Sequence[int]:
        """The epoch's order, sliceable."""
        length = len(self.items)
        return permutation(length, self.seed, epoch) if self.is_shuffled else range(length)  # type: ignore[return-value]

    def __len__(self) -> int:
        return len(self.items)

    def state(self, is_running: bool) -> dict[str, Any]:
        """Nothing: seed and epoch say it all."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


class SamplerOrder:
    """The order of a user's sampler or batch sampler.

    Args:
        sampler: anything that yields indices, or lists of them.
        seed: of the global streams as the sampler sees them.
        is_seedable: seed those by (seed, epoch); False: go on from torch's global stream, as a plain loader does.
        loader_generator: the generator that the user gave to the loader itself.
        agree: turns this rank's state into that of rank 0; None: this process draws alone.
        is_synchronised: let the sampler's own generators begin each epoch with rank 0's state.
        is_persistent: workers live on after an epoch (then torch seeds them once only).
    """

    def __init__(self, sampler: Iterable[Any], seed: int, is_seedable: bool, loader_generator: torch.Generator | None,
                 agree: Agree | None, is_synchronised: bool, is_persistent: bool) -> None:  # fmt: skip
        self.sampler = sampler
        self.seed = seed
        self._own = OwnGenerators(sampler, agree if is_synchronised else None)
        self._continues_global = not is_seedable and not self._own.generators
        self._loader_generator = loader_generator
        self._agree = agree
        self._draws_base_seed_once = is_persistent
        self._has_begun = False
        self._global: str | None = None
        self._loaded_global: str | None = None

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def draw(self, epoch: int) -> Iterator[Any]:
        """Begin the epoch's draw; its items come as they are asked for."""
        if not self._own.is_resuming and self._loaded_global is None:
            self._draw_base_seed()
        self._own.begin()
        if self._continues_global:
            return self._items(GlobalStreams(decode(self._take_global())))
        return self._items(GlobalStreams.seeded(mix(self.seed, epoch)))

    def _items(self, streams: GlobalStreams) -> Iterator[Any]:
        with streams:
            iterator = iter(self.sampler)
        while True:
            with streams:
                chunk = list(islice(iterator, _CHUNK))
            yield from chunk
            if len(chunk) < _CHUNK:
                return

    def _take_global(self) -> str:
        text, self._loaded_global = self._loaded_global, None
        if text is None:
            text = encode(torch.get_rng_state())
            torch.empty((), dtype=torch.int64).random_()  # the next epoch goes on from another state
        self._global = text if self._agree is None else self._agree(text)
        return self._global

    def _draw_base_seed(self) -> None:
        # torch's loader takes its workers' seed from the user's generator before the sampler draws from it; without
        # the same draw a seeded generator would give another order than it gives the plain loader.
        is_due = self._loader_generator is not None or self._continues_global
        if is_due and not (self._has_begun and self._draws_base_seed_once):
            torch.empty((), dtype=torch.int64).random_(generator=self._loader_generator)
        self._has_begun = True

    def state(self, is_running: bool) -> dict[str, Any]:
        """What the epoch in progress (else the next one) was drawn from, where seed and epoch do not say it."""
        taken = self._global if is_running else self._loaded_global
        return self._own.state(is_running) if taken is None else {"global": taken}

    def load_state(self, state: dict[str, Any]) -> None:
        """Draw the next epoch from that."""
        self._own.load_state(state)
        self._loaded_global = state.get("global")
