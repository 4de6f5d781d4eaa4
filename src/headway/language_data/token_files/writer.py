"""Write a `.bin`/`.idx` pair so that an interrupted run leaves no incomplete file and can continue.

Tokens and lengths are appended to files with the suffix `.partial`. From time to time they are flushed to the disk, and
the progress is stored. A later run truncates them to the stored progress and continues. At the end, the files get their
final names. The index comes last, because a `.bin` file without its index is not a dataset.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy

from headway.common.atomic import write_text
from headway.errors import ConfigError, DataError
from headway.language_data.token_files.files import PARTIAL_SUFFIX
from headway.language_data.token_files.indexed import get_pair, write_index

_LENGTH_TYPE = numpy.dtype("<i4")

Integers = numpy.ndarray[Any, Any]


@dataclass
class TokenizeProgress:
    """Counts of what was written.

    Attributes:
        num_blocks: Number of blocks of documents.
        num_documents: Number of documents.
        num_tokens: Number of tokens.
        num_text_bytes: Size of the documents' texts in UTF-8.
        num_empty: Number of documents without tokens, which are left out.
        num_with_end: Number of documents that contain the end-of-document token in their text.
    """

    num_blocks: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_text_bytes: int = 0
    num_empty: int = 0
    num_with_end: int = 0


class TokenWriter:
    """Writer of a `.bin`/`.idx` pair. Use it in a `with` block, which keeps other processes from writing the same pair.

    Args:
        prefix: Path of both files without suffix. Its folder is created if necessary.
        dtype: Type of the token IDs.
        settings: Text that identifies the data and how they are tokenized. Only a run with equal settings continues an
            interrupted one.
        overwrites: Whether existing files, and the progress of a run with other settings, are replaced.

    Attributes:
        progress: Counts of what was written, including what an interrupted run wrote.

    Raises:
        ConfigError: If the pair exists, or an interrupted run had other settings, and `overwrites` is False. Also if
            another process is writing the pair, or the folder cannot be created.
    """

    def __init__(self, prefix: Path, dtype: "numpy.dtype[Any]", settings: str, *, overwrites: bool) -> None:
        self._prefix = prefix
        self._bin_path, self._index_path = get_pair(prefix)
        self._lengths_path = prefix.with_name(prefix.name + ".lengths")
        self._progress_path = prefix.with_name(f"{prefix.name}.progress{PARTIAL_SUFFIX}")
        self._lock_path = prefix.with_name(f"{prefix.name}.lock{PARTIAL_SUFFIX}")
        self._dtype = dtype
        self._settings = settings
        self._overwrites = overwrites
        self.progress = TokenizeProgress()

    @contextlib.contextmanager
    def open(self) -> Iterator["TokenWriter"]:
        """Return a context in which tokens can be added, after those of an interrupted run with equal settings.

        If the block raises an error, the progress is stored.

        Raises:
            ConfigError: If the folder cannot be created, another process is writing the file, or the files of an
                interrupted run do not fit.
        """
        try:
            self._bin_path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the folder {self._bin_path.parent} cannot be created: {error.strerror}") from error
        with self._lock_path.open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._check_lock_file(lock)
            except BlockingIOError as error:
                raise ConfigError(
                    f"another process is writing {self._bin_path}; wait for it, or choose another --output"
                ) from error
            try:
                self._prepare_files()
                with (
                    _get_partial(self._bin_path).open("r+b") as bin_file,
                    _get_partial(self._lengths_path).open("r+b") as lengths,
                ):
                    self._bin_file, self._lengths_file = bin_file, lengths
                    bin_file.seek(0, os.SEEK_END)
                    lengths.seek(0, os.SEEK_END)
                    try:
                        yield self
                    except BaseException:
                        with contextlib.suppress(OSError):  # such as a full disk, which is the error that is raised
                            self.save_progress()
                        raise
            finally:
                self._lock_path.unlink(missing_ok=True)

    def _check_lock_file(self, lock: BinaryIO) -> None:
        """Raise `BlockingIOError` if the locked file is not the one at its path, because a run that ended removed it."""
        try:
            is_current = os.path.samestat(os.fstat(lock.fileno()), self._lock_path.stat())
        except FileNotFoundError:
            is_current = False
        if not is_current:
            raise BlockingIOError(f"{self._lock_path} was removed by a run that has just ended")

    def _prepare_files(self) -> None:
        """Truncate the partial files to the stored progress, or create them.

        Raises:
            ConfigError: If the pair exists, or an interrupted run had other settings, and `overwrites` is False.
        """
        stored = self._read_progress()
        if stored is None:
            # The progress of a run with other settings must not outlive its tokens, or that run would continue after ours.
            self._progress_path.unlink(missing_ok=True)
        bin_partial, lengths_partial = _get_partial(self._bin_path), _get_partial(self._lengths_path)
        if stored is not None and not bin_partial.exists() and self._bin_path.exists():
            # The earlier run died in `commit`, after the .bin file got its final name.
            if self._index_path.exists():
                self._remove_leftovers()
                stored = None
            else:
                self._bin_path.replace(bin_partial)
        if not self._overwrites:
            check_no_pair(self._prefix)
        progress = stored or TokenizeProgress()
        sizes = {
            bin_partial: progress.num_tokens * self._dtype.itemsize,
            lengths_partial: progress.num_documents * _LENGTH_TYPE.itemsize,
        }
        if not all(path.exists() and path.stat().st_size >= size for path, size in sizes.items()):
            progress, sizes = TokenizeProgress(), dict.fromkeys(sizes, 0)
        self.progress = progress
        for path, size in sizes.items():
            path.touch()
            os.truncate(path, size)

    def _read_progress(self) -> TokenizeProgress | None:
        """Return the stored progress of a run with equal settings, or None.

        Raises:
            ConfigError: If the settings differ and `overwrites` is False.
        """
        try:
            stored = json.loads(self._progress_path.read_text(encoding="utf-8"))
            progress, settings = TokenizeProgress(**stored["progress"]), stored["settings"]
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None
        if settings == self._settings:
            return progress
        if not self._overwrites:
            raise ConfigError(
                f"an interrupted run has begun {self._bin_path} with other data, another tokenizer or other options; give those "
                "again to continue it, or begin anew with --overwrite"
            )
        return None

    def add_block(self, tokens: Integers, lengths: Integers, counts: TokenizeProgress) -> None:
        """Append the documents of one block.

        Args:
            tokens: Token IDs of all documents, in the type of the file.
            lengths: Number of tokens of each document.
            counts: Counts of the block, which are added to the progress.
        """
        self._bin_file.write(tokens.tobytes())
        self._lengths_file.write(lengths.astype(_LENGTH_TYPE).tobytes())
        # One assignment, so that Ctrl-C cannot leave counts of which only some include this block.
        self.progress = TokenizeProgress(
            **{name: value + getattr(self.progress, name) for name, value in asdict(counts).items()}
        )

    def save_progress(self) -> None:
        """Flush all tokens to the disk, and store the progress, from which a later run can continue."""
        for file in (self._bin_file, self._lengths_file):
            _flush(file)
        stored = {"settings": self._settings, "progress": asdict(self.progress)}
        write_text(self._progress_path, json.dumps(stored))

    def commit(self) -> None:
        """Write the index, and give both files their final names.

        Raises:
            DataError: If there are no tokens.
        """
        if not self.progress.num_tokens:
            raise DataError("all documents are empty; give documents with text")
        self.save_progress()  # if the process dies from here on, the next one repeats only this method
        lengths = numpy.memmap(_get_partial(self._lengths_path), _LENGTH_TYPE, "r")
        with _get_partial(self._index_path).open("wb") as file:
            write_index(file, lengths, self._dtype)
            _flush(file)
        # Remove an old index first: with the new .bin file, it would describe wrong documents.
        self._index_path.unlink(missing_ok=True)
        _get_partial(self._bin_path).replace(self._bin_path)
        _get_partial(self._index_path).replace(self._index_path)
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        self._progress_path.unlink(missing_ok=True)
        _get_partial(self._lengths_path).unlink(missing_ok=True)


def check_no_pair(prefix: Path) -> None:
    """Raise `ConfigError` if a file of the pair exists."""
    for path in get_pair(prefix):
        if path.exists():
            raise ConfigError(f"{path} exists; choose another --output, or replace it with --overwrite")


def _get_partial(path: Path) -> Path:
    """Return the name of a file while it is incomplete."""
    return path.with_name(path.name + PARTIAL_SUFFIX)


def _flush(file: BinaryIO) -> None:
    """Write buffered bytes of a file to the disk."""
    file.flush()
    os.fsync(file.fileno())
