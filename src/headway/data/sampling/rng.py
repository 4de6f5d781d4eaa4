"""Generators that decide an order: a sampler's or an iterable dataset's own, and the global ones as it sees them.

A dataset that is read in this process sees the global generators apart from what training draws. One that draws (noise, a
shuffle buffer) cannot be sought: a resume reads it again from its start, and it must draw what it drew then, while
training goes on with the numbers of the moment. So from its first draw in a pass on, each of torch's, Python's and
NumPy's generators that the dataset draws from has two lines::

    the stream ... | before the first drawing fetch = kept, for a resume
                   +-- the dataset's line goes on from here: the numbers are those of a plain loop
                   +-- training's line is derived from it; when the pass is over, the dataset's line is the stream again

Where training does not draw from the same stream, all numbers are a plain loop's. A stream that the dataset leaves alone is
left alone.
"""

import base64
import ctypes
import hashlib
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy
import torch

from headway.data.feeds import State
from headway.runtime import seed

Agree = Callable[[Any], Any]
"""Turns this rank's value into that of rank 0."""

_PYTHON = struct.Struct("<?d")
_NUMPY = struct.Struct("<iid")


class OwnGenerators:
    """The torch generators that an object holds, and the states they had when an epoch began.

    Args:
        owner: a sampler, a batch sampler or a dataset.
        agree: begin each epoch with rank 0's states; None: with this process's.
    """

    def __init__(self, owner: Any, agree: Agree | None) -> None:
        self.generators = generators_of(owner)
        self._agree = agree if self.generators else None
        self._begun: list[str] = []
        self._loaded: list[str] | None = None

    def begin(self) -> None:
        """An epoch begins."""
        texts = self._read() if self._loaded is None else self._loaded
        self._begun = texts if self._agree is None else self._agree(texts)
        self._loaded = None
        self._write(self._begun)

    def state(self, is_running: bool) -> State:
        """The states at the start of the epoch in progress; between epochs, as they are."""
        if not self.generators:
            return {}
        if is_running or self._loaded is not None:
            return {"generators": self._begun if self._loaded is None else self._loaded}
        return {"generators": self._read(), "is_idle": True}

    def load_state(self, state: State) -> None:
        """Begin the next epoch with these states."""
        texts = state.get("generators")
        if texts is None:
            self._loaded = None
        elif state.get("is_idle"):
            self._write(texts)
        else:
            self._loaded = list(texts)

    def _read(self) -> list[str]:
        return [encode(generator.get_state()) for generator in self.generators]

    def _write(self, texts: list[str]) -> None:
        for generator, text in zip(self.generators, texts):
            generator.set_state(decode(text))


class GlobalGenerators:
    """torch's, Python's and NumPy's global generators as a sampler sees them: swapped in for a block.

    Attributes:
        states: of the three.
    """

    def __init__(self, states: "_States") -> None:
        self.states, self._outside = states, states

    @classmethod
    def seeded(cls, seed: int) -> "GlobalGenerators":
        """Streams that begin at `seed`."""
        return cls(_around(torch.Generator().manual_seed(seed).get_state()))

    @classmethod
    def of(cls, text: str) -> "GlobalGenerators":
        """Streams that begin where `read_text` read them."""
        return cls(_unpack(text))

    @classmethod
    def here(cls) -> "GlobalGenerators":
        """Streams that begin where this process's are now."""
        return cls(_read_global())

    def __enter__(self) -> None:
        self._outside = _read_global()
        _write_global(self.states)

    def __exit__(self, *_: object) -> None:
        self.states = _read_global()
        _write_global(self._outside)


def read_text() -> str:
    """This process's global generators as text, fit for JSON (about 14 kB); takes 75 us."""
    return _pack(_read_global())


def pack_seeded(state: torch.Tensor) -> str:
    """The same of generators that begin at this state of torch's, the other two seeded from it."""
    return _pack(_around(state))


def write_text(text: str) -> None:
    """Let this process's global generators go on from what `read_text` returned."""
    _write_global(_unpack(text))


def is_rng_states_text(text: str) -> bool:
    """Could the global generators go on from this? It is tried on generators that nobody uses."""
    try:
        state, python, (_, keys, position, has_gauss, _) = _unpack(text)
        torch.Generator().set_state(state)
        random.Random().setstate(python)
    except (ValueError, TypeError, OverflowError, RuntimeError, struct.error):
        return False
    # NumPy reads beyond its words where the position is beyond them.
    return len(keys) == 624 and 0 <= position <= 624 and has_gauss in (0, 1)


def is_generator_text(text: str, is_on_cpu: bool) -> bool:
    """Is it what `encode` made of a generator's state? Those of other devices than the CPU are taken as they are.

    Args:
        text: perhaps such a state.
        is_on_cpu: there are no other generators here.
    """
    try:
        state = decode(text)
        torch.Generator().set_state(state)
    except RuntimeError:
        return not is_on_cpu
    except ValueError:
        return False
    return True


def text_of(state: object, place: int) -> str:
    """The state of one of the three generators, as torch, `random` and NumPy give it, as text."""
    states: list[Any] = list(GlobalGenerators.seeded(0).states)
    states[place] = state
    return _pack((states[0], states[1], states[2])).split(" ")[place]


def state_from(text: str, place: int) -> Any:
    """The state that `text_of` wrote."""
    return _unpack(among_rng_states(text, place))[place]


def among_rng_states(text: str, place: int) -> str:
    """What `text_of` wrote, as a part of what `read_text` writes; the other two are of no account."""
    parts = _pack(GlobalGenerators.seeded(0).states).split(" ")
    parts[place] = text
    return " ".join(parts)


def _around(state: torch.Tensor) -> "_States":
    """A state of torch's, and of Python's and NumPy's generators seeded from it."""
    seed = zlib.crc32(state.numpy().tobytes())
    return state, random.Random(seed).getstate(), numpy.random.RandomState(seed).get_state()


def _pack(states: "_States") -> str:
    # Python's and NumPy's global generators are Mersenne twisters of 624 words.
    state, (_, words, gauss), (_, keys, position, has_gauss, cached) = states
    parts = [
        state.numpy().tobytes(),
        _PYTHON.pack(gauss is not None, gauss or 0.0) + numpy.asarray(words, dtype="<u4").tobytes(),
        _NUMPY.pack(position, has_gauss, cached) + numpy.asarray(keys, dtype="<u4").tobytes(),
    ]
    return " ".join(base64.b64encode(part).decode("ascii") for part in parts)


def _unpack(text: str) -> "_States":
    first, second, third = (base64.b64decode(part) for part in text.split(" "))
    has_python_gauss, gauss = _PYTHON.unpack_from(second)
    words = tuple(numpy.frombuffer(second, "<u4", offset=_PYTHON.size).tolist())
    position, has_gauss, cached = _NUMPY.unpack_from(third)
    keys = numpy.frombuffer(third, "<u4", offset=_NUMPY.size).astype(numpy.uint32)
    state = torch.frombuffer(bytearray(first), dtype=torch.uint8)
    return state, (3, words, gauss if has_python_gauss else None), ("MT19937", keys, position, has_gauss, cached)


def generators_of(sampler: object) -> list[torch.Generator]:
    """The torch generators that a sampler holds, or the sampler inside it, under whatever name."""
    nested = (sampler, getattr(sampler, "sampler", None), getattr(sampler, "batch_sampler", None))
    values = [value for each in nested for value in getattr(each, "__dict__", {}).values()]
    found = {id(value): value for value in values if isinstance(value, torch.Generator)}
    return list(found.values())


def encode(state: torch.Tensor) -> str:
    """A generator's state as text, fit for JSON."""
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def decode(text: str) -> torch.Tensor:
    """The state that `encode` wrote."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


_States = tuple[torch.Tensor, Any, Any]


def _read_global() -> _States:
    return seed.read_torch(), random.getstate(), numpy.random.get_state()


def _write_global(states: _States) -> None:
    for write, state in zip(_WRITE, states):
        write(state)


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
        """The pass is over: the dataset's lines are the generators again. Nothing where that was done, or it has not drawn."""
        for place, state in self._dataset.items():
            _WRITE[place](state)
        self._dataset, self._starts = {}, {}

    def begin(self) -> None:
        """A pass begins: with the lines that were loaded, or where the generators are."""
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
        """Of a pass that was left: where the dataset's lines are, which are the generators again when the next one begins."""
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
    return GlobalGenerators.seeded(int.from_bytes(digest, "little") >> 1).states[place]
