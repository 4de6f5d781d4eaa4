"""The global random streams as a dataset sees them that is read in this process, apart from what training draws.

A stream that draws (noise, a shuffle buffer) cannot be sought: a resume reads it again from its start, and it must draw what it
drew then, while training goes on with the numbers of the moment. So from its first draw in a pass on, each of torch's, Python's
and NumPy's streams that the dataset draws from has two lines::

    the stream ... | before the first drawing fetch = kept, for a resume
                   +-- the dataset's line goes on from here: the numbers are those of a plain loop
                   +-- training's line is derived from it; when the pass is over, the dataset's line is the stream again

Where training does not draw from the same stream, all numbers are a plain loop's. A stream that the dataset leaves alone is
left alone.
"""

import ctypes
import hashlib
import random
from collections.abc import Callable
from typing import Any, TypeVar

import numpy
import torch

from headway.data.feeds.feed import State
from headway.data.sampling.rng import GlobalStreams, state_from, text_of
from headway.runtime import seed

Result = TypeVar("Result")

_MT19937_SIZE = 625 * 4  # 624 words and the place among them


class NumpyReader:
    """`numpy.random.get_state`, which takes 50 us, called only where the stream may have moved; looking takes 3.

    The generator's own words are compared. What they do not show is a second normal number kept from a pair, so while there is
    one, the state is read in full.
    """

    def __init__(self) -> None:
        self._words: tuple[int, bytes] | None = None
        self._state: Any = None

    def read(self) -> Any:
        """The stream's state; the same object as the last time where nothing was drawn."""
        words = self._read_words()
        if words is None or words != self._words or self._state[3]:
            self._state, self._words = numpy.random.get_state(), words
        return self._state

    def _read_words(self) -> tuple[int, bytes] | None:
        """None where they cannot be read: an older NumPy, or another kind of generator."""
        if not hasattr(numpy.random, "get_bit_generator"):
            return None
        generator = numpy.random.get_bit_generator()
        if not isinstance(generator, numpy.random.MT19937):
            return None
        address = generator.ctypes.state_address
        return address, ctypes.string_at(address, _MT19937_SIZE)


_WRITE: tuple[Callable[[Any], Any], ...] = (
    seed.write_torch,
    random.setstate,
    lambda state: numpy.random.set_state(state),
)


class DatasetRNGStates:
    """The lines of one dataset; places are numbers of torch's, Python's and NumPy's stream, in this order."""

    def __init__(self) -> None:
        self._readers: tuple[Callable[[], Any], ...] = (seed.read_torch, random.getstate, NumpyReader().read)
        self._dataset: dict[int, Any] = {}
        self._starts: dict[int, tuple[int, str]] = {}
        self._num_fetched = 0
        self._loaded: dict[int, tuple[int, str]] = {}

    def end(self) -> None:
        """The pass is over: the dataset's lines are the streams again. Nothing where that was done, or it has not drawn."""
        for place, state in self._dataset.items():
            _WRITE[place](state)
        self._dataset, self._starts = {}, {}

    def begin(self) -> None:
        """A pass begins: with the lines that were loaded, or where the streams are."""
        self.end()
        self._num_fetched = 0
        self._starts, self._loaded = self._loaded, {}

    def fetch(self, act: Callable[[], Result]) -> Result:
        """Let the dataset do something with its lines, and see whether it draws."""
        for place, (number, text) in self._starts.items():
            if place not in self._dataset and number == self._num_fetched:
                self._dataset[place] = state_from(text, place)
        outside = [read() for read in self._readers]
        for place, state in self._dataset.items():
            _WRITE[place](state)
        try:
            return act()
        finally:
            for place, was in enumerate(outside):
                now = self._readers[place]()
                if place in self._dataset:
                    self._dataset[place] = now
                    _WRITE[place](was)
                elif not _is_same(now, was):
                    self._starts[place] = self._num_fetched, text_of(was, place)
                    self._dataset[place] = now
                    _WRITE[place](_derived(now, place))
            self._num_fetched += 1

    def state(self) -> State:
        """Where the lines of the pass in progress began; between passes those that were loaded."""
        starts = self._starts or self._loaded
        return {"lines": [[place, *start] for place, start in sorted(starts.items())]} if starts else {}

    def left(self) -> State:
        """Of a pass that was left: where the dataset's lines are, which are the streams again when the next one begins."""
        ends = [[place, -1, text_of(state, place)] for place, state in sorted(self._dataset.items())]
        return {"lines": ends} if ends else {}

    def load_state(self, state: State) -> None:
        """Go on from that."""
        lines = {int(place): (int(number), str(text)) for place, number, text in state.get("lines", ())}
        self._loaded = {place: line for place, line in lines.items() if line[0] >= 0}
        self._dataset = {place: state_from(text, place) for place, (number, text) in lines.items() if number < 0}
        self._starts = {}


def _is_same(one: Any, other: Any) -> bool:
    """Are two states of one stream equal? Of a Mersenne Twister the place and two words tell: a draw moves the place, and one that
    comes round to the same place has replaced all words.
    """
    if one is other:
        return True
    if isinstance(one, torch.Tensor):
        return bool(one.numpy().tobytes() == other.numpy().tobytes())
    if isinstance(one[1], numpy.ndarray):
        return bool(one[2:] == other[2:]) and numpy.array_equal(one[1], other[1])
    return bool(one[2] == other[2] and all(one[1][at] == other[1][at] for at in (-1, 0, 1)))


def _derived(state: Any, place: int) -> Any:
    """A stream that has nothing in common with the one in that state, and is known by it."""
    digest = hashlib.blake2b(text_of(state, place).encode(), digest_size=8, person=b"training").digest()
    return GlobalStreams.seeded(int.from_bytes(digest, "little") >> 1).states[place]
