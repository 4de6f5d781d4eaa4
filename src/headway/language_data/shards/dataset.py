"""`ShardedDataset`: map-style dataset over sharded files, with an order that does not depend on ranks or workers."""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy
import torch

from headway.common.text import format_bytes
from headway.errors import ConfigError, DataError
from headway.language_data.fingerprinted import FingerprintedDataset
from headway.language_data.shards.blocks import BlockTable, OpenShard, RecordBlock
from headway.language_data.shards.copies import LocalCopies
from headway.language_data.shards.formats import build_format, choose_compression, choose_format
from headway.language_data.shards.index import ShardAccess, describe_content, load_tables
from headway.language_data.shards.mds import list_shards
from headway.language_data.shards.order import RecordLocations, ShardOrder, Stripes
from headway.language_data.shards.retry import RetryPolicy
from headway.language_data.shards.storage import (
    RangeReader,
    ShardFile,
    find_files,
    get_cache_folder,
    get_scheme,
    join_url,
)
from headway.log import get_logger

log = get_logger(__name__)

ShardPaths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""Path, pattern or URL of shards, or a list of them."""
_MDS_INDEX = "index.json"
_MAX_OPEN_SHARDS = 64
"""Largest number of files that each process keeps open."""


class ShardedDataset(FingerprintedDataset[Any]):
    """Map-style dataset over the records of sharded files, local or remote.

    Sample `i` is a pure function of (files, seed, epoch, i). A prepared loader therefore reads the same samples in the
    same order on any number of ranks and workers. A resumed run continues at its position without reading the samples
    before it. Leave out `shuffle=True` in the DataLoader. The dataset itself shuffles, in such a way that neighboring
    positions are read from the same blocks of a file.

    The formats and their records:

    - "jsonl": JSON lines; each value is a record.
    - "parquet" and "arrow" (stream or file format): a dict from column names to values; needs pyarrow.
    - "tar" (WebDataset): a dict of bytes by extension, and the base name as "__key__".
    - "mds" (MosaicML): a dict from column names to values. Give the dataset's folder or its `index.json`.

    Files may be compressed with gzip, bz2, xz, zstd or lz4. A compressed shard is decompressed into the folder of local
    copies when it is needed. Shuffling keeps the blocks of a compressed shard together.

    A scan divides each file into blocks (records that are read together), and stores the result in `cache_dir`. The
    scan reads JSON lines and arrow files completely. In tar files, it can skip data only in members larger than 1 MiB.
    In parquet and mds files, it reads only the footer or header. With several ranks, all of them may create the dataset
    at once; the processes of a machine share one scan.

    Args:
        shards: Path, pattern (`*`, `?`, `[...]`) or URL of the shards, or a list of them. `http://` and `https://` URLs
            are read with range requests, `s3://`, `gs://` and `az://` URLs by Headway's own client, and URLs with other
            schemes by fsspec.
        format: Format of all shards, "jsonl", "parquet", "arrow", "tar" or "mds". None (the default): chosen by the
            suffix of each file.
        shuffle: Whether to shuffle the blocks of all shards, and then the records within windows of `shuffle_buffer`
            records. Each epoch has another order. Default: False.
        seed: Seed of the order, equal on all ranks. Default: 0.
        shuffle_buffer: Number of records that are shuffled together. Default: 10,000.
        num_stripes: Number of ranges of the shuffled data that are read in parallel, for remote shards in a run on
            several machines. Each machine then fetches only the blocks that its ranks read. Choose a multiple of the
            numbers of machines on which the run may be resumed. Default: 1, so that each machine fetches all blocks.
            Other values require `shuffle=True`.
        samples_per_step: Number of samples that all ranks together read per step: batch size times number of ranks.
            Needed only with `num_stripes`, and must be a multiple of it.
        columns: Columns of parquet and arrow shards to read. Default: all.
        on_damage: "error" (the default): reading a damaged record raises an error with the file and the offset. "skip":
            damaged records are left out and counted in `num_skipped`. All records are then read once, when the index is
            built.
        cache_dir: Folder for indexes and local copies, which all processes of a machine share. Default:
            `~/.cache/headway/shards`.
        memory_bytes: Bytes of host memory for decoded blocks in each process that reads, such as a DataLoader's worker.
            At least one block is kept. Default: 128 MiB.
        copy_bytes: Limit on the total size of the local copies in `cache_dir`, in bytes. Default: 64 GiB.
        stall_limit: Seconds for which a read from remote storage is repeated while it fails for a transient reason,
            such as HTTP 429 or 503. The other ranks wait meanwhile. If the read still fails after this time, the run
            ends with an error that names the shard. Default: 300.
        attempt_timeout: Seconds that one attempt to read from remote storage may go without receiving data. Default:
            30.

    Attributes:
        num_skipped: Number of damaged records that are left out.
        stall_limit: Seconds for which a read may keep the other ranks waiting; 0.0 if all shards are local.
        orders_samples: Whether the dataset itself shuffles. If True, a mixture reads the dataset without shuffling it.

    Raises:
        ConfigError: If an argument is out of range.
        DataError: If there are no files or no records, or a file is damaged or cannot be read.
        OptionalDependencyMissing: If a package that the format or the storage needs is not installed.

    Example::

        dataset = ShardedDataset("data/*.jsonl.gz", shuffle=True, seed=1)
        loader = accelerator.prepare(DataLoader(dataset, batch_size=8, num_workers=2, collate_fn=collate))
    """

    fingerprinted_settings = (
        "the shards, their number of records, or shuffle=, seed=, shuffle_buffer=, num_stripes= or samples_per_step="
    )

    def __init__(
        self,
        shards: ShardPaths,
        format: str | None = None,  # noqa: A002  (the word that pandas and datasets use)
        *,
        shuffle: bool = False,
        seed: int = 0,
        shuffle_buffer: int = 10_000,
        num_stripes: int = 1,
        samples_per_step: int | None = None,
        columns: Sequence[str] | None = None,
        on_damage: Literal["error", "skip"] = "error",
        cache_dir: str | os.PathLike[str] | None = None,
        memory_bytes: int = 128 * 2**20,
        copy_bytes: int = 64 * 2**30,
        stall_limit: float = 300.0,
        attempt_timeout: float = 30.0,
    ) -> None:
        _check_arguments(on_damage, shuffle_buffer, memory_bytes, copy_bytes, stall_limit, attempt_timeout)
        stripes = _build_stripes(num_stripes, samples_per_step, shuffle)
        policy = RetryPolicy(stall_limit, attempt_timeout)
        folder = get_cache_folder(cache_dir)
        self._access = ShardAccess(LocalCopies(folder / "copies", copy_bytes, policy), policy)
        self._files = _find_shards(shards, format, policy)
        format_names = [choose_format(file.url, format) for file in self._files]
        formats = [(name, build_format(name, columns)) for name in format_names]
        tables = load_tables(self._files, formats, self._access, folder / "index", skips_damage=on_damage == "skip")
        self._formats = [shard_format for _, shard_format in formats]
        self._blocks = _join_tables(self._files, tables)
        self.num_skipped = sum(table.num_skipped for table in tables)
        if not self._blocks.counts.sum():
            skipped = f" ({self.num_skipped} damaged ones are left out)" if self.num_skipped else ""
            raise DataError(f"{shards!r} has no records{skipped}; give shards with at least one record")
        if self.num_skipped:
            log.warning("%d damaged records of %d files are left out", self.num_skipped, len(self._files))
        buffer_size = shuffle_buffer if shuffle else 0
        self._order = ShardOrder(self._blocks.counts, self._blocks.units, seed, buffer_size, stripes)
        self._settings: tuple[object, ...] = (shuffle, seed, shuffle_buffer)  # that determine the order
        if num_stripes > 1:
            self._settings += (num_stripes, samples_per_step)
        self.orders_samples = shuffle
        # Shared memory, because persistent workers keep their copy of the dataset from one epoch to the next.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._memory_bytes = memory_bytes
        self._open_shards = _OpenShards(self._files, self._formats, self._access)
        self._block_cache = _BlockCache(memory_bytes)
        self.stall_limit = 0.0 if all(file.is_local for file in self._files) else stall_limit

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, position: int) -> Any:
        """Return the record at a position of the current epoch's order. Negative positions count from the end.

        Raises:
            IndexError: If the position is out of range.
            DataError: If the record is damaged, or its storage does not respond.
        """
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """Return the records at several positions of the current epoch's order. DataLoader calls this for each batch.

        Negative positions count from the end.

        Raises:
            IndexError: If a position is out of range.
            DataError: If a record is damaged, or its storage does not respond.
        """
        signed = numpy.asarray(positions, numpy.int64)
        length = len(self)
        if len(signed) and not (-length <= int(signed.min()) and int(signed.max()) < length):
            raise IndexError(f"positions {min(positions)} to {max(positions)} of a dataset with {length} records")
        locations = self._order.locate(numpy.where(signed < 0, signed + length, signed), int(self._epoch))
        return self._read_records(locations)

    def __iter__(self) -> Iterator[Any]:
        """Yield the records in the order of the current epoch."""
        return (self[position] for position in range(len(self)))

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch whose order the next reads use. A prepared loader calls this method before each pass.

        Args:
            epoch: Index of the epoch, from 0.
        """
        self._epoch.fill_(epoch)

    @property
    def source_fingerprint(self) -> str:
        """Hash of the files' names, sizes and record counts, and of the settings that determine the order.

        Ranks that read the same data in the same order have equal hashes.
        """
        digest = hashlib.sha256(repr(self._settings).encode())
        for file in self._files:
            digest.update(f"\n{file.url.rpartition('/')[2]} {file.num_bytes}".encode())
        digest.update(self._blocks.counts.tobytes())
        return digest.hexdigest()[:32]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling, without open files and cached blocks."""
        empty_caches = {
            "_open_shards": _OpenShards(self._files, self._formats, self._access),
            "_block_cache": _BlockCache(self._memory_bytes),
        }
        return self.__dict__ | empty_caches

    def _read_records(self, locations: RecordLocations) -> list[Any]:
        """Return records in the order of their locations, reading all records of a block at once."""
        records: list[Any] = [None] * len(locations.blocks)
        places_by_block: dict[int, list[int]] = {}  # places in `records`
        for place, block in enumerate(locations.blocks.tolist()):
            places_by_block.setdefault(block, []).append(place)
        indices = locations.indices.tolist()
        for block, places in places_by_block.items():
            block_records = self._get_block(block).read_records([indices[place] for place in places])
            for place, record in zip(places, block_records):
                records[place] = record
        return records

    def _get_block(self, index: int) -> RecordBlock:
        """Return a block from the cache, or read it. Warn once if the cache is too small for the shuffle buffer."""
        block = self._block_cache.get_block(index)
        if block is None:
            block = self._load_block(index)
            is_too_small = self._block_cache.add_block(index, block)
            if is_too_small:
                log.warning_once(
                    "blocks of shards are read repeatedly, because those of one shuffle buffer need more memory than "
                    "memory_bytes (%s): allow more, or use a smaller shuffle_buffer (and leave out shuffle=True in the DataLoader)",
                    format_bytes(self._memory_bytes),
                )
        return block

    def _load_block(self, index: int) -> RecordBlock:
        """Read the block with this index from its file, and decode it without its damaged records."""
        blocks = self._blocks
        reader, open_shard = self._open_shards.get_shard(int(blocks.shards[index]))
        offset, size = int(blocks.offsets[index]), int(blocks.sizes[index])
        excluded = blocks.excluded.get(index, [])
        num_records = int(blocks.counts[index]) + len(excluded)
        block = open_shard.decode(reader.read_range(offset, size), offset, num_records)
        if excluded:
            block.drop_records(excluded)
        return block


@dataclass
class _AllBlocks:
    """Table of the blocks of all shards, in the order of the files.

    Attributes:
        shards: Index of each block's file.
        offsets: Byte offset of each block in its file.
        sizes: Size of each block in bytes.
        counts: Number of records in each block, without damaged records.
        units: Index of the unit that each block belongs to. A unit is a group of blocks that `ShardOrder` keeps
            together, such as those of a compressed shard.
        excluded: Indices, within a block, of the damaged records that are left out, by index of the block.
    """

    shards: "numpy.ndarray[Any, Any]"
    offsets: "numpy.ndarray[Any, Any]"
    sizes: "numpy.ndarray[Any, Any]"
    counts: "numpy.ndarray[Any, Any]"
    units: "numpy.ndarray[Any, Any]"
    excluded: dict[int, list[int]]


def _join_tables(files: Sequence[ShardFile], tables: Sequence[BlockTable]) -> _AllBlocks:
    """Concatenate the block tables of all shards. Damaged records are not counted.

    Args:
        files: All shards.
        tables: Block table of each shard.
    """
    shards: list[int] = []
    starts_unit: list[bool] = []
    excluded: dict[int, list[int]] = {}
    for shard, (file, table) in enumerate(zip(files, tables)):
        first_block = len(shards)
        for block, record in table.excluded:
            excluded.setdefault(first_block + block, []).append(record)
        is_compressed = choose_compression(file.url) is not None
        starts_unit += [block == 0 or not is_compressed for block in range(len(table.counts))]
        shards += [shard] * len(table.counts)
    counts = numpy.array([count for table in tables for count in table.counts], numpy.int64)
    for block, records in excluded.items():
        counts[block] -= len(records)
    return _AllBlocks(
        shards=numpy.array(shards, numpy.int64),
        offsets=numpy.array([offset for table in tables for offset in table.offsets], numpy.int64),
        sizes=numpy.array([size for table in tables for size in table.sizes], numpy.int64),
        counts=counts,
        units=numpy.cumsum(numpy.array(starts_unit, numpy.int64)) - 1,
        excluded=excluded,
    )


class _OpenShards:
    """Cache of open shards, at most 64 at a time.

    Args:
        files: All shards.
        formats: Format of each shard.
        access: Cache folder and retry policy with which the content of shards is opened.
    """

    def __init__(self, files: Sequence[ShardFile], formats: Sequence[Any], access: ShardAccess) -> None:
        self._files = files
        self._formats = formats
        self._access = access
        self._cache: OrderedDict[int, tuple[RangeReader, OpenShard]] = OrderedDict()

    def get_shard(self, index: int) -> tuple[RangeReader, OpenShard]:
        """Return the reader and the opened shard of the file with this index, and open it if necessary.

        If too many shards are open, the least recently used one is closed.
        """
        cached = self._cache.get(index)
        if cached is None:
            file = self._files[index]
            reader, num_bytes = self._access.open_content(file, caches_ranges=True)
            cached = reader, self._formats[index].open(reader, num_bytes, describe_content(file))
            while len(self._cache) >= _MAX_OPEN_SHARDS:
                _, (oldest_reader, _) = self._cache.popitem(last=False)
                oldest_reader.close()
            self._cache[index] = cached
        self._cache.move_to_end(index)
        return cached


class _BlockCache:
    """Cache of the most recently read blocks, within a memory limit.

    Args:
        max_bytes: Limit in bytes. A single block may exceed it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._blocks: OrderedDict[int, RecordBlock] = OrderedDict()
        self._recently_evicted: OrderedDict[int, None] = OrderedDict()  # an ordered set of the last 16 blocks
        self._num_reloaded = 0

    def get_block(self, index: int) -> RecordBlock | None:
        """Return the block with this index, or None if it is not cached. The block then counts as recently used."""
        block = self._blocks.get(index)
        if block is not None:
            self._blocks.move_to_end(index)
        return block

    def add_block(self, index: int, block: RecordBlock) -> bool:
        """Add a block to the cache, and evict the least recently used blocks beyond the limit.

        Args:
            index: Index of the block.
            block: Block to add. It stays in the cache even if it alone exceeds the limit.

        Returns:
            Whether more than 100 blocks were added again soon after their eviction. The limit is then too small.
        """
        if index in self._recently_evicted:
            self._num_reloaded += 1
        self._blocks[index] = block
        self._num_bytes += block.num_bytes
        while self._num_bytes > self._max_bytes and len(self._blocks) > 1:
            evicted_index, evicted_block = self._blocks.popitem(last=False)
            self._num_bytes -= evicted_block.num_bytes
            self._recently_evicted[evicted_index] = None
            if len(self._recently_evicted) > 16:
                self._recently_evicted.popitem(last=False)
        return self._num_reloaded > 100


def _find_shards(paths: ShardPaths, format_name: str | None, policy: RetryPolicy) -> list[ShardFile]:
    """Return the shard files that paths, patterns and URLs refer to.

    The folder or the index of an MDS dataset is replaced by the shards that the index lists.

    Args:
        paths: Path, pattern or URL, or a list of them.
        format_name: Format that the user chose, or None.
        policy: Time limits of remote requests.

    Raises:
        DataError: If a path is a folder without an MDS index, or matches no file, or a file is listed twice.
    """
    path_list = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    shard_paths: list[str | os.PathLike[str]] = []
    for path in path_list:
        url = os.fspath(path)
        if get_scheme(url) == "" and os.path.isdir(url):
            if format_name != "mds" and not os.path.isfile(os.path.join(url, _MDS_INDEX)):
                raise DataError(f"{url} is a folder without an {_MDS_INDEX}; give a pattern, such as {url}/*.jsonl")
            url = join_url(url, _MDS_INDEX)
        elif format_name == "mds" and get_scheme(url):
            # Whether a URL is a folder cannot be checked in all storage, so a name without a suffix counts as one.
            file_name = url.partition("?")[0].rpartition("/")[2]
            if "." not in file_name:
                url = join_url(url, _MDS_INDEX)
        if url.rpartition("/")[2] == _MDS_INDEX and format_name in (None, "mds"):
            shard_paths += list_shards(url, policy, find_files)
        else:
            shard_paths.append(path)
    return find_files(shard_paths, policy)


def _check_arguments(
    on_damage: str,
    shuffle_buffer: int,
    memory_bytes: int,
    copy_bytes: int,
    stall_limit: float,
    attempt_timeout: float,
) -> None:
    """Raise `ConfigError` if an argument of `ShardedDataset` is out of range."""
    if on_damage not in ("error", "skip"):
        raise ConfigError(f'on_damage={on_damage!r} is unknown; give "error" or "skip"')
    for name, value in (("shuffle_buffer", shuffle_buffer), ("memory_bytes", memory_bytes), ("copy_bytes", copy_bytes)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r} must be a whole number, at least 1")
    for name, seconds in (("stall_limit", stall_limit), ("attempt_timeout", attempt_timeout)):
        if not 0 < seconds < 1e9:
            raise ConfigError(f"{name}={seconds!r} must be a number of seconds above 0")


def _build_stripes(num_stripes: int, samples_per_step: int | None, shuffle: bool) -> Stripes:
    """Return the division of the order into stripes, which are ranges that are read in parallel.

    Raises:
        ConfigError: If the order is not shuffled, or the samples of a step cannot be divided among the stripes.
    """
    if isinstance(num_stripes, bool) or not isinstance(num_stripes, int) or num_stripes < 1:
        raise ConfigError(f"num_stripes={num_stripes!r} must be a whole number, at least 1")
    if num_stripes == 1:
        return Stripes()
    if not shuffle:
        raise ConfigError(f"num_stripes={num_stripes} changes the order of the records; give shuffle=True, too")
    if samples_per_step is None or samples_per_step < 1 or samples_per_step % num_stripes:
        raise ConfigError(
            f"num_stripes={num_stripes} needs samples_per_step=, the batch size times the number of ranks, as a multiple of "
            f"{num_stripes}; it is {samples_per_step!r}"
        )
    return Stripes(num_stripes, samples_per_step)
