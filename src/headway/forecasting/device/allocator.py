"""Replay allocations and frees by the rules of CUDA's caching allocator, to determine how much memory it reserves.

The rules are those of torch's `CUDACachingAllocator` with its default settings. Requests are rounded up to a multiple
of 512 bytes. Small and large requests have separate pools. A request gets the smallest free block that is large enough,
and the rest of the block is split off. Adjacent free blocks are merged. Reserved memory is never returned to the
device. With expandable segments, each pool is one address range that grows by pages.

If the GPU is full, torch frees its cached memory. This is not modeled, because a forecast computes how much memory a
step needs on a GPU that has enough.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from headway.errors import StateError
from headway.forecasting.device.memory_events import MemoryEvent

MIN_BLOCK = 512
"""Granularity of block sizes in bytes: every block size is a multiple of this (kMinBlockSize)."""
SMALL = 1 << 20
"""Largest request in bytes that uses the small pool (kSmallSize).

A block of the large pool is split only if more bytes than this remain.
"""
SMALL_SEGMENT = 2 << 20
"""Bytes that the small pool reserves at a time (kSmallBuffer)."""
LARGE_SEGMENT = 20 << 20
"""Bytes that the large pool reserves for a request below `OWN_SEGMENT` (kLargeBuffer)."""
OWN_SEGMENT = 10 << 20
"""Smallest request in bytes that gets a segment of its own (kMinLargeAlloc).

The size of such a segment is a multiple of `ROUND_LARGE`.
"""
ROUND_LARGE = 2 << 20
"""Granularity in bytes for the size of a segment that serves a single large request (kRoundLarge)."""
_ADDRESS_RANGE_BYTES = 1 << 60
"""Bytes in the address range of an expandable segment, larger than any GPU's memory."""


@dataclass(slots=True, eq=False)
class _Block:
    """Block of memory in a segment, in use or free.

    Attributes:
        address: Address of the block's first byte in the simulated memory.
        size: Bytes of the block.
        pool: Pool to which the block belongs.
        is_free: Whether the block is free.
        before: Neighbor at the next lower address in the segment, or None.
        after: Neighbor at the next higher address in the segment, or None.
    """

    address: int
    size: int
    pool: "_Pool"
    is_free: bool = True
    before: "_Block | None" = None
    after: "_Block | None" = None

    @property
    def key(self) -> tuple[int, int]:
        """Sort key of the block in its pool's list of free blocks: size, then address."""
        return self.size, self.address


@dataclass(slots=True, eq=False)
class _Pool:
    """Pool of free blocks on one stream, for either small or large requests.

    Attributes:
        page_bytes: Number of bytes by which an expandable segment of this pool grows at a time.
        min_remainder: Minimum number of bytes that a split must leave over. A block with a smaller remainder is not
            split.
        free_keys: Pairs of (size, address) of the free blocks, in ascending order.
        free_blocks: Free blocks, by address.
        end_block: Highest block of the expandable segment, the only one that can grow. None without such a segment.
    """

    page_bytes: int
    min_remainder: int
    free_keys: list[tuple[int, int]] = field(default_factory=list)
    free_blocks: dict[int, _Block] = field(default_factory=dict)
    end_block: _Block | None = None

    def add_block(self, block: _Block) -> None:
        """Add a free block."""
        insort(self.free_keys, block.key)
        self.free_blocks[block.address] = block

    def remove_block(self, block: _Block) -> None:
        """Remove a free block."""
        del self.free_keys[bisect_left(self.free_keys, block.key)]
        del self.free_blocks[block.address]

    def find_best_block(self, size: int) -> _Block | None:
        """Return the smallest free block that is large enough, or None, by the rules of torch's `get_free_block`.

        In an expandable segment, the size of the last block includes the address range into which it can grow. So any
        other free block that is large enough is preferred to the last one.

        Args:
            size: Bytes that the block must have.
        """
        best: _Block | None = None
        for index in range(bisect_left(self.free_keys, (size, 0)), len(self.free_keys)):
            block = self.free_blocks[self.free_keys[index][1]]
            if best is not None and self._compute_reach(block) >= self._compute_reach(best):
                break
            best = block
        return best

    def _compute_reach(self, block: _Block) -> int:
        """Return the block's size in bytes, plus the bytes by which it can grow in an expandable segment."""
        return block.size + (_ADDRESS_RANGE_BYTES if block is self.end_block else 0)


def round_to_block(num_bytes: int) -> int:
    """Round the size of a request in bytes up to a valid block size."""
    return max(MIN_BLOCK, -(-num_bytes // MIN_BLOCK) * MIN_BLOCK)


def compute_segment_size(size: int) -> int:
    """Return the bytes that the allocator reserves for a block of `size` bytes if no free block is large enough."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


class Allocator:
    """Simulation of CUDA's caching allocator.

    Args:
        expandable: Whether segments are expandable, as with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.

    Attributes:
        allocated: Bytes in blocks that are in use (`torch.cuda.memory_allocated`).
        reserved: Bytes reserved on the GPU (`torch.cuda.memory_reserved`).
        peak_allocated: Maximum of `allocated` so far.
        peak_reserved: Maximum of `reserved` so far.
    """

    def __init__(self, expandable: bool = False) -> None:
        self.allocated = 0
        self.reserved = 0
        self.peak_allocated = 0
        self.peak_reserved = 0
        self._is_expandable = expandable
        self._pools: dict[tuple[Hashable, bool], _Pool] = {}  # by stream and whether the pool is for small requests
        self._blocks_in_use: dict[Hashable, _Block] = {}  # by key of the memory
        self._next_address = ROUND_LARGE

    def allocate_memory(self, key: Hashable, num_bytes: int, stream: Hashable = 0) -> None:
        """Allocate memory that is identified by `key` until it is freed. A request of 0 bytes does nothing.

        Args:
            key: Identifier of the memory.
            num_bytes: Bytes to allocate.
            stream: CUDA stream that allocates. Default: 0.

        Raises:
            StateError: If the key is in use.
        """
        if key in self._blocks_in_use:
            raise StateError(f"{key!r} is allocated already; free it first, or give another key")
        if num_bytes <= 0:
            return
        size = round_to_block(num_bytes)
        pool = self._get_pool(size, stream)
        block = pool.find_best_block(size)
        if block is not None:
            pool.remove_block(block)
        else:
            block = self._grow_segment(pool, size) if self._is_expandable else self._reserve_segment(pool, size)
            self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._split_block(block, size)
        block.is_free = False
        self._blocks_in_use[key] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free_memory(self, key: Hashable) -> None:
        """Free the memory with this key. Do nothing if the key is unknown or its request was for 0 bytes."""
        block = self._blocks_in_use.pop(key, None)
        if block is None:
            return
        self.allocated -= block.size
        block.is_free = True
        for neighbor in (block.before, block.after):
            if neighbor is not None and neighbor.is_free:
                block.pool.remove_block(neighbor)
                self._merge_blocks(block, neighbor)
        block.pool.add_block(block)

    def _get_pool(self, size: int, stream: Hashable) -> _Pool:
        """Return the pool that serves requests of a size, and create it if necessary.

        Args:
            size: Rounded bytes of the request.
            stream: CUDA stream of the request.
        """
        is_small = size <= SMALL
        pool = self._pools.get((stream, is_small))
        if pool is None:
            # Large blocks of an expandable segment are split as finely as blocks of the small pool.
            min_remainder = MIN_BLOCK if is_small or self._is_expandable else SMALL + 1
            pool = _Pool(SMALL_SEGMENT if is_small else LARGE_SEGMENT, min_remainder)
            self._pools[stream, is_small] = pool
        return pool

    def _reserve_segment(self, pool: _Pool, size: int) -> _Block:
        """Reserve a new segment of device memory, and return it as one block.

        Args:
            pool: Pool to which the segment belongs.
            size: Bytes of the request that the segment must hold.
        """
        num_bytes = compute_segment_size(size)
        block = _Block(self._next_address, num_bytes, pool)
        self.reserved += num_bytes
        self._next_address += num_bytes
        return block

    def _grow_segment(self, pool: _Pool, size: int) -> _Block:
        """Add pages to an expandable segment, and return a free block of at least `size` bytes at its end.

        If the last block of the segment is free, that block grows. Otherwise a new block is added after it.
        """
        end_block = pool.end_block
        free_bytes = end_block.size if end_block is not None and end_block.is_free else 0
        num_pages = -(-(size - free_bytes) // pool.page_bytes)
        added_bytes = num_pages * pool.page_bytes
        self.reserved += added_bytes
        if end_block is not None and free_bytes:
            pool.remove_block(end_block)
            end_block.size += added_bytes
            return end_block
        address = 0 if end_block is None else end_block.address + end_block.size
        block = _Block(address, added_bytes, pool, before=end_block)
        if end_block is not None:
            end_block.after = block
        pool.end_block = block
        return block

    def _split_block(self, block: _Block, size: int) -> None:
        """Shrink `block` to `size` bytes, and add the remainder to the pool, unless the remainder is too small."""
        remaining_bytes = block.size - size
        if remaining_bytes < block.pool.min_remainder:
            return
        remainder = _Block(block.address + size, remaining_bytes, block.pool, before=block, after=block.after)
        if remainder.after is not None:
            remainder.after.before = remainder
        elif block.pool.end_block is block:
            block.pool.end_block = remainder
        block.after = remainder
        block.size = size
        block.pool.add_block(remainder)

    @staticmethod
    def _merge_blocks(block: _Block, other: _Block) -> None:
        """Extend `block` by an adjacent free block, which ceases to exist."""
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
        if block.pool.end_block is other:
            block.pool.end_block = block


@dataclass(frozen=True)
class AllocationReplay:
    """Peak memory during a replayed sequence of allocations.

    Attributes:
        allocated: Maximum number of bytes in use. On CUDA, each request is rounded up to a multiple of 512 bytes.
        reserved: Maximum number of bytes reserved on the device.
        peak_index: Index of the event at which the most bytes are in use.
    """

    allocated: int
    reserved: int
    peak_index: int


def replay_events(events: Iterable[MemoryEvent], expandable: bool = False) -> AllocationReplay:
    """Replay allocation events on a new simulated allocator, and return the peak memory.

    Args:
        events: Events in order.
        expandable: Whether segments are expandable. Default: False.
    """
    allocator = Allocator(expandable)
    peak_index, most = 0, 0
    for index, event in enumerate(events):
        if event.num_bytes < 0:
            allocator.free_memory(event.key)
            continue
        allocator.allocate_memory(event.key, event.num_bytes, event.stream)
        if allocator.allocated > most:
            most, peak_index = allocator.allocated, index
    return AllocationReplay(allocator.peak_allocated, allocator.peak_reserved, peak_index)
