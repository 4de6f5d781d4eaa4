"""Random numbers on split activations: each rank uses its own stream, and returns to the common one afterwards.

Ranks of one tensor-parallel group hold the same state, so that dropout on whole activations is alike on all of them. On
activations that are cut, the same state would give each rank's heads the same mask. There a rank goes on with a stream
that follows from the common state and its number. It needs no memory: whoever computes again from the same common state
(activation checkpointing, a resumed run) draws the same numbers.
"""

import zlib
from collections.abc import Callable

import torch

from headway.runtime import torch_stream
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
        """From here on they are whole; the common stream goes on where it was, one number further if any was drawn."""
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
            return torch_stream.read()
        state: torch.Tensor = torch.get_device_module(self._kind).get_rng_state()
        return state

    def _write(self, state: torch.Tensor) -> None:
        if self._kind == "cpu":
            torch_stream.write(state)
        else:
            torch.get_device_module(self._kind).set_rng_state(state)
