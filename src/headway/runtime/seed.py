"""The global generators of this process: seeding them all, reading them and putting them back.

torch's global generator on the host, read and written by one thread at a time.

A generator's own lock is taken with the interpreter's lock held, and reading its state may give that one up before the
generator's is free again: two threads that read at once can wait for each other for ever (torch 2.13, `THPGenerator_getState`).
A loader of a stream reads it at each batch, in whichever thread the loop runs.
"""

import os
import pickle
import random
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headway.errors import ConfigError
from headway.log import get_logger
from headway.runtime.device import Hardware
from headway.runtime.process import current

_ONE_AT_A_TIME = threading.Lock()
# A worker that is forked while another thread reads must not wait for that thread, which it does not have.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ONE_AT_A_TIME._at_fork_reinit)  # type: ignore[attr-defined]


def read_torch() -> torch.Tensor:
    """`torch.get_rng_state`."""
    with _ONE_AT_A_TIME:
        return torch.get_rng_state()


def write_torch(state: torch.Tensor) -> None:
    """`torch.set_rng_state`."""
    with _ONE_AT_A_TIME:
        torch.set_rng_state(state)


log = get_logger(__name__)

_MASK = (1 << 63) - 1
_ALL = ["python", "numpy", "torch", "device"]


class RNGReader:
    """Which part of the data this process reads; ranks that read the same part draw the same numbers.

    Attributes:
        index: the part's number; None: the rank reads a part of its own, or no Accelerator has told.
    """

    def __init__(self) -> None:
        self.index: int | None = None


def mix(*parts: int) -> int:
    """One seed of 63 bits from several numbers, well spread (the finaliser of SplitMix64, Steele et al. 2014)."""
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state & _MASK


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, NumPy's and torch's generators.

    Args:
        seed: 0 or more.
        device_specific: give every rank a stream of its own (seed + rank). The data order stays common to all ranks. Ranks
            that share one part of the data (tensor parallel) need one stream: there the part's number counts, which is known
            once the Accelerator is made.
        deterministic: ask torch for deterministic algorithms as well.

    Raises:
        ConfigError: the seed is negative or no integer.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"set_seed got {seed!r}; give a whole number, 0 or more")
    if device_specific:
        runtime = current()
        index = runtime.scope.own(RNGReader).index
        seed += runtime.rank if index is None else index
    random.seed(seed)
    _seed_numpy(seed)
    torch.manual_seed(seed)  # every device's generator included
    if deterministic:
        torch.use_deterministic_algorithms(True)


def digests() -> list[float]:
    """A number for the state of each of the generators `reseed` knows, in their order; -1: not in use here."""
    states = read_states(_ALL[:-1], None)
    if "torch" in states:
        states["torch"] = states["torch"].numpy().tobytes()  # a pickled tensor says where it lay, too
    return [float(zlib.crc32(pickle.dumps(states[name]))) if name in states else -1.0 for name in _ALL[:-1]]


def reseed(name: str, seed: int) -> None:
    """Let one stream ("python", "numpy" or "torch", which is the device's too) begin anew."""
    if name == "python":
        random.seed(seed)
    elif name == "numpy":
        _seed_numpy(seed)
    else:
        torch.manual_seed(seed)


def _seed_numpy(seed: int) -> None:
    # numpy.random is imported by torch's users, not always by torch: an unused stream needs no seed until then.
    import numpy

    numpy.random.seed(seed % (1 << 32))


def read_states(rng_types: list[str], generator: torch.Generator | None) -> dict[str, Any]:
    """The states of the generators of these names (see `synchronize_rng_states`), as they are now."""
    states: dict[str, Any] = {}
    if "python" in rng_types:
        states["python"] = random.getstate()
    if "numpy" in rng_types and "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if "torch" in rng_types:
        states["torch"] = read_torch()
    if "device" in rng_types and (read := _device_generator("get_rng_state")) is not None:
        states["device"] = read()
    if "generator" in rng_types and generator is not None:
        states["generator"] = generator.get_state()
    return states


def _device_generator(name: str) -> Callable[..., Any] | None:
    """How the device's stream is read or written; None on the CPU, and where torch's module for the device cannot."""
    hardware = current().hardware
    found = None if hardware.kind == "cpu" else hardware.ability(name)
    if found is None and hardware.kind != "cpu":
        log.warning_once(
            "torch.%s has no %s: its random state is not in checkpoints, and a resumed run draws different numbers there",
            hardware.kind,
            name,
        )
    return found


def write_states(states: dict[str, Any], generator: torch.Generator | None) -> None:
    """Put back what `read_states` returned."""
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "torch" in states:
        write_torch(states["torch"])
    if "device" in states and (write := _device_generator("set_rng_state")) is not None:
        write(states["device"])
    if "generator" in states and generator is not None:
        generator.set_state(states["generator"])


def read_rng_states(hardware: Hardware) -> dict[str, Any]:
    """The states of Python's, NumPy's, torch's and the device's global generators."""
    return read_states(_ALL if hardware.kind != "cpu" else _ALL[:-1], None)


def write_rng_states(states: dict[str, Any], hardware: Hardware) -> None:
    """Go on from those states; a device's is left out where there is another kind of device now."""
    write_states({name: state for name, state in states.items() if name != "device" or hardware.kind != "cpu"}, None)


@contextmanager
def untouched_rng_states() -> Iterator[None]:
    """After the block the host's generators are as before it: for code of others that may draw from them; about 0.2 ms."""
    states = read_states(_ALL[:-1], None)
    try:
        yield
    finally:
        write_states(states, None)


def derive_rng_states(seed: int, num_updates: int, index: int) -> None:
    """Begin new generators if there is no saved state for this rank: a function of (seed, update, part of the data)."""
    set_seed(mix(seed, num_updates, index) >> 1)
