"""Tokenize text documents in several processes, and write the `.bin`/`.idx` pair of Megatron-LM's datasets."""

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from headway.common.text import format_bytes
from headway.errors import DataError
from headway.language_data.token_files.indexed import check_document_length, choose_type
from headway.language_data.token_files.texts import TextBlock, TextFiles
from headway.language_data.token_files.tokenizer import DocumentTokenizer
from headway.language_data.token_files.workers import map_in_order
from headway.language_data.token_files.writer import TokenizeProgress, TokenWriter
from headway.log import get_logger

log = get_logger(__name__)

_SAVE_SECONDS = 10.0
"""Seconds of work that a kill can lose."""
_NUM_ENCODED = 256
"""Number of documents that are tokenized at a time."""
_NUM_SAMPLED = 64
"""Number of documents from which the total number of tokens is estimated."""

Integers = numpy.ndarray[Any, Any]


class EncodedBlock(NamedTuple):
    """Tokenized documents of one block.

    Attributes:
        tokens: Token IDs of all documents, in the type of the file.
        lengths: Number of tokens of each document.
        counts: Counts of the block.
    """

    tokens: Integers
    lengths: Integers
    counts: TokenizeProgress


@dataclass(frozen=True)
class BlockTokenizer:
    """Function that reads a block of documents and tokenizes it, for worker processes.

    Attributes:
        files: Data files.
        tokenizer: Tokenizer of the documents.
    """

    files: TextFiles
    tokenizer: DocumentTokenizer

    def __call__(self, block: TextBlock) -> EncodedBlock:
        """Return the tokens of a block's documents, with the added tokens. Documents without tokens are left out.

        Raises:
            DataError: If a document cannot be read or tokenized.
        """
        return self.encode_texts(self.files.read_texts(block), block)

    def encode_texts(self, texts: list[str], block: TextBlock) -> EncodedBlock:
        """Return the tokens of texts from a block, with the added tokens. Texts without tokens are left out.

        Raises:
            DataError: If a text has characters that are not valid in UTF-8, or too many tokens.
        """
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        counts = TokenizeProgress(
            num_blocks=1, num_text_bytes=sum(len(text.encode(errors="replace")) for text in texts)
        )
        documents: list[list[int]] = []
        for begin in range(0, len(texts), _NUM_ENCODED):
            for tokens in self._encode(texts[begin : begin + _NUM_ENCODED], block):
                if not tokens:
                    counts.num_empty += 1
                    continue
                counts.num_with_end += eos is not None and eos in tokens
                document = [*([] if bos is None else [bos]), *tokens, *([] if eos is None else [eos])]
                check_document_length(len(document), self.files.describe_block(block))
                documents.append(document)
        lengths = numpy.array([len(document) for document in documents], numpy.int64)
        counts.num_documents, counts.num_tokens = len(documents), int(lengths.sum())
        joined = numpy.empty(counts.num_tokens, choose_type(self.tokenizer.vocab_size))
        position = 0
        for document in documents:
            joined[position : position + len(document)] = document
            position += len(document)
        return EncodedBlock(joined, lengths, counts)

    def _encode(self, texts: list[str], block: TextBlock) -> list[list[int]]:
        try:
            return self.tokenizer.encode(texts)
        except UnicodeEncodeError as error:
            name = self.files.describe_block(block)
            raise DataError(f"{name}: a text is not valid Unicode ({error}); correct the file") from error


@dataclass(frozen=True)
class TokenizeResult:
    """Result of a tokenization.

    Attributes:
        progress: Counts of all that was written.
        num_new_tokens: Number of tokens that this run added; less than all if it continued an interrupted run.
        seconds: Seconds in which this run added them.
    """

    progress: TokenizeProgress
    num_new_tokens: int
    seconds: float


@dataclass(frozen=True)
class TokenizeEstimate:
    """Estimate of a tokenization, from the first documents.

    Attributes:
        num_tokens: Estimated number of tokens.
        sample: First document that has tokens, as texts of its first tokens.
    """

    num_tokens: int
    sample: list[str]


def tokenize_files(
    files: TextFiles,
    tokenizer: DocumentTokenizer,
    prefix: Path,
    *,
    num_processes: int,
    overwrites: bool,
) -> TokenizeResult:
    """Tokenize documents and write them to `PREFIX.bin` and `PREFIX.idx`, in the order of the files.

    The content does not depend on the number of processes. An interrupted run continues if it is started again.

    Args:
        files: Data files.
        tokenizer: Tokenizer of the documents.
        prefix: Path of both files without suffix.
        num_processes: Number of processes that tokenize.
        overwrites: Whether existing files, and the progress of a run with other settings, are replaced.

    Raises:
        ConfigError: If the pair exists, another process is writing it, or an interrupted run had other settings.
        DataError: If a document cannot be read or tokenized, all are empty, or the files cannot be written.
        StateError: If a worker process ends.
    """
    settings = json.dumps([files.describe_files(), tokenizer.compute_fingerprint()])
    digest = hashlib.sha256(settings.encode()).hexdigest()
    writer = TokenWriter(prefix, choose_type(tokenizer.vocab_size), digest, overwrites=overwrites)
    with _report_write_errors(prefix), writer.open():
        earlier = writer.progress
        if earlier.num_blocks:
            log.info("continuing after %d documents of an interrupted run", earlier.num_documents)
        blocks = files.blocks[earlier.num_blocks :]
        start = last_save = time.monotonic()
        num_workers = max(1, min(num_processes, len(blocks)))
        with closing(map_in_order(BlockTokenizer(files, tokenizer), blocks, num_workers)) as results:
            for encoded in results:
                writer.add_block(encoded.tokens, encoded.lengths, encoded.counts)
                now = time.monotonic()
                if now - last_save > _SAVE_SECONDS:
                    writer.save_progress()
                    last_save = now
                    progress = writer.progress
                    rate = (progress.num_tokens - earlier.num_tokens) / (now - start)
                    log.info(
                        "%d of %d documents, %s tokens, %s tokens/s",
                        progress.num_documents + progress.num_empty, files.num_documents, f"{progress.num_tokens:,}", f"{rate:,.0f}",
                    )  # fmt: skip
        writer.commit()
    progress = writer.progress
    return TokenizeResult(progress, progress.num_tokens - earlier.num_tokens, time.monotonic() - start)


@contextmanager
def _report_write_errors(prefix: Path) -> Iterator[None]:
    """Return a context that raises an `OSError`, such as a full disk, as `DataError`. The worker processes read the data."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{prefix} cannot be written: {error.strerror or error}. Remove the cause and run the command again; it continues after "
            "the documents that are written"
        ) from error


def estimate_tokens(files: TextFiles, tokenizer: DocumentTokenizer) -> TokenizeEstimate:
    """Tokenize the first documents, and estimate the total number of tokens.

    Raises:
        DataError: If one of these documents cannot be read or tokenized, or all are empty.
    """
    block = files.blocks[0]
    texts = files.read_texts(block, _NUM_SAMPLED)
    encoded = BlockTokenizer(files, tokenizer).encode_texts(texts, block)
    if not encoded.counts.num_tokens:
        raise DataError(
            f"{files.describe_block(block)}: the first {len(texts)} documents are empty; give documents with text"
        )
    first = encoded.tokens[: int(encoded.lengths[0])].tolist()
    sample = [tokenizer.get_token_text(token_id) for token_id in first]
    return TokenizeEstimate(encoded.counts.num_tokens * files.num_documents // len(texts), sample)


def format_result(result: TokenizeResult, tokenizer: DocumentTokenizer, prefix: Path) -> list[str]:
    """Return lines of text that summarize a finished tokenization."""
    progress, dtype = result.progress, choose_type(tokenizer.vocab_size)
    size = format_bytes(progress.num_tokens * dtype.itemsize)
    num_documents = _count_documents(progress.num_documents)
    lines = [f"{prefix}.bin and {prefix}.idx: {progress.num_tokens:,} tokens in {num_documents}, {dtype.name}, {size}"]
    rate = result.num_new_tokens / max(result.seconds, 1e-9)
    lines.append(f"{rate:,.0f} tokens/s, {progress.num_text_bytes / progress.num_tokens:.2f} bytes of text per token")
    if progress.num_empty:
        lines.append(f"{_count_documents(progress.num_empty)} without text left out")
    if progress.num_with_end and tokenizer.eos_token_id is not None:
        end = tokenizer.get_token_text(tokenizer.eos_token_id)
        lines.append(
            f"{end!r} is in the text of {_count_documents(progress.num_with_end)}; --split_special_tokens tokenizes it like other "
            "text"
        )
    return lines


def _count_documents(count: int) -> str:
    return f"{count:,} document{'' if count == 1 else 's'}"


def format_estimate(
    estimate: TokenizeEstimate, files: TextFiles, tokenizer: DocumentTokenizer, prefix: Path
) -> list[str]:
    """Return lines of text that describe a tokenization before it begins."""
    dtype = choose_type(tokenizer.vocab_size)
    size = format_bytes(estimate.num_tokens * dtype.itemsize)
    data = f"{_count_documents(files.num_documents)} in {files.num_files} file{'s' if files.num_files > 1 else ''}"
    lines = [
        f"would write {prefix}.bin and {prefix}.idx",
        f"{data}; about {estimate.num_tokens:,} tokens, {size}",
        f"{tokenizer.name} with {tokenizer.vocab_size:,} IDs, stored as {dtype.name}",
    ]
    for word, token_id in (("begins", tokenizer.bos_token_id), ("ends", tokenizer.eos_token_id)):
        if token_id is not None:
            lines.append(f"each document {word} with {tokenizer.get_token_text(token_id)!r} (ID {token_id})")
    shown = estimate.sample if len(estimate.sample) <= 12 else [*estimate.sample[:8], "...", *estimate.sample[-3:]]
    return [*lines, f"first document, {len(estimate.sample)} tokens: {' '.join(shown)}"]
