"""The boxes that make up a saved tensor: listed one by one, or stored as a grid, whatever the number of ranks. Torch-free."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod
from typing import Any, overload

from headway.errors import CheckpointError

MOST = 2**63 - 1
_MOST_FILES = 2**24
"""Files of different grids that a manifest may name: what checking them takes is bounded."""


@dataclass(frozen=True)
class TensorChunk:
    """A box of a tensor: where it begins, its shape, and the file and key that hold it."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    key: str


class ChunkGrid(Sequence[TensorChunk]):
    """The boxes of a tensor that is cut regularly along its dims, each in a file of its own under the tensor's name.

    Args:
        key: the tensor's name.
        sizes: along each dim the lengths of the boxes, as (length, how many in a row).
        file: the files' name, with `*` for the number of the one.
        parts: their numbers in the order of the boxes (rows first), as (first, step, how many).
    """

    def __init__(
        self, key: str, sizes: Iterable[Iterable[tuple[int, int]]], file: str, parts: Iterable[tuple[int, int, int]]
    ) -> None:
        self.key, self.file = key, file
        self.sizes = tuple(tuple(dim) for dim in sizes)
        self.parts = tuple(parts)
        self._counts = [sum(count for _, count in dim) for dim in self.sizes]
        # Where each row of equal ones begins: (offset, number) along a dim, and a number of a box among the parts.
        self._offsets = [list(accumulate((size * count for size, count in dim), initial=0)) for dim in self.sizes]
        self._numbers = [list(accumulate((count for _, count in dim), initial=0)) for dim in self.sizes]
        self._firsts = list(accumulate((count for _, _, count in self.parts), initial=0))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
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
        """The box of that number."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        place = []
        left = index
        for count in reversed(self._counts):
            left, number = divmod(left, count)
            place.append(number)
        return self._chunk(place[::-1])

    def __iter__(self) -> Iterator[TensorChunk]:
        for place in product(*map(range, self._counts)):
            yield self._chunk(place)

    def _chunk(self, place: Sequence[int]) -> TensorChunk:
        offsets, shape, index = [], [], 0
        for dim, number in enumerate(place):
            row = bisect_right(self._numbers[dim], number) - 1
            size = self.sizes[dim][row][0]
            offsets.append(self._offsets[dim][row] + (number - self._numbers[dim][row]) * size)
            shape.append(size)
            index = index * self._counts[dim] + number
        row = bisect_right(self._firsts, index) - 1
        first, step, _ = self.parts[row]
        number = first + step * (index - self._firsts[row])
        return TensorChunk(tuple(offsets), tuple(shape), file_of(self.file, number), self.key)

    def overlapping(self, offsets: Sequence[int], shape: Sequence[int]) -> Iterator[TensorChunk]:
        """Those that have something of a box; the others are not looked at."""
        if not prod(shape) or not len(self):
            return
        ranges = [
            range(self._number(dim, start), self._number(dim, start + size - 1) + 1)
            for dim, (start, size) in enumerate(zip(offsets, shape))
        ]
        for place in product(*ranges):
            yield self._chunk(place)

    def _number(self, dim: int, offset: int) -> int:
        row = bisect_right(self._offsets[dim], offset) - 1
        return self._numbers[dim][row] + (offset - self._offsets[dim][row]) // self.sizes[dim][row][0]

    def encode(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "sizes": [[list(row) for row in dim] for dim in self.sizes],
            "file": self.file,
            "parts": [list(row) for row in self.parts],
        }


def file_of(pattern: str, number: int) -> str:
    """The file of that number."""
    return pattern.replace("*", f"{number:05d}")


def overlapping(chunks: Sequence[TensorChunk], offsets: Sequence[int], shape: Sequence[int]) -> Iterator[TensorChunk]:
    """The chunks that have something of a box."""
    if isinstance(chunks, ChunkGrid):
        yield from chunks.overlapping(offsets, shape)
        return
    for chunk in chunks:
        if prod(meeting(chunk, offsets, shape)[1]):
            yield chunk


def meeting(
    chunk: TensorChunk, offsets: Sequence[int], shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(where it begins, its shape) of what a chunk and a box have in common."""
    begins = tuple(map(max, chunk.offsets, offsets))
    ends = [
        min(start + size, other + extent)
        for start, size, other, extent in zip(chunk.offsets, chunk.shape, offsets, shape)
    ]
    return begins, tuple(max(0, end - begin) for begin, end in zip(begins, ends))


class ChunkGridReader:
    """Reads the grids of one manifest, whoever wrote it: what it takes is bounded by the manifest's length and its files."""

    def __init__(self, files: Mapping[str, Any]) -> None:
        self._files = files
        self._known: set[tuple[str, tuple[tuple[int, int, int], ...]]] = set()
        self._left = _MOST_FILES

    def read(self, name: str, told: Any, shape: tuple[int, ...]) -> ChunkGrid:
        """The grid of a tensor.

        Raises:
            CheckpointError: it does not make up the shape, or names files that are not there, or one twice.
        """
        file = told["file"]
        sizes = tuple(
            tuple((read_count(size, 1), read_count(times, 1)) for size, times in dim) for dim in told["sizes"]
        )
        parts = tuple(
            (read_count(first), read_count(step, 1), read_count(times, 1)) for first, step, times in told["parts"]
        )
        if not isinstance(file, str) or file.count("*") != 1:
            raise CheckpointError(f"the manifest has {file!r} instead of a file name with one '*'")
        grid = ChunkGrid(name, sizes, file, parts)
        if grid.shape != shape or len(grid) > len(self._files) or len(grid) != sum(each[2] for each in parts):
            raise CheckpointError(f"the boxes of {name!r}, each in its own file, do not cover its shape {shape}")
        self._check_files(name, grid)
        return grid

    def _check_files(self, name: str, grid: ChunkGrid) -> None:
        if (grid.file, grid.parts) in self._known:
            return
        self._left -= len(grid)
        if self._left < 0:
            raise CheckpointError(f"the tensors of the manifest are in more than {_MOST_FILES:,} files")
        found: set[str] = set()
        for first, step, times in grid.parts:
            found.update(file_of(grid.file, number) for number in range(first, first + step * times, step))
        absent = next((file for file in found if file not in self._files), None)
        if absent is not None:
            raise CheckpointError(f"the tensor {name!r} is in {absent!r}, which the manifest does not list")
        if len(found) != len(grid):
            raise CheckpointError(f"the manifest places two boxes of {name!r} in one file")
        self._known.add((grid.file, grid.parts))


def read_count(value: Any, least: int = 0) -> int:
    """A whole number of a manifest.

    Raises:
        CheckpointError: it is none, or out of range.
    """
    if type(value) is not int or not least <= value <= MOST:
        raise CheckpointError(f"the manifest has {value!r} where a whole number, {least} or more, belongs")
    return value
