"""Separate global RNG states for a dataset, so that its random numbers do not depend on those drawn by training.

A dataset that is read in this process gets its own copies of the global generators. If it draws random numbers
(noise, a shuffle buffer), it cannot continue from a position. A resumed run reads it again from its start, and must
then repeat the dataset's random numbers, although training has advanced the global generators. So dataset and training
get separate states of each global generator (torch's, Python's or NumPy's) that the dataset uses. In each pass, the
states are separated at the first fetch that draws from the generator::

    state before that fetch    saved, for a resume
    dataset's sequence         continues from that state, as in a plain loop; becomes global again after the pass
    training's sequence        starts with a state that is derived from it

If training does not draw from a generator, all random numbers are equal to those of a plain loop. A generator that the
dataset does not use is not changed.
"""

import ctypes
import random
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy

from headway.core.data.feeds.protocol import State
from headway.core.data.sampling.handover import DatasetHandover
from headway.core.data.sampling.rng import (
    STATE_WRITERS,
    TORCH,
    decode_state,
    derive_state,
    encode_state,
    has_same_state,
)
from headway.core.runtime import seed

Result = TypeVar("Result")


class DatasetStart(NamedTuple):
    """State of one global generator with which a dataset's draws in a pass began.

    Attributes:
        num_fetches: Number of fetches in the pass before the dataset's first draw from the generator.
        state: State of the generator before that draw, in the format of `encode_state`.
    """

    num_fetches: int
    state: str


_MT19937_SIZE = 625 * 4  # 624 words and the position


class NumpyReader:
    """Reader of NumPy's global RNG state that avoids the cost of `numpy.random.get_state` if nothing was drawn.

    `get_state` takes 50 us, while comparing the generator's state words takes 3 us. Normally distributed numbers are
    drawn in pairs, and the words do not show whether the second number of a pair is still cached. While it is cached,
    the state is always read completely.
    """

    def __init__(self) -> None:
        self._words: tuple[int, bytes] | None = None
        self._state: Any = None

    def read(self) -> Any:
        """Return NumPy's global RNG state.

        If nothing was drawn since the previous call, return the same object again.
        """
        words = self._read_words()
        if words is None or words != self._words or self._state[3]:
            self._state = numpy.random.get_state()
            self._words = words
        return self._state

    def _read_words(self) -> tuple[int, bytes] | None:
        """Return the address and the raw state words of NumPy's global generator.

        Return None if NumPy is too old to give access to the generator, or if the generator is not an MT19937.
        """
        if not hasattr(numpy.random, "get_bit_generator"):
            return None
        generator = numpy.random.get_bit_generator()
        if not isinstance(generator, numpy.random.MT19937):
            return None
        address = generator.ctypes.state_address
        return address, ctypes.string_at(address, _MT19937_SIZE)


class DatasetRNGStates:
    """Separate global RNG states for one dataset that is read in this process.

    While a sample is fetched, torch's, Python's and NumPy's global generators have the dataset's states. Afterwards
    they have the states of training again. Generators are identified by their indices (`TORCH`, `PYTHON`, `NUMPY`).
    """

    def __init__(self) -> None:
        self._readers: tuple[Callable[[], Any], ...] = (seed.read_torch_rng_state, random.getstate, NumpyReader().read)
        self._dataset_states: dict[int, Any] = {}  # current states of the dataset, by index of the generator
        self._starts: dict[int, DatasetStart] = {}  # starts of the current pass, by index of the generator
        self._num_fetched = 0
        self._loaded_starts: dict[int, DatasetStart] = {}  # starts of the pass that the next pass resumes
        self._handover: DatasetHandover | None = None  # source of states that all ranks share

    def end_pass(self, is_complete: bool = False) -> None:
        """End the pass, and set the global generators to the dataset's states.

        Generators from which the dataset has not drawn keep their states. If all ranks share the dataset's states, no
        global generator is changed, because the ranks' global states can differ.

        Args:
            is_complete: Whether the dataset was read to its end. If so, and if all ranks share the states, the changed
                states are handed back to the `DatasetHandover`, so that the next pass continues from them. Default:
                False.
        """
        if self._handover is None:
            for index, state in self._dataset_states.items():
                STATE_WRITERS[index](state)
        elif is_complete and TORCH in self._starts:
            changed = {
                index: state
                for index, state in self._dataset_states.items()
                if encode_state(state, index) != self._starts[index].state
            }
            self._handover.end_pass(decode_state(self._starts[TORCH].state, TORCH), changed)
        self._dataset_states = {}
        self._starts = {}

    def start_pass(self, handover: DatasetHandover | None = None) -> None:
        """End the previous pass, and start one from loaded states, states shared by all ranks, or the global states.

        Args:
            handover: Source of states that are equal on all ranks. Loaded states take precedence. None (the default):
                the dataset draws from this process's generators.
        """
        self.end_pass()
        self._num_fetched = 0
        self._starts = self._loaded_starts
        self._loaded_starts = {}
        self._handover = handover
        if handover is not None:
            # The text contains the encoded state of each generator, in the order of their indices.
            texts = handover.start_pass(bool(self._starts)).split(" ")
            shared_starts = {index: DatasetStart(num_fetches=0, state=text) for index, text in enumerate(texts)}
            self._starts = shared_starts | self._starts

    def call_with_states(self, fetch: Callable[[], Result]) -> Result:
        """Call `fetch` with the global generators set to the dataset's RNG states, and return its result.

        If `fetch` draws from a generator for the first time in a pass, separate states of the generator are kept from
        then on.

        Args:
            fetch: Function that fetches data from the dataset.
        """
        for index, start in self._starts.items():
            if index not in self._dataset_states and start.num_fetches == self._num_fetched:
                self._dataset_states[index] = decode_state(start.state, index)
        training_states = [read() for read in self._readers]
        for index, state in self._dataset_states.items():
            STATE_WRITERS[index](state)
        try:
            return fetch()
        finally:
            for index, training_state in enumerate(training_states):
                state_after = self._readers[index]()
                if index in self._dataset_states:
                    self._dataset_states[index] = state_after
                    STATE_WRITERS[index](training_state)
                elif not has_same_state(state_after, training_state):
                    # The first draw from this generator: the dataset continues its sequence, training gets a new one.
                    self._starts[index] = DatasetStart(self._num_fetched, encode_state(training_state, index))
                    self._dataset_states[index] = state_after
                    STATE_WRITERS[index](derive_state(state_after, index))
            self._num_fetched += 1

    def state(self) -> State:
        """Return the RNG states from which the dataset's draws in the current pass began; else the loaded states.

        The result is {"lines": [[index of the generator, number of fetches before its first draw, state as text]]}. It
        is empty if the dataset has not drawn any random numbers.
        """
        starts = self._starts or self._loaded_starts
        return {"lines": [[index, *start] for index, start in sorted(starts.items())]} if starts else {}

    def state_after_break(self) -> State:
        """Return the dataset's current RNG states after a pass that was left early (by `break`).

        They become the global states when the next pass starts. The result has the form of `state`, with -1 as number
        of fetches. It is empty if all ranks share the states, because the next pass then gets new ones.
        """
        if self._handover is not None:
            return {}
        ends = [[index, -1, encode_state(state, index)] for index, state in sorted(self._dataset_states.items())]
        return {"lines": ends} if ends else {}

    def load_state(self, state: State) -> None:
        """Load states that `state` or `state_after_break` returned, for the next pass."""
        self._loaded_starts = {}
        self._dataset_states = {}
        self._starts = {}
        for index, num_fetches, text in state.get("lines", ()):
            if num_fetches >= 0:
                self._loaded_starts[int(index)] = DatasetStart(int(num_fetches), str(text))
            else:  # from `state_after_break`
                self._dataset_states[int(index)] = decode_state(text, int(index))
