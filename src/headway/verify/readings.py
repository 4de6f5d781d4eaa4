"""Read the state of a process that is recorded: random number generators, attributes of datasets, and memory."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from headway.verify.fingerprints import hash_bytes


def hash_generators() -> dict[str, str]:
    """Return a hash of the state of each global random number generator on the CPU: "torch", "random", "numpy"."""
    states = {
        "torch": hash_bytes(torch.get_rng_state().numpy().tobytes()),
        "random": hash_bytes(repr(random.getstate()).encode()),
    }
    kind, keys, *rest = numpy.random.get_state()
    states["numpy"] = hash_bytes(str((kind, rest)).encode(), keys.tobytes())  # type: ignore[attr-defined]
    return states


def list_indices(indices: Any) -> list[int]:
    """Return the dataset indices that a rank fetches, or an empty list if they are not integers.

    The list is copied by a slice, because iterating over the lists of some loaders also seeds generators.
    """
    copied = indices[:] if isinstance(indices, list) else []
    return copied if all(isinstance(each, int) for each in copied) else []


def _list_attributes(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for each attribute of a dataset, with names such as "Crops.generator".

    Attributes of the datasets that torch's `Subset`, `ConcatDataset` and `ChainDataset` wrap are included.
    """
    for name, value in getattr(dataset, "__dict__", {}).items():
        yield f"{type(dataset).__name__}.{name}", value
    is_subset = isinstance(dataset, torch.utils.data.Subset)
    wrapped = [dataset.dataset] if is_subset else getattr(dataset, "datasets", ())
    for each in wrapped if isinstance(wrapped, list | tuple) else ():
        yield from _list_attributes(each)


def list_generators(dataset: Any) -> list[str]:
    """Return the names of a dataset's attributes that are random number generators, such as "Crops.generator"."""
    kinds = (numpy.random.Generator, numpy.random.RandomState, random.Random, torch.Generator)
    return [name for name, value in _list_attributes(dataset) if isinstance(value, kinds)]


def list_versions(dataset: Any) -> dict[str, int]:
    """Return how often each tensor among a dataset's attributes was changed in place, by names such as "Crops.images"."""
    return {
        name: value._version
        for name, value in _list_attributes(dataset)
        if isinstance(value, torch.Tensor) and not value.is_inference()
    }


def measure_resident(device: torch.device) -> int:
    """Return the memory in use at present, in bytes: allocated on the GPU, or resident in this process on a CPU."""
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else _read_resident()


def measure_peak(device: torch.device) -> int:
    """Return the peak memory so far, in bytes: allocated on the GPU, or resident in this process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _read_resident() -> int:
    """Return the resident memory of this process in bytes; 0 if it cannot be read."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
