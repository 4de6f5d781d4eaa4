"""How much pinned memory to ask for at a time: torch rounds each piece up to a power of two, so pieces are powers of two."""

from collections.abc import Iterator, Sequence

ARENA = 1 << 30
"""The most bytes of one piece, unless one tensor alone is larger."""
_ALIGNED = 256


def arenas(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Pieces of memory for tensors of these sizes, as (bytes, [(which tensor, where it begins)]), in order.

    Each is the largest power of two that the rest fills, up to `ARENA`; a tensor that is larger gets one of its own.

    Args:
        sizes: of the tensors, in bytes.
        limit: bytes of all pieces together; tensors beyond it get no place.
    """
    needed = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
    index, rest = 0, sum(needed)
    while index < len(needed):
        num_bytes = min(max(min(_floor(rest), ARENA), _ceil(needed[index])), _floor(limit))
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


def pieces(size: int) -> list[int]:
    """Sizes of pieces that hold `size` bytes: powers of two, and a last one that is rounded up by less than an eighth of them all."""
    found: list[int] = []
    rest = size
    while rest > 0:
        found.append(_floor(rest) if 8 * rest > size else rest)
        rest -= found[-1]
    return found


def _floor(number: int) -> int:
    """The largest power of two that is not larger; 0 for 0."""
    return 1 << (number.bit_length() - 1) if number > 0 else 0


def _ceil(number: int) -> int:
    """The smallest power of two that is not smaller; 0 for 0."""
    return 1 << (number - 1).bit_length() if number > 0 else 0
