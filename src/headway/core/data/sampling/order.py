"""Order of an epoch's samples: drawn as torch's own samplers draw it, and reproducible from saved state.

By default, torch's plain shuffling is replaced by a `DrawnOrder`. At the start of a pass, it draws the seed that
torch's sampler would draw. The order is a pure function of this seed, so that a resumed pass can start at any position.
Seedable shuffling and sequential reading use a `PureOrder`, which is a function of (seed, epoch). Every other sampler
is used as it is (`SamplerOrder`). It draws from its own generators and from the global ones. The states of its own
generators at the start of the epoch are saved. The global states are saved too, unless they are functions of
(seed, epoch).

torch's loader draws a base seed for its workers (even if there are none), and its sampler draws a seed for a
shuffled order. Both are drawn in the same way (the base seed by `loader_generator.BaseSeed`), so that later random
numbers are equal to those of a plain loop. For the shuffled order, the drawn seed is saved. For the base seed, the RNG
state before the draw is saved. So a resumed pass draws neither again and repeats its order.

`LoadingRules` chooses between behaviors, such as whether ranks compare their data.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice
from typing import Any, Protocol
from warnings import warn

import numpy
import torch
from torch.utils.data import RandomSampler, SequentialSampler

from headway.core.config.run import DataLoaderConfiguration
from headway.core.data.feeds.protocol import State
from headway.core.data.loader import PreparedLoader
from headway.core.data.sampling.handover import SamplerHandover
from headway.core.data.sampling.loader_generator import LoaderGenerator
from headway.core.data.sampling.own_generators import OwnGenerators
from headway.core.data.sampling.rng import Broadcast, GlobalGenerators
from headway.core.runtime.seed import mix_seed
from headway.errors import HeadwayWarning

_CHUNK_SIZE = 64
"""Number of items taken from a sampler at a time.

Each time, all global RNG states are replaced, which costs about 0.1 ms.
"""
_NUM_COMPARED = 32
"""Number of indices at the start of an epoch that are compared between an original pass and the resumed one."""
_PASS_START_KEYS = ("first", "rest", "item", "sampler", "sampler_begun")
"""Keys of a saved state that identify the start of a pass over a sampler.

"first" and "rest" are digests of the first indices, with and without the first item. "item" is the first item.
"sampler" and "sampler_begun" are the sampler's states before the pass and after the first item. Only "first" is saved for
a sampler without `state_dict`.
"""

_OTHER_ORDER = (
    "{kind} gives another order after the resume than before the save, so this epoch would repeat some samples and leave out "
    "others. The order depends on something that a checkpoint does not contain. Keep its generator (torch.Generator, "
    "numpy.random.Generator, random.Random) as an attribute of the sampler, give the sampler state_dict and load_state_dict, or "
    "let set_epoch(epoch) fix the order; resume(..., changed='data') begins the epoch at its first batch instead"
)
"""Text of the warning about a sampler whose order differs after a resume."""


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
        """Return an empty state, because seed and epoch determine the order."""
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
        """Return an empty state, because the next pass draws a new seed."""
        return {}

    def load_state(self, state: State) -> None:
        """Load the seed that `state` returned. It shuffles the next pass.

        Args:
            state: Saved state. An empty state discards a seed that was loaded before.
        """
        self._loaded_seed = state.get("drawn")
        self._next_seed = None


class SamplerOrder:
    """Order in which a user's sampler or batch sampler yields indices.

    Args:
        sampler: Iterable of indices, or of lists of indices.
        seed: Seed for the global generators while the sampler draws. It is used only if `is_seedable`, or if the
            sampler has its own `torch.Generator`.
        is_seedable: Whether to seed the global generators from (seed, epoch). Otherwise they start with the state of
            `stream`, as with a plain loader, unless the sampler has its own `torch.Generator`.
        stream: Random number stream from which the run's loaders draw.
        broadcast: Function that returns rank 0's value on every rank; None if this process draws alone.
        is_synchronized: Whether random generators in the sampler start each epoch with rank 0's state.

    Attributes:
        sampler: User's sampler or batch sampler.
        seed: Seed for the global generators while the sampler draws.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        seed: int,
        is_seedable: bool,
        stream: LoaderGenerator,
        broadcast: Broadcast | None,
        is_synchronized: bool,
    ) -> None:
        self.sampler = sampler
        self.seed = seed
        self._stream = stream
        self._own_generators = OwnGenerators(sampler, broadcast if is_synchronized else None)
        self._draws_from_stream = not is_seedable and not self._own_generators.has_torch
        self._broadcast = broadcast
        self._stateful_sampler = _find_stateful_sampler(sampler)
        # The start of the current pass, and that of the saved pass which the next pass must repeat (`_PASS_START_KEYS`).
        self._pass_start: State = {}
        self._loaded_pass_start: State = {}
        self._sampler_state_before: Any = None  # state of the stateful sampler before the current pass
        # Global RNG states with which the sampler started, as text, and the handover of the run's stream.
        self._global_states: str | None = None
        self._loaded_global_states: str | None = None
        self._handover: SamplerHandover | None = None
        self._loaded_handover: list[int] | None = None

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def set_seed(self, seed: int) -> None:
        """Set the seed from which a seedable sampler draws its order. It applies from the next epoch on."""
        self.seed = seed

    def draw_ahead(self) -> None:
        """Do nothing, because the sampler draws its random numbers itself."""

    def draw_order(self, epoch: int) -> Iterator[Any]:
        """Return an iterator over the sampler's items, which are drawn on request.

        A resumed pass must start with the same items as the original pass. If it does not, the sampler's saved state is
        restored, provided that the sampler has a `state_dict`. If the items still differ, a `HeadwayWarning` is issued.

        Args:
            epoch: Number of the epoch.
        """
        self._own_generators.start_epoch()
        self._sampler_state_before = self._read_sampler_state()
        self._pass_start = {}
        expected_start = self._loaded_pass_start
        self._loaded_pass_start = {}
        if not self._draws_from_stream:
            seed = mix_seed(self.seed, epoch)
            return self._draw_expected(expected_start, lambda: self._draw_items(GlobalGenerators.from_seed(seed)))
        handover, states = self._start_handover()
        return self._draw_expected(
            expected_start, lambda: self._draw_items(GlobalGenerators.from_text(states), handover)
        )

    def _start_handover(self) -> tuple[SamplerHandover, str]:
        """Return the object that moves the run's stream in this pass, and the sampler's global RNG states as text.

        All ranks must call this method, because they use rank 0's states.
        """
        loaded_states, self._loaded_global_states = self._loaded_global_states, None
        loaded_handover, self._loaded_handover = self._loaded_handover, None
        own_states = self._stream.lend_states() if loaded_states is None else loaded_states
        states = str(own_states if self._broadcast is None else self._broadcast(own_states))
        if loaded_states is None:
            if self._stream.is_global and states != own_states:
                handover = SamplerHandover.without_effect(self._stream)  # this rank's training has other RNG states
            else:
                handover = SamplerHandover(self._stream)
        elif loaded_handover is None:
            handover = SamplerHandover.continue_older(self._stream)
        else:
            handover = SamplerHandover(self._stream, loaded_handover)
        self._global_states, self._handover = states, handover
        return handover, states

    def _draw_expected(self, expected_start: State, draw: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return the items of a pass over the sampler, starting with the first item of the interrupted pass.

        A sampler that does not start with that item by itself is reset by its `state_dict`, if it has one. Its state at
        the start of the pass is tried first, then its state after the first item. With the latter, a sampler whose
        state contains its position continues with the second item. If no attempt succeeds, issue a warning and return
        the items of the last attempt.

        Args:
            expected_start: Saved start of the interrupted pass, with the keys in `_PASS_START_KEYS`. Without "first",
                nothing is compared.
            draw: Function that starts a pass over the sampler.
        """
        if "first" not in expected_start:
            return draw()
        sampler_states = [None]  # None: try without loading a state
        if self._stateful_sampler is not None:
            sampler_states += [expected_start.get("sampler"), expected_start.get("sampler_begun")]
        for sampler_state in sampler_states:
            if sampler_state is not None:
                self._stateful_sampler.load_state_dict(copy.deepcopy(sampler_state))
            self._own_generators.rewind_epoch()
            self._pass_start = {}
            items = draw()
            drawn = list(islice(items, 2))  # the second item triggers the read of all items that are compared
            digest = self._pass_start.get("first")
            if digest is None:
                continue
            if digest == expected_start["first"]:
                self._pass_start = expected_start
                return chain(drawn, items)
            if digest == expected_start.get("rest"):  # the sampler has continued with the second item
                self._pass_start = expected_start
                return chain([expected_start["item"]], drawn, items)
        warn(_OTHER_ORDER.format(kind=type(self.sampler).__name__), HeadwayWarning, stacklevel=2)
        return chain(drawn, items)

    def _draw_items(self, rng_states: GlobalGenerators, handover: SamplerHandover | None = None) -> Iterator[Any]:
        """Yield the sampler's items, drawn with separate global RNG states.

        If the sampler drew with the process's own states, its draws would alternate with those of training, and could
        not be repeated after a resume.

        Args:
            rng_states: States with which the sampler starts.
            handover: Object that moves the run's stream. Default: None, the states do not come from the stream.
        """
        states_before = rng_states.states
        with rng_states:
            iterator = iter(self.sampler)
            first_items = list(islice(iterator, 1))
        if handover is not None:
            handover.record_first_item(states_before, rng_states.states)
        sampler_state = self._read_sampler_state()
        yield from first_items
        yield from self._draw_later_items(iterator, rng_states, handover, first_items, sampler_state)

    def _read_sampler_state(self) -> Any:
        return None if self._stateful_sampler is None else copy.deepcopy(self._stateful_sampler.state_dict())

    def _draw_later_items(
        self,
        iterator: Iterator[Any],
        rng_states: GlobalGenerators,
        handover: SamplerHandover | None,
        first_items: Sequence[Any],
        sampler_state: Any,
    ) -> Iterator[Any]:
        """Yield the sampler's items after the first one, drawn in chunks, and describe the start of the pass.

        Args:
            iterator: Iterator over the sampler, from which the first item was taken.
            rng_states: Global RNG states with which the sampler continues.
            handover: Object that moves the run's stream; None if the states do not come from the stream.
            first_items: List of the first item; empty if the sampler has none.
            sampler_state: State of the sampler after the first item; None if it has no state.
        """
        # A sampler might draw again if more items are requested than it has. That must not happen in mid-epoch.
        length, num_taken, is_first_chunk = get_length(self.sampler), len(first_items), True
        while True:
            num_requested = _CHUNK_SIZE if length is None else min(_CHUNK_SIZE, max(1, length - num_taken))
            states_before = rng_states.states
            with rng_states:
                chunk = list(islice(iterator, num_requested))
            if handover is not None:
                handover.record_later_items(states_before, rng_states.states)
            if is_first_chunk:
                is_first_chunk = False
                self._pass_start = self._describe_pass_start([*first_items, *chunk], sampler_state)
            yield from chunk
            if len(chunk) < num_requested:
                if handover is not None:
                    handover.end_pass(rng_states.states)
                return
            num_taken += num_requested

    def state(self, is_running: bool) -> State:
        """Return the state that determines the order of the current epoch or, between epochs, of the next one.

        It contains the states of the sampler's own generators and, unless they are functions of (seed, epoch), of the
        global ones. It also contains the sampler's own state, if any, and a digest of the epoch's first items. A
        resumed epoch must start with items that have the same digest.

        Args:
            is_running: Whether an epoch is in progress.
        """
        rng_states = {**self._own_generators.state(is_running), **self._describe_global_states(is_running)}
        return {**rng_states, **(self._pass_start if is_running else self._loaded_pass_start)}

    def _describe_global_states(self, is_running: bool) -> State:
        """Return the global RNG states with which the pass started, and the progress of its handover.

        The keys are "global" and, if it is known, "handover". The result is empty if there are no such states.
        """
        states = self._global_states if is_running else self._loaded_global_states
        if states is None:
            return {}
        handover = self._loaded_handover
        if is_running and self._handover is not None:
            handover = self._handover.state()
        return {"global": states} if handover is None else {"global": states, "handover": handover}

    def state_after_break(self) -> State:
        """Return the current states of the sampler's own generators, with which the next epoch continues."""
        return self._own_generators.state(False)

    def _describe_pass_start(self, items: Sequence[Any], sampler_state: Any) -> State:
        """Return the sampler's states and digests of a pass's first items, with the keys in `_PASS_START_KEYS`.

        A resumed pass must start with items that have the same digest. The result is empty if the items are neither
        integers nor strings.

        Args:
            items: First items of the pass.
            sampler_state: State of the sampler after the first item; None if it has no state.
        """
        digest = digest_items(items)
        if digest is None:
            return {}
        if self._stateful_sampler is None:
            return {"first": digest}
        return {
            "first": digest,
            "rest": digest_items(items[1:]),
            "item": items[0],
            "sampler": self._sampler_state_before,
            "sampler_begun": sampler_state,
        }

    def load_state(self, state: State) -> None:
        """Load the state that `state` returned. The next epoch is drawn from it.

        An empty state discards the state that was loaded before.
        """
        self._own_generators.load_state(state)
        self._loaded_global_states = state.get("global")
        self._loaded_handover = state.get("handover")
        self._loaded_pass_start = {name: state[name] for name in _PASS_START_KEYS if name in state}


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


def _find_stateful_sampler(sampler: Any) -> Any:
    """Return the sampler if it has a `state_dict`, else the sampler inside it that has one, else None."""
    for each in (sampler, getattr(sampler, "sampler", None)):
        if callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None)):
            return each
    return None


def digest_items(items: Iterable[Any]) -> str | None:
    """Return a digest of the first 32 indices; None if there are none, or if some are neither integers nor strings.

    Batches are flattened, so that the digest does not depend on the batch size.

    Args:
        items: Indices, or batches of indices.
    """
    texts: list[str] = []
    for item in items:
        indices = item if isinstance(item, list | tuple) else (item,)
        for index in indices[: _NUM_COMPARED - len(texts)]:
            if not isinstance(index, int | str | numpy.integer):
                return None
            texts.append(str(index))
    return blake2b(" ".join(texts).encode(), digest_size=8).hexdigest() if texts else None


def get_length(items: Any) -> int | None:
    """Return the number of items of an object, or None if it has no length."""
    try:
        return len(items)
    except TypeError:
        return None


@dataclass(frozen=True)
class RandomSource:
    """Settings and random number stream with which a loader's sample order is drawn.

    Attributes:
        config: Loader configuration of the run.
        seed: Seed of this loader's order, equal on all ranks.
        stream: Random number stream from which the run's loaders draw.
        broadcast: Function that returns rank 0's value on every rank; None if this process draws alone.
        is_synchronized: Whether random generators in samplers start each epoch with rank 0's state.
    """

    config: DataLoaderConfiguration
    seed: int
    stream: LoaderGenerator
    broadcast: Broadcast | None
    is_synchronized: bool


class LoadingRules:
    """Rules by which a run's loaders order, read and split data. The defaults follow torch's loaders.

    Attributes:
        reads_ahead: Whether to fetch the next batch of a map-style dataset before training on the current one. It
            applies to loaders without workers. Fetching a batch then draws from the global generators before training
            on the previous batch does.
        keeps_torch_worker_seeds: Whether workers keep torch's seeding even with several ranks. Otherwise their random
            numbers are functions of a sample's position, so that a resumed epoch is equal on any number of ranks.
        draws_order_late: Whether a pass draws its order when the first batch is requested. Otherwise it does so in
            `iter()`, as torch's loaders do.
        separates_rng_streams: Whether loaders and training draw from separate random number streams in a run with
            several ranks.
        raises_for_unequal_data: Whether different data or samplers on different ranks raise `DataError`. Otherwise they
            cause one warning.
        compares_iterable_datasets: Whether ranks that each read an iterable dataset in full compare their samples, read
            with equal global RNG states, and end a pass together. Otherwise they exchange nothing.
    """

    reads_ahead = False
    keeps_torch_worker_seeds = False
    draws_order_late = False
    separates_rng_streams = True
    raises_for_unequal_data = True
    compares_iterable_datasets = True

    def choose_order(self, sampler: Any, draws: RandomSource) -> SampleOrder:
        """Return the order of a sampler.

        It is a `PureOrder` or `DrawnOrder` for torch's plain samplers, else a `SamplerOrder`.

        Args:
            sampler: Sampler or batch sampler.
            draws: Source of random numbers for the order, and its settings.
        """
        is_seedable, is_shuffled = draws.config.is_seedable, is_plain_shuffling(sampler)
        if type(sampler) is SequentialSampler or (is_shuffled and is_seedable):
            return PureOrder(sampler, is_shuffled, draws.seed)
        if is_shuffled:
            return DrawnOrder(sampler, draws.stream, draws.broadcast)
        return SamplerOrder(sampler, draws.seed, is_seedable, draws.stream, draws.broadcast, draws.is_synchronized)

    def wrap_loader(self, config: DataLoaderConfiguration, **parts: Any) -> PreparedLoader:
        """Create a prepared loader from its components.

        Args:
            config: Loader configuration of the run.
            parts: Keyword arguments of `PreparedLoader`.
        """
        return PreparedLoader(**parts)

    def has_seeded_order(self, config: DataLoaderConfiguration) -> bool:
        """Whether the sample order and the workers' RNG states are functions of (seed, epoch).

        Otherwise they are drawn from the run's random number stream.

        Args:
            config: Loader configuration of the run.
        """
        return config.is_seedable

    def should_dispatch(self, config: DataLoaderConfiguration, is_stream: bool, is_placed: bool) -> bool:
        """Whether rank 0 reads the data and sends each rank its batch.

        Args:
            config: Loader configuration of the run.
            is_stream: Whether the dataset is iterable.
            is_placed: Whether batches are moved to the device.
        """
        return bool(config.dispatch_batches)

    def should_spread_last_step(self, is_dispatched: bool) -> bool:
        """Whether the samples of an incomplete last step are spread evenly over the ranks, as short batches.

        Otherwise the first ranks get full batches.

        Args:
            is_dispatched: Whether rank 0 reads the data and sends each rank its batch.
        """
        return False
