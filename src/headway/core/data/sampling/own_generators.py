"""Find random generators that are attributes of a sampler or dataset, and save and restore their states."""

import json
import random
from typing import Any, TypeAlias

import numpy
import torch

from headway.core.data.feeds.protocol import State
from headway.core.data.sampling.rng import (
    NUMPY,
    PYTHON,
    TWISTERS,
    Broadcast,
    complete_states_text,
    decode_state,
    decode_torch_state,
    encode_state,
    encode_torch_state,
    is_rng_states_text,
)

# A string, because numpy.random is imported on first use and most runs do not need it.
OwnGenerator: TypeAlias = "torch.Generator | random.Random | numpy.random.RandomState | numpy.random.Generator"
"""Random generator that is an attribute of a sampler or dataset."""
_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
"""Supported bit generators of `numpy.random.Generator`."""


class OwnGenerators:
    """Random generators that are attributes of an object, and their states at the start of an epoch.

    Args:
        owner: Sampler, batch sampler or dataset.
        broadcast: Function that returns rank 0's value on every rank, to start each epoch with rank 0's states; None to use
            this process's states.

    Attributes:
        generators: Generators that were found in `owner`.
    """

    def __init__(self, owner: Any, broadcast: Broadcast | None) -> None:
        self.generators = find_generators(owner)
        self._broadcast = broadcast if self.generators else None
        self._start_states: list[str] = []  # texts of the states at the start of the current epoch
        self._loaded_states: list[str] | None = None

    @property
    def has_torch(self) -> bool:
        """Whether one of the generators is a `torch.Generator`."""
        return any(isinstance(each, torch.Generator) for each in self.generators)

    def rewind_epoch(self) -> None:
        """Reset the generators to their states at the start of the current epoch. The order can then be drawn again."""
        self._write_states(self._start_states)

    def start_epoch(self) -> None:
        """Start an epoch with the loaded states if there are any, or else with the generators' current states.

        If a `broadcast` function was given, all ranks use rank 0's states. The states are stored, so that `rewind_epoch` can
        return to them.
        """
        texts = self._read_states() if self._loaded_states is None else self._loaded_states
        self._start_states = texts if self._broadcast is None else self._broadcast(texts)
        self._loaded_states = None
        self._write_states(self._start_states)

    def state(self, is_running: bool) -> State:
        """Return {"generators": the generators' states at the start of the current epoch, as texts}.

        Between epochs, return the states that were loaded for the next epoch. If none were loaded, return the current
        states, with the additional entry {"is_idle": True}. Return an empty dict if there are no generators.

        Args:
            is_running: Whether an epoch is in progress.
        """
        if not self.generators:
            return {}
        if self._loaded_states is not None:
            return {"generators": self._loaded_states}
        if is_running:
            return {"generators": self._start_states}
        return {"generators": self._read_states(), "is_idle": True}

    def load_state(self, state: State) -> None:
        """Load the states that `state` returned. The next epoch starts with them.

        States that were saved between epochs are set at once, others at the start of the epoch. An empty dict discards
        states that were loaded before.
        """
        texts = state.get("generators")
        if texts is None:
            self._loaded_states = None
        elif state.get("is_idle"):
            self._write_states(texts)
        else:
            self._loaded_states = list(texts)

    def _read_states(self) -> list[str]:
        return [_encode_generator(generator) for generator in self.generators]

    def _write_states(self, texts: list[str]) -> None:
        for generator, text in zip(self.generators, texts):
            _write_generator(generator, text)


def is_generator_text(text: str, is_on_cpu: bool) -> bool:
    """Whether a text is a valid state of one random generator, in the format of `OwnGenerators.state`.

    Args:
        text: Text to check.
        is_on_cpu: Whether there are only CPU generators. Otherwise states that torch's CPU generator rejects are
            accepted too, because they may be states of another device's generator.
    """
    kind, colon, state_text = text.partition(":")
    if colon:
        return _is_python_or_numpy_state(kind, state_text)
    try:
        state = decode_torch_state(text)
        torch.Generator().set_state(state)
    except RuntimeError:
        return not is_on_cpu
    except ValueError:
        return False
    return True


def _is_python_or_numpy_state(kind: str, text: str) -> bool:
    """Whether a string is a valid state of a Python or NumPy random number generator.

    To check it, the state is loaded into a new generator.

    Args:
        kind: Type of the generator, such as "random", "numpy" or "PCG64".
        text: State to check.
    """
    if kind in TWISTERS:
        return is_rng_states_text(complete_states_text(text, TWISTERS[kind]))
    if kind not in _BIT_GENERATORS:
        return False
    generator = getattr(numpy.random, kind)()
    try:
        _write_bit_generator(generator, text)
        words = json.loads(text)["state"]
    except (ValueError, TypeError, KeyError, OverflowError):
        return False
    # NumPy would read out of bounds if the position is beyond its words.
    return kind != "MT19937" or (len(words["key"]) == 624 and 0 <= int(words["pos"]) <= 624)


def _encode_generator(generator: OwnGenerator) -> str:
    """Return the state of a generator as text: base64 for torch's generators, "type:state" for others."""
    if isinstance(generator, torch.Generator):
        return encode_torch_state(generator.get_state())
    if isinstance(generator, random.Random):
        return f"random:{encode_state(generator.getstate(), PYTHON)}"
    if isinstance(generator, numpy.random.RandomState):
        return f"numpy:{encode_state(generator.get_state(), NUMPY)}"
    bit_generator = generator.bit_generator
    return f"{type(bit_generator).__name__}:{json.dumps(bit_generator.state, default=lambda array: array.tolist())}"


def _write_generator(generator: OwnGenerator, text: str) -> None:
    """Set the state of a generator from a text that `_encode_generator` returned.

    This has no effect if the text belongs to another type of generator.
    """
    kind, colon, state_text = text.partition(":")
    if isinstance(generator, torch.Generator):
        if not colon:
            generator.set_state(decode_torch_state(text))
    elif isinstance(generator, random.Random):
        if kind == "random":
            generator.setstate(decode_state(state_text, PYTHON))
    elif isinstance(generator, numpy.random.RandomState):
        if kind == "numpy":
            generator.set_state(decode_state(state_text, NUMPY))
    elif kind == type(generator.bit_generator).__name__:
        _write_bit_generator(generator.bit_generator, state_text)


def _write_bit_generator(generator: "numpy.random.BitGenerator", text: str) -> None:
    generator.state = _restore_arrays(json.loads(text), generator.state)


def _restore_arrays(json_state: Any, example: Any) -> Any:
    """Return a bit generator's state after a round trip through JSON, with lists converted back to NumPy arrays.

    Args:
        json_state: State as read from JSON, or a part of it.
        example: Current state of the generator, or the same part of it. It shows where arrays are needed.
    """
    if isinstance(example, dict):
        return {name: _restore_arrays(json_state[name], value) for name, value in example.items()}
    return numpy.asarray(json_state, dtype=example.dtype) if isinstance(example, numpy.ndarray) else json_state


def _is_readable(generator: object) -> bool:
    """Whether an object is a random generator whose complete state can be read and written.

    False for `random.SystemRandom` and unusual subclasses.
    """
    if isinstance(generator, numpy.random.Generator):
        return type(generator.bit_generator).__name__ in _BIT_GENERATORS
    if isinstance(generator, numpy.random.RandomState):
        return isinstance(generator._bit_generator, numpy.random.MT19937)
    return isinstance(generator, torch.Generator) or type(generator) is random.Random


def find_generators(owner: object) -> list[OwnGenerator]:
    """Return the random generators in the attributes of a sampler or dataset, and of its nested samplers.

    Nested samplers are those in the attributes `sampler` and `batch_sampler`. NumPy's global RandomState is left out,
    because it is saved with the global RNG states. So are generators whose state cannot be read and written.
    """
    owners = (owner, getattr(owner, "sampler", None), getattr(owner, "batch_sampler", None))
    values = [value for each in owners for value in getattr(each, "__dict__", {}).values()]
    generators_by_id = {id(value): value for value in values if _is_readable(value)}
    # NumPy's module-level functions share one RandomState, which may be an attribute too.
    global_state = getattr(numpy.random.mtrand, "_rand", None)
    return [generator for generator in generators_by_id.values() if generator is not global_state]
