"""The global random streams of this process, read and written as plain values."""

import random
import sys
from typing import Any

import torch

from headway.runtime.device import Hardware
from headway.runtime.seed import mix, set_seed


def read_streams(hardware: Hardware) -> dict[str, Any]:
    """The states of Python's, NumPy's, torch's and the device's global streams."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if hardware.kind != "cpu":
        states["device"] = hardware.module.get_rng_state()
    return states


def write_streams(states: dict[str, Any], hardware: Hardware) -> None:
    """Go on from those states; one that a stream's library is not here for is left out."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"].cpu())
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    if "device" in states and hardware.kind != "cpu":
        hardware.module.set_rng_state(states["device"].cpu())


def derive_streams(seed: int, num_updates: int, rank: int) -> None:
    """Begin streams anew, where there is no saved state for this rank: a function of (seed, update, rank)."""
    set_seed(mix(seed, num_updates, rank) >> 1)
