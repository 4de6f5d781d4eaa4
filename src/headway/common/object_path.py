"""Paths in object stores, such as `s3://bucket/run`. A file larger than one part is stored as several objects.

The object with the file's name contains the first 16 MiB, `<name>.part-00001` contains the next 16 MiB, and so on. The
first object that is not exactly 16 MiB long is the last one. Each part is written by one request that succeeds or fails
as a whole, so a killed process leaves only complete, named objects. A multipart upload would leave parts that no
listing shows, that cost money, and that obstore cannot find. Folders are prefixes and need not be created.
"""

import contextlib
import io
import os
import queue
import re
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from headway.common.object_client import ObjectClient, ObjectInfo, get_client
from headway.common.range_file import RangeFile
from headway.errors import ConfigError

PART = 16 * 2**20
"""Size in bytes of one part of a file. Only the last part is shorter."""
THREADS = 4
"""Number of parts that a process sends or receives concurrently."""
SCHEMES = ("s3", "gs", "az")
"""URL schemes of object stores.

They repeat the "store" rows of `headway.core.extensions`, which this layer must not import.
"""
_T = TypeVar("_T")
_URL = re.compile(rf"({'|'.join(SCHEMES)})://")
_URL_WITHOUT_SLASH = re.compile(rf"({'|'.join(SCHEMES)}):/(?!/)")
_PART_NAME = re.compile(r"(.+)\.part-(\d{5,})")


class ObjectPath(type(Path())):  # type: ignore[misc]
    """Path in a bucket of an object store.

    `/`, `name`, `parent` and `with_name` work as in `pathlib`. File operations become requests to the store.
    """

    def __str__(self) -> str:
        text = super().__str__()
        return _URL_WITHOUT_SLASH.sub(r"\1://", text)

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is in an object store, and has no path in the file system")

    def __rtruediv__(self, other: Any) -> "ObjectPath":
        """Return this path as the result of `folder / path`.

        An object path is absolute and replaces the folder, as in `pathlib`.
        """
        return self

    @property
    def client(self) -> ObjectClient:
        """Client for the bucket of this path."""
        return get_client(f"{self.parts[0]}//{self.parts[1]}")

    @property
    def scheme(self) -> str:
        """Scheme of this path's URL: one of `SCHEMES`."""
        return str(self.parts[0]).removesuffix(":")

    @property
    def key(self) -> str:
        """Key of this path in the bucket."""
        return "/".join(self.parts[2:])

    def make_part_key(self, number: int) -> str:
        """Return the key of part `number` of this file. Part 0 has the key of the file itself."""
        return f"{self.key}.part-{number:05d}" if number else self.key

    def list_part_sizes(self) -> list[int]:
        """Return the sizes in bytes of the objects that hold this file, in order.

        Raises:
            FileNotFoundError: If the file does not exist.
        """
        size = self.client.get_size(self.key)
        if size is None:
            raise FileNotFoundError(f"{self} does not exist")
        sizes = [size]
        stored = self._find_later_parts() if size == PART else {}
        while sizes[-1] == PART and len(sizes) in stored:
            sizes.append(stored[len(sizes)])
        return sizes

    def delete_parts(self, first: int) -> None:
        """Delete the parts of this file from number `first` on, which remain from an earlier, longer file.

        Do nothing if part `first` does not exist.

        Args:
            first: Number of the first part to delete, at least 1.
        """
        if self.client.get_size(self.make_part_key(first)) is not None:
            self.client.delete([self.make_part_key(number) for number in self._find_later_parts() if number >= first])

    def _find_later_parts(self) -> dict[int, int]:
        """Return the sizes of the objects that belong to this file, except the first one, by their part numbers."""
        sizes = {}
        for name, each in self.parent.list_objects():
            match = _PART_NAME.fullmatch(name)
            if match is not None and match[1] == self.name:
                sizes[int(match[2])] = each.num_bytes
        return sizes

    def list_objects(self) -> list[tuple[str, ObjectInfo]]:
        """Return pairs of (name relative to this path, `ObjectInfo`) of all objects under this path, sorted by key."""
        start = len(self.key) + 1 if self.key else 0  # skip the slash after this path, too
        return [(each.key[start:], each) for each in sorted(self.client.list(self.key), key=lambda each: each.key)]

    # ---------------------------------------------------------------- the interface of pathlib.Path

    def absolute(self) -> "ObjectPath":
        """Return this path, which is always absolute."""
        return self

    expanduser = resolve = absolute

    def exists(self, **_: Any) -> bool:
        """Whether an object with this key exists."""
        return self.client.get_size(self.key) is not None

    is_file = exists

    def is_dir(self, **_: Any) -> bool:
        """Whether any object exists under this path."""
        return bool(self.client.list(self.key))

    def iterdir(self) -> "Iterator[ObjectPath]":
        """Yield the files and folders directly in this folder."""
        names = {name.split("/")[0] for name, _ in self.list_objects()}
        yield from (self / name for name in sorted(names) if not _PART_NAME.fullmatch(name))

    def rglob(self, pattern: str = "*", **_: Any) -> "Iterator[ObjectPath]":
        """Yield all files in this folder and its subfolders. The pattern is ignored."""
        yield from (self / name for name, _ in self.list_objects() if not _PART_NAME.fullmatch(name))

    def mkdir(self, *_: Any, **__: Any) -> None:
        """Do nothing, because a folder is only a prefix and exists as soon as an object's key starts with it."""

    def touch(self, *_: Any, **__: Any) -> None:
        """Write an empty object. Unlike in `pathlib`, the content of an existing object is lost."""
        self.write_bytes(b"")

    def read_bytes(self) -> bytes:
        """Return the content of the file.

        Raises:
            FileNotFoundError: If the file does not exist.
        """
        found = self.client.get(self.key)
        if found is None:
            raise FileNotFoundError(f"{self} does not exist")
        first_part, _ = found
        if len(first_part) != PART:
            return first_part
        return first_part + b"".join(self.read_range(PART, sum(self.list_part_sizes())))

    def read_text(self, *_: Any, **__: Any) -> str:
        """Return the content of the file, decoded from UTF-8. Arguments of `Path.read_text`, such as `encoding`, are ignored.

        Raises:
            FileNotFoundError: If the file does not exist.
        """
        return self.read_bytes().decode()

    def write_bytes(self, data: Any) -> int:
        """Write the file as one object, in one request, and return the number of bytes."""
        self.client.put(self.key, data)
        if len(data) == PART:  # otherwise readers ignore the parts of an earlier, longer file
            self.delete_parts(1)
        return len(data)

    def write_text(self, data: str, *_: Any, **__: Any) -> int:
        """Write the file as text in UTF-8, in one request, and return the number of bytes."""
        return self.write_bytes(data.encode())

    def replace(self, target: Any) -> "ObjectPath":
        """Copy a small file to `target`, delete the original, and return `target`. One of the two always exists."""
        target.write_bytes(self.read_bytes())
        self.unlink()
        return target  # type: ignore[no-any-return]

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the file. A missing file is ignored, whatever the value of `missing_ok`."""
        has_more = self.client.get_size(self.key) == PART
        self.client.delete([self.key])
        if has_more:
            self.delete_parts(1)

    def open(self, mode: str = "rb", *_: Any, **__: Any) -> Any:
        """Open a file of any size for sequential writing ("wb") or for reading ("rb").

        Raises:
            FileNotFoundError: If the file is opened for reading and does not exist.
        """
        return PartsWriter(self) if mode == "wb" else PartsReader(self)

    def read_range(self, start: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes from `start` to `end` (exclusive) of a file that was written in parts, one buffer per part.

        Raises:
            FileNotFoundError: If a part does not exist.
        """
        while start < end:
            number, offset = divmod(start, PART)
            count = min(end - start, PART - offset)
            yield memoryview(self.client.get_range(self.make_part_key(number), offset, offset + count))
            start += count


def expand_home(place: _T) -> _T:
    """Return a path of the same type in which a leading `~` is replaced by the home directory.

    Args:
        place: Path or URL. None is returned unchanged.
    """
    text = os.path.expanduser(str(place))
    if text == str(place):
        return place
    path_type: Any = type(place)
    expanded: _T = path_type(text)
    return expanded


def to_path(place: str | Path) -> Path:
    """Return `place` as a file system path, or as an `ObjectPath` if it is the URL of an object store.

    A leading `~` is replaced by the home directory.

    Raises:
        ConfigError: If a URL was passed through `Path` (which removes a slash), or names no bucket.
    """
    text = str(place)
    if isinstance(place, ObjectPath):
        return place
    if isinstance(place, Path) and _URL_WITHOUT_SLASH.match(text):
        raise ConfigError(f"{place!r} is a URL that lost a slash in Path(); give the URL as text")
    if not _URL.match(text):
        return Path(expand_home(place))
    path = ObjectPath(text)
    if len(path.parts) < 2:
        raise ConfigError(f"{text!r} names no bucket; give a URL such as s3://bucket/run")
    return path


@contextlib.contextmanager
def open_writable(place: Path) -> Iterator[Path]:
    """Yield a local folder for code that opens files by name.

    A local `place` is yielded itself. For an object store, a temporary folder is yielded, and its files are uploaded
    if the block succeeds.
    """
    if not isinstance(place, ObjectPath):
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="headway-") as temporary:
        yield Path(temporary)
        for path in sorted(each for each in Path(temporary).rglob("*") if each.is_file()):
            with path.open("rb") as source, (place / path.relative_to(temporary)).open("wb") as file:
                shutil.copyfileobj(source, file, PART)


class PartsWriter(io.RawIOBase):
    """Sequential writer that uploads parts in background threads while the next parts are filled.

    Holds at most `THREADS` buffers of `PART` bytes. The file is complete once `close` has returned. Further parts of an
    earlier, longer file are then deleted. If the `with` block raises an error, parts that were already uploaded remain.

    Args:
        path: File to write.
    """

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        self._num_written = 0  # bytes
        self._part_number = 0  # of the part that is being filled, from 0
        self._num_buffers = 0  # buffers allocated so far
        self._free_buffers: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        self._executor = ThreadPoolExecutor(THREADS, "headway-send")
        self._uploads: list[Future[None]] = []  # those that were not yet seen to have ended
        self._buffer = self._wait_for_buffer()  # part that is being filled
        self._num_filled = 0  # bytes of `_buffer` that are filled

    def _wait_for_buffer(self) -> bytearray:
        """Return a free buffer for the next part. Up to `THREADS` buffers are allocated; then wait until an upload frees one."""
        if self._num_buffers < THREADS and self._free_buffers.empty():
            self._num_buffers += 1
            return bytearray(PART)
        return self._free_buffers.get()

    def writable(self) -> bool:
        """Return True, as `io` requires of a writer."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._num_written

    def write(self, data: Any) -> int:
        """Write all of `data` and return its length in bytes.

        Raises:
            ObjectStoreError: If an earlier part could not be uploaded.
        """
        view = memoryview(data).cast("B")
        count = len(view)
        while view:
            if self._num_filled == PART:
                self._send_part()
                self._buffer = self._wait_for_buffer()
                self._num_filled = 0
            chunk = view[: PART - self._num_filled]
            self._buffer[self._num_filled : self._num_filled + len(chunk)] = chunk
            self._num_filled += len(chunk)
            self._num_written += len(chunk)
            view = view[len(chunk) :]
        return count

    def _send_part(self) -> None:
        """Start to upload the filled part of the current buffer on another thread.

        Raise the error of an earlier upload that has failed meanwhile.
        """
        for upload in [each for each in self._uploads if each.done()]:
            self._uploads.remove(upload)
            upload.result()  # raises the error of a failed upload
        key, buffer, filled = self._path.make_part_key(self._part_number), self._buffer, self._num_filled
        self._part_number += 1

        def upload_buffer() -> None:
            try:
                self._path.client.put(key, memoryview(buffer)[:filled])
            finally:
                self._free_buffers.put(buffer)

        self._uploads.append(self._executor.submit(upload_buffer))

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()
        else:
            self._executor.shutdown(cancel_futures=True)
            super().close()

    def close(self) -> None:
        """Upload the last part and wait for all uploads.

        Raises:
            ObjectStoreError: If a part could not be uploaded.
        """
        if self.closed:
            return
        try:
            self._send_part()
            for upload in self._uploads:
                upload.result()
            self._path.delete_parts(self._part_number)
        finally:
            self._executor.shutdown(cancel_futures=True)
            super().close()


class PartsReader(RangeFile):
    """Seekable reader of a file whose parts are stored as one or more objects.

    Args:
        path: File to read.

    Raises:
        FileNotFoundError: If the file does not exist.
    """

    def __init__(self, path: ObjectPath) -> None:
        sizes = path.list_part_sizes()
        super().__init__(sum(sizes))
        self._path = path
        self._is_one_object = len(sizes) == 1

    def read_at(self, offset: int, view: memoryview) -> int:
        """Fill `view` with the file's bytes from the byte offset `offset` on, and return the number of bytes read.

        The number is less than `len(view)` only at the end of the file.
        """
        end = min(self._num_bytes, offset + len(view))
        if offset >= end:
            return 0
        if self._is_one_object:
            # Other programs also store files longer than a part as one object, so part boundaries do not apply.
            chunks = iter([memoryview(self._path.client.get_range(self._path.key, offset, end))])
        else:
            chunks = self._path.read_range(offset, end)
        count = 0
        for chunk in chunks:
            view[count : count + len(chunk)] = chunk
            count += len(chunk)
        return count
