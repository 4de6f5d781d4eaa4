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
from typing import Any, TypeVar

import numpy

from headway.core.data.feeds.protocol import State
from headway.core.data.sampling.handover import DatasetHandover
from headway.core.data.sampling.rng import (
    STATE_WRITERS,
    decode_state,
    derive_state,
    encode_state,
    has_same_state,
)
from headway.core.runtime import seed

Result = TypeVar("Result")
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
    they have the states of training again. Generators have indices: 0 is torch's, 1 Python's, 2 NumPy's.
    """

    def __init__(self) -> None:
        self._readers: tuple[Callable[[], Any], ...] = (
            seed.read_torch_rng_state,
            random.getstate,
            NumpyReader().read,
        )
        self._dataset: dict[int, Any] = {}
        self._starts: dict[int, tuple[int, str]] = {}
        self._num_fetched = 0
        self._loaded: dict[int, tuple[int, str]] = {}
        self._shared: DatasetHandover | None = None

    def end_pass(self, is_complete: bool = False) -> None:
        """End the pass, and set the global generators to the dataset's states.

        Generators from which the dataset has not drawn keep their states. If all ranks share the dataset's states, no
        global generator is changed, because the ranks' global states can differ.

        Args:
            is_complete: Whether the dataset was read to its end. Shared states then return to the run's stream.
                Default: False.
        """
        if self._shared is None:
            for index, state in self._dataset.items():
                STATE_WRITERS[index](state)
        elif is_complete and 0 in self._starts:
            starts = {index: text for index, (_, text) in self._starts.items()}
            changed = {
                index: state for index, state in self._dataset.items() if encode_state(state, index) != starts[index]
            }
            self._shared.end_pass(decode_state(starts[0], 0), changed)
        self._dataset = {}
        self._starts = {}

    def start_pass(self, shared: DatasetHandover | None = None) -> None:
        """Start a pass from the loaded states, from states shared by all ranks, or from the current global states.

        Args:
            shared: Source of states that are equal on all ranks. States that were loaded take precedence. Default:
                None, the dataset draws from this process's generators.
        """
        self.end_pass()
        self._num_fetched = 0
        self._starts = self._loaded
        self._loaded = {}
        self._shared = shared
        if shared is not None:
            parts = shared.start_pass(bool(self._starts)).split(" ")
            self._starts = {index: (0, part) for index, part in enumerate(parts)} | self._starts

    def call_with_states(self, act: Callable[[], Result]) -> Result:
        """Call `act` with the global generators set to the dataset's RNG states, and return its result.

        If `act` draws from a generator for the first time in a pass, separate states of the generator are kept from
        then on.

        Args:
            act: Function that fetches data from the dataset.
        """
        for index, (number, text) in self._starts.items():
            if index not in self._dataset and number == self._num_fetched:
                self._dataset[index] = decode_state(text, index)
        outside = [read() for read in self._readers]
        for index, state in self._dataset.items():
            STATE_WRITERS[index](state)
        try:
            return act()
        finally:
            for index, was in enumerate(outside):
                now = self._readers[index]()
                if index in self._dataset:
                    self._dataset[index] = now
                    STATE_WRITERS[index](was)
                elif not has_same_state(now, was):
                    self._starts[index] = self._num_fetched, encode_state(was, index)
                    self._dataset[index] = now
                    STATE_WRITERS[index](derive_state(now, index))
            self._num_fetched += 1

    def state(self) -> State:
        """Return the RNG states from which the dataset's draws in the current pass began; else the loaded states.

        The result is {"lines": [[index of the generator, number of fetches before its first draw, state as text]]}. It
        is empty if the dataset has not drawn any random numbers.
        """
        starts = self._starts or self._loaded
        return {"lines": [[index, *start] for index, start in sorted(starts.items())]} if starts else {}

    def state_after_break(self) -> State:
        """Return the dataset's current RNG states after a pass that was left early (by `break`).

        They become the global states when the next pass starts. The result has the form of `state`, with -1 as number
        of fetches. It is empty if all ranks share the states, because the next pass then gets new ones.
        """
        if self._shared is not None:
            return {}  # the next pass gets new states
        ends = [[index, -1, encode_state(state, index)] for index, state in sorted(self._dataset.items())]
        return {"lines": ends} if ends else {}

    def load_state(self, state: State) -> None:
        """Load states that `state` or `state_after_break` returned, for the next pass."""
        lines = {int(index): (int(number), str(text)) for index, number, text in state.get("lines", ())}
        self._loaded = {index: line for index, line in lines.items() if line[0] >= 0}
        self._dataset = {index: decode_state(text, index) for index, (number, text) in lines.items() if number < 0}
        self._starts = {}
