"""A model of CUDA's caching allocator: what a sequence of allocations takes from the card, and when it no longer fits.

Its rules are those of torch's `CUDACachingAllocator` at its default settings: requests are rounded to 512 bytes, small ones and
large ones have pools of their own, the smallest free block that is large enough is split, neighbours that are free are merged, and
what was taken from the card is kept until the card is full. With expandable segments each pool is one range of addresses that grows
by pages.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from headway.errors import StateError
from headway.forecasting.tracing.events import MemoryEvent

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


class DeviceFull(Exception):
    """The card is full: what was asked for does not fit, even after everything cached was given back."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"{num_bytes} bytes do not fit")
        self.num_bytes = num_bytes


@dataclass(slots=True, eq=False)
class _Block:
    address: int
    size: int
    pool: "_Pool"
    is_free: bool = True
    is_mapped: bool = True
    before: "_Block | None" = None
    after: "_Block | None" = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address

    @property
    def reach(self) -> int:
        """Its size, with the room behind it that has no memory yet; only an expandable segment has such room."""
        room = self.after
        return self.size + (room.size if room is not None and not room.is_mapped else 0)


@dataclass(slots=True, eq=False)
class _Pool:
    """Free blocks of one size class on one stream, by size and address."""

    page: int
    rest: int
    """Bytes that must remain for a block to be split."""
    free: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, _Block] = field(default_factory=dict)
    """Free blocks by address."""
    first: _Block | None = None
    """Of the expandable segment: its lowest block."""

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
            if found is not None and block.reach >= found.reach:
                break
            found = block
        return found


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
        capacity: bytes that it may take from the card; None: as many as it likes.
        expandable: as with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.

    Attributes:
        allocated: bytes in blocks that are in use (torch.cuda.memory_allocated).
        reserved: bytes taken from the card (torch.cuda.memory_reserved).
        peak_allocated: the most of it so far.
        peak_reserved: the most of it so far.
        flushes: how often everything cached was given back because the card was full (`num_alloc_retries`).
    """

    def __init__(self, capacity: int | None = None, expandable: bool = False) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.flushes = 0
        self._capacity = capacity
        self._expandable = expandable
        self._pools: dict[tuple[Hashable, bool], _Pool] = {}
        self._live: dict[Hashable, _Block] = {}
        self._next_address = ROUND_LARGE

    def allocate(self, key: Hashable, num_bytes: int, stream: Hashable = 0) -> None:
        """Answer one request; of 0 bytes, nothing happens.

        Raises:
            Full: it does not fit.
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
            block = self._taken(pool, size)
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
            if neighbour is not None and neighbour.is_free and neighbour.is_mapped:
                block.pool.take(neighbour)
                self._merge(block, neighbour)
        block.pool.add(block)

    def release(self) -> None:
        """Give everything to the card that no block in use needs: whole segments, or whole pages of an expandable one."""
        for pool in self._pools.values():
            for block in list(pool.blocks.values()):
                if self._expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.take(block)
                    self.reserved -= block.size

    def _pool(self, size: int, stream: Hashable) -> _Pool:
        is_small = size <= SMALL
        pool = self._pools.get((stream, is_small))
        if pool is None:
            # Blocks of an expandable segment are split as finely as small ones.
            rest = MIN_BLOCK if is_small or self._expandable else SMALL + 1
            pool = _Pool(SMALL_SEGMENT if is_small else LARGE_SEGMENT, rest)
            self._pools[stream, is_small] = pool
        return pool

    def _taken(self, pool: _Pool, size: int) -> _Block:
        """A block of at least `size` bytes, in no pool, with memory that was taken from the card."""
        take = self._grow if self._expandable else self._segment
        block = take(pool, size)
        if block is None:
            self.release()
            self.flushes += 1
            block = take(pool, size)
        if block is None:
            raise DeviceFull(size)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def _fits(self, num_bytes: int) -> bool:
        return self._capacity is None or self.reserved + num_bytes <= self._capacity

    def _segment(self, pool: _Pool, size: int) -> _Block | None:
        taken = segment_of(size)
        if not self._fits(taken):
            return None
        self.reserved += taken
        self._next_address += taken
        return _Block(self._next_address - taken, taken, pool)

    def _split(self, block: _Block, size: int) -> None:
        left = block.size - size
        if left < block.pool.rest:
            return
        rest = _Block(block.address + size, left, block.pool, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
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
        if block.pool.first is other:
            block.pool.first = block

    # ---------------------------------------------------------------- expandable segments

    def _grow(self, pool: _Pool, size: int) -> _Block | None:
        """The lowest gap, with the free block before it, that can hold `size` bytes, filled with pages."""
        if pool.first is None:
            pool.first = _Block(0, 1 << 60, pool, is_mapped=False)
        gap: _Block | None = pool.first
        while gap is not None:
            if not gap.is_mapped:
                start = gap.before if gap.before is not None and gap.before.is_free else gap
                if self._room(start) >= size:
                    return self._map(pool, start, size)
            gap = gap.after
        return None

    @staticmethod
    def _room(start: _Block) -> int:
        room, block = 0, start
        while block.is_free:
            room += block.size
            if block.after is None:
                break
            block = block.after
        return room

    def _map(self, pool: _Pool, start: _Block, size: int) -> _Block | None:
        block = start
        if block.is_mapped:
            pool.take(block)
        else:
            mapped = self._mapped(pool, block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while True:
            following = block.after
            if following is not None and following.is_free and following.is_mapped:
                pool.take(following)
            elif block.size < size:
                assert following is not None
                following = self._mapped(pool, following, min(following.size, size - block.size))
                if following is None:
                    pool.add(block)
                    return None
            else:
                return block
            self._merge(block, following)

    def _mapped(self, pool: _Pool, gap: _Block, size: int) -> _Block | None:
        """Pages at the start of a gap; None where the card has none left."""
        pages = min(gap.size, -(-size // pool.page) * pool.page)
        if not self._fits(pages):
            return None
        self.reserved += pages
        if pages < gap.size:
            rest = _Block(gap.address + pages, gap.size - pages, pool, is_mapped=False, before=gap, after=gap.after)
            if rest.after is not None:
                rest.after.before = rest
            gap.after, gap.size = rest, pages
        gap.is_mapped = True
        return gap

    def _unmap(self, block: _Block) -> None:
        pool, page = block.pool, block.pool.page
        begin = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if end <= begin:
            return
        pool.take(block)
        self.reserved -= end - begin
        if block.address < begin:
            self._split_off(block, begin - block.address)
            pool.add(block)
            assert block.after is not None
            block = block.after
        if end < block.address + block.size:
            self._split_off(block, end - block.address)
            assert block.after is not None
            pool.add(block.after)
        block.is_mapped = False
        for neighbour in (block.before, block.after):
            if neighbour is not None and not neighbour.is_mapped:
                self._merge(block, neighbour)

    @staticmethod
    def _split_off(block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.size - size, block.pool, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size = rest, size


@dataclass(frozen=True)
class AllocationReplay:
    """What a sequence of allocations took.

    Attributes:
        allocated: the most that was in use at once, bytes; each request rounded to 512.
        reserved: the most that was taken from the card, bytes.
        flushes: how often the card was full and everything cached was given back.
        fits: False: it ended in an out-of-memory error.
        peak: the index of the event at which the most was in use.
    """

    allocated: int
    reserved: int
    flushes: int
    fits: bool
    peak: int


def replay(events: Iterable[MemoryEvent], capacity: int | None = None, expandable: bool = False) -> AllocationReplay:
    """Let a fresh allocator answer these events.

    Args:
        events: in the order in which they happened.
        capacity: bytes that it may take from the card; None: as many as it likes.
        expandable: as with expandable segments.
    """
    allocator = Allocator(capacity, expandable)
    peak, fits, most = 0, True, 0
    for index, event in enumerate(events):
        if event.num_bytes < 0:
            allocator.free(event.key)
            continue
        try:
            allocator.allocate(event.key, event.num_bytes, event.stream)
        except DeviceFull:
            peak, fits = index, False
            break
        if allocator.allocated > most:
            most, peak = allocator.allocated, index
    return AllocationReplay(allocator.peak_allocated, allocator.peak_reserved, allocator.flushes, fits, peak)
