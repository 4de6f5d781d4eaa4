"""Recognize files of token IDs: where the tokens of a file begin, their number and their type.

| file | content |
|---|---|
| `NAME.bin` and `NAME.idx` | dataset of Megatron-LM, which NeMo also uses; the index has the type and the documents |
| `.bin` with a header of 256 int32 | llm.c and modded-nanogpt; the header has a code for the type |
| `.npy` of NumPy | one-dimensional array of integers |
| any other file | only tokens: nanoGPT's `.bin`, and the `.npy` files of OLMo and dolma, which have no NumPy header |
"""

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from headway.common.object_path import expand_home
from headway.errors import ConfigError, DataError
from headway.language_data.shards.storage import get_scheme
from headway.language_data.token_files.indexed import IndexHeader, read_index_header
from headway.log import get_logger

log = get_logger(__name__)

TokenPaths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""Path, pattern or prefix of token files, or a list of them."""
Tokens = numpy.ndarray[Any, Any]

PARTIAL_SUFFIX = ".partial"
"""Suffix of files that are not complete yet."""
_NUMPY_MAGIC = b"\x93NUMPY"
_LLM_C_HEADER_BYTES = 256 * 4
_LLM_C_TYPES = {20240520: "uint16", 20240801: "uint32"}
"""Types of the token IDs by the first number of llm.c's header."""
_LLM_C_VERSIONS = {20240520: 1, 20240801: 7}
_LLM_C_EVALUATION = 20240522
"""First number of llm.c's files of multiple-choice questions."""
_NUM_INSPECTED = 2**16
"""Number of tokens at each end of a file that are checked when a dataset is created."""
VOCABULARY_LIMIT = 2**24
"""Vocabularies are smaller than this. Larger IDs mean that a file was read as another type."""
_TYPES = ("uint8", "uint16", "int32", "uint32", "int64", "uint64")


@dataclass(frozen=True)
class TokenFile:
    """File of token IDs.

    Attributes:
        path: Absolute path of the file.
        num_bytes: Size of the file.
        dtype: Type of the token IDs.
        offset: Byte offset of the first token.
        num_tokens: Number of tokens.
        version: Modification time. It changes when the file is replaced.
        index: Header of the index file; None for files without an index.
    """

    path: str
    num_bytes: int
    dtype: "numpy.dtype[Any]"
    offset: int
    num_tokens: int
    version: int
    index: IndexHeader | None = None

    def map_tokens(self) -> Tokens:
        """Return all tokens as a read-only, memory-mapped array.

        Raises:
            DataError: If the file does not exist anymore, or has another size.
        """
        try:
            num_bytes = os.path.getsize(self.path)
            if num_bytes == self.num_bytes:
                # A plain array, because each slice of a `numpy.memmap` costs about a microsecond more.
                return numpy.asarray(numpy.memmap(self.path, self.dtype, "r", self.offset, (self.num_tokens,)))
        except FileNotFoundError as error:
            raise DataError(f"{self.path} was removed after the dataset was created; restore it") from error
        raise DataError(
            f"{self.path} has {num_bytes} bytes, and had {self.num_bytes} when the dataset was created; create the dataset again"
        )


def find_token_files(paths: TokenPaths, dtype: str | None) -> list[TokenFile]:
    """Return the token files that paths, patterns and prefixes refer to, in this order. Matches of a pattern are sorted.

    Args:
        paths: Path, pattern with `*`, `?` and `[...]`, or prefix (path without `.bin`), or a list of them.
        dtype: Type of the token IDs in files that do not contain it; None if all files contain it.

    Raises:
        ConfigError: If a path is a URL, `dtype` is not a type of integers, or it is needed or contradicts a file.
        DataError: If a path matches no file, a file is named twice, or a file is empty, truncated or damaged.
    """
    if dtype is not None and dtype not in _TYPES:
        raise ConfigError(f"dtype={dtype!r} is not a type of token IDs; give one of {', '.join(map(repr, _TYPES))}")
    path_list = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    names: dict[str, None] = {}  # an ordered set
    for path in path_list:
        for name in _expand_path(os.fspath(path)):
            if name in names:
                raise DataError(f"the file {name} is named twice, so its tokens would be read twice; name it once")
            names[name] = None
    if not names:
        raise DataError("the list of token files is empty; give the path or pattern of at least one file")
    return [inspect_file(name, dtype) for name in names]


def _expand_path(path: str) -> list[str]:
    """Return the absolute paths of the token files that one path, pattern or prefix refers to.

    Raises:
        ConfigError: If the path is a URL.
        DataError: If there is no such file, or the path is a folder.
    """
    if get_scheme(path):
        raise ConfigError(
            f"{path} is a URL, and token files are memory-mapped, so they must be local; copy the file to this machine"
        )
    path = expand_home(path.removeprefix("file://"))
    if os.path.isdir(path):
        raise DataError(f"{path} is a folder; give a pattern, such as {os.path.join(path, '*.bin')}")
    is_pattern = not {"*", "?", "["}.isdisjoint(path) and not os.path.exists(path)
    candidates = [path]
    if is_pattern:  # files that `headway tokenize` is still writing are left out
        candidates = [name for name in sorted(glob.glob(path, recursive=True)) if not name.endswith(PARTIAL_SUFFIX)]
    names: dict[str, None] = {}  # an ordered set, because a pattern can match both files of a pair
    for name in candidates:
        if name.endswith(".idx"):
            name = name.removesuffix(".idx") + ".bin"
        elif not os.path.exists(name):
            name = f"{name}.bin"
        if os.path.isfile(name):
            names[os.path.abspath(name)] = None
        elif not is_pattern:
            raise DataError(
                f"there is no file {path} or {name}; give the path of a token file, or its prefix without .bin"
            )
    if not names:
        raise DataError(f"no file matches {path!r}; give the path or pattern of at least one token file")
    return list(names)


def inspect_file(path: str, dtype: str | None) -> TokenFile:
    """Detect the format of a token file, and check its size.

    Args:
        path: Path of the file.
        dtype: Type of the token IDs if the file does not contain it, or None.

    Raises:
        ConfigError: If `dtype` is needed, or contradicts the type in the file.
        DataError: If the file is empty, truncated or damaged.
    """
    num_bytes = os.path.getsize(path)
    if not num_bytes:
        raise DataError(f"{path} is empty; leave it out, or write it again")
    with open(path, "rb") as file:
        begin = file.read(_LLM_C_HEADER_BYTES)
    index_path = path.removesuffix(".bin") + ".idx"
    if path.endswith(".bin") and os.path.isfile(index_path):
        found = _inspect_indexed(path, num_bytes, index_path)
    elif begin.startswith(_NUMPY_MAGIC):
        found = _inspect_npy(path, num_bytes)
    elif int.from_bytes(begin[:4], "little") in (*_LLM_C_TYPES, _LLM_C_EVALUATION):
        found = _inspect_llm_c(path, num_bytes, begin)
    else:
        return _describe_raw(path, num_bytes, dtype)
    if dtype is not None and found.dtype != numpy.dtype(dtype):
        raise ConfigError(f"dtype={dtype!r} contradicts {path}, whose tokens are {found.dtype.name}; leave dtype= out")
    return found


def _inspect_indexed(path: str, num_bytes: int, index_path: str) -> TokenFile:
    index = read_index_header(index_path, num_bytes)
    num_tokens = num_bytes // index.dtype.itemsize
    return TokenFile(path, num_bytes, index.dtype, 0, num_tokens, _get_version(path), index)


def _inspect_npy(path: str, num_bytes: int) -> TokenFile:
    try:
        array = numpy.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{path} is a truncated or damaged file of NumPy: {error}; write it again") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            f"{path} has an array of the shape {array.shape} and the type {array.dtype}; give a one-dimensional array of integers"
        )
    if not len(array):
        raise DataError(f"{path} has no tokens; leave it out, or write it again")
    if array.offset + array.nbytes != num_bytes:
        raise DataError(f"{path} has {num_bytes - array.offset - array.nbytes} bytes after its array; write it again")
    return TokenFile(path, num_bytes, array.dtype, array.offset, len(array), _get_version(path))


def _inspect_llm_c(path: str, num_bytes: int, begin: bytes) -> TokenFile:
    if len(begin) < _LLM_C_HEADER_BYTES:
        raise DataError(
            f"{path} is truncated: its header of llm.c has {len(begin)} bytes instead of {_LLM_C_HEADER_BYTES}"
        )
    magic, version, num_tokens = numpy.frombuffer(begin, "<i4", 3).tolist()
    if magic == _LLM_C_EVALUATION:
        raise DataError(f"{path} contains multiple-choice questions of llm.c; give a file of tokens")
    if version != _LLM_C_VERSIONS[magic]:
        raise DataError(
            f"{path} has a header of llm.c ({magic}) with version {version}, and only version {_LLM_C_VERSIONS[magic]} can be read"
        )
    dtype = numpy.dtype(_LLM_C_TYPES[magic]).newbyteorder("<")
    expected_bytes = _LLM_C_HEADER_BYTES + num_tokens * dtype.itemsize
    if num_bytes != expected_bytes:
        raise DataError(
            f"{path} has {num_bytes} bytes, but its header declares {num_tokens} tokens, {expected_bytes} bytes. It is truncated or "
            "damaged; write it again"
        )
    if not num_tokens:
        raise DataError(f"{path} has no tokens; leave it out, or write it again")
    return TokenFile(path, num_bytes, dtype, _LLM_C_HEADER_BYTES, num_tokens, _get_version(path))


def _describe_raw(path: str, num_bytes: int, dtype: str | None) -> TokenFile:
    """Return a file that contains only tokens.

    Raises:
        ConfigError: If `dtype` is None.
        DataError: If the size is not a multiple of the size of a token.
    """
    if dtype is None:
        missing = (
            f", and there is no {os.path.basename(path).removesuffix('.bin')}.idx next to it"
            if path.endswith(".bin")
            else ""
        )
        raise ConfigError(
            f"{path} does not contain the type of its tokens{missing}; give dtype='uint16' (nanoGPT, vocabularies up to 65536) or "
            "dtype='uint32'"
        )
    number_type = numpy.dtype(dtype).newbyteorder("<")
    if num_bytes % number_type.itemsize:
        raise DataError(
            f"{path} has {num_bytes} bytes, which is not a multiple of the {number_type.itemsize} bytes of a token of the type "
            f"{dtype}. The file is truncated, or its tokens have another type; write it again, or change dtype="
        )
    return TokenFile(path, num_bytes, number_type, 0, num_bytes // number_type.itemsize, _get_version(path))


def _get_version(path: str) -> int:
    return os.stat(path).st_mtime_ns


def check_values(file: TokenFile, vocab_size: int | None) -> None:
    """Check the first and last 65,536 tokens of a file, to find a wrong type or vocabulary before the training begins.

    Args:
        file: File to check.
        vocab_size: Number of token IDs of the model, or None.

    Raises:
        DataError: If a token ID is negative, is not below `vocab_size`, or is larger than those of any vocabulary.
    """
    if vocab_size is not None and vocab_size > 2 ** (8 * file.dtype.itemsize):
        log.warning(
            "%s has tokens of the type %s, which cannot hold all of vocab_size=%d IDs; check that none was lost when the file was "
            "written",
            file.path, file.dtype.name, vocab_size,
            once=True,
        )  # fmt: skip
    tokens = file.map_tokens()
    check_range(tokens[:_NUM_INSPECTED], file, 0, vocab_size or VOCABULARY_LIMIT)
    last_start = max(0, file.num_tokens - _NUM_INSPECTED)
    check_range(tokens[last_start:], file, last_start, vocab_size or VOCABULARY_LIMIT)
    is_raw = file.index is None and file.offset == 0
    num_bytes = file.dtype.itemsize
    if is_raw and num_bytes in (2, 4) and _looks_wider(tokens[:_NUM_INSPECTED]):
        log.warning(
            "every second token of %s is below 16, so its tokens probably have %d bytes instead of %d; give dtype='uint%d' then",
            file.path, 2 * num_bytes, num_bytes, 16 * num_bytes,
            once=True,
        )  # fmt: skip


def _looks_wider(tokens: Tokens) -> bool:
    """Whether numbers seem to be halves of token IDs of twice their size: each upper half is below 16, unlike the lower ones."""
    lower, upper = tokens[::2], tokens[1::2]
    return len(tokens) >= 32 and bool(upper.max() < 16 <= lower.max())


def check_range(tokens: Tokens, file: TokenFile, start: int, limit: int) -> None:
    """Check that token IDs are not negative and below a limit.

    Args:
        tokens: Token IDs, which can be empty.
        file: File from which they were read.
        start: Position of the first one in the file.
        limit: Smallest ID that is too large.

    Raises:
        DataError: If an ID is out of range. The message contains the file and the position.
    """
    bound = limit
    if tokens.dtype.kind == "i":
        # As unsigned numbers, negative IDs are at least 2^7, 2^15, ..., so one maximum checks both ends.
        bound = min(limit, 2 ** (8 * tokens.dtype.itemsize - 1))
    unsigned = tokens.view(tokens.dtype.str.replace("i", "u")) if tokens.dtype.kind == "i" else tokens
    if not len(tokens) or unsigned.max() < bound:
        return
    place = int(numpy.argmax(unsigned >= bound))
    if tokens[place] < 0:
        reason = "which is negative"
    elif limit != VOCABULARY_LIMIT:
        reason = f"which is not below vocab_size={limit}"
    else:
        reason = "which no vocabulary contains"
    raise DataError(
        f"{file.path} has the token ID {tokens[place]} at position {start + place}, {reason}. The file was written with another "
        f"tokenizer, is damaged, or its tokens are not {file.dtype.name}"
    )
