"""Compare the sources of streamed Hugging Face datasets: the order of files and shards, and the shuffling.

If each rank reads different shards of a stream, no rank ever reads the whole stream. But if the stream is shuffled
without a seed, or is already split by rank, each rank chooses its shards from a different list. Some shards are then
read twice and others never. To detect this, ranks compare descriptions of their sources instead of samples.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy

from headway.core.data.compare.fingerprint import hash_fingerprint, take_fingerprint

_MAX_DEPTH = 12

_IGNORED_ATTRIBUTES = (
    "_state_dict",
    "features",
    "_features",
    "formatting",
    "function",
    "fn_kwargs",
    "info",
    "token_per_repo_id",
)
"""Attributes of a source that are not compared.

They change while a stream is read, or do not affect which rows it yields.
"""


def hash_sources(dataset: Any) -> float:
    """Return a 52-bit hash of the sources of a `datasets.IterableDataset`; 0 for any other dataset."""
    source = getattr(dataset, "_ex_iterable", None)
    if source is None:
        return 0.0
    digest = hashlib.blake2b(digest_size=8)
    for text in _describe_value(source, 0, set()):
        digest.update(text.encode(errors="replace") + b"\0")
    return float(int.from_bytes(digest.digest(), "big") >> 12)


def _describe_value(node: Any, depth: int, seen: set[int]) -> Iterator[str]:
    """Yield texts that describe a dataset's source, so that sources can be compared by a hash of the texts.

    Described are strings, numbers, None, NumPy's random generators, containers of these, and the attributes of objects
    from the `datasets` library. Other values are ignored, and an object that was already described is not described
    again. Only the file name of a path is described, because directories may differ between machines.

    Args:
        node: Source, or a value inside it.
        depth: Nesting level of `node`. Levels beyond 12 are ignored.
        seen: IDs of the objects that were already described.
    """
    if depth > _MAX_DEPTH:
        return
    if isinstance(node, str):
        yield node.rsplit("/", 1)[-1]
    elif node is None or isinstance(node, bool | int | float):
        yield repr(node)
    elif isinstance(node, numpy.random.Generator):
        yield repr(node.bit_generator.state)
    elif isinstance(node, list | tuple | Mapping):
        for value in node.items() if isinstance(node, Mapping) else node:
            yield from _describe_value(value, depth + 1, seen)
    elif type(node).__module__.startswith("datasets.") and hasattr(node, "__dict__") and id(node) not in seen:
        seen.add(id(node))
        yield from _describe_object(node, depth, seen)


def _describe_object(node: Any, depth: int, seen: set[int]) -> Iterator[str]:
    """Yield texts that describe the class and the attributes of an object from the `datasets` library.

    A map-style dataset is described by its length, and by its first and last row.

    Args:
        node: Object to describe.
        depth: Nesting level of `node`.
        seen: IDs of the objects that were already described.
    """
    yield type(node).__name__
    if hasattr(node, "_fingerprint"):  # a map-style dataset, whose rows are cheap to read
        rows = [node[0], node[len(node) - 1]] if len(node) else []
        yield str(len(node))
        yield repr(hash_fingerprint(take_fingerprint(rows)))
        return
    for name, value in vars(node).items():
        if name not in _IGNORED_ATTRIBUTES:
            yield from _describe_value(value, depth + 1, seen)
