"""Global RNG states of torch, Python and NumPy: replace them within a block, and convert them to text.

Generators have indices in this package: `TORCH` is torch's CPU generator, `PYTHON` Python's `random`, and `NUMPY` NumPy's
global RandomState. Checkpoints contain these numbers.
"""

import base64
import hashlib
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy
import torch

from headway.core.runtime import seed

TORCH, PYTHON, NUMPY = 0, 1, 2
"""Indices of the global generators."""

Broadcast = Callable[[Any], Any]
"""Function that returns rank 0's value on every rank. All ranks must call it."""

_PYTHON = struct.Struct("<?d")
_NUMPY = struct.Struct("<iid")
TWISTERS = {"random": PYTHON, "numpy": NUMPY}
"""Indices of Python's and NumPy's global generators, by the name of the generator in a saved state."""
STATE_WRITERS: tuple[Callable[[Any], Any], ...] = (
    seed.write_torch_rng_state,
    random.setstate,
    lambda state: numpy.random.set_state(state),
)
"""Functions that set the global RNG states of torch, Python and NumPy, in this order."""
States = tuple[torch.Tensor, Any, Any]
"""RNG states of torch, Python and NumPy, in this order."""


class GlobalGenerators:
    """Context manager that sets the global RNG states of torch, Python and NumPy within a block, then restores them.

    If it is entered again, the next block continues with the states at the end of the previous one.

    Attributes:
        states: States of the three generators inside the block, as of the end of the latest block.
    """

    def __init__(self, states: States) -> None:
        self.states = states
        self._outer_states = states

    @classmethod
    def from_seed(cls, seed: int) -> "GlobalGenerators":
        """Return a context manager that starts with states seeded by `seed`."""
        return cls(_complete_states(torch.Generator().manual_seed(seed).get_state()))

    @classmethod
    def from_text(cls, text: str) -> "GlobalGenerators":
        """Return a context manager that starts with the states in a text that `encode_global_states` returned."""
        return cls(_unpack_states(text))

    @classmethod
    def from_current(cls) -> "GlobalGenerators":
        """Return a context manager that starts with this process's current global RNG states."""
        return cls(_read_global())

    def __enter__(self) -> None:
        self._outer_states = _read_global()
        _write_global(self.states)

    def __exit__(self, *_: object) -> None:
        self.states = _read_global()
        _write_global(self._outer_states)


def encode_global_states() -> str:
    """Return this process's global RNG states as text that fits into JSON (about 14 kB). Takes 75 us."""
    return _pack_states(_read_global())


def encode_states_from_torch(state: torch.Tensor) -> str:
    """Return global RNG states as text: `state` for torch, and states seeded from it for Python and NumPy.

    Args:
        state: State of a torch generator.
    """
    return _pack_states(_complete_states(state))


def encode_seeded_states(seed: int) -> str:
    """Return global RNG states as text, seeded by `seed`."""
    return _pack_states(GlobalGenerators.from_seed(seed).states)


def write_global_states(text: str) -> None:
    """Set this process's global RNG states from a text that `encode_global_states` returned."""
    _write_global(_unpack_states(text))


def is_rng_states_text(text: str) -> bool:
    """Whether a text contains valid global RNG states, as `encode_global_states` returns them.

    To check the states of torch and Python, they are loaded into new generators.
    """
    try:
        state, python, (_, keys, position, has_gauss, _) = _unpack_states(text)
        torch.Generator().set_state(state)
        random.Random().setstate(python)
    except (ValueError, TypeError, OverflowError, RuntimeError, struct.error):
        return False
    # NumPy accepts any position, and would read out of bounds if it is beyond the 624 words.
    return len(keys) == 624 and 0 <= position <= 624 and has_gauss in (0, 1)


def encode_state(state: object, index: int) -> str:
    """Return the state of one of the three global generators as text.

    Args:
        state: State as returned by torch, `random` or NumPy.
        index: Index of the generator: `TORCH`, `PYTHON` or `NUMPY`.
    """
    # `_pack_states` needs all three states. The other two are placeholders.
    states: list[Any] = list(GlobalGenerators.from_seed(0).states)
    states[index] = state
    return _pack_states((states[0], states[1], states[2])).split(" ")[index]


def decode_state(text: str, index: int) -> Any:
    """Return the state in a text that `encode_state` returned.

    Args:
        text: Text of the state.
        index: Index of the generator: `TORCH`, `PYTHON` or `NUMPY`.
    """
    return _unpack_states(complete_states_text(text, index))[index]


def complete_states_text(text: str, index: int) -> str:
    """Return a text of all three global RNG states, in the format of `encode_global_states`.

    It contains the given state of one generator, and arbitrary states of the other two.

    Args:
        text: Text that `encode_state` returned.
        index: Index of the generator: `TORCH`, `PYTHON` or `NUMPY`.
    """
    texts = _pack_states(GlobalGenerators.from_seed(0).states).split(" ")
    texts[index] = text
    return " ".join(texts)


def has_same_state(one: Any, other: Any) -> bool:
    """Whether two states of one generator are equal.

    For Python's Mersenne Twister, only the position, two of 624 words and the cached Gaussian number are compared. A
    draw moves the position, and when the position returns to its old value, all words have been replaced.
    """
    if one is other:
        return True
    if isinstance(one, torch.Tensor):
        return bool(one.numpy().tobytes() == other.numpy().tobytes())
    if isinstance(one[1], numpy.ndarray):
        return bool(one[2:] == other[2:]) and numpy.array_equal(one[1], other[1])
    # A state of Python's generator is (version, 624 words and the position, cached Gaussian number or None).
    (_, words, gauss), (_, other_words, other_gauss) = one, other
    return bool(gauss == other_gauss and all(words[place] == other_words[place] for place in (-1, 0, 1)))


def derive_state(state: Any, index: int) -> Any:
    """Return a new RNG state that is computed from `state`, but yields unrelated random numbers.

    Args:
        state: State of a global generator.
        index: Index of the generator: `TORCH`, `PYTHON` or `NUMPY`.
    """
    digest = hashlib.blake2b(encode_state(state, index).encode(), digest_size=8, person=b"training").digest()
    return GlobalGenerators.from_seed(int.from_bytes(digest, "little") >> 1).states[index]


def _complete_states(state: torch.Tensor) -> States:
    """Return states of all three generators: `state` for torch, and states seeded from it for Python and NumPy.

    Args:
        state: State of a torch generator.
    """
    seed = zlib.crc32(state.numpy().tobytes())
    return state, random.Random(seed).getstate(), numpy.random.RandomState(seed).get_state()


def _pack_states(states: States) -> str:
    """Return the three states as base64 texts, separated by spaces."""
    # Python's and NumPy's global generators are Mersenne twisters of 624 words.
    state, (_, words, gauss), (_, keys, position, has_gauss, cached) = states
    parts = [
        state.numpy().tobytes(),
        _PYTHON.pack(gauss is not None, gauss or 0.0) + numpy.asarray(words, dtype="<u4").tobytes(),
        _NUMPY.pack(position, has_gauss, cached) + numpy.asarray(keys, dtype="<u4").tobytes(),
    ]
    return " ".join(base64.b64encode(part).decode("ascii") for part in parts)


def _unpack_states(text: str) -> States:
    """Return the states of torch's, Python's and NumPy's generators from the text that `_pack_states` made."""
    first, second, third = (base64.b64decode(part) for part in text.split(" "))
    has_python_gauss, gauss = _PYTHON.unpack_from(second)
    words = tuple(numpy.frombuffer(second, "<u4", offset=_PYTHON.size).tolist())
    position, has_gauss, cached = _NUMPY.unpack_from(third)
    keys = numpy.frombuffer(third, "<u4", offset=_NUMPY.size).astype(numpy.uint32)
    state = torch.frombuffer(bytearray(first), dtype=torch.uint8)
    return state, (3, words, gauss if has_python_gauss else None), ("MT19937", keys, position, has_gauss, cached)


def encode_torch_state(state: torch.Tensor) -> str:
    """Return the state of a torch generator as text that JSON can hold."""
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def decode_torch_state(text: str) -> torch.Tensor:
    """Return the state of a torch generator, as a uint8 tensor, from text that `encode_torch_state` returned."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _read_global() -> States:
    """Return the RNG states of this process's global generators."""
    return seed.read_torch_rng_state(), random.getstate(), numpy.random.get_state()


def _write_global(states: States) -> None:
    for write, state in zip(STATE_WRITERS, states):
        write(state)
