"""Random streams made equal on all ranks, through checked collectives."""

from collections.abc import Sequence

import torch

from headway.errors import ConfigError
from headway.log import get_logger
from headway.runtime.collectives.checked import Collectives
from headway.runtime.device import is_kind
from headway.runtime.process import current
from headway.runtime.seed import digests, mix, read_states, reseed, write_states

log = get_logger(__name__)

_KNOWN = ("python", "numpy", "torch", "device", "generator")
_VENDORS = frozenset({"npu", "mlu", "musa", "sdaa", "neuron"})
"""Kinds that Accelerate's scripts name also where the vendor's package, by which torch knows them, is not imported."""


def stream_names(rng_types: Sequence[str]) -> list[str]:
    """The streams by Headway's own names: "cuda", "xpu" and their like are "device".

    Raises:
        ConfigError: an unknown name.
    """
    names = ["device" if _is_device(str(name)) else str(name) for name in rng_types]
    for name in names:
        if name not in _KNOWN:
            raise ConfigError(f"unknown random stream {name!r}; allowed: {', '.join(_KNOWN)}")
    return list(dict.fromkeys(names))


def _is_device(name: str) -> bool:
    return name in _VENDORS or (name not in ("cpu", "meta") and is_kind(name))


def synchronize_rng_states(rng_types: Sequence[str], generator: torch.Generator | None = None) -> None:
    """Give all ranks the random states of rank 0.

    Args:
        rng_types: any of "python", "numpy", "torch", "device" (or its kind, "cuda" say), "generator".
        generator: the generator that "generator" means.

    Raises:
        ConfigError: an unknown name, or "generator" without one.
        CollectiveError: other ranks do something else at this moment.
    """
    rng_types = stream_names(rng_types)
    if "generator" in rng_types and generator is None:
        raise ConfigError("rng_types names 'generator', but no generator was given; pass generator=, or leave it out")
    runtime = current()
    if runtime.world_size > 1:
        own = read_states(rng_types, generator) if runtime.is_main_process else None
        write_states(Collectives(runtime).broadcast_object(own), generator)


def share_streams(everyone: Collectives, index: int) -> list[str]:
    """Let ranks that read the same part of the data draw the same random numbers: dropout, noise, what a dataset draws.

    Streams that are alike on them already stay as they are; the others begin anew, at a seed of rank 0's and the part's number.

    Args:
        everyone: all ranks; each of them calls this.
        index: the number of the part that this rank reads.

    Returns:
        The streams that began anew.
    """
    rows = everyone.gather_numbers([float(index), float(torch.initial_seed() % (1 << 52)), *digests()])
    begun = []
    for place, name in enumerate(("python", "numpy", "torch")):
        first: dict[float, float] = {}
        if any(first.setdefault(row[0], row[2 + place]) != row[2 + place] for row in rows):
            reseed(name, mix(int(rows[0][1]), place, index))
            begun.append(name)
    if "torch" in begun:
        log.warning_once(
            "ranks that read the same part of the data had different random streams: torch's are now seeded again, with "
            "the same seed on these ranks. To seed ranks differently, call set_seed(seed, device_specific=True) after you create the "
            "Accelerator"
        )
    return begun
