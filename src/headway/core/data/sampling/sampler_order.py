"""`SamplerOrder`, the order of a user's sampler, and how a resumed epoch repeats it.

The sampler draws from its own generators and from the global ones. It must not draw from the process's own global
states, because its draws would alternate with those of training, and could not be repeated. So it gets separate global
states (`GlobalGenerators`). They are functions of (seed, epoch), or come from the run's random number stream
(`handover.py`).

A saved state contains the RNG states at the start of the epoch, the sampler's own `state_dict()` if it has one, and a
digest of the first indices. A resumed pass restores the states and reads the sampler again up to the saved position. The
digest shows whether the sampler really repeats its order.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import chain, islice
from typing import Any, TypedDict, cast
from warnings import warn

import numpy

from headway.core.data.feeds.protocol import State
from headway.core.data.sampling.handover import SamplerHandover
from headway.core.data.sampling.loader_generator import LoaderGenerator
from headway.core.data.sampling.order import get_length
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
_ORDER_CHANGED = (
    "{kind} gives another order after the resume than before the save, so this epoch would repeat some samples and leave out "
    "others. The order depends on something that a checkpoint does not contain. Keep its generator (torch.Generator, "
    "numpy.random.Generator, random.Random) as an attribute of the sampler, give the sampler state_dict and load_state_dict, or "
    "let set_epoch(epoch) fix the order; resume(..., changed='data') begins the epoch at its first batch instead"
)
"""Text of the warning about a sampler whose order differs after a resume."""


class PassStart(TypedDict, total=False):
    """Start of a pass over a sampler, by which a resumed pass is compared. A saved state contains these keys.

    It is empty if the items are neither integers nor strings. A sampler without `state_dict` has only "first".

    Attributes:
        first: Digest of the first indices.
        rest: Digest of the first indices without the first item.
        item: First item.
        sampler: State of the sampler before the pass.
        sampler_begun: State of the sampler after the first item.
    """

    first: str
    rest: str | None
    item: Any
    sampler: Any
    sampler_begun: Any


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
        # The start of the current pass, and that of the saved pass which the next pass must repeat.
        self._pass_start: PassStart = {}
        self._loaded_pass_start: PassStart = {}
        self._sampler_state_before: Any = None  # state of the stateful sampler before the current pass
        # Global RNG states with which the sampler started, as text, and the handover of the run's stream. Those of a
        # loaded state apply to the next pass.
        self._global_states: str | None = None
        self._loaded_global_states: str | None = None
        self._handover: SamplerHandover | None = None
        self._loaded_handover: list[int] | None = None

    # ---------------------------------------------------------------- items of a pass

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
            handover = SamplerHandover.from_state(self._stream, loaded_handover)
        self._global_states, self._handover = states, handover
        return handover, states

    def _draw_expected(self, expected_start: PassStart, draw: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return the items of a pass over the sampler, starting with the first item of the interrupted pass.

        A sampler that does not start with that item by itself is reset with `load_state_dict`, if it has one. Its state at
        the start of the pass is tried first, then its state after the first item. With the latter, a sampler whose
        state contains its position continues with the second item. If no attempt succeeds, issue a warning and return
        the items of the last attempt.

        Args:
            expected_start: Saved start of the interrupted pass. If empty, nothing is compared.
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
            self._pass_start = {}  # filled while the second item is drawn
            items = draw()
            drawn = list(islice(items, 2))  # the second item triggers the read of all items that are compared
            digest = self._pass_start.get("first")
            if digest is None:  # the sampler has yielded nothing that can be compared
                continue
            if digest == expected_start["first"]:
                self._pass_start = expected_start
                return chain(drawn, items)
            if digest == expected_start.get("rest"):  # the sampler has continued with the second item
                self._pass_start = expected_start
                return chain([expected_start["item"]], drawn, items)
        warn(_ORDER_CHANGED.format(kind=type(self.sampler).__name__), HeadwayWarning, stacklevel=2)
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

    def _describe_pass_start(self, items: Sequence[Any], sampler_state: Any) -> PassStart:
        """Return the description of the pass's start, from its first items and the sampler's states.

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

    def _read_sampler_state(self) -> Any:
        return None if self._stateful_sampler is None else copy.deepcopy(self._stateful_sampler.state_dict())

    # ---------------------------------------------------------------- state

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

    def load_state(self, state: State) -> None:
        """Load the state that `state` returned. The next epoch is drawn from it.

        An empty state discards the state that was loaded before.
        """
        self._own_generators.load_state(state)
        self._loaded_global_states = state.get("global")
        self._loaded_handover = state.get("handover")
        self._loaded_pass_start = cast(
            PassStart, {name: state[name] for name in PassStart.__annotations__ if name in state}
        )

    # ---------------------------------------------------------------- other methods of `SampleOrder`

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def set_seed(self, seed: int) -> None:
        """Set the seed from which a seedable sampler draws its order. It applies from the next epoch on."""
        self.seed = seed

    def draw_ahead(self) -> None:
        """Do nothing, because the sampler draws its random numbers itself."""


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
        if len(texts) == _NUM_COMPARED:
            break
        indices = item if isinstance(item, list | tuple) else (item,)
        for index in indices[: _NUM_COMPARED - len(texts)]:
            if not isinstance(index, int | str | numpy.integer):
                return None
            texts.append(str(index))
    if not texts:
        return None
    return blake2b(" ".join(texts).encode(), digest_size=8).hexdigest()
