"""Lend the random number stream of a run's loaders to a sampler or dataset for one pass, and move the stream accordingly.

A sampler or dataset that draws from the global generators starts a pass with the RNG states of the stream
(`LoaderGenerator`). If the stream then continued from these states, other draws would repeat the same numbers. So it is
moved whenever the sampler or dataset draws.

`SamplerHandover`: most samplers draw all their random numbers for the first item. The stream then continues where the
sampler stopped, as in plain torch. A sampler that also draws later keeps its sequence until its end, because a resumed
run repeats all of its draws at once. Meanwhile the stream continues with a state derived from that sequence. After the
sampler's end, it continues where the sampler stopped, as in plain torch.

`DatasetHandover`: an iterable dataset gets states that are equal on all ranks. It draws throughout the pass, so the
stream continues with a derived state from the beginning of the pass.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any

from headway.core.data.sampling.loader_generator import LoaderGenerator
from headway.core.data.sampling.rng import (
    NUMPY,
    PYTHON,
    TORCH,
    Broadcast,
    States,
    decode_state,
    derive_state,
    encode_global_states,
    encode_seeded_states,
    has_same_state,
)


class PassStage(IntEnum):
    """Stage of a pass over a sampler. Checkpoints contain the number."""

    BEFORE_FIRST_ITEM = 0
    AFTER_FIRST_ITEM = 1
    AFTER_END = 2


class SamplerHandover:
    """Moves the run's stream in step with one pass over a sampler.

    Args:
        stream: Random number stream whose states the sampler starts with.
        stage: Stage up to which the stream has been moved already, if the pass repeats an interrupted one. Default: a
            new pass.
        separate_generators: Indices of the generators (`TORCH`, `PYTHON`, `NUMPY`) from which the sampler draws in
            separate sequences, because it has drawn from them after its first item. Default: none.
    """

    def __init__(
        self,
        stream: LoaderGenerator,
        stage: PassStage = PassStage.BEFORE_FIRST_ITEM,
        separate_generators: Iterable[int] = (),
    ) -> None:
        self._stream = stream
        self._stage = stage
        self._separate_generators = set(separate_generators)

    @classmethod
    def from_state(cls, stream: LoaderGenerator, saved_state: Sequence[int]) -> "SamplerHandover":
        """Return an object for a pass that repeats an interrupted one.

        Draws that had already moved the stream before the save do not move it again.

        Args:
            stream: Random number stream whose states the sampler starts with.
            saved_state: Result of `state`.
        """
        stage, *separate_generators = saved_state
        return cls(stream, PassStage(stage), separate_generators)

    @classmethod
    def without_effect(cls, stream: LoaderGenerator) -> "SamplerHandover":
        """Return an object that never moves the stream."""
        return cls(stream, PassStage.AFTER_END)

    @classmethod
    def continue_older(cls, stream: LoaderGenerator) -> "SamplerHandover":
        """Return an object for a pass that was saved by an older version of Headway, which had no handovers.

        In such a version, the first item moved the process's global generators, but not a copy of them.
        """
        return cls(stream, PassStage.AFTER_FIRST_ITEM if stream.is_global else PassStage.BEFORE_FIRST_ITEM)

    def record_first_item(self, states_before: States, states_after: States) -> None:
        """Let the stream continue after the draws for the sampler's first item.

        Args:
            states_before: Global RNG states before these draws.
            states_after: Global RNG states after these draws.
        """
        if self._stage is PassStage.BEFORE_FIRST_ITEM:
            self._stage = PassStage.AFTER_FIRST_ITEM
            changed = _find_changed(states_before, states_after)
            self._stream.write_states({index: states_after[index] for index in changed})

    def record_later_items(self, states_before: States, states_after: States) -> None:
        """Let the stream continue with a new sequence for each generator from which the sampler draws later items.

        The sampler keeps the sequence that it draws from. Otherwise, both would draw the same numbers. Call this each time
        the sampler has yielded items after its first one. A generator is separated only at its first such draw.

        Args:
            states_before: Global RNG states before the sampler yielded these items.
            states_after: Global RNG states after it yielded them.
        """
        if self._stage is PassStage.AFTER_END:
            return
        changed = _find_changed(states_before, states_after)
        newly_separate = [index for index in changed if index not in self._separate_generators]
        self._separate_generators.update(newly_separate)
        self._stream.write_states({index: derive_state(states_before[index], index) for index in newly_separate})

    def end_pass(self, states: States) -> None:
        """Let the stream continue where the sampler's separate sequences ended. A second call has no effect.

        Args:
            states: Global RNG states after the sampler's last draw.
        """
        if self._stage is not PassStage.AFTER_END:
            self._stage = PassStage.AFTER_END
            self._stream.write_states({index: states[index] for index in sorted(self._separate_generators)})

    def state(self) -> list[int]:
        """Return the progress of this pass: the number of its stage, and the indices of generators with separate sequences."""
        return [int(self._stage), *sorted(self._separate_generators)]


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
        torch_state = decode_state(text.split(" ")[TORCH], TORCH)
        self._stream.write_states({TORCH: derive_state(torch_state, TORCH)})
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
        if TORCH in changed:
            self._stream.write_states({TORCH: changed[TORCH]})
        elif not changed and self._stream.has_torch_state(derive_state(torch_start, TORCH)):
            self._stream.write_states({TORCH: torch_start})  # neither the dataset nor the stream has drawn anything


def _find_changed(before: States, after: States) -> list[int]:
    """Return the indices of the generators whose states differ."""
    return [index for index in (TORCH, PYTHON, NUMPY) if not has_same_state(before[index], after[index])]
