"""Sizes of pinned allocations, which are powers of two because torch rounds each pinned allocation up to a power of two."""

from collections.abc import Iterator, Sequence

MAX_ARENA_BYTES = 1 << 30
"""Maximum size in bytes of one piece of pinned memory, unless a single tensor is larger."""

_ALIGNMENT = 256
"""Alignment of tensors in a piece of memory, in bytes."""


def plan_arenas(
    sizes: Sequence[int], limit: int, max_bytes: int = MAX_ARENA_BYTES
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
    aligned_sizes = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    index, remaining_bytes, available_bytes = 0, sum(aligned_sizes), limit
    while index < len(aligned_sizes):
        num_bytes = min(_floor_power_of_two(remaining_bytes), max_bytes)
        num_bytes = max(num_bytes, _ceil_power_of_two(aligned_sizes[index]))
        num_bytes = min(num_bytes, _floor_power_of_two(available_bytes))
        placements, offset = [], 0
        while index < len(aligned_sizes) and offset + aligned_sizes[index] <= num_bytes:
            placements.append((index, offset))
            offset += aligned_sizes[index]
            index += 1
        if not placements:  # the limit leaves no room for the next tensor
            return
        remaining_bytes -= offset
        available_bytes -= num_bytes
        yield num_bytes, placements


def split_into_powers_of_two(size: int) -> list[int]:
    """Return the sizes in bytes of pieces that together hold `size` bytes.

    All sizes are powers of two, except possibly the last one. If an allocator rounds the last one up to a power of two,
    it wastes less than an eighth of `size`.
    """
    pieces: list[int] = []
    remaining = size
    while remaining > 0:
        # The last eighth is not divided further, so that there are few pieces.
        is_last = 8 * remaining <= size
        pieces.append(remaining if is_last else _floor_power_of_two(remaining))
        remaining -= pieces[-1]
    return pieces


def _floor_power_of_two(number: int) -> int:
    """Return the largest power of two that is not larger than `number`; 0 for 0."""
    return 1 << (number.bit_length() - 1) if number > 0 else 0


def _ceil_power_of_two(number: int) -> int:
    """Return the smallest power of two that is not smaller than `number`; 0 for 0."""
    return 1 << (number - 1).bit_length() if number > 0 else 0
