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
    SampleColumn,
    compare_fingerprints,
    describe_difference,
    hash_fingerprint,
    take_fingerprint,
)
from headway.core.data.sampling.rng import GlobalGenerators
from headway.core.runtime.collectives.checked import Collectives

_NUM_SAMPLES = 4
_NUM_CHEAP_SAMPLES = 8
_TIME_LIMIT = 1.0
"""Time limit in seconds, after which no further sample is read. At least one sample is always read."""
_SEED = 5
_MAX_NODES = 2000
_MAX_WIDTH = 64
_MAX_COPIED = 10_000
_STATELESS_TYPES = (list, tuple, range, torch.Tensor, numpy.ndarray)
"""Types of datasets that a read cannot change."""
_CHEAP_TYPES = (*_STATELESS_TYPES, TensorDataset)
"""Types of datasets whose samples are in memory, so that reading more of them costs little."""


def compare_samples(dataset: Any, everyone: Collectives) -> str:
    """Return a description of how the ranks' data differ; an empty string if they agree or cannot be compared.

    All ranks must call this function. If the data agree, it reads a few samples and makes one collective call.

    Args:
        dataset: Map-style dataset of this rank.
        everyone: Collectives of all ranks that read the dataset.
    """
    if everyone.world_size == 1:
        return ""
    first_read = _read_all_fingerprints(dataset)
    hashes = {index: hash_fingerprint(fingerprint) for index, fingerprint in first_read.items()}
    if all(each == hashes for each in everyone.gather_objects(hashes)):
        return ""
    # Leave out values that change from one read to the next: they prove nothing about the ranks.
    second_read = _read_all_fingerprints(dataset)
    reproducible = {
        index: _keep_equal_columns(first_read[index], second_read[index])
        for index in first_read
        if index in second_read
    }
    reads_by_rank: list[dict[int, Fingerprint]] = everyone.gather_objects(reproducible)
    common_indices = [index for index in reads_by_rank[0] if all(index in each for each in reads_by_rank)]
    fingerprints = [_join_columns([read[index] for index in common_indices]) for read in reads_by_rank]
    _, paths = compare_fingerprints(_keep_common_paths(fingerprints))
    if not paths:
        return ""
    difference = describe_difference(fingerprints, paths[0])
    sample_indices = [str(index) for index in common_indices if index >= 0]
    return f"{difference} (samples {', '.join(sample_indices)})" if sample_indices else difference


def _read_all_fingerprints(dataset: Any) -> dict[int, Fingerprint]:
    """Return fingerprints of a few samples of a dataset as {sample index: fingerprint}.

    The entry at key -1 is a fingerprint of the dataset's `Subset` indices and of its `source_fingerprint`. If the
    dataset has a `source_fingerprint`, this is the only entry, and no sample is read.
    """
    sources = _find_source_fingerprint(dataset)
    indices = _list_subset_indices(dataset)
    if sources:
        return {-1: take_fingerprint([{"indices": indices, "files and order": sources}])}
    return {-1: take_fingerprint([{"indices": indices}]), **_read_fingerprints(dataset)}


def _find_source_fingerprint(dataset: Any) -> str:
    """Return the dataset's `source_fingerprint`, which describes its files and their order; "" if it has none.

    If there is one, no sample has to be read to compare datasets.
    """
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    fingerprint = getattr(dataset, "source_fingerprint", "")
    return fingerprint if isinstance(fingerprint, str) else ""


def _keep_equal_columns(one: Fingerprint, other: Fingerprint) -> Fingerprint:
    """Return the columns of `one` that are equal in `other`."""
    return {path: column for path, column in one.items() if other.get(path) == column}


def _join_columns(fingerprints: Sequence[Fingerprint]) -> Fingerprint:
    """Merge the fingerprints of single samples into one fingerprint that describes all samples."""
    joined: Fingerprint = {}
    for path in dict.fromkeys(path for each in fingerprints for path in each):
        columns = [each[path] for each in fingerprints if path in each]
        is_exact = all(column.is_exact for column in columns)
        joined[path] = SampleColumn(is_exact, tuple(value for column in columns for value in column.values))
    return joined


def _keep_common_paths(fingerprints: Sequence[Fingerprint]) -> list[Fingerprint]:
    """Return the fingerprints without the leaves that some of them lack."""
    paths = [path for path in fingerprints[0] if all(path in each for each in fingerprints)]
    return [{path: each[path] for path in paths} for each in fingerprints]


def _list_subset_indices(dataset: Any) -> list[Any]:
    """Return the length, the first 8 indices and the last 8 indices of each `Subset` in a dataset, outermost first.

    These indices distinguish subsets whose samples look alike.
    """
    described: list[Any] = []
    while isinstance(dataset, Subset):
        indices = dataset.indices
        described += [len(indices), [*map(int, indices[:8])], [*map(int, indices[-8:])]]
        dataset = dataset.dataset
    return described


# -------------------------------------------------------------------- reading


def _read_fingerprints(dataset: Any) -> dict[int, Fingerprint]:
    """Read a few evenly spaced samples, and return their fingerprints as {sample index: fingerprint}.

    Samples that fail to load are left out.
    """
    length = len(dataset) if hasattr(dataset, "__len__") else 0
    is_cheap = isinstance(dataset, _CHEAP_TYPES) or type(dataset).__module__.startswith("datasets.")
    num_samples = min(length, _NUM_CHEAP_SAMPLES if is_cheap else _NUM_SAMPLES)
    indices = sorted({number * (length - 1) // max(1, num_samples - 1) for number in range(num_samples)})
    dataset_copy = _copy_for_reading(dataset)
    if dataset_copy is None:
        return {}
    generators = list(_find_generators(dataset_copy))
    states = [_read_state(generator) for generator in generators]
    fingerprints = {}
    start = time.monotonic()
    try:
        for generator in generators:
            _seed_generator(generator)
        for index in indices:
            fingerprint = _read_sample(dataset_copy, index)
            if fingerprint is not None:
                fingerprints[index] = fingerprint
            if time.monotonic() - start > _TIME_LIMIT:
                break
    finally:
        for generator, state in zip(generators, states):
            _write_state(generator, state)
    return fingerprints


def _read_sample(dataset: Any, index: int) -> Fingerprint | None:
    """Return the fingerprint of one sample, read with seeded global generators; None if reading it fails."""
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
    dataset_class = type(dataset)
    if isinstance(dataset, _STATELESS_TYPES) or not hasattr(dataset, "__dict__"):
        return dataset
    if dataset_class.__module__.startswith("datasets."):
        return dataset
    # Garbage collection of a copy must not close resources of the dataset. A class with its own `__new__` may need
    # arguments, or return an object that already exists.
    if hasattr(dataset_class, "__del__") or any("__new__" in vars(base) for base in dataset_class.__mro__[:-1]):
        return None
    dataset_copy = object.__new__(dataset_class)
    for name, value in vars(dataset).items():
        copied = _copy_value(value)
        if copied is None and value is not None:
            return None
        vars(dataset_copy)[name] = copied
    return dataset_copy


def _copy_value(value: Any) -> Any:
    """Return a copy of a nested dataset or small container, or any other value itself.

    Return None if the value contains a dataset for which a copy would not be safe.
    """
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
    queue: deque[Any] = deque([root])
    while queue and len(seen) < _MAX_NODES:
        node = queue.popleft()
        if id(node) in seen or isinstance(node, type | ModuleType | torch.Tensor | numpy.ndarray | str | bytes):
            continue
        seen.add(id(node))
        if isinstance(node, random.SystemRandom):
            continue  # has no state
        if isinstance(node, _list_generator_types()):
            yield node
        elif isinstance(node, Mapping):
            queue.extend(islice(node.values(), _MAX_WIDTH))
        elif isinstance(node, list | tuple | set | deque):
            queue.extend(islice(node, _MAX_WIDTH))
        elif isinstance(node, FunctionType):
            queue.extend(cell.cell_contents for cell in node.__closure__ or () if _has_content(cell))
            queue.extend(_list_global_generators(node.__globals__))
        elif isinstance(node, MethodType | partial):
            queue.extend([node.__self__] if isinstance(node, MethodType) else [node.func, node.args, node.keywords])
        elif hasattr(node, "__dict__"):
            queue.extend(islice(vars(node).values(), _MAX_WIDTH))
            module = sys.modules.get(type(node).__module__)
            if module is not None:
                queue.extend(_list_global_generators(vars(module)))


def _list_global_generators(variables: Mapping[str, Any]) -> list[Any]:
    """Return the random generators among the variables of a module."""
    return [value for value in variables.values() if isinstance(value, _list_generator_types())]


def _has_content(cell: CellType) -> bool:
    """Whether a variable of a closure has a value. Reading one without a value raises an error."""
    return cell != CellType()


def _seed_generator(generator: Any) -> None:
    """Seed a random generator of torch, NumPy or Python with a constant."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(_SEED)
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(_SEED).state
    else:
        generator.seed(_SEED)


def _read_state(generator: Any) -> Any:
    """Return the state of a random generator of torch, NumPy or Python."""
    if isinstance(generator, torch.Generator | numpy.random.RandomState):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


def _write_state(generator: Any, state: Any) -> None:
    """Set the state of a random generator of torch, NumPy or Python to one that `_read_state` returned."""
    if isinstance(generator, torch.Generator | numpy.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state
