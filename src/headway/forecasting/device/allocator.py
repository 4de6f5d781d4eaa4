"""Memory that is asked for and given back, in order, and what CUDA's caching allocator takes from the card for it.

The model's rules are those of torch's `CUDACachingAllocator` at its default settings: requests are rounded to 512 bytes, small ones
and large ones have pools of their own, the smallest free block that is large enough is split, free neighbours are merged, and what
was taken from the card is kept. With expandable segments each pool is one range of addresses that grows by pages. A full card,
on which torch gives back what it has cached, is not modelled: a forecast says what a step takes where there is room.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.errors import StateError


class MemoryEvent(NamedTuple):
    """Memory that is asked for or given back.

    Attributes:
        key: of the memory, the same at both; given anew for each request.
        num_bytes: asked for; given back: negative.
        what: the operation that asked for it.
        where: the user's line, "train.py:12 in main"; "" where none is.
        kind: what it turned out to be: one of `KINDS`.
        stream: on which it is asked for; 0: the one that computes.
    """

    key: int
    num_bytes: int
    what: str = ""
    where: str = ""
    kind: str = "temporaries"
    stream: int = 0


KINDS = (
    "weights", "buffers", "batch", "gradients", "optimizer state", "activations", "cast weights", "gathered weights", "buckets",
    "workspaces", "temporaries",
)  # fmt: skip
"""What memory is held for, in the order in which it is shown."""

UNSURE = "unsure"
"""What asks for memory that may come on top of all the rest; it is the last event of a trace, and never given back."""


def told_apart(events: list[MemoryEvent]) -> tuple[list[MemoryEvent], int]:
    """What is known to be asked for, and the bytes that may come on top."""
    if events and events[-1].what == UNSURE:
        return events[:-1], events[-1].num_bytes
    return events, 0


def plain_peak(events: list[MemoryEvent]) -> int:
    """The most bytes that were in use at once, without any rounding."""
    held = most = 0
    for event in events:
        held += event.num_bytes
        most = max(most, held)
    return most


def split_at(events: list[MemoryEvent], index: int) -> dict[str, int]:
    """Bytes in use right after the event of that index, by kind."""
    held: dict[str, int] = {}
    for event in events[: index + 1]:
        held[event.kind] = held.get(event.kind, 0) + event.num_bytes
    return {kind: held[kind] for kind in KINDS if held.get(kind)}


MIN_BLOCK = 512
"""Every block is a multiple of it (kMinBlockSize)."""
SMALL = 1 << 20
"""Requests up to it come from the small pool (kSmallSize); a large block is split only if more than this is left."""
SMALL_SEGMENT = 2 << 20
"""What the small pool takes from the card at a time (kSmallBuffer)."""
LARGE_SEGMENT = 20 << 20
"""What the large pool takes for a request below `OWN_SEGMENT` (kLargeBuffer)."""
OWN_SEGMENT = 10 << 20
"""From here on a request gets a segment for itself (kMinLargeAlloc), rounded to `ROUND_LARGE`."""
ROUND_LARGE = 2 << 20
"""kRoundLarge."""
_ENDLESS = 1 << 60
"""Addresses of an expandable segment."""


@dataclass(slots=True, eq=False)
class _Block:
    address: int
    size: int
    pool: "_Pool"
    is_free: bool = True
    before: "_Block | None" = None
    after: "_Block | None" = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address


@dataclass(slots=True, eq=False)
class _Pool:
    """Free blocks of one size class on one stream, by size and address."""

    page: int
    rest: int
    """Bytes that must remain for a block to be split."""
    free: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, _Block] = field(default_factory=dict)
    """Free blocks by address."""
    last: _Block | None = None
    """Of the expandable segment: its highest block, which can grow."""

    def add(self, block: _Block) -> None:
        insort(self.free, block.key)
        self.blocks[block.address] = block

    def take(self, block: _Block) -> None:
        del self.free[bisect_left(self.free, block.key)]
        del self.blocks[block.address]

    def best(self, size: int) -> _Block | None:
        """The smallest free block of at least `size` bytes, or the next larger ones while each reaches less far (get_free_block)."""
        found: _Block | None = None
        for index in range(bisect_left(self.free, (size, 0)), len(self.free)):
            block = self.blocks[self.free[index][1]]
            if found is not None and self._reach(block) >= self._reach(found):
                break
            found = block
        return found

    def _reach(self, block: _Block) -> int:
        """Its size, with the room for it to grow."""
        return block.size + (_ENDLESS if block is self.last else 0)


def rounded(num_bytes: int) -> int:
    """The size of the block for a request, bytes."""
    return max(MIN_BLOCK, -(-num_bytes // MIN_BLOCK) * MIN_BLOCK)


def segment_of(size: int) -> int:
    """What is taken from the card for a block of `size` bytes, where no free one is large enough."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


class Allocator:
    """Answers allocations as CUDA's caching allocator would.

    Args:
        expandable: as with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.

    Attributes:
        allocated: bytes in blocks that are in use (torch.cuda.memory_allocated).
        reserved: bytes taken from the card (torch.cuda.memory_reserved).
        peak_allocated: the most of it so far.
        peak_reserved: the most of it so far.
    """

    def __init__(self, expandable: bool = False) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._expandable = expandable
        self._pools: dict[tuple[Hashable, bool], _Pool] = {}
        self._live: dict[Hashable, _Block] = {}
        self._next_address = ROUND_LARGE

    def allocate(self, key: Hashable, num_bytes: int, stream: Hashable = 0) -> None:
        """Answer one request; of 0 bytes, nothing happens.

        Raises:
            StateError: the key is in use.
        """
        if key in self._live:
            raise StateError(f"{key!r} is allocated already; free it first, or give another key")
        if num_bytes <= 0:
            return
        size = rounded(num_bytes)
        pool = self._pool(size, stream)
        block = pool.best(size)
        if block is not None:
            pool.take(block)
        else:
            block = self._grow(pool, size) if self._expandable else self._segment(pool, size)
            self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._split(block, size)
        block.is_free = False
        self._live[key] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, key: Hashable) -> None:
        """Give a block back to its pool; a key of 0 bytes, or an unknown one, is left alone."""
        block = self._live.pop(key, None)
        if block is None:
            return
        self.allocated -= block.size
        block.is_free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                block.pool.take(neighbour)
                self._merge(block, neighbour)
        block.pool.add(block)

    def _pool(self, size: int, stream: Hashable) -> _Pool:
        is_small = size <= SMALL
        pool = self._pools.get((stream, is_small))
        if pool is None:
            # Blocks of an expandable segment are split as finely as small ones.
            rest = MIN_BLOCK if is_small or self._expandable else SMALL + 1
            pool = _Pool(SMALL_SEGMENT if is_small else LARGE_SEGMENT, rest)
            self._pools[stream, is_small] = pool
        return pool

    def _segment(self, pool: _Pool, size: int) -> _Block:
        taken = segment_of(size)
        self.reserved += taken
        self._next_address += taken
        return _Block(self._next_address - taken, taken, pool)

    def _grow(self, pool: _Pool, size: int) -> _Block:
        """As many pages as are missing, behind the pool's last block or merged with it where that is free."""
        last = pool.last
        room = last.size if last is not None and last.is_free else 0
        pages = -(-(size - room) // pool.page) * pool.page
        self.reserved += pages
        if last is not None and room:
            pool.take(last)
            last.size += pages
            return last
        block = _Block(0 if last is None else last.address + last.size, pages, pool, before=last)
        if last is not None:
            last.after = block
        pool.last = block
        return block

    def _split(self, block: _Block, size: int) -> None:
        left = block.size - size
        if left < block.pool.rest:
            return
        rest = _Block(block.address + size, left, block.pool, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        elif block.pool.last is block:
            block.pool.last = rest
        block.after, block.size = rest, size
        block.pool.add(rest)

    @staticmethod
    def _merge(block: _Block, other: _Block) -> None:
        """`block` takes in a neighbour."""
        if other is block.before:
            block.address = other.address
            block.before = other.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = other.after
            if block.after is not None:
                block.after.before = block
        block.size += other.size
        if block.pool.last is other:
            block.pool.last = block


@dataclass(frozen=True)
class AllocationReplay:
    """What a sequence of allocations took.

    Attributes:
        allocated: the most that was in use at once, bytes; each request rounded to 512.
        reserved: the most that was taken from the card, bytes.
        peak: the index of the event at which the most was in use.
    """

    allocated: int
    reserved: int
    peak: int


def replay(events: Iterable[MemoryEvent], expandable: bool = False) -> AllocationReplay:
    """Let a fresh allocator answer these events.

    Args:
        events: in the order in which they happened.
        expandable: as with expandable segments.
    """
    allocator = Allocator(expandable)
    peak, most = 0, 0
    for index, event in enumerate(events):
        if event.num_bytes < 0:
            allocator.free(event.key)
            continue
        allocator.allocate(event.key, event.num_bytes, event.stream)
        if allocator.allocated > most:
            most, peak = allocator.allocated, index
    return AllocationReplay(allocator.peak_allocated, allocator.peak_reserved, peak)
