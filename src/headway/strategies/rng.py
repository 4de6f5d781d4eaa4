"""Random numbers in models that are split: each rank uses its own generator where activations differ, and the common one elsewhere.

Ranks of one tensor-parallel group hold the same state, so that dropout on whole activations is alike on all of them. On
activations that are cut, the same state would give each rank's heads the same mask. There a rank goes on with a stream
that follows from the common state and its number. It needs no memory: whoever computes again from the same common state
(activation checkpointing, a resumed run) draws the same numbers.

Random numbers in the stages of a pipeline.

Ranks along a pipeline read the same data, and must go on to draw alike from every stream; what a stage draws is its own, and no other
stage draws as often. So the generators are put back after a batch, and those that any rank has drawn from move by one number on all.
In which order micro-batches pass a stage depends on the schedule, and on what has passed before: each begins generators of its own.
"""

import pickle
import random
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch

from headway.runtime import seed
from headway.runtime.device import Hardware
from headway.runtime.seed import mix, read_rng_states, write_rng_states
from headway.strategies.tensor.crossings import SplitAxis


class SplitRNG:
    """Of one model on one rank.

    Args:
        axis: the ranks among which it is cut.

    Attributes:
        part: from here on activations are cut.
        join: from here on they are whole again.
    """

    def __init__(self, axis: SplitAxis) -> None:
        self._axis = axis
        self._common: torch.Tensor | None = None
        self._start: torch.Tensor | None = None
        self._kind: str = axis.mesh.device_type
        # Not by decorators: what they import takes longer than torch.
        self.part: Callable[[], None] = torch.compiler.disable(self._part)  # type: ignore[no-untyped-call]
        self.join: Callable[[], None] = torch.compiler.disable(self._join)  # type: ignore[no-untyped-call]

    def _part(self) -> None:
        """From here on activations are cut."""
        if self._common is None:
            self._common = self._read()
            seed = zlib.crc32(self._common.numpy().tobytes())
            self._start = torch.Generator(self._kind).manual_seed(seed * 65_537 + self._axis.rank).get_state()
            self._write(self._start)

    def _join(self) -> None:
        """From here on they are whole; the common generator goes on where it was, one number further if any was drawn."""
        if self._common is None:
            return
        assert self._start is not None
        is_drawn = not torch.equal(self._read(), self._start)
        self._write(self._common)
        self._common = self._start = None
        if is_drawn:
            torch.rand((), device=self._kind)

    def _read(self) -> torch.Tensor:
        if self._kind == "cpu":
            return seed.read_torch()
        state: torch.Tensor = torch.get_device_module(self._kind).get_rng_state()
        return state

    def _write(self, state: torch.Tensor) -> None:
        if self._kind == "cpu":
            seed.write_torch(state)
        else:
            torch.get_device_module(self._kind).set_rng_state(state)


NAMES = ("python", "numpy", "torch", "device")


class StageRNG:
    """What a batch draws in this rank's stages, and from which generators.

    Args:
        hardware: where the models compute.
        common: the generators before the batch, which ranks of a pipeline have alike.

    Attributes:
        flags: 1 or 0 for each of `NAMES`: were numbers drawn from it?
    """

    def __init__(self, hardware: Hardware, common: dict[str, Any]) -> None:
        self.flags = [0.0] * len(NAMES)
        self._hardware = hardware
        self._main = "torch" if hardware.kind == "cpu" else "device"
        # NumPy's stream may be of a kind that is not seeded like this: it goes on from one micro-batch to the next.
        seeded = {name: state for name, state in common.items() if name != "numpy" or isinstance(state, tuple)}
        self._seeds = {name: crc32(_bytes(state)) for name, state in seeded.items()}
        self._start = common

    def begin(self, stage: int, number: int) -> None:
        """A stage is about to compute a micro-batch.

        Where models compute, each stage draws from a stream of its own. The others are alike on all stages: on a GPU what a model's
        forward draws on the host, outside of its blocks, every stage draws.

        Args:
            stage: its number.
            number: of the micro-batch; that of what comes after all of them is the number of micro-batches.
        """
        self.look()
        self._start = self._start | {
            name: self._begun(name, mix(seed, number, stage if name == self._main else 0))
            for name, seed in self._seeds.items()
        }
        write_rng_states({name: self._start[name] for name in self._seeds}, self._hardware)

    def look(self) -> None:
        """Note which generators were drawn from since the last beginning."""
        now = read_rng_states(self._hardware)
        for index, name in enumerate(NAMES):
            if name in self._start and _bytes(now[name]) != _bytes(self._start[name]):
                self.flags[index] = 1.0

    def _begun(self, name: str, seed: int) -> Any:
        if name == "python":
            return random.Random(seed).getstate()
        if name == "numpy":
            return sys.modules["numpy"].random.RandomState(seed % (1 << 32)).get_state()
        return torch.Generator("cpu" if name == "torch" else self._hardware.kind).manual_seed(seed).get_state()


@contextmanager
def own_generators(hardware: Hardware) -> Iterator[StageRNG]:
    """A block after which all generators are as before."""
    common = read_rng_states(hardware)
    told = StageRNG(hardware, common)
    try:
        yield told
    finally:
        told.look()
        write_rng_states(common, hardware)


def go_on(flags: Sequence[float], device: torch.device) -> None:
    """Move the common generators by one number each, where any rank has drawn: the next batch must not draw the same.

    Args:
        flags: for each of `NAMES`, alike on all ranks.
        device: where the models compute.
    """
    drawn = {name for name, flag in zip(NAMES, flags) if flag}
    if "python" in drawn:
        random.random()
    if "numpy" in drawn:
        import numpy

        numpy.random.random()
    if "torch" in drawn:
        torch.rand(())
    if "device" in drawn:
        torch.rand((), device=device)


def _bytes(state: Any) -> bytes:
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state)
