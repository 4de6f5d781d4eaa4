"""What loaders draw themselves when they are iterated, from which stream, and how it is kept.

torch's loader draws a base seed for its workers, with or without any, and its sampler one for a shuffled order. Both are
drawn here as there, so that the numbers which follow in the same stream are those of a plain loop. What they were drawn
from is kept, so that a pass that goes on after a resume draws nothing and is the same.
"""

import torch
from torch.utils.data import DataLoader

from headway.data.sampling.rng import decode, encode, pack_seeded, read_text
from headway.runtime import seed


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
