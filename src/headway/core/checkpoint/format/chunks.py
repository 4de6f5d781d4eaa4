"""Chunks of a saved tensor, listed one by one or as a grid.

A chunk is a rectangular block (box) of the tensor that is stored in one file. The size of a grid's description is
independent of the number of ranks. This module does not import torch.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod
from typing import Any, overload

from headway.errors import CheckpointError

MAX_COUNT = 2**63 - 1
"""Largest number that a manifest may contain. torch's sizes are signed 64-bit integers."""
_MAX_FILES = 2**24
"""Maximum total number of files in the grids of one manifest. It bounds the time for checking an untrusted manifest."""


@dataclass(frozen=True)
class TensorChunk:
    """Rectangular block of a saved tensor that is stored in one file.

    Attributes:
        offsets: First index of the chunk along each dim of the tensor.
        shape: Shape of the chunk.
        file: Name of the file that holds the chunk.
        key: Key of the chunk in the file.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    key: str


class ChunkGrid(Sequence[TensorChunk]):
    """Chunks of a tensor that is split into a regular grid, described without listing each chunk.

    Each chunk is in a separate file. Its key in the file is the tensor's name.

    Args:
        key: Name of the tensor, and key in each file.
        sizes: For each dim, pairs of (length of a chunk, number of consecutive chunks with this length).
        file: File name pattern with `*` in place of the number of the file.
        parts: Numbers of the files in row-major order of the chunks, as arithmetic progressions. Each is a triple of
            (first, step, count).
    """

    def __init__(
        self, key: str, sizes: Iterable[Iterable[tuple[int, int]]], file: str, parts: Iterable[tuple[int, int, int]]
    ) -> None:
        self.key = key
        self.file = file
        self.sizes = tuple(tuple(dim) for dim in sizes)
        self.parts = tuple(parts)
        self._counts = [sum(count for _, count in dim) for dim in self.sizes]
        # For each dim, the element offset (`_offsets`) and the chunk number (`_numbers`) at which each run of chunks of
        # equal length starts. `_first_indices`: index of the first chunk of each progression in `parts`.
        self._offsets = [list(accumulate((size * count for size, count in dim), initial=0)) for dim in self.sizes]
        self._numbers = [list(accumulate((count for _, count in dim), initial=0)) for dim in self.sizes]
        self._first_indices = list(accumulate((count for _, _, count in self.parts), initial=0))

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape of the tensor."""
        return tuple(offsets[-1] for offsets in self._offsets)

    def __len__(self) -> int:
        return prod(self._counts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChunkGrid) and self.encode() == other.encode() and self.key == other.key

    def __hash__(self) -> int:
        return hash((self.key, self.sizes, self.file, self.parts))

    @overload
    def __getitem__(self, index: int) -> TensorChunk: ...
    @overload
    def __getitem__(self, index: slice) -> list[TensorChunk]: ...
    def __getitem__(self, index: int | slice) -> TensorChunk | list[TensorChunk]:
        """Return the chunk with the given index in row-major order, or a list of chunks for a slice.

        Raises:
            IndexError: If the grid has no chunk with this index.
        """
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        coordinates = []
        rest = index
        for count in reversed(self._counts):
            rest, number = divmod(rest, count)
            coordinates.append(number)
        return self._make_chunk(coordinates[::-1])

    def __iter__(self) -> Iterator[TensorChunk]:
        for coordinates in product(*map(range, self._counts)):
            yield self._make_chunk(coordinates)

    def _make_chunk(self, coordinates: Sequence[int]) -> TensorChunk:
        """Return the chunk with the given index along each dim of the grid."""
        offsets, shape, index = [], [], 0
        for dim, number in enumerate(coordinates):
            run = bisect_right(self._numbers[dim], number) - 1
            size, _ = self.sizes[dim][run]
            offsets.append(self._offsets[dim][run] + (number - self._numbers[dim][run]) * size)
            shape.append(size)
            index = index * self._counts[dim] + number
        progression = bisect_right(self._first_indices, index) - 1
        first, step, _ = self.parts[progression]
        number = first + step * (index - self._first_indices[progression])
        return TensorChunk(tuple(offsets), tuple(shape), make_file_name(self.file, number), self.key)

    def iterate_overlapping(self, offsets: Sequence[int], shape: Sequence[int]) -> Iterator[TensorChunk]:
        """Yield the chunks that overlap a box (rectangular block of the tensor), in row-major order.

        Other chunks are skipped without iterating over them. Nothing is yielded if the box has no elements.

        Args:
            offsets: First index of the box along each dim.
            shape: Shape of the box.
        """
        if not prod(shape) or not len(self):
            return
        ranges = [
            range(self._find_number(dim, start), self._find_number(dim, start + size - 1) + 1)
            for dim, (start, size) in enumerate(zip(offsets, shape))
        ]
        for coordinates in product(*ranges):
            yield self._make_chunk(coordinates)

    def _find_number(self, dim: int, offset: int) -> int:
        """Return the index along a dim of the chunk that contains an element offset."""
        run = bisect_right(self._offsets[dim], offset) - 1
        size, _ = self.sizes[dim][run]
        return self._numbers[dim][run] + (offset - self._offsets[dim][run]) // size

    def encode(self) -> dict[str, Any]:
        """Return the grid as JSON values."""
        return {
            "sizes": [[list(row) for row in dim] for dim in self.sizes],
            "file": self.file,
            "parts": [list(row) for row in self.parts],
        }


def make_file_name(pattern: str, number: int) -> str:
    """Return a file name, made from a pattern by replacing `*` with a number of at least five digits, such as 00012.

    Args:
        pattern: File name that contains `*`.
        number: Number to insert.
    """
    return pattern.replace("*", f"{number:05d}")


def iterate_overlapping(
    chunks: Sequence[TensorChunk], offsets: Sequence[int], shape: Sequence[int]
) -> Iterator[TensorChunk]:
    """Yield the chunks that overlap a box (rectangular block of the tensor), in the order of `chunks`.

    Args:
        chunks: Chunks of one tensor, as a list or a `ChunkGrid`.
        offsets: First index of the box along each dim.
        shape: Shape of the box.
    """
    if isinstance(chunks, ChunkGrid):
        yield from chunks.iterate_overlapping(offsets, shape)
        return
    for chunk in chunks:
        if prod(intersect_box(chunk, offsets, shape)[1]):
            yield chunk


def intersect_box(
    chunk: TensorChunk, offsets: Sequence[int], shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets and the shape of the intersection of a chunk and a box (rectangular block of the tensor).

    Offsets are relative to the full tensor. The shape contains 0 if the chunk and the box do not overlap.

    Args:
        chunk: Chunk of the tensor.
        offsets: First index of the box along each dim of the tensor.
        shape: Shape of the box.
    """
    begins = tuple(map(max, chunk.offsets, offsets))
    ends = [
        min(start + size, other + extent)
        for start, size, other, extent in zip(chunk.offsets, chunk.shape, offsets, shape)
    ]
    return begins, tuple(max(0, end - begin) for begin, end in zip(begins, ends))


class ChunkGridReader:
    """Decoder of the chunk grids in one untrusted manifest.

    The manifest's length and its number of files bound the time that decoding takes.

    Args:
        files: Files that the manifest lists, by name.
    """

    def __init__(self, files: Mapping[str, Any]) -> None:
        self._files = files
        self._checked_parts: set[tuple[str, tuple[tuple[int, int, int], ...]]] = set()
        """Pairs of (file name pattern, numbers of the files) that have been checked, because many tensors share them."""
        self._num_files_left = _MAX_FILES

    def read(self, name: str, encoded: Any, shape: tuple[int, ...]) -> ChunkGrid:
        """Return the grid of a tensor, decoded from JSON and checked.

        Args:
            name: Name of the tensor.
            encoded: The grid as JSON.
            shape: Shape of the tensor.

        Raises:
            CheckpointError: If the grid does not cover the shape, names a file that the manifest does not list, or
                names a file twice. Also if all grids of the manifest together have too many files.
            LookupError, TypeError, ValueError: If `encoded` has another structure.
        """
        file = encoded["file"]
        sizes = tuple(
            tuple((read_count(size, 1), read_count(times, 1)) for size, times in dim) for dim in encoded["sizes"]
        )
        parts = tuple(
            (read_count(first), read_count(step, 1), read_count(times, 1)) for first, step, times in encoded["parts"]
        )
        if not isinstance(file, str) or file.count("*") != 1:
            raise CheckpointError(f"the manifest has {file!r} instead of a file name with one '*'")
        grid = ChunkGrid(name, sizes, file, parts)
        if grid.shape != shape or len(grid) > len(self._files) or len(grid) != sum(each[2] for each in parts):
            raise CheckpointError(f"the boxes of {name!r}, each in its own file, do not cover its shape {shape}")
        self._check_files(name, grid)
        return grid

    def _check_files(self, name: str, grid: ChunkGrid) -> None:
        """Raise `CheckpointError` if the manifest lacks a file of a grid, or the grid names a file twice."""
        if (grid.file, grid.parts) in self._checked_parts:
            return
        self._num_files_left -= len(grid)
        if self._num_files_left < 0:
            raise CheckpointError(f"the tensors of the manifest are in more than {_MAX_FILES:,} files")
        files: set[str] = set()
        for first, step, times in grid.parts:
            files.update(make_file_name(grid.file, number) for number in range(first, first + step * times, step))
        missing = next((file for file in files if file not in self._files), None)
        if missing is not None:
            raise CheckpointError(f"the tensor {name!r} is in {missing!r}, which the manifest does not list")
        if len(files) != len(grid):
            raise CheckpointError(f"the manifest places two boxes of {name!r} in one file")
        self._checked_parts.add((grid.file, grid.parts))


def read_counts(value: Any) -> tuple[int, ...]:
    """Return a list from a manifest as a tuple, after checking that its items are integers from 0 to 2^63 - 1.

    Raises:
        CheckpointError: If an item is not an integer or out of range.
        TypeError: If the value is not iterable.
    """
    counts = tuple(value)
    if counts and not (set(map(type, counts)) == {int} and min(counts) >= 0 and max(counts) <= MAX_COUNT):
        for count in counts:  # call the function that raises, to name the first invalid item
            read_count(count)
    return counts


def read_count(value: Any, least: int = 0) -> int:
    """Return a number from a manifest, after checking that it is an integer from `least` to 2^63 - 1.

    Args:
        value: Number in the manifest. It is untrusted.
        least: Smallest allowed number. Default: 0.

    Raises:
        CheckpointError: If the value is not an integer or out of range.
    """
    if type(value) is not int or not least <= value <= MAX_COUNT:
        raise CheckpointError(f"the manifest has {value!r} where a whole number, {least} or more, belongs")
    return value
