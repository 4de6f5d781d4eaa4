"""Sizes of pinned allocations, which are powers of two because torch rounds each allocation up to a power of two."""

from collections.abc import Iterator, Sequence

ARENA = 1 << 30
"""Maximum size in bytes of one piece of pinned memory, unless a single tensor is larger."""

_ALIGNED = 256


def plan_arenas(
    sizes: Sequence[int], limit: int, max_bytes: int = ARENA
) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Divide tensors, in order, among pieces of pinned memory.

    The size of each piece is the largest power of two that the remaining tensors can fill, up to `max_bytes`. It is
    larger only if the next tensor would not fit otherwise.

    Args:
        sizes: Sizes of the tensors in bytes.
        limit: Maximum total size of all pieces in bytes. The first tensor that does not fit, and all tensors after it,
            are left out.
        max_bytes: Maximum size of one piece, unless a single tensor is larger. Default: 1 GiB.

    Yields:
        For each piece, its size in bytes and a list of pairs (tensor index, offset in the piece in bytes). Offsets are
            multiples of 256 bytes.
    """
    needed = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
    index, rest = 0, sum(needed)
    while index < len(needed):
        num_bytes = min(
            max(min(_floor_power_of_two(rest), max_bytes), _ceil_power_of_two(needed[index])),
            _floor_power_of_two(limit),
        )
        part, offset = [], 0
        while index < len(needed) and offset + needed[index] <= num_bytes:
            part.append((index, offset))
            offset += needed[index]
            index += 1
        if not part:
            return
        rest -= offset
        limit -= num_bytes
        yield num_bytes, part


def split_size(size: int) -> list[int]:
    """Return the sizes of pieces that together hold `size` bytes.

    All sizes are powers of two, except possibly the last one. If an allocator rounds the last one up to a power of two,
    it wastes less than an eighth of `size`.
    """
    found: list[int] = []
    rest = size
    while rest > 0:
        found.append(_floor_power_of_two(rest) if 8 * rest > size else rest)
        rest -= found[-1]
    return found


def _floor_power_of_two(number: int) -> int:
    """Return the largest power of two that is not larger than `number`; 0 for 0."""
    return 1 << (number.bit_length() - 1) if number > 0 else 0


def _ceil_power_of_two(number: int) -> int:
    """Return the smallest power of two that is not smaller than `number`; 0 for 0."""
    return 1 << (number - 1).bit_length() if number > 0 else 0
