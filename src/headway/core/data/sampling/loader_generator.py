"""Random numbers that a run's loaders draw from torch's generator, in the same order as torch's own loaders."""

from typing import Any

import torch
from torch.utils.data import DataLoader

from headway.core.data.sampling.rng import (
    STATE_WRITERS,
    TORCH,
    decode_torch_state,
    encode_global_states,
    encode_states_from_torch,
    encode_torch_state,
)
from headway.core.runtime import seed


class LoaderGenerator:
    """Random number stream from which the loaders of one run draw.

    With a single process, it is torch's global generator, as in plain torch. With several ranks (`is_private`), it is a
    copy of that generator, created when the first pass starts. A copy is needed because training's own draws on a rank
    (e.g. dropout on a CPU) depend on the number of ranks. They must not determine which samples are read after a resume
    with a different number of ranks. Each draw also advances the process's global generator, so that training (noise,
    dropout) then draws the same numbers as after a plain loader.

    If the script reseeds torch between two passes, the copy is created again, so that the order follows the new seed
    as it does with a single process. Reseeding is detected by a changed initial seed, or by a generator from which
    nothing has been drawn.

    Args:
        is_private: Whether to draw from a copy of torch's global generator. Default: False.
    """

    def __init__(self, is_private: bool = False) -> None:
        self._is_private = is_private
        self._copy: torch.Generator | None = None
        self._initial_seed: int | None = None  # torch's initial seed at the last access; None after a state was loaded
        self._was_unused = False  # whether nothing had been drawn from torch's generator at the last access

    @property
    def _generator(self) -> torch.Generator:
        """Generator to draw from. Creates the copy if it is needed and does not exist, or if torch was reseeded."""
        if self._copy is None and not self._is_private:
            return torch.default_generator
        if self._copy is None or (self._is_private and self._is_reseeded()):
            self._copy = torch.Generator()
            self._copy.set_state(seed.read_torch_rng_state())
        self._initial_seed = torch.initial_seed()
        self._was_unused = _is_global_generator_unused()
        return self._copy

    def _is_reseeded(self) -> bool:
        """Whether the script has seeded torch since the last access to this stream.

        False after a state was loaded, because the loaded state takes precedence over a seed. A resume can seed torch,
        too. So a generator from which nothing has been drawn is a sign of a new seed only if it was drawn from before.
        """
        if self._initial_seed is None:
            return False
        if torch.initial_seed() != self._initial_seed:
            return True
        return not self._was_unused and _is_global_generator_unused()

    def draw_seed(self) -> int:
        """Draw and return a seed in [0, 2**63), as torch's loader and sampler do."""
        drawn = _draw_seed(self._generator)
        if not self.is_global:
            _draw_seed(torch.default_generator)
            self._was_unused = False
        return drawn

    def encode_state(self) -> str:
        """Return the state of the stream as text. The base seed of a loader's workers can be drawn from it."""
        return encode_torch_state(self._generator.get_state())

    def lend_states(self) -> str:
        """Return the RNG states of torch, Python and NumPy with which a sampler or dataset starts to draw, as text.

        The text has the format of `rng.encode_global_states`. Afterwards, the stream must be moved with `write_states`,
        so that nothing else draws the same numbers. If the stream is a copy of torch's generator, the process's global
        generator is advanced by one draw.
        """
        if self._generator is torch.default_generator:
            return encode_global_states()
        text = encode_states_from_torch(self._generator.get_state())
        _draw_seed(torch.default_generator)
        self._was_unused = False
        return text

    def write_states(self, states: dict[int, Any]) -> None:
        """Continue with the given states. No effect without states.

        A copy of torch's generator has no states of Python and NumPy, which are computed from torch's. If only these
        are given, it is advanced by one draw.

        Args:
            states: States by the index of the generator: `TORCH`, `PYTHON` or `NUMPY` (see `rng.py`).
        """
        if self.is_global:
            for index, state in states.items():
                STATE_WRITERS[index](state)
        elif TORCH in states:
            self._generator.set_state(states[TORCH])
        elif states:
            _draw_seed(self._generator)

    def has_torch_state(self, state: torch.Tensor) -> bool:
        """Whether the stream's next numbers are those of a torch generator with the given state."""
        return torch.equal(self._generator.get_state(), state)

    @property
    def is_global(self) -> bool:
        """Whether loaders draw from this process's global torch generator, which training uses too."""
        return self._copy is None and not self._is_private

    def state(self) -> torch.Tensor | None:
        """Return the state of the copied torch generator as a uint8 tensor; None if there is no copy."""
        return None if self._copy is None else self._copy.get_state()

    def load_state(self, state: torch.Tensor | None) -> None:
        """Continue with a copy of torch's generator that has the given state.

        Args:
            state: State returned by `state`. None to discard the copy: if the stream is private, a new copy of torch's
                generator is created when the next pass starts. Otherwise torch's generator itself is used.
        """
        self._copy = None
        self._initial_seed = None
        if state is not None:
            self._copy = torch.Generator()
            self._copy.set_state(state)


class BaseSeed:
    """Base seed of one loader's workers, drawn as torch's DataLoader draws it.

    Args:
        loader: User's loader.
        is_seedable: Whether the order and the workers' seeds are functions of (seed, epoch). A base seed is then drawn
            only if the user gave the loader a generator, because a sampler might draw from that generator afterwards.
        stream: Random number stream to draw from if the loader has no generator.
    """

    def __init__(self, loader: DataLoader[object], is_seedable: bool, stream: LoaderGenerator) -> None:
        self._generator: torch.Generator | None = loader.generator
        self._stream = stream
        self._is_needed = not is_seedable or loader.generator is not None
        self._has_workers = loader.num_workers > 0
        self._has_persistent_workers = loader.persistent_workers
        self._was_drawn = False  # whether any iterator was created
        self._is_iterator_waiting = False  # whether an iterator was created whose pass has not started
        self._state_before_draw = ""  # RNG state from which the latest base seed was drawn; "" without workers
        self._loaded_state: str | None = None  # RNG state from which the next base seed must be drawn

    def draw_seed(self) -> None:
        """Draw the base seed for a new iterator, unless a resumed pass or persistent workers already have one.

        Nothing is drawn either if the workers' seeds are functions of (seed, epoch) and the loader has no generator.
        """
        if self._loaded_state is not None:
            self._state_before_draw = self._loaded_state
            self._loaded_state = None
        elif self._is_needed and not (self._was_drawn and self._has_persistent_workers):
            self._state_before_draw = self._encode_state() if self._has_workers else ""
            if self._generator is None:
                self._stream.draw_seed()
            else:
                _draw_seed(self._generator)
        self._was_drawn = True
        self._is_iterator_waiting = True

    def _encode_state(self) -> str:
        """Return the state of the generator from which the base seed is drawn, as text."""
        if self._generator is None:
            return self._stream.encode_state()
        return encode_torch_state(self._generator.get_state())

    def start_pass(self, inner_loader: DataLoader[object], is_used: bool) -> None:
        """Start a pass, and optionally give the workers of `inner_loader` the base seed that was drawn.

        Args:
            inner_loader: DataLoader that reads the dataset, with its own generator.
            is_used: Whether to give `inner_loader` the base seed that a plain loader would draw, provided that it was
                drawn and the loader has workers. Otherwise the generator of `inner_loader` is unchanged.
        """
        self._is_iterator_waiting = False
        generator = inner_loader.generator
        if is_used and self._state_before_draw and generator is not None:
            # Its next draw, which is the base seed in `iter()`, is then the one that a plain loader would make.
            generator.set_state(decode_torch_state(self._state_before_draw))

    def state(self, is_running: bool) -> dict[str, str]:
        """Return {"base_seed": RNG state before the base seed was drawn, as text}; empty if no base seed was drawn.

        The text is "" if the loader has no workers, which need no base seed. The base seed belongs to the current pass,
        to an iterator whose first batch was not requested yet, or to persistent workers. If none of these exists, the
        loaded state is returned.

        Args:
            is_running: Whether a pass is in progress.
        """
        has_base_seed = is_running or self._is_iterator_waiting or (self._has_persistent_workers and self._was_drawn)
        state = self._state_before_draw if has_base_seed else self._loaded_state
        return {} if state is None or not self._is_needed else {"base_seed": state}

    def load_state(self, state: dict[str, str]) -> None:
        """Load the state that `state` returned. The next pass uses its base seed, and draws none.

        With an empty state, the next pass draws a base seed.
        """
        self._loaded_state = state.get("base_seed")
        self._is_iterator_waiting = False


def seed_generator(loader: DataLoader[Any], seed: int) -> None:
    """Seed the generator from which `loader` draws its workers' base seed. No effect if the loader has no generator."""
    generator: torch.Generator | None = loader.generator
    if generator is not None:
        generator.manual_seed(seed)


def _is_global_generator_unused() -> bool:
    """Whether nothing has been drawn from torch's global generator since it was seeded."""
    return torch.equal(torch.Generator().manual_seed(torch.initial_seed()).get_state(), seed.read_torch_rng_state())


def _draw_seed(generator: torch.Generator) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
