"""Random streams that decide an order: a sampler's or stream's own generators, and the global ones as it sees them."""

import base64
import random
import zlib
from collections.abc import Callable
from typing import Any

import numpy
import torch

Agree = Callable[[Any], Any]
"""Turns this rank's value into that of rank 0."""


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

    @property
    def is_resuming(self) -> bool:
        """Will the next epoch begin with loaded states?"""
        return self._loaded is not None

    def begin(self) -> None:
        """An epoch begins."""
        texts = self._read() if self._loaded is None else self._loaded
        self._begun = texts if self._agree is None else self._agree(texts)
        self._loaded = None
        self._write(self._begun)

    def state(self, is_running: bool) -> dict[str, Any]:
        """The states at the start of the epoch in progress; between epochs, as they are."""
        if not self.generators:
            return {}
        if is_running or self._loaded is not None:
            return {"generators": self._begun if self._loaded is None else self._loaded}
        return {"generators": self._read(), "is_idle": True}

    def load_state(self, state: dict[str, Any]) -> None:
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


class GlobalStreams:
    """torch's, Python's and NumPy's global random streams as a sampler sees them: swapped in for a block.

    Args:
        state: torch's; the other two are seeded from it.
    """

    def __init__(self, state: torch.Tensor) -> None:
        seed = zlib.crc32(state.numpy().tobytes())
        self._states = (state, random.Random(seed).getstate(), numpy.random.RandomState(seed).get_state())
        self._outside = self._states

    @classmethod
    def seeded(cls, seed: int) -> "GlobalStreams":
        """Streams that begin at `seed`."""
        return cls(torch.Generator().manual_seed(seed).get_state())

    def __enter__(self) -> None:
        self._outside = _read_global()
        _write_global(self._states)

    def __exit__(self, *_: object) -> None:
        self._states = _read_global()
        _write_global(self._outside)


def generators_of(sampler: Any) -> list[torch.Generator]:
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
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()


def _write_global(states: _States) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])
