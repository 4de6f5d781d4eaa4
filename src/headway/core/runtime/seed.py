"""Global random number generators of this process: setting seeds, and reading and restoring states.

Access to torch's host generator is limited to one thread at a time, because concurrent reads can deadlock (torch 2.13,
`THPGenerator_getState`). torch takes the generator's own lock while it holds the interpreter lock. Reading the state
can release the interpreter lock before the generator's lock is free again. Concurrent reads do occur: the loader of a
streamed dataset reads the state at each batch, in the thread that runs the training loop.
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

from headway.core.runtime.device import Hardware
from headway.core.runtime.process import current
from headway.errors import ConfigError
from headway.log import get_logger

log = get_logger(__name__)

_TORCH_RNG_LOCK = threading.Lock()
# If a worker is forked while another thread holds the lock, the child process has no thread that would release it.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_TORCH_RNG_LOCK._at_fork_reinit)  # type: ignore[attr-defined]


def read_torch_rng_state() -> torch.Tensor:
    """Return torch's host RNG state (`torch.get_rng_state`), under a lock."""
    with _TORCH_RNG_LOCK:
        return torch.get_rng_state()


def write_torch_rng_state(state: torch.Tensor) -> None:
    """Set torch's host RNG state (`torch.set_rng_state`), under a lock."""
    with _TORCH_RNG_LOCK:
        torch.set_rng_state(state)


_HOST_GENERATORS = ["python", "numpy", "torch"]
_GLOBAL_GENERATORS = [*_HOST_GENERATORS, "device"]


class DataShardIndex:
    """Holder of the index of the data shard that this process reads, for `set_seed(device_specific=True)`.

    Ranks that read the same shard draw equal random numbers.

    Attributes:
        index: Index of the shard; None if each rank reads its own shard, or before an Accelerator has set it.
    """

    def __init__(self) -> None:
        self.index: int | None = None


def mix_seed(*parts: int) -> int:
    """Combine several integers into one 63-bit seed, with the finalizer of SplitMix64 (Steele et al. 2014)."""
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state & ((1 << 63) - 1)


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the random number generators of Python, NumPy and torch, including those of all devices.

    Call it on every rank, before models and loaders are created. Ranks do not communicate.

    Args:
        seed: Seed, 0 or more, equal on all ranks.
        device_specific: Whether to give each rank its own seed (seed + rank), for example for different dropout masks.
            The data order stays equal on all ranks. Ranks that share a data shard (tensor parallelism) need equal
            numbers, so the shard's index is added instead of the rank. The index is known once the Accelerator has been
            created. Default: False, all ranks get equal numbers.
        deterministic: Whether to also call `torch.use_deterministic_algorithms(True)`. Operations without a
            deterministic implementation then raise an error. Default: False.

    Raises:
        ConfigError: If the seed is negative or not an integer.

    Example::

        accelerator = Accelerator()
        set_seed(42)
        model = build_model()
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"set_seed got {seed!r}; give a whole number, 0 or more")
    if device_specific:
        runtime = current()
        index = runtime.scope.get_or_create(DataShardIndex).index
        seed += runtime.rank if index is None else index
    random.seed(seed)
    _seed_numpy(seed)
    torch.manual_seed(seed)  # includes the generators of all devices
    if deterministic:
        torch.use_deterministic_algorithms(True)


def checksum_rng_states() -> list[float]:
    """Return a checksum of the state of each host generator, in the order "python", "numpy", "torch".

    The checksum is a CRC-32, or -1 for NumPy's generator if NumPy has not been imported. Ranks compare the checksums.
    """
    states = read_states(_HOST_GENERATORS, None)
    states["torch"] = states["torch"].numpy().tobytes()  # a pickled tensor would include its device
    return [float(zlib.crc32(pickle.dumps(states[name]))) if name in states else -1.0 for name in _HOST_GENERATORS]


def reseed_generator(name: str, seed: int) -> None:
    """Seed one generator.

    Args:
        name: "python", "numpy" or "torch". "torch" includes the generators of all devices.
        seed: Seed to set.
    """
    if name == "python":
        random.seed(seed)
    elif name == "numpy":
        _seed_numpy(seed)
    else:
        torch.manual_seed(seed)


def _seed_numpy(seed: int) -> None:
    # torch does not always import numpy.random, and an unused generator needs no seed.
    import numpy

    numpy.random.seed(seed % (1 << 32))


def read_states(rng_types: list[str], generator: torch.Generator | None) -> dict[str, Any]:
    """Return the current states of the named generators, as a dict with these names as keys.

    Generators that do not exist are left out: NumPy's if NumPy has not been imported, and the device's on a CPU.

    Args:
        rng_types: Any of "python", "numpy", "torch" (host), "device" and "generator".
        generator: Generator to read if `rng_types` contains "generator". None: its state is left out.
    """
    states: dict[str, Any] = {}
    if "python" in rng_types:
        states["python"] = random.getstate()
    if "numpy" in rng_types and "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if "torch" in rng_types:
        states["torch"] = read_torch_rng_state()
    if "device" in rng_types and (read := _find_device_function("get_rng_state")) is not None:
        states["device"] = read()
    if "generator" in rng_types and generator is not None:
        states["generator"] = generator.get_state()
    return states


def _find_device_function(name: str) -> Callable[..., Any] | None:
    """Return torch's function `name` for the RNG state of this process's device type.

    None on the CPU, or if torch's module for the device type lacks the function.
    """
    hardware = current().hardware
    if hardware.kind == "cpu":
        return None
    function = hardware.find_function(name)
    if function is None:
        log.warning_once(
            "torch.%s has no %s: its random state is not in checkpoints, and a resumed run draws different numbers there",
            hardware.kind,
            name,
        )
    return function


def write_states(states: dict[str, Any], generator: torch.Generator | None) -> None:
    """Restore states that `read_states` returned.

    Args:
        states: States by name.
        generator: Generator whose state is restored if `states` contains "generator". None: that state is ignored.
    """
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "torch" in states:
        write_torch_rng_state(states["torch"])
    if "device" in states and (write := _find_device_function("set_rng_state")) is not None:
        write(states["device"])
    if "generator" in states and generator is not None:
        generator.set_state(states["generator"])


def read_rng_states(hardware: Hardware) -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy, torch and the device, by name.

    The device's state is left out if `hardware` is the CPU, and NumPy's if NumPy has not been imported.
    """
    return read_states(_HOST_GENERATORS if hardware.kind == "cpu" else _GLOBAL_GENERATORS, None)


def write_rng_states(states: dict[str, Any], hardware: Hardware) -> None:
    """Restore states that `read_rng_states` returned.

    The device's state is skipped if this process computes on a CPU.
    """
    has_device_generator = hardware.kind != "cpu"
    usable_states = {name: state for name, state in states.items() if name != "device" or has_device_generator}
    write_states(usable_states, None)


@contextmanager
def preserve_rng_states() -> Iterator[None]:
    """Return a context manager that restores the host's RNG states on exit. This takes about 0.2 ms.

    It is used around third-party code that might draw random numbers.
    """
    states = read_states(_HOST_GENERATORS, None)
    try:
        yield
    finally:
        write_states(states, None)


def seed_from_update(seed: int, num_updates: int, index: int) -> None:
    """Seed the generators of Python, NumPy and torch from the run's seed, the number of updates and the data shard.

    This is needed after a resume if the checkpoint has no RNG states for this rank.

    Args:
        seed: Seed of the run.
        num_updates: Number of updates so far.
        index: Index of the data shard that this rank reads.
    """
    set_seed(mix_seed(seed, num_updates, index) >> 1)
