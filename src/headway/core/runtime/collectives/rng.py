"""RNG states that are equal on several ranks: copied from rank 0, or seeded equally on ranks that read equal data."""

from collections.abc import Sequence

import torch

from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.device import is_device_type
from headway.core.runtime.process import current
from headway.core.runtime.seed import checksum_rng_states, mix_seed, read_states, reseed_generator, write_states
from headway.errors import ConfigError
from headway.log import get_logger

log = get_logger(__name__)

_KNOWN = ("python", "numpy", "torch", "device", "generator")

_VENDORS = frozenset({"npu", "mlu", "musa", "sdaa", "neuron"})
"""Device types that torch knows only after their vendors' packages have been imported.

Scripts written for Accelerate can name them in `rng_types` before that.
"""


def resolve_generator_names(rng_types: Sequence[str]) -> list[str]:
    """Translate the user's RNG names into Headway's names, without duplicates. "cuda", for example, becomes "device".

    Args:
        rng_types: Names of random number generators, which may include device types such as "cuda".

    Raises:
        ConfigError: If a name is unknown.
    """
    names = ["device" if _is_device(str(name)) else str(name) for name in rng_types]
    for name in names:
        if name not in _KNOWN:
            raise ConfigError(f"unknown generator {name!r}; allowed: {', '.join(_KNOWN)}")
    return list(dict.fromkeys(names))


def _is_device(name: str) -> bool:
    """Whether a name of an RNG type, such as "cuda", stands for the generator of an accelerator."""
    return name in _VENDORS or (name not in ("cpu", "meta") and is_device_type(name))


def synchronize_rng_states(rng_types: Sequence[str], generator: torch.Generator | None = None) -> None:
    """Copy rank 0's RNG states to all ranks, so that they draw equal numbers from now on. All ranks must call this.

    In a run with a single process, nothing changes.

    Args:
        rng_types: Any of "python", "numpy", "torch" (the host's), "device" (that of this process's device, also by its
            type, such as "cuda"), "generator".
        generator: Generator to synchronize if `rng_types` contains "generator". Default: None.

    Raises:
        ConfigError: If a name is unknown, or "generator" is named and no generator is given.
        CollectiveError: If other ranks call a different collective at this point.
    """
    names = resolve_generator_names(rng_types)
    if "generator" in names and generator is None:
        raise ConfigError("rng_types names 'generator', but no generator was given; pass generator=, or leave it out")
    runtime = current()
    if runtime.world_size > 1:
        own = read_states(names, generator) if runtime.is_main_process else None
        write_states(Collectives(runtime).broadcast_object(own), generator)


def share_rng_states(everyone: Collectives, index: int) -> list[str]:
    """Make ranks that read the same data shard draw equal random numbers, for example in dropout, noise and datasets.

    A generator whose state agrees on these ranks, for every shard, keeps its state. Any other generator is seeded on
    all ranks, from rank 0's seed and the shard's index. All ranks must call this.

    Args:
        everyone: Collectives of all ranks.
        index: Index of the data shard that this rank reads.

    Returns:
        Names of the generators that were reseeded.
    """
    # Numbers up to 2^53 are exchanged exactly.
    rows = everyone.gather_numbers([float(index), float(torch.initial_seed() % (1 << 52)), *checksum_rng_states()])
    _, rank_0_seed, *_ = rows[0]
    reseeded = []
    for number, name in enumerate(("python", "numpy", "torch")):
        checksums_by_shard: dict[float, set[float]] = {}
        for shard_index, _, *checksums in rows:
            checksums_by_shard.setdefault(shard_index, set()).add(checksums[number])
        if any(len(checksums) > 1 for checksums in checksums_by_shard.values()):
            reseed_generator(name, mix_seed(int(rank_0_seed), number, index))
            reseeded.append(name)
    if "torch" in reseeded:
        log.warning_once(
            "ranks that read the same part of the data had different RNG states: torch's are now reseeded equally on these ranks. "
            "To seed ranks differently, call set_seed(seed, device_specific=True) after you create the Accelerator"
        )
    return reseeded
