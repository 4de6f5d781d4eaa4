"""Pass random number sequences from a run's stream to a sampler or dataset and back, so that no two epochs overlap.

A sampler or dataset that draws from the global generators starts an epoch with the RNG states of the run's stream
(`LoaderGenerator`). Two parts of a program must never continue from one state. So the stream moves on whenever the
sampler or dataset draws::

    sampler's first item       drawn with the stream's states; the stream continues after it, as in plain torch
    its first later draw       the sampler keeps its sequence; the stream continues with a state derived from it
    end of the sampler         the stream continues where the sampler's sequence ended, as in plain torch

Most samplers draw all their random numbers for the first item. Those that draw later need a separate sequence until
their end, because a resumed run repeats all of the sampler's draws at once. An iterable dataset whose RNG states are
equal on all ranks has a separate sequence from the beginning of a pass.
"""

from collections.abc import Sequence
from typing import Any

from headway.core.data.sampling.loader_generator import LoaderGenerator
from headway.core.data.sampling.rng import (
    Broadcast,
    States,
    decode_state,
    derive_state,
    encode_global_states,
    encode_seeded_states,
    has_same_state,
)

_BEFORE_FIRST_ITEM, _AFTER_FIRST_ITEM, _AFTER_END = range(3)
"""Stages of a pass over a sampler, as saved in checkpoints."""


class SamplerHandover:
    """Moves the run's stream in step with one pass over a sampler.

    Args:
        stream: Random number stream whose states the sampler starts with.
        saved_state: Result of `state` for an interrupted pass that this pass repeats. Draws after which the stream had
            moved then do not move it again. Default: None, a new pass.
    """

    def __init__(self, stream: LoaderGenerator, saved_state: Sequence[int] | None = None) -> None:
        self._stream = stream
        self._stage, *indices = saved_state or (_BEFORE_FIRST_ITEM,)
        self._separate_generators = set(indices)  # indices of generators with separate sequences

    @classmethod
    def without_effect(cls, stream: LoaderGenerator) -> "SamplerHandover":
        """Return an object that never moves the stream."""
        return cls(stream, (_AFTER_END,))

    @classmethod
    def continue_older(cls, stream: LoaderGenerator) -> "SamplerHandover":
        """Return an object for a pass that a version of Headway without handovers has saved.

        In such a version, the first item moved the process's global generators, but not a copy of them.
        """
        return cls(stream, (_AFTER_FIRST_ITEM if stream.is_global else _BEFORE_FIRST_ITEM,))

    def record_first_item(self, states_before: States, states_after: States) -> None:
        """Let the stream continue after the draws for the sampler's first item.

        Args:
            states_before: Global RNG states before these draws.
            states_after: Global RNG states after these draws.
        """
        if self._stage == _BEFORE_FIRST_ITEM:
            self._stage = _AFTER_FIRST_ITEM
            changed = _find_changed(states_before, states_after)
            self._stream.write_states({index: states_after[index] for index in changed})

    def record_later_items(self, states_before: States, states_after: States) -> None:
        """Separate the stream from the sequences of generators from which the sampler draws after its first item.

        Args:
            states_before: Global RNG states before the sampler yielded some later items.
            states_after: Global RNG states after it yielded them.
        """
        if self._stage != _AFTER_END:
            changed = [
                index for index in _find_changed(states_before, states_after) if index not in self._separate_generators
            ]
            self._separate_generators.update(changed)
            self._stream.write_states({index: derive_state(states_before[index], index) for index in changed})

    def end_pass(self, states: States) -> None:
        """Let the stream continue where separate sequences ended.

        Args:
            states: Global RNG states after the sampler's last draw.
        """
        if self._stage != _AFTER_END:
            self._stage = _AFTER_END
            self._stream.write_states({index: states[index] for index in sorted(self._separate_generators)})

    def state(self) -> list[int]:
        """Return the progress of this pass: its stage, and the indices of generators with separate sequences.

        The stage is 0 before the first item, 1 after it, and 2 after the last item.
        """
        return [self._stage, *sorted(self._separate_generators)]


class DatasetHandover:
    """Gives an iterable dataset the RNG states of the run's stream, and moves the stream accordingly.

    Args:
        stream: Random number stream from which the run's loaders draw.
        broadcast: Function that returns rank 0's value on every rank; None if this process reads alone.
    """

    def __init__(self, stream: LoaderGenerator, broadcast: Broadcast | None) -> None:
        self._stream = stream
        self._is_alone = broadcast is None
        self._broadcast: Broadcast = broadcast or (lambda value: value)

    @property
    def is_needed(self) -> bool:
        """Whether the dataset must not draw from this process's global generators.

        A process that reads alone and draws from these generators needs no handover.
        """
        return not (self._is_alone and self._stream.is_global)

    def start_pass(self, is_resumed: bool) -> str:
        """Return RNG states as text, equal on all ranks, for one pass over the dataset. All ranks must call this method.

        Args:
            is_resumed: Whether this rank resumes a pass. It then ignores the result, because it has already loaded its
                RNG states from a checkpoint, and its stream has moved already.
        """
        if is_resumed:
            return str(self._broadcast(encode_global_states()))  # the other ranks wait for this collective
        if self._stream.is_global:  # training draws from it, so the dataset gets states from a drawn seed
            return str(self._broadcast(encode_seeded_states(self._stream.draw_seed())))
        text = str(self._broadcast(self._stream.lend_states()))
        torch_state = decode_state(text.split(" ")[0], 0)
        self._stream.write_states({0: derive_state(torch_state, 0)})
        return text

    def end_pass(self, torch_start: Any, changed: dict[int, Any]) -> None:
        """Let the stream continue where the dataset's draws ended.

        No effect if the stream is the process's global generator, because the dataset's states then come from a seed.

        Args:
            torch_start: State of torch's generator with which the dataset started the pass.
            changed: Final states of the generators from which the dataset has drawn, by index of the generator.
        """
        if self._stream.is_global:
            return
        if 0 in changed:
            self._stream.write_states({0: changed[0]})
        elif not changed and self._stream.has_torch_state(derive_state(torch_start, 0)):
            self._stream.write_states({0: torch_start})  # neither the dataset nor the stream has drawn anything


def _find_changed(before: States, after: States) -> list[int]:
    """Return the indices of the generators whose states differ."""
    return [index for index in range(3) if not has_same_state(before[index], after[index])]
