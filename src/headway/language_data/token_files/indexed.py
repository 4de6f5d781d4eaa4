"""Index files (`.idx`) of Megatron-LM's indexed datasets: their layout, checks, reading and writing.

A dataset consists of `NAME.bin`, which contains only token IDs, and `NAME.idx`. All numbers of the index are
little-endian:

    9 bytes            magic b"MMIDIDX\\0\\0"
    8 bytes            version, 1
    1 byte             code of the type of the token IDs
    8 bytes            number of sequences, S
    8 bytes            number of document bounds, D: the number of documents plus 1
    4 bytes each of S  number of tokens of a sequence
    8 bytes each of S  byte offset of a sequence in the `.bin` file
    8 bytes each of D  index of the first sequence of each document, then S

The index of a multimodal dataset ends with one byte for each sequence. A document usually has one sequence. Megatron-LM
writes several if it splits documents into sentences.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy

from headway.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
_FAIRSEQ_MAGIC = b"TNTIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_TYPE_BY_CODE = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16",
}  # fmt: skip
_CODE_BY_TYPE = {name: code for code, name in _TYPE_BY_CODE.items()}
_LARGEST_UINT16_VOCABULARY = 65499
"""Megatron-LM stores the token IDs of larger vocabularies as int32."""
_MAX_SEQUENCE = 2**31 - 1
_CHUNK = 2**20

Integers = numpy.ndarray[Any, Any]


@dataclass(frozen=True)
class IndexHeader:
    """Header of an index file.

    Attributes:
        path: Path of the index file.
        dtype: Type of the token IDs.
        num_sequences: Number of sequences.
        num_documents: Number of documents.
    """

    path: str
    dtype: "numpy.dtype[Any]"
    num_sequences: int
    num_documents: int


def read_index_header(path: str, num_bin_bytes: int) -> IndexHeader:
    """Read and check the header of an index file, and its bounds: the first and last sequence and document.

    Args:
        path: Path of the index file.
        num_bin_bytes: Size of the `.bin` file.

    Raises:
        DataError: If the file is not an index, is truncated or damaged, has an unsupported type, or belongs to a `.bin`
            file of another size.
    """
    num_bytes = os.path.getsize(path)
    with open(path, "rb") as file:
        data = file.read(_HEADER.size)
    if not data.startswith(MAGIC):
        hint = "; it is an index of fairseq's or an early Megatron's format" if data.startswith(_FAIRSEQ_MAGIC) else ""
        raise DataError(
            f"{path} is not an index of a Megatron-LM dataset: it begins with {data[:9]!r} instead of {MAGIC!r}{hint}. Restore the "
            "index, or remove it and give dtype= to read the .bin file alone"
        )
    if len(data) < _HEADER.size:
        raise DataError(f"{path} is truncated: it has {num_bytes} bytes, less than its header")
    _, version, code, num_sequences, num_bounds = _HEADER.unpack(data)
    if version != _VERSION:
        raise DataError(f"{path} has version {version} of the index format, and only version {_VERSION} can be read")
    dtype = numpy.dtype(_TYPE_BY_CODE.get(code, "V1"))
    if dtype.kind not in "iu":
        name = _TYPE_BY_CODE.get(code, "an unknown type")
        raise DataError(
            f"{path} declares values of code {code} ({name}), which cannot be token IDs; give a file of integers"
        )
    expected_bytes = _HEADER.size + 12 * num_sequences + 8 * num_bounds
    if num_bytes == expected_bytes + num_sequences and num_sequences:
        raise DataError(
            f"{path} is the index of a multimodal dataset, which is not supported; give a dataset of text only"
        )
    if num_bytes != expected_bytes:
        raise DataError(
            f"{path} has {num_bytes} bytes instead of {expected_bytes}, so it is truncated or damaged; restore it, or create the "
            "pair of files again"
        )
    if not num_sequences or num_bounds < 2:
        raise DataError(f"{path} lists no documents; leave the empty dataset out")
    header = IndexHeader(path, dtype.newbyteorder("<"), num_sequences, num_bounds - 1)
    _check_bounds(header, num_bin_bytes)
    return header


def _check_bounds(header: IndexHeader, num_bin_bytes: int) -> None:
    """Raise `DataError` if the last sequence does not end at the end of the `.bin` file, or documents do not cover all."""
    index = DocumentIndex(header)
    last_end = int(index.pointers[-1]) + int(index.lengths[-1]) * header.dtype.itemsize
    if last_end != num_bin_bytes or index.pointers[0] != 0:
        raise DataError(
            f"{header.path} does not belong to its .bin file: its sequences end at byte {last_end}, and the .bin file has "
            f"{num_bin_bytes} bytes. The .bin file is truncated, or one of the two files is from another dataset; restore the pair"
        )
    if index.bounds[0] != 0 or index.bounds[-1] != header.num_sequences:
        raise DataError(
            f"{header.path} is damaged: its documents contain sequences {index.bounds[0]} to {index.bounds[-1]} instead of 0 to "
            f"{header.num_sequences}; create the pair of files again"
        )


class DocumentIndex:
    """Memory-mapped index file: the documents of a `.bin` file.

    Args:
        header: Header of the index file.

    Attributes:
        lengths: Number of tokens of each sequence.
        pointers: Byte offset of each sequence in the `.bin` file.
        bounds: Index of the first sequence of each document, followed by the number of sequences.
    """

    def __init__(self, header: IndexHeader) -> None:
        self._header = header
        data = numpy.asarray(numpy.memmap(header.path, numpy.uint8, "r"))
        count, num_bounds = header.num_sequences, header.num_documents + 1
        start = _HEADER.size
        self.lengths: Integers = numpy.frombuffer(data, "<i4", count, start)
        self.pointers: Integers = numpy.frombuffer(data, "<i8", count, start + 4 * count)
        self.bounds: Integers = numpy.frombuffer(data, "<i8", num_bounds, start + 12 * count)

    def find_document(self, number: int) -> tuple[int, int]:
        """Return the positions of a document's first token, and of the token after its last, in the `.bin` file.

        Positions are counted in tokens, not bytes. An empty document is (0, 0).

        Raises:
            DataError: If the index is damaged at this document.
        """
        first, end = int(self.bounds[number]), int(self.bounds[number + 1])
        if first == end:
            return 0, 0
        if not 0 <= first < end <= self._header.num_sequences:
            self._raise_damage(number)
        if end == first + 1:  # the usual case, for which a sum would take most of the time
            num_tokens = int(self.lengths[first])
        else:
            num_tokens = int(self.lengths[first:end].sum(dtype=numpy.int64))
        start, remainder = divmod(int(self.pointers[first]), self._header.dtype.itemsize)
        stop = start + num_tokens
        # The header's check ensures that the last sequence ends at the end of the file.
        next_start = stop if end == len(self.pointers) else int(self.pointers[end]) // self._header.dtype.itemsize
        if remainder or start < 0 or next_start != stop:
            self._raise_damage(number)
        return start, stop

    def measure_documents(self) -> Integers:
        """Return the number of tokens of each document, as an int64 array."""
        if len(self.bounds) == len(self.lengths) + 1:
            return self.lengths.astype(numpy.int64)  # each document has one sequence, or `find_document` reports damage
        ends = numpy.concatenate([[0], numpy.cumsum(self.lengths, dtype=numpy.int64)])
        return numpy.diff(ends[self.bounds])

    def _raise_damage(self, number: int) -> None:
        raise DataError(
            f"{self._header.path} is damaged at document {number}: its sequences do not follow each other in the .bin file; create "
            "the pair of files again"
        )


def choose_type(vocab_size: int) -> "numpy.dtype[Any]":
    """Return the type that Megatron-LM chooses for the token IDs of a vocabulary: uint16 or int32."""
    return numpy.dtype("<u2" if vocab_size <= _LARGEST_UINT16_VOCABULARY else "<i4")


def write_index(file: BinaryIO, lengths: Integers, dtype: "numpy.dtype[Any]") -> None:
    """Write an index file in which each document has one sequence.

    Args:
        file: Binary file to write to.
        lengths: Number of tokens of each document, up to 2**31 - 1.
        dtype: Type of the token IDs in the `.bin` file.
    """
    count = len(lengths)
    file.write(_HEADER.pack(MAGIC, _VERSION, _CODE_BY_TYPE[dtype.name], count, count + 1))
    # Convert chunks, so that an index of a billion documents needs little memory.
    for begin in range(0, count, _CHUNK):
        file.write(lengths[begin : begin + _CHUNK].astype("<i4").tobytes())
    num_tokens = 0  # before the chunk
    for begin in range(0, count, _CHUNK):
        ends = num_tokens + numpy.cumsum(lengths[begin : begin + _CHUNK], dtype=numpy.int64)
        starts = numpy.concatenate([[num_tokens], ends[:-1]])
        file.write((starts * dtype.itemsize).astype("<i8").tobytes())
        num_tokens = int(ends[-1])
    for begin in range(0, count + 1, _CHUNK):
        file.write(numpy.arange(begin, min(begin + _CHUNK, count + 1), dtype="<i8").tobytes())


def check_document_length(num_tokens: int, name: str) -> None:
    """Raise `DataError` if a document has more tokens than an index file can express.

    Args:
        num_tokens: Number of tokens of the document.
        name: Name of the document, for the message.
    """
    if num_tokens > _MAX_SEQUENCE:
        raise DataError(f"{name} has {num_tokens} tokens, more than the {_MAX_SEQUENCE} of the index format; split it")


def get_pair(prefix: Path) -> tuple[Path, Path]:
    """Return the paths of the `.bin` and the `.idx` file of a dataset."""
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")
