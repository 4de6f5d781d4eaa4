"""In which order an epoch's samples come: drawn as torch's own samplers draw it, and reproducible from what is kept.

By default torch's plain shuffling is a `DrawnOrder`: at the start of a pass the number is drawn that torch's sampler would
draw, and the order is a pure function of it, so that any position can be sought. A seedable order and sequential reading
are a `PureOrder`, a function of (seed, epoch). Every other sampler is kept as the user gave it (`SamplerOrder`): it
draws from its own generators or, where it has none, from the global ones, whose state at the epoch's start is kept.

torch's loader draws a base seed for its workers, with or without any, and its sampler one for a shuffled order. Both are
drawn here as there, so that the numbers which follow in the same stream are those of a plain loop. What they were drawn
from is kept, so that a pass that goes on after a resume draws nothing and is the same.

What loaders do where several ways are right is a choice that is handed in: `LoadingRules`.
"""

from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from headway.config.run import DataLoaderConfiguration
from headway.data.feeds import State
from headway.data.loader import PreparedLoader
from headway.data.sampling.rng import Agree, GlobalGenerators, OwnGenerators, decode, encode, pack_seeded, read_text
from headway.runtime import seed
from headway.runtime.seed import mix


class LoaderGenerator:
    """The stream that the loaders of one run draw from.

    On one process it is torch's global one, as in plain torch. On several ranks it is a copy of that, made when the first
    pass begins: what training draws on a rank (e.g. dropout on a CPU) depends on the number of ranks, and must not decide
    which samples come after a resume on another number. Each draw moves the process's own generator on as well, so that what
    training draws (noise, dropout) is what it would be after a plain loader's draws.

    Args:
        is_private: use a copy.
    """

    def __init__(self, is_private: bool = False) -> None:
        self._is_private = is_private
        self._own: torch.Generator | None = None

    @property
    def _generator(self) -> torch.Generator:
        if self._own is None and not self._is_private:
            return torch.default_generator
        if self._own is None:
            self._own = torch.Generator()
            self._own.set_state(seed.read_torch())
        return self._own

    def draw(self) -> int:
        """A number, as torch's loader and sampler draw one."""
        drawn = _draw(self._generator)
        if not self.is_global:
            _draw(torch.default_generator)
        return drawn

    def encoded(self) -> str:
        """Its state, for a loader of workers that is to draw the same base seed."""
        return encode(self._generator.get_state())

    def for_sampler(self) -> str:
        """All global generators as a sampler of the user's is to see them, as text."""
        if self._generator is torch.default_generator:
            return read_text()
        text = pack_seeded(self._generator.get_state())
        self.draw()  # the next epoch begins at another state
        return text

    @property
    def is_global(self) -> bool:
        """Do loaders draw from this process's global generator, between training's own draws?"""
        return self._own is None and not self._is_private

    def state(self) -> torch.Tensor | None:
        """Of the copy: uint8; None where there is none."""
        return None if self._own is None else self._own.get_state()

    def load_state(self, state: torch.Tensor | None) -> None:
        """Go on with a copy in that state; None: without one, until a pass begins."""
        self._own = None
        if state is not None:
            self._own = torch.Generator()
            self._own.set_state(state)


class BaseSeed:
    """The base seed of one loader's workers.

    Args:
        loader: the user's.
        is_seedable: leave the run's stream alone: draw only where the user gave the loader a generator, whose later numbers
            a sampler may use.
        stream: what is drawn from where the loader has no generator.
    """

    def __init__(self, loader: DataLoader[object], is_seedable: bool, stream: LoaderGenerator) -> None:
        self._generator: torch.Generator | None = loader.generator
        self._stream = stream
        self._is_due = not is_seedable or loader.generator is not None
        self._has_workers = loader.num_workers > 0
        self._is_once = loader.persistent_workers
        self._has_begun = False
        self._is_open = False
        self._origin = ""
        self._loaded: str | None = None

    def open(self) -> None:
        """An iterator is made: draw, unless the pass goes on or persistent workers have their seed."""
        if self._loaded is not None:
            self._origin, self._loaded = self._loaded, None
        elif self._is_due and not (self._has_begun and self._is_once):
            self._origin = self._encoded() if self._has_workers else ""
            if self._generator is None:
                self._stream.draw()
            else:
                _draw(self._generator)
        self._has_begun = self._is_open = True

    def _encoded(self) -> str:
        return self._stream.encoded() if self._generator is None else encode(self._generator.get_state())

    def begin(self, inner: DataLoader[object], is_given: bool) -> None:
        """The pass begins; with `is_given`, let `inner`, which draws from a generator of its own, draw the same."""
        self._is_open = False
        generator = inner.generator
        if is_given and self._origin and generator is not None:
            generator.set_state(decode(self._origin))

    def state(self, is_running: bool) -> dict[str, str]:
        """What was drawn for the pass in progress, for one whose iterator is made, or for persistent workers."""
        is_drawn = is_running or self._is_open or (self._is_once and self._has_begun)
        origin = self._origin if is_drawn else self._loaded
        return {} if origin is None or not self._is_due else {"base_seed": origin}

    def load_state(self, state: dict[str, str]) -> None:
        """The next pass is the one that this state was taken in."""
        self._loaded, self._is_open = state.get("base_seed"), False


def _draw(generator: torch.Generator) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


_CHUNK = 64
"""Items taken from a sampler at a time: swapping all global generators costs about 0.1 ms."""


class SampleOrder(Protocol):
    """The order of an epoch's samples, or of its batches."""

    def reseed(self, seed: int) -> None:
        """Let an order that is a function of a seed be one of this seed from now on."""

    def open(self) -> None:
        """An iterator is made; torch's would draw now if workers wait for indices."""

    def draw(self, epoch: int) -> Sequence[Any] | Iterator[Any]:
        """The whole order of `epoch`: a sequence where any position can be reached, an iterator elsewhere."""

    def __len__(self) -> int:
        """How many items it has."""

    def state(self, is_running: bool) -> State:
        """What is needed to draw the epoch in progress (else the next one) again."""

    def load_state(self, state: State) -> None:
        """Draw the next epoch from this state."""


def permutation(length: int, seed: int) -> numpy.ndarray[Any, Any]:
    """The shuffled order of `length` samples: torch.randperm, seeded by `seed`."""
    generator = torch.Generator()
    generator.manual_seed(seed)
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
        self.items, self.is_shuffled, self.seed = items, is_shuffled, seed

    def reseed(self, seed: int) -> None:
        """Shuffle by this seed from the next epoch on."""
        self.seed = seed

    def open(self) -> None:
        """Nothing is drawn."""

    def draw(self, epoch: int) -> Sequence[int]:
        """The epoch's order, sliceable."""
        length = len(self.items)
        return permutation(length, mix(self.seed, epoch)) if self.is_shuffled else range(length)  # type: ignore[return-value]

    def __len__(self) -> int:
        return len(self.items)

    def state(self, is_running: bool) -> State:
        """Nothing: seed and epoch say it all."""
        return {}

    def load_state(self, state: State) -> None:
        """Nothing to restore."""


def is_plain_shuffling(sampler: Any) -> bool:
    """Is this torch's shuffling without replacement of a whole dataset, by the global generator?"""
    is_plain = type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is None
    return is_plain and sampler.num_samples == len(sampler.data_source)


class DrawnOrder:
    """Shuffled without replacement by a number that each pass draws as torch's sampler does.

    Args:
        items: what has a length (which may change between epochs).
        stream: what it is drawn from.
        agree: turns this rank's number into that of rank 0; None: this process draws alone.
    """

    def __init__(self, items: Sized, stream: LoaderGenerator, agree: Agree | None) -> None:
        self.items, self._stream, self._agree = items, stream, agree
        self._drawn: int | None = None
        self._opened: int | None = None
        self._loaded: int | None = None

    def reseed(self, seed: int) -> None:
        """Nothing: each pass draws its own."""

    def open(self) -> None:
        """Draw now, where a resumed pass has not drawn before."""
        if self._loaded is None:
            self._opened = self._stream.draw()

    def draw(self, epoch: int) -> Sequence[int]:
        """The epoch's order, sliceable."""
        number, self._loaded = self._loaded, None
        if number is None:
            number = self._stream.draw() if self._opened is None else self._opened
        self._opened = None
        # A resumed pass asks as well: ranks that do not resume alike must not wait for each other.
        self._drawn = number if self._agree is None else self._agree(number)
        return permutation(len(self.items), self._drawn)  # type: ignore[return-value]

    def __len__(self) -> int:
        return len(self.items)

    def state(self, is_running: bool) -> State:
        """The number drawn for the pass in progress, or for one whose iterator is made."""
        number = self._drawn if is_running else self._loaded if self._opened is None else self._opened
        return {} if number is None else {"drawn": number}

    def load_state(self, state: State) -> None:
        """Let the next pass be in that order."""
        self._loaded, self._opened = state.get("drawn"), None


class SamplerOrder:
    """The order of a user's sampler or batch sampler.

    Args:
        sampler: anything that yields indices, or lists of them.
        seed: of the global generators as a seedable sampler sees them.
        is_seedable: seed those by (seed, epoch); False: let them begin where `stream` is, as a plain loader does.
        stream: what the run's loaders draw from.
        agree: turns this rank's state into that of rank 0; None: this process draws alone.
        is_synchronised: let the sampler's own generators begin each epoch with rank 0's state.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        seed: int,
        is_seedable: bool,
        stream: LoaderGenerator,
        agree: Agree | None,
        is_synchronised: bool,
    ) -> None:
        self.sampler, self.seed, self._stream = sampler, seed, stream
        self._own = OwnGenerators(sampler, agree if is_synchronised else None)
        self._continues_global = not is_seedable and not self._own.generators
        self._agree = agree
        self._global: str | None = None
        self._loaded_global: str | None = None

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def reseed(self, seed: int) -> None:
        """Let the sampler see generators of this seed from the next epoch on, where it sees seeded ones."""
        self.seed = seed

    def open(self) -> None:
        """Nothing yet: the sampler is the user's."""

    def draw(self, epoch: int) -> Iterator[Any]:
        """Begin the epoch's draw; its items come as they are asked for."""
        self._own.begin()
        if not self._continues_global:
            return self._items(GlobalGenerators.seeded(mix(self.seed, epoch)))
        text, self._loaded_global = self._loaded_global, None
        draws_here = text is None and self._stream.is_global
        text = self._stream.for_sampler() if text is None else text
        self._global = text if self._agree is None else self._agree(text)
        if draws_here and self._global == text:
            return self._own_draw()
        return self._items(GlobalGenerators.of(self._global))

    def _own_draw(self) -> Iterator[Any]:
        """As plain torch would: what the sampler draws for its first item, it draws from this process's generators.

        Most samplers draw all they need then. Of what one draws later a copy of the generators is used, because between
        training's own draws it could not be drawn again after a resume.
        """
        iterator = iter(self.sampler)
        first = list(islice(iterator, 1))
        rng_states = GlobalGenerators.here()  # before training draws
        yield from first
        yield from self._chunks(iterator, rng_states, len(first))

    def _items(self, rng_states: GlobalGenerators) -> Iterator[Any]:
        with rng_states:
            iterator = iter(self.sampler)
        yield from self._chunks(iterator, rng_states)

    def _chunks(self, iterator: Iterator[Any], rng_states: GlobalGenerators, num_taken: int = 0) -> Iterator[Any]:
        # A sampler that is asked for more than it has may draw once more, which an epoch that is left must not.
        length = length_of(self.sampler)
        while True:
            wanted = _CHUNK if length is None else min(_CHUNK, max(1, length - num_taken))
            with rng_states:
                chunk = list(islice(iterator, wanted))
            yield from chunk
            if len(chunk) < wanted:
                return
            num_taken += wanted

    def state(self, is_running: bool) -> State:
        """What the epoch in progress (else the next one) was drawn from, where seed and epoch do not say it."""
        taken = self._global if is_running else self._loaded_global
        return self._own.state(is_running) if taken is None else {"global": taken}

    def load_state(self, state: State) -> None:
        """Draw the next epoch from that."""
        self._own.load_state(state)
        self._loaded_global = state.get("global")


def length_of(items: Any) -> int | None:
    """How many there are; None where that is unknown."""
    try:
        return len(items)
    except TypeError:
        return None


@dataclass(frozen=True)
class RandomSource:
    """What an order may be drawn from.

    Attributes:
        config: how loaders shuffle.
        seed: of this loader's order, the same on all ranks.
        stream: what the run's loaders draw from.
        agree: turns this rank's value into that of rank 0; None: this process draws alone.
        is_synchronised: let samplers' own generators begin each epoch with rank 0's state.
    """

    config: DataLoaderConfiguration
    seed: int
    stream: LoaderGenerator
    agree: Agree | None
    is_synchronised: bool


class LoadingRules:
    """How a run's loaders order, read and share out: as torch's do, unless a subclass says otherwise.

    Attributes:
        reads_ahead: fetch a map-style batch before the one in hand is trained on, where the process itself fetches it: what
            collating draws from the global generators then comes before what training draws.
        leaves_workers: workers draw from the generators that torch gives them, on several ranks too; False: there from functions
            of a sample's place in the epoch, so that a resumed epoch is the same on any number of ranks.
        opens_late: a pass draws its order with its first batch; False: when `iter` is called, as torch's loaders do.
        parts_streams: where several ranks read the same part of the data, loaders draw from a stream of their own.
    """

    reads_ahead = False
    leaves_workers = False
    opens_late = False
    parts_streams = True

    def order_of(self, sampler: Any, draws: RandomSource) -> SampleOrder:
        """The order of a sampler: plain shuffling as torch draws it, or by the seed and the epoch; others as they are."""
        is_seedable, is_shuffled = draws.config.is_seedable, is_plain_shuffling(sampler)
        if type(sampler) is SequentialSampler or (is_shuffled and is_seedable):
            return PureOrder(sampler, is_shuffled, draws.seed)
        if is_shuffled:
            return DrawnOrder(sampler, draws.stream, draws.agree)
        return SamplerOrder(sampler, draws.seed, is_seedable, draws.stream, draws.agree, draws.is_synchronised)

    def wrap(self, config: DataLoaderConfiguration, *parts: Any) -> PreparedLoader:
        """The prepared loader of these parts, which goes by `config`."""
        return PreparedLoader(*parts)

    def is_apart(self, config: DataLoaderConfiguration) -> bool:
        """Do loaders leave the run's stream alone, and are workers' generators functions of the seed and the epoch?"""
        return config.is_seedable

    def spreads(self, config: DataLoaderConfiguration, is_stream: bool) -> bool:
        """Is an incomplete round shared out evenly, in short batches, instead of filling one rank's batch after the other?"""
        return False
