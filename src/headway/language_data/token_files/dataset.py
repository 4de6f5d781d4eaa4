"""`TokenDataset`: map-style dataset over files of token IDs, which returns documents or blocks of equal length."""

import hashlib
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from operator import index as to_index
from typing import Any, Literal, NamedTuple

import numpy
import torch

from headway.errors import ConfigError, DataError
from headway.language_data.fingerprinted import FingerprintedDataset
from headway.language_data.packing import LABELS, TOKENS
from headway.language_data.shards.storage import get_cache_folder
from headway.language_data.token_files.documents import (
    CutDocuments,
    Separator,
    get_scan_path,
    open_scan,
    scan_documents,
)
from headway.language_data.token_files.files import (
    VOCABULARY_LIMIT,
    TokenFile,
    TokenPaths,
    Tokens,
    check_range,
    check_values,
    find_token_files,
)
from headway.language_data.token_files.indexed import DocumentIndex
from headway.log import get_logger

log = get_logger(__name__)

SHIFTED_LABELS = "shift_labels"
_LABELS = ("same", "shifted")
_MAX_OPEN_FILES = 256
"""Maximum number of files that a process maps at a time. A mapped file has a file descriptor, and many systems allow 1024."""
_SAMPLED_BYTES = 4096


class TokenDataset(FingerprintedDataset[dict[str, torch.Tensor]]):
    """Map-style dataset over files of token IDs. A sample is a document, or a block of consecutive tokens.

    The files are memory-mapped, and workers share the operating system's page cache. When the dataset is created, the
    header and the first and last 65,536 tokens of each file are checked. Sample `i` depends only on the files and `i`. A
    resumed run therefore continues exactly, on any number of ranks and workers. Use the DataLoader, or a `Mixture`, to
    shuffle.

    These files are recognized by their content:

    - `NAME.bin` with `NAME.idx`: datasets of Megatron-LM and NeMo, as `headway tokenize` writes them. Give either file, or
      the prefix `NAME`.
    - `.bin` with the header of llm.c and modded-nanogpt.
    - `.npy` of NumPy, with a one-dimensional array of integers.
    - Files that contain only tokens, such as nanoGPT's `.bin` and OLMo's `.npy`. They need `dtype`.

    With `sequence_length`, a sample is a block: a dict of int64 tensors `input_ids` and `labels`, which are equal, or
    `shift_labels`. Blocks ignore the ends of documents, but never contain tokens of two files. The tokens at the end of a
    file that do not fill a block are left out. Without `sequence_length`, a sample is a document: a dict with `input_ids`.
    Documents of different lengths can be joined by a `PackedDataset`, without attention between them.

    Args:
        files: Path, pattern (`*`, `?`, `[...]`) or prefix of local files, or a list of them.
        sequence_length: Number of tokens of a block. None (the default): samples are documents.
        dtype: Type of the token IDs in files that do not contain it, such as "uint16".
        vocab_size: Number of token IDs of the model. An ID that is not below it raises an error with the file and the
            position. The ends of each file are checked when the dataset is created, and other tokens when they are read.
            None (the default): 2**24, because larger IDs show that a file has another type.
        labels: Labels of a block. "same" (the default): `labels` equal to `input_ids`, for models that shift the labels
            themselves, as those of transformers do. "shifted": `shift_labels`, the next token of each position. A block
            then reads one token more, so that every token but the first one of a file is predicted once.
        eos_token_id: ID of the last token of each document, in files without an index. Each file is read once to find
            the documents.
        bos_token_id: ID of the first token of each document, in files without an index, as llm.c writes them.
        cache_dir: Folder for the positions of documents that are found with `eos_token_id` or `bos_token_id`. All
            processes of a machine share it. Default: `~/.cache/headway/shards`.

    Attributes:
        num_tokens: Number of tokens of all files.
        num_dropped_tokens: Number of tokens that belong to no block.

    Raises:
        ConfigError: If an argument is not allowed, or does not fit the files.
        DataError: If a file is missing, empty, truncated or damaged, an index belongs to another file, there are no
            documents or blocks, or a token ID is out of range.

    Example::

        dataset = TokenDataset("tokens/*.bin", 2048, vocab_size=model.config.vocab_size)
        loader = accelerator.prepare(DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2))
    """

    fingerprinted_settings = "the token files, or sequence_length=, labels=, eos_token_id= or bos_token_id=,"

    def __init__(
        self,
        files: TokenPaths,
        sequence_length: int | None = None,
        *,
        dtype: str | None = None,
        vocab_size: int | None = None,
        labels: Literal["same", "shifted"] = "same",
        eos_token_id: int | None = None,
        bos_token_id: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        _check_number("sequence_length", sequence_length, least=1)
        _check_number("vocab_size", vocab_size, least=1)
        _check_number("eos_token_id", eos_token_id, least=0)
        _check_number("bos_token_id", bos_token_id, least=0)
        if labels not in _LABELS:
            raise ConfigError(f"labels={labels!r}; give one of {', '.join(map(repr, _LABELS))}")
        separator = _choose_separator(eos_token_id, bos_token_id)
        if sequence_length is None and labels != "same":
            raise ConfigError(f"labels={labels!r} needs sequence_length=, because documents have no labels")
        if sequence_length is not None and separator is not None:
            raise ConfigError(
                f"sequence_length={sequence_length} makes blocks regardless of documents, so eos_token_id= and bos_token_id= have no "
                "effect; leave them out, or pack the documents with PackedDataset(TokenDataset(...), sequence_length)"
            )
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.labels = labels
        self._files = find_token_files(files, dtype)
        for file in self._files:
            check_values(file, vocab_size)
        self._separator = separator
        self._folder = get_cache_folder(cache_dir) / "documents"
        self.num_tokens = sum(file.num_tokens for file in self._files)
        self.num_dropped_tokens = 0
        counts = self._count_documents() if sequence_length is None else self._count_blocks(sequence_length)
        # Plain ints, because `bisect` compares them faster than numbers of NumPy.
        self._ends: list[int] = numpy.cumsum(counts, dtype=numpy.int64).tolist()
        self._lengths: numpy.ndarray[Any, Any] | None = None
        self._open_files: OrderedDict[int, _OpenFile] = OrderedDict()

    def _count_blocks(self, sequence_length: int) -> list[int]:
        """Return the number of blocks of each file, and count the tokens that are left out.

        Raises:
            DataError: If no file has enough tokens for a block.
        """
        num_extra = 1 if self.labels == "shifted" else 0
        counts = [max(0, file.num_tokens - num_extra) // sequence_length for file in self._files]
        self.num_dropped_tokens = self.num_tokens - sum(
            count * sequence_length + (num_extra if count else 0) for count in counts
        )
        if not any(counts):
            longest = max(file.num_tokens for file in self._files)
            raise DataError(
                f"no file has the {sequence_length + num_extra} tokens of a block; the longest has {longest}. Give a smaller "
                "sequence_length="
            )
        if self.num_dropped_tokens:
            log.info(
                "%d of %d tokens, at the ends of %d files, fill no block and are left out",
                self.num_dropped_tokens, self.num_tokens, len(self._files),
            )  # fmt: skip
        return counts

    def _count_documents(self) -> list[int]:
        """Return the number of documents of each file, after finding those of files without an index.

        Raises:
            ConfigError: If a file has no index and no separator was given, or all have an index and one was given.
            DataError: If no file contains the separator.
        """
        without_index = [file for file in self._files if file.index is None]
        if without_index and self._separator is None:
            raise ConfigError(
                f"{without_index[0].path} has no index of its documents; give sequence_length= for blocks, or eos_token_id= (or "
                "bos_token_id=), the token that separates documents"
            )
        if not without_index and self._separator is not None:
            raise ConfigError(
                "the .idx files list the documents, so eos_token_id= and bos_token_id= have no effect; leave them out"
            )
        counts = []
        for file in self._files:
            if file.index is not None:
                counts.append(file.index.num_documents)
                continue
            assert self._separator is not None
            counts.append(scan_documents(file, self._separator, get_scan_path(self._folder, file, self._separator)))
        if self._separator is not None:
            self._check_separator_occurs(self._separator, without_index, counts)
        return counts

    def _check_separator_occurs(self, separator: Separator, files: Sequence[TokenFile], counts: Sequence[int]) -> None:
        """Raise `DataError` if the separator occurs in none of the files without an index."""
        place = 0 if separator.is_first else -1
        has_several = any(count > 1 for count, file in zip(counts, self._files) if file.index is None)
        if not has_several and all(file.map_tokens()[place] != separator.token_id for file in files):
            name = "bos_token_id" if separator.is_first else "eos_token_id"
            raise DataError(
                f"{name}={separator.token_id} does not occur in {files[0].path}"
                f"{' and the other files' if len(files) > 1 else ''}, so each file would be one document; give the ID with which the "
                "files were written"
            )

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one sample as a dict of int64 tensors. Negative indices count from the end.

        Without `sequence_length`, the sample is a document: `input_ids`. With it, the sample is a block: `input_ids` and
        equal `labels`, or with `labels="shifted"`, `input_ids` and the next tokens in `shift_labels`.

        Raises:
            IndexError: If the index is out of range.
            DataError: If a token ID is out of range, or a file was changed after the dataset was created.
        """
        opened, offset = self._find_sample(index)
        if self.sequence_length is None:
            assert opened.documents is not None
            start, stop = opened.documents.find_document(offset)
            return {TOKENS: self._read_tokens(opened, start, stop)}
        start, stop = offset * self.sequence_length, (offset + 1) * self.sequence_length
        if self.labels == "same":
            tokens = self._read_tokens(opened, start, stop)
            return {TOKENS: tokens, LABELS: tokens.clone()}  # a copy, so that masking labels in place keeps the tokens
        tokens = self._read_tokens(opened, start, stop + 1)
        return {TOKENS: tokens[:-1], SHIFTED_LABELS: tokens[1:].clone()}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Return several blocks or documents. DataLoader calls this for each batch.

        The blocks of a batch are converted and checked together, which is faster. See `__getitem__` for the errors.
        """
        length = self.sequence_length
        if length is None:
            return [self[index] for index in indices]
        is_shifted = self.labels == "shifted"
        rows = numpy.empty((len(indices), length + is_shifted), numpy.int64)
        for row, index in zip(rows, indices):
            opened, offset = self._find_sample(index)
            start = offset * length
            row[:] = opened.tokens[start : start + len(row)]
        # As unsigned numbers, negative IDs are large, so one maximum checks both ends.
        if rows.size and rows.view(numpy.uint64).max() >= (self.vocab_size or VOCABULARY_LIMIT):
            for index in indices:
                self[index]  # raises the error with the file and the position
        tokens = torch.from_numpy(rows)
        if is_shifted:
            names, inputs, labels = (TOKENS, SHIFTED_LABELS), tokens[:, :-1], tokens[:, 1:].clone()
        else:
            names, inputs, labels = (TOKENS, LABELS), tokens, tokens.clone()
        return [dict(zip(names, sample)) for sample in zip(inputs.unbind(), labels.unbind())]

    def _find_sample(self, index: int) -> tuple["_OpenFile", int]:
        """Return the file of a sample, and the index of the sample in this file.

        Raises:
            IndexError: If the index is out of range.
        """
        position = to_index(index)
        length = self._ends[-1]
        if position < 0:
            position += length
        if not 0 <= position < length:
            raise IndexError(f"sample {index} of a TokenDataset with {length} samples")
        number = bisect_right(self._ends, position)
        offset = position - (self._ends[number - 1] if number else 0)
        return self._open_files.get(number) or self._open_file(number), offset

    def _read_tokens(self, opened: "_OpenFile", start: int, stop: int) -> torch.Tensor:
        """Return a copy of the tokens from position `start` up to `stop` (exclusive) of a file, as an int64 tensor.

        Raises:
            DataError: If the file ends before `stop`, or if a token is outside the vocabulary.
        """
        tokens = opened.tokens[start:stop]
        if len(tokens) != stop - start:
            raise DataError(
                f"the index of {opened.file.path} lists a document from token {start} to {stop}, beyond the {opened.file.num_tokens} "
                "tokens of the file; create the pair of files again"
            )
        if opened.limit is not None:
            check_range(tokens, opened.file, start, opened.limit)
        return torch.from_numpy(tokens.astype(numpy.int64))

    def _open_file(self, number: int) -> "_OpenFile":
        """Map the file with this index, and close the file that was opened first if too many are open."""
        file = self._files[number]
        documents: DocumentIndex | CutDocuments | None = None
        if self.sequence_length is None:
            documents = self._open_documents(file)
        is_always_valid = self.vocab_size is None and file.dtype.kind == "u" and file.dtype.itemsize <= 2
        limit = None if is_always_valid else self.vocab_size or VOCABULARY_LIMIT
        while len(self._open_files) >= _MAX_OPEN_FILES:
            self._open_files.popitem(last=False)
        opened = self._open_files[number] = _OpenFile(file, file.map_tokens(), documents, limit)
        return opened

    def _open_documents(self, file: TokenFile) -> DocumentIndex | CutDocuments:
        if file.index is not None:
            return DocumentIndex(file.index)
        assert self._separator is not None
        return CutDocuments(open_scan(get_scan_path(self._folder, file, self._separator)))

    @property
    def lengths(self) -> numpy.ndarray[Any, Any]:
        """Number of tokens of each sample, as an int64 array, for `TokenBatchSampler(dataset.lengths, ...)`."""
        if self.sequence_length is not None:
            return numpy.full(len(self), self.sequence_length, numpy.int64)
        if self._lengths is None:
            parts = [self._open_documents(file).measure_documents() for file in self._files]
            self._lengths = numpy.concatenate(parts)
        return self._lengths

    def measure_lengths(self) -> numpy.ndarray[Any, Any]:
        """Return `lengths`. `PackedDataset` calls this method instead of reading all samples."""
        if self.sequence_length is not None:
            log.warning_once(
                "PackedDataset treats each block of %d tokens as a document, whose tokens attend to no other block; leave out "
                "sequence_length= of the TokenDataset to pack its documents",
                self.sequence_length,
            )
        return self.lengths

    @property
    def source_fingerprint(self) -> str:
        """Hash of the files' names, sizes, first and last bytes, and of the settings that determine the samples.

        Ranks that read the same data have equal hashes.
        """
        settings = (self.sequence_length, self.labels, self._separator, len(self))
        digest = hashlib.sha256(repr(settings).encode())
        for file in self._files:
            digest.update(f"\n{os.path.basename(file.path)} {file.num_bytes} {file.dtype.name}".encode())
            num_sampled = _SAMPLED_BYTES // file.dtype.itemsize
            tokens = file.map_tokens()
            digest.update(tokens[:num_sampled].tobytes() + tokens[-num_sampled:].tobytes())
        return digest.hexdigest()[:32]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling, without mapped files, whose content would be copied, and without lengths."""
        return {**self.__dict__, "_open_files": OrderedDict(), "_lengths": None}


class _OpenFile(NamedTuple):
    """Memory-mapped token file.

    Attributes:
        file: Description of the file.
        tokens: Tokens of the file.
        documents: Positions of the documents; None if samples are blocks.
        limit: Smallest token ID that raises an error; None if no ID does.
    """

    file: TokenFile
    tokens: Tokens
    documents: DocumentIndex | CutDocuments | None
    limit: int | None


def _choose_separator(eos_token_id: int | None, bos_token_id: int | None) -> Separator | None:
    """Return the token that separates documents; None if none was given. Raise `ConfigError` if both were given."""
    if eos_token_id is not None and bos_token_id is not None:
        raise ConfigError(
            "eos_token_id= and bos_token_id= are both given, but only one token can separate documents; give the one that "
            "every document has"
        )
    if eos_token_id is not None:
        return Separator(eos_token_id, is_first=False)
    return None if bos_token_id is None else Separator(bos_token_id, is_first=True)


def _check_number(name: str, value: Any, least: int) -> None:
    """Raise `ConfigError` if a value is neither None nor a whole number of at least `least`."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ConfigError(f"{name}={value!r}; give a whole number, {least} or more")
