"""Random streams made equal on all ranks, through the one door."""

import torch

from headway.errors import ConfigError
from headway.ops.collectives import Collectives
from headway.runtime.process import current
from headway.runtime.seed import read_states, write_states

_KNOWN = ("python", "numpy", "torch", "device", "generator")


def synchronize_rng_states(rng_types: list[str], generator: torch.Generator | None = None) -> None:
    """Give all ranks the random states of rank 0.

    Args:
        rng_types: any of "python", "numpy", "torch", "device", "generator".
        generator: the generator that "generator" means.

    Raises:
        ConfigError: an unknown name, or "generator" without one.
        CollectiveError: other ranks do something else at this moment.
    """
    for name in rng_types:
        if name not in _KNOWN:
            raise ConfigError(f"unknown random stream {name!r}; allowed: {', '.join(_KNOWN)}")
    if "generator" in rng_types and generator is None:
        raise ConfigError("rng_types names 'generator', but no generator was given; pass generator=, or leave it out")
    runtime = current()
    if runtime.world_size > 1:
        own = read_states(rng_types, generator) if runtime.is_main_process else None
        write_states(Collectives(runtime).broadcast_object(own), generator)
