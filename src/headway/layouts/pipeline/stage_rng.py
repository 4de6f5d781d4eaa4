"""`StageRNG`: RNG states of a pipeline's stages, so that results do not depend on which rank runs a stage when."""

import pickle
import random
import sys
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.device import Hardware
from headway.core.runtime.seed import mix_seed, read_rng_states, write_rng_states

_GENERATORS = ("python", "numpy", "torch", "device")
"""Names of the random generators that a stage can use, as in `read_rng_states`. "device": that of the accelerator."""


class StageRNG:
    """Seeder of the random generators for each stage and micro-batch. It records which generators were used.

    Args:
        hardware: Device on which models compute.
        initial_states: RNG states before the batch, by name, equal on all ranks of a pipeline.

    Attributes:
        used: Names of the generators from which numbers were drawn: "python", "numpy", "torch", "device".
    """

    def __init__(self, hardware: Hardware, initial_states: dict[str, Any]) -> None:
        self.used: set[str] = set()
        self._hardware = hardware
        self._model_generator = "torch" if hardware.kind == "cpu" else "device"
        # Only NumPy's default bit generator has a tuple as its state. Others cannot be seeded here, and are left as they are.
        self._base_seeds = {
            name: zlib.crc32(_encode_state(state))
            for name, state in initial_states.items()
            if name != "numpy" or isinstance(state, tuple)
        }
        self._seeded_states = initial_states  # states after the last seeding, from which `record_use` sees draws

    def seed_micro_batch(self, stage: int, number: int) -> None:
        """Seed the random generators for one micro-batch in one stage.

        The generator of the device on which models compute gets a different seed on each stage. The other generators
        get equal seeds on all stages. So if models compute on a GPU, host generators draw equal numbers on all stages.
        This is required by the code outside of the blocks, because this code runs on all stages.

        Args:
            stage: Index of the stage.
            number: Index of the micro-batch. For the computation after the blocks, which runs on the entire batch, pass
                the number of micro-batches.
        """
        self.record_use()
        new_states = {
            name: self._make_state(name, mix_seed(base_seed, number, stage if name == self._model_generator else 0))
            for name, base_seed in self._base_seeds.items()
        }
        self._seeded_states = self._seeded_states | new_states
        write_rng_states(new_states, self._hardware)

    def record_use(self) -> None:
        """Add the random generators that were used since they were last seeded to `used`."""
        states = read_rng_states(self._hardware)
        for name, seeded_state in self._seeded_states.items():
            if name in _GENERATORS and _encode_state(states[name]) != _encode_state(seeded_state):
                self.used.add(name)

    def _make_state(self, name: str, seed: int) -> Any:
        """Return the state of a generator after it was seeded, in the form of `read_rng_states`.

        Args:
            name: Name of the generator.
            seed: Seed.
        """
        if name == "python":
            return random.Random(seed).getstate()
        if name == "numpy":
            return sys.modules["numpy"].random.RandomState(seed % (1 << 32)).get_state()
        return torch.Generator("cpu" if name == "torch" else self._hardware.kind).manual_seed(seed).get_state()


@contextmanager
def isolate_generators(hardware: Hardware) -> Iterator[StageRNG]:
    """Return a context that yields a `StageRNG`, and restores the states of all random generators on exit."""
    initial_states = read_rng_states(hardware)
    stage_rng = StageRNG(hardware, initial_states)
    try:
        yield stage_rng
    finally:
        stage_rng.record_use()
        write_rng_states(initial_states, hardware)


def gather_used_generators(used: Collection[str], group: Collectives) -> set[str]:
    """Return the names of the random generators that any rank has used. All ranks must call this function.

    Args:
        used: Names of the generators that this rank has used, from `StageRNG.used`.
        group: Collectives over the ranks of one pipeline.
    """
    flags = group.reduce_numbers([float(name in used) for name in _GENERATORS], "max")
    return {name for name, flag in zip(_GENERATORS, flags) if flag}


def advance_generators(used: Collection[str], device: torch.device) -> None:
    """Draw one number from each random generator that any rank has used.

    The next batch then draws different numbers.

    Args:
        used: Names of these generators, equal on all ranks.
        device: Device on which models compute.
    """
    if "python" in used:
        random.random()
    if "numpy" in used:
        import numpy

        numpy.random.random()
    if "torch" in used:
        torch.rand(())
    if "device" in used:
        torch.rand((), device=device)


def _encode_state(state: Any) -> bytes:
    """Return an RNG state, a tensor or an object of Python's or NumPy's generator, as bytes that can be compared."""
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state)
