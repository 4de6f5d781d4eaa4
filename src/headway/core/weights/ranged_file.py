"""A file that was written in ranges, with its hashes, and checks that the disk holds what was written."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from headway.common.untrusted import open_regular_file
from headway.core.weights.safetensors_format import BLOCK, read_header
from headway.core.weights.tensor_bytes import TensorSpec
from headway.errors import CheckpointError

RANGE = 16 * 2**20
"""Bytes of a file on a disk that one thread writes at a time. In object stores, a range is one stored object."""


@dataclass
class RangedFile:
    """File that `ParallelWriter` writes, with its length and hashes.

    Attributes:
        path: Path of the file.
        num_bytes: Length in bytes.
        digests: Hexadecimal XXH3-128 hash of each piece of the file, in order. Complete when the file is finished.
    """

    path: Path
    num_bytes: int
    digests: list[str]


def check_specs(path: Path, specs: Mapping[str, TensorSpec]) -> None:
    """Raise `CheckpointError` if the header of a written file does not list the written tensors.

    The header is read in the same way as when the file is loaded.

    Args:
        path: Written file.
        specs: Shape and dtype of each written tensor.

    Raises:
        CheckpointError: If the file could not be loaded, or its tensors differ from `specs`.
    """
    with open_regular_file(path) as opened:
        stored, _ = read_header(opened, path)
    if {name: spec for name, (spec, _) in stored.items()} != dict(specs):
        raise CheckpointError(f"{path} does not contain what was written; nothing was replaced. Save to another disk")


def verify_range(file: RangedFile, number: int) -> None:
    """Raise `CheckpointError` if one range (`RANGE` bytes) of a written file differs from its hash.

    Args:
        file: File on a disk with one hash per range.
        number: Index of the range, from 0.

    Raises:
        CheckpointError: If the bytes of the file differ from those that were written.
    """
    digest, start = xxhash.xxh3_128(), number * RANGE
    with open_regular_file(file.path) as opened:
        opened.seek(start)
        block = memoryview(bytearray(BLOCK))
        remaining = min(RANGE, file.num_bytes - start)
        while remaining and (count := opened.readinto(block[: min(remaining, BLOCK)])):  # type: ignore[attr-defined]
            digest.update(block[:count])
            remaining -= count
    if remaining or digest.hexdigest() != file.digests[number]:
        raise CheckpointError(
            f"{file.path} does not contain what was written from byte {start:,} on; nothing was replaced. Save to another disk"
        )
