"""Read a few samples of a map-style dataset without side effects, to compare the data of all ranks.

Reading a sample runs the user's code, which can change the dataset. So samples are read from a shallow copy. For
example, counters in the dataset must not change. A file that the dataset opens with its first sample must not be
opened before the workers are forked. During the reads, the global random generators and those in the dataset have
equal seeds on all ranks, so that augmentation is equal. Afterwards, their states are restored. A sample that fails to
load is left out.
"""

import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import islice
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from headway.core.data.compare.fingerprint import (
    Fingerprint,
    compare_fingerprints,
    describe_difference,
    hash_fingerprint,
    take_fingerprint,
)
from headway.core.data.sampling.rng import GlobalGenerators
from headway.core.runtime.collectives.checked import Collectives

_NUM_SAMPLES = 4
_NUM_CHEAP_SAMPLES = 8
_BUDGET = 1.0
"""Time limit in seconds, after which no further sample is read. At least one sample is always read."""
_SEED = 5
_MAX_NODES = 2000
_MAX_WIDTH = 64
_MAX_COPIED = 10_000
_CHEAP = (list, tuple, range, torch.Tensor, numpy.ndarray, TensorDataset)


def compare_samples(dataset: Any, everyone: Collectives) -> str:
    """Return a description of how the ranks' data differ; an empty string if they agree or cannot be compared.

    All ranks must call this function. If the data agree, it reads a few samples and makes one collective call.

    Args:
        dataset: Map-style dataset of this rank.
        everyone: Collectives of all ranks that read the dataset.
    """
    if everyone.world_size == 1:
        return ""
    read = _read_all(dataset)
    hashes = {index: hash_fingerprint(fingerprint) for index, fingerprint in read.items()}
    if all(each == hashes for each in everyone.gather_objects(hashes)):
        return ""
    # Leave out values that change from one read to the next: they prove nothing about the ranks.
    again = _read_all(dataset)
    steady = {index: _keep_steady(read[index], again[index]) for index in read if index in again}
    ranks: list[dict[int, Fingerprint]] = everyone.gather_objects(steady)
    shared = [index for index in ranks[0] if all(index in each for each in ranks)]
    joined = [_join_columns([each[index] for index in shared]) for each in ranks]
    _, paths = compare_fingerprints(_keep_common_paths(joined))
    if not paths:
        return ""
    told = describe_difference(joined, paths[0])
    return f"{told} (samples {', '.join(str(index) for index in shared if index >= 0)})" if shared != [-1] else told


def _read_all(dataset: Any) -> dict[int, Fingerprint]:
    """Return fingerprints of a few samples of a dataset as {sample index: fingerprint}.

    The entry at key -1 is a fingerprint of the dataset's `Subset` indices and of its `source_fingerprint`. If the
    dataset has a `source_fingerprint`, this is the only entry, and no sample is read.
    """
    sources = _find_source_fingerprint(dataset)
    described = {"indices": _list_indices(dataset)} | ({"files and order": sources} if sources else {})
    return {-1: take_fingerprint([described]), **({} if sources else _read_fingerprints(dataset))}


def _find_source_fingerprint(dataset: Any) -> str:
    """Return the dataset's `source_fingerprint`, which describes its files and their order; "" if it has none.

    If there is one, no sample has to be read to compare datasets.
    """
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    found = getattr(dataset, "source_fingerprint", "")
    return found if isinstance(found, str) else ""


def _keep_steady(one: Fingerprint, other: Fingerprint) -> Fingerprint:
    return {path: column for path, column in one.items() if other.get(path) == column}


def _join_columns(fingerprints: Sequence[Fingerprint]) -> Fingerprint:
    """Merge the fingerprints of single samples into one fingerprint that describes all samples."""
    found: Fingerprint = {}
    for path in dict.fromkeys(path for each in fingerprints for path in each):
        columns = [each[path] for each in fingerprints if path in each]
        is_exact = all(column.is_exact for column in columns)
        found[path] = columns[0]._replace(
            is_exact=is_exact, values=tuple(value for column in columns for value in column.values)
        )
    return found


def _keep_common_paths(fingerprints: Sequence[Fingerprint]) -> list[Fingerprint]:
    """Return the fingerprints without the leaves that some of them lack."""
    paths = [path for path in fingerprints[0] if all(path in each for each in fingerprints)]
    return [{path: each[path] for path in paths} for each in fingerprints]


def _list_indices(dataset: Any) -> list[Any]:
    """Return the length and the first and last 8 indices of each `Subset` in a dataset.

    These indices distinguish subsets whose samples look alike.
    """
    found: list[Any] = []
    while isinstance(dataset, Subset):
        indices = dataset.indices
        found += [len(indices), [*map(int, indices[:8])], [*map(int, indices[-8:])]]
        dataset = dataset.dataset
    return found


# -------------------------------------------------------------------- reading


def _read_fingerprints(dataset: Any) -> dict[int, Fingerprint]:
    """Read a few evenly spaced samples, and return their fingerprints as {sample index: fingerprint}.

    Samples that fail to load are left out.
    """
    length = len(dataset) if hasattr(dataset, "__len__") else 0
    is_cheap = isinstance(dataset, _CHEAP) or type(dataset).__module__.startswith("datasets.")
    number = min(length, _NUM_CHEAP_SAMPLES if is_cheap else _NUM_SAMPLES)
    indices = sorted({place * (length - 1) // max(1, number - 1) for place in range(number)})
    twin = _copy_for_reading(dataset)
    if twin is None:
        return {}
    generators = list(_find_generators(twin))
    states = [_read_state(generator) for generator in generators]
    found = {}
    begun = time.monotonic()
    try:
        for generator in generators:
            _seed_generator(generator)
        for index in indices:
            fingerprint = _read_one(twin, index)
            if fingerprint is not None:
                found[index] = fingerprint
            if time.monotonic() - begun > _BUDGET:
                break
    finally:
        for generator, state in zip(generators, states):
            _write_state(generator, state)
    return found


def _read_one(dataset: Any, index: int) -> Fingerprint | None:
    try:
        with GlobalGenerators.from_seed(_SEED):
            return take_fingerprint([dataset[index]])
    except Exception:  # the run itself will raise errors of the user's code (a damaged file, odd keys)
        return None


def _copy_for_reading(dataset: Any) -> Any:
    """Return a shallow copy of a dataset, in which nested datasets and small containers are copied too.

    Returns:
        Copy of the dataset, or the dataset itself if it has no state that could change. None if a copy would not be
            safe.
    """
    kind = type(dataset)
    if isinstance(dataset, _CHEAP[:-1]) or not hasattr(dataset, "__dict__") or kind.__module__.startswith("datasets."):
        return dataset
    # Garbage collection of a copy must not close resources of the dataset.
    if hasattr(kind, "__del__") or any("__new__" in vars(base) for base in kind.__mro__[:-1]):
        return None
    twin = object.__new__(kind)
    for name, value in vars(dataset).items():
        copied = _copy_value(value)
        if copied is None and value is not None:
            return None
        vars(twin)[name] = copied
    return twin


def _copy_value(value: Any) -> Any:
    if isinstance(value, Dataset):
        return _copy_for_reading(value)
    if type(value) in (list, dict, set, deque) and len(value) <= _MAX_COPIED:
        if type(value) is list and any(isinstance(each, Dataset) for each in value):
            copies = [_copy_value(each) for each in value]
            return None if any(copy is None for copy in copies) else copies
        return value.copy()
    return value


# -------------------------------------------------------------------- generators


@cache
def _list_generator_types() -> tuple[type, ...]:
    """Return the classes of random generators.

    It is a function and not a constant because numpy.random is imported on first use.
    """
    return (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)


def _find_generators(root: Any) -> Iterator[Any]:
    """Yield the random generators that a dataset's methods can use.

    The search follows attributes, containers and closures. It also finds generators that are global variables of the
    modules in which the classes and functions are defined.
    """
    seen: set[int] = set()
    waiting: deque[Any] = deque([root])
    while waiting and len(seen) < _MAX_NODES:
        node = waiting.popleft()
        if id(node) in seen or isinstance(node, type | ModuleType | torch.Tensor | numpy.ndarray | str | bytes):
            continue
        seen.add(id(node))
        if isinstance(node, random.SystemRandom):
            continue  # has no state
        if isinstance(node, _list_generator_types()):
            yield node
        elif isinstance(node, Mapping):
            waiting.extend(islice(node.values(), _MAX_WIDTH))
        elif isinstance(node, list | tuple | set | deque):
            waiting.extend(islice(node, _MAX_WIDTH))
        elif isinstance(node, FunctionType):
            waiting.extend(
                cell.cell_contents for cell in node.__closure__ or () if cell is not None and _has_content(cell)
            )
            waiting.extend(value for value in node.__globals__.values() if isinstance(value, _list_generator_types()))
        elif isinstance(node, MethodType | partial):
            waiting.extend([node.__self__] if isinstance(node, MethodType) else [node.func, node.args, node.keywords])
        elif hasattr(node, "__dict__"):
            waiting.extend(islice(vars(node).values(), _MAX_WIDTH))
            module = sys.modules.get(type(node).__module__)
            waiting.extend(
                value for value in vars(module or node).values() if isinstance(value, _list_generator_types())
            )


def _has_content(cell: CellType) -> bool:
    return cell != CellType()


def _seed_generator(generator: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(_SEED)
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(_SEED).state
    else:
        generator.seed(_SEED)


def _read_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator | numpy.random.RandomState):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


def _write_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator | numpy.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state
