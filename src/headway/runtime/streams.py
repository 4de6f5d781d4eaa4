"""The global random streams of this process, all of them at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headway.runtime.device import Hardware
from headway.runtime.seed import mix, read_states, set_seed, write_states

_ALL = ["python", "numpy", "torch", "device"]


def read_streams(hardware: Hardware) -> dict[str, Any]:
    """The states of Python's, NumPy's, torch's and the device's global streams."""
    return read_states(_ALL if hardware.kind != "cpu" else _ALL[:-1], None)


def write_streams(states: dict[str, Any], hardware: Hardware) -> None:
    """Go on from those states; a device's is left out where there is another kind of device now."""
    write_states({name: state for name, state in states.items() if name != "device" or hardware.kind != "cpu"}, None)


@contextmanager
def untouched_streams() -> Iterator[None]:
    """After the block the host's streams are as before it: for code of others that may draw from them; about 0.2 ms."""
    states = read_states(_ALL[:-1], None)
    try:
        yield
    finally:
        write_states(states, None)


def derive_streams(seed: int, num_updates: int, rank: int) -> None:
    """Begin new streams if there is no saved state for this rank: a function of (seed, update, rank)."""
    set_seed(mix(seed, num_updates, rank) >> 1)
