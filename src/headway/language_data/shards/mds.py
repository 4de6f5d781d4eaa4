"""Shards in MosaicML's MDS format.

A shard begins with the number of its samples and their offsets, followed by a JSON description of its columns. Text,
bytes, numbers, JSON and arrays are decoded by this module, because the package `mosaicml-streaming` cannot be installed
together with current versions of NumPy and transformers. Columns that contain pickles are refused, because a pickle can
run code. Columns that contain images are not supported either.
"""

import json
import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy

from headway.errors import DataError
from headway.language_data.shards.blocks import (
    BLOCK_BYTES,
    BlockTable,
    LazyBlock,
    ShardScan,
    check_count,
    describe_damage,
)
from headway.language_data.shards.retry import RetryPolicy
from headway.language_data.shards.storage import RangeReader, join_url, open_ranges

_UINT32 = struct.Struct("<I")
_RECORD_OVERHEAD = 100
"""Approximate memory of a sample's slot, in bytes."""
_SCALARS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)] + ["float16", "float32", "float64"]
_ARRAY_DTYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
_SHAPE_DTYPES = ("<u1", "<u2", "<u4", "<u8")

Decoder = Callable[[bytes], Any]


def list_shards(index_url: str, policy: RetryPolicy, find_files: Callable[[str, RetryPolicy], Any]) -> list[str]:
    """Return the URLs of the shards that an `index.json` lists.

    If the index lists a shard in compressed and in uncompressed form, the compressed file is chosen.

    Args:
        index_url: Path or URL of the index.
        policy: Time limits of remote requests.
        find_files: Function that returns the files (`ShardFile`) of a path or URL.

    Raises:
        DataError: If the index is missing, is not an index of MDS shards, or lists no shards.
    """
    files = find_files(index_url, policy)
    if not files:
        raise DataError(f"{index_url} does not exist; an MDS dataset has an index.json next to its shards")
    file = files[0]
    try:
        index = json.loads(bytes(open_ranges(file, policy).read_range(0, file.num_bytes)))
        shards = [(shard["format"], shard.get("zip_data") or shard["raw_data"]) for shard in index["shards"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{index_url} is not the index of an MDS dataset: {error!r}") from error
    if not shards or any(kind != "mds" for kind, _ in shards):
        raise DataError(f"{index_url} lists no MDS shards, but {sorted({kind for kind, _ in shards})}")
    return [join_url(index_url.rpartition("/")[0], data["basename"]) for _, data in shards]


class MDS:
    """File format of MosaicML's MDS shards. It finds the blocks of such files and opens them."""

    def scan(self, reader: RangeReader, num_bytes: int, name: str) -> ShardScan:
        """Find the blocks of a shard, reading only the header of the file.

        Each block consists of whole samples with at least `BLOCK_BYTES` bytes in total, except the last. The result
        describes the damage if the samples do not fit into the file. See `ShardFormat.scan` for the arguments.

        Raises:
            DataError: If the file is too short for its own header.
        """
        offsets = read_offsets(reader, num_bytes, name)
        table = BlockTable()
        damage = ""
        first = 0  # index of the block's first sample
        for sample, (begin, end) in enumerate(pairwise(offsets)):
            if end > num_bytes or end < begin:
                damage = describe_damage(name, begin, f"it ends at byte {end} of {num_bytes}")
                if sample > first:
                    table.add_block(offsets[first], begin - offsets[first], sample - first)
                break
            is_last = sample == len(offsets) - 2
            if end - offsets[first] >= BLOCK_BYTES or is_last:
                table.add_block(offsets[first], end - offsets[first], sample + 1 - first)
                first = sample + 1
        return ShardScan(table, damage)

    def open(self, reader: RangeReader, num_bytes: int, name: str) -> "OpenMDS":
        """Open a shard, and return an object that decodes its blocks.

        See `ShardFormat.open` for the arguments.

        Raises:
            DataError: If the header is damaged, or a column has an encoding that is not supported.
        """
        offsets = read_offsets(reader, num_bytes, name)
        begin = _UINT32.size * (len(offsets) + 1)
        try:
            config = json.loads(bytes(reader.read_range(begin, offsets[0] - begin)))
            columns = [*zip(config["column_names"], config["column_encodings"], config["column_sizes"])]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(describe_damage(name, begin, f"no description of the columns ({error!r})")) from error
        decoders = [(column, find_decoder(encoding, f"{name}: column {column!r}")) for column, encoding, _ in columns]
        return OpenMDS(offsets, decoders, [size for _, _, size in columns], name)


def read_offsets(reader: RangeReader, num_bytes: int, name: str) -> list[int]:
    """Return the byte offset of each sample of an MDS shard, followed by the end of the last sample.

    Args:
        reader: Reader of the file's bytes.
        num_bytes: Size of the file.
        name: Name of the file, for messages.

    Raises:
        DataError: If the file is too short for its own header.
    """
    count_field = reader.read_range(0, _UINT32.size)
    num_samples = _UINT32.unpack(count_field)[0] if len(count_field) == _UINT32.size else num_bytes
    # A count that cannot be right would make the process allocate up to 16 GiB.
    is_possible = num_samples < num_bytes
    raw = reader.read_range(_UINT32.size, _UINT32.size * (num_samples + 1)) if is_possible else b""
    if len(raw) != _UINT32.size * (num_samples + 1):
        raise DataError(describe_damage(name, 0, "the header of an MDS shard is incomplete"))
    return [int(offset) for offset in numpy.frombuffer(raw, "<u4")]


def find_decoder(encoding: str, description: str) -> Decoder:
    """Return the function that decodes values of an MDS encoding.

    Args:
        encoding: Name of the encoding, such as "str" or "ndarray:int32".
        description: File and column, for messages.

    Raises:
        DataError: If the encoding is not supported.
    """
    kind, _, details = encoding.partition(":")
    simple: dict[str, Decoder] = {
        "bytes": bytes,
        "str": lambda data: data.decode(),
        "int": lambda data: int.from_bytes(data, "little", signed=True),
        "json": json.loads,
        "str_int": lambda data: int(data.decode()),
        "str_float": lambda data: float(data.decode()),
    }
    if encoding in simple:
        return simple[encoding]
    if encoding in _SCALARS:
        dtype = numpy.dtype(encoding).newbyteorder("<")
        return lambda data: numpy.frombuffer(data, dtype)[0]
    if kind == "ndarray":
        name, _, shape = details.partition(":")
        try:
            sizes = tuple(int(size) for size in shape.split(",")) if shape else None
            numpy.dtype(name or None)
        except (ValueError, TypeError) as error:
            raise DataError(f"{description} has the encoding {encoding!r}, which is not an array: {error}") from error
        return lambda data: decode_array(data, name, sizes)
    raise DataError(
        f"{description} has the encoding {encoding!r}, which is not supported; supported are {', '.join([*simple, 'ndarray'])} and "
        "NumPy's numbers. Store images as bytes, and objects as JSON instead of pickles"
    )


def decode_array(data: bytes, dtype: str, shape: tuple[int, ...] | None) -> "numpy.ndarray[Any, Any]":
    """Decode an array from its MDS encoding.

    Args:
        data: Encoded array.
        dtype: Name of the dtype; "" if `data` begins with the MDS code of the dtype.
        shape: Shape of the array; None if `data` contains it.
    """
    offset = 0
    if not dtype:
        dtype = _ARRAY_DTYPES[data[0]]
        offset = 1
    if shape is None:
        # One byte holds the number of dimensions and the width of the sizes (log2 of bytes), which follow it.
        num_dims, width = data[offset] >> 2, data[offset] & 3
        shape_end = offset + 1 + (num_dims << width)
        shape = tuple(int(size) for size in numpy.frombuffer(data[offset + 1 : shape_end], _SHAPE_DTYPES[width]))
        offset = shape_end
    flat = numpy.frombuffer(data, numpy.dtype(dtype).newbyteorder("<"), offset=offset)
    # Copy, because an array over bytes is read-only, and a collate function may want to write to it.
    array: numpy.ndarray[Any, Any] = flat.reshape(shape).copy()
    return array


class OpenMDS:
    """MDS shard whose blocks can be decoded from their bytes.

    Args:
        offsets: Byte offset of each sample, followed by the end of the last one.
        decoders: Pairs of (name, decoder), one per column.
        sizes: Size in bytes of each column's values; None for a column whose values store their sizes.
        name: Name of the file, for messages.
    """

    def __init__(
        self, offsets: list[int], decoders: list[tuple[str, Decoder]], sizes: list[int | None], name: str
    ) -> None:
        self._offsets = offsets
        self._sample_at = {offset: sample for sample, offset in enumerate(offsets)}
        self._decoders = decoders
        self._sizes = sizes
        self._name = name

    def decode(self, data: memoryview, offset: int, count: int) -> LazyBlock:
        """Split a block into samples. Each sample is decoded when it is read.

        See `OpenShard.decode` for the arguments.

        Raises:
            DataError: If no block of `count` samples begins at `offset`.
        """
        first = self._sample_at.get(offset, len(self._offsets))
        check_count(len(self._offsets[first : first + count]), count, self._name, offset)
        bounds = self._offsets[first : first + count + 1]
        slots = [(begin - offset, end - offset) for begin, end in pairwise(bounds)]

        def decode_sample(slot: tuple[int, int]) -> dict[str, Any]:
            begin, end = slot
            try:
                return self._decode_columns(bytes(data[begin:end]))
            except (ValueError, KeyError, IndexError, struct.error) as error:
                raise DataError(describe_damage(self._name, offset + begin, error)) from error

        return LazyBlock(slots, decode_sample, len(data) + _RECORD_OVERHEAD * count)

    def _decode_columns(self, sample: bytes) -> dict[str, Any]:
        """Return a sample's values by column.

        A sample begins with the sizes of the columns whose sizes vary. The values of all columns follow.

        Raises:
            DataError: If the sizes of the columns do not add up to the sample's length.
        """
        position = 0
        sizes: list[int] = []
        for fixed_size in self._sizes:
            if fixed_size:
                sizes.append(fixed_size)
            else:
                sizes.append(_UINT32.unpack_from(sample, position)[0])
                position += _UINT32.size
        if position + sum(sizes) != len(sample):
            raise DataError(f"its columns have {position + sum(sizes)} bytes instead of {len(sample)}")
        record = {}
        for (column, decode), size in zip(self._decoders, sizes):
            record[column] = decode(sample[position : position + size])
            position += size
        return record
