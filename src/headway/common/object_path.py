"""Paths in object stores (`s3://bucket/run`); a file longer than a part is stored as several objects.

A file's first 16 MiB are the object of its name, the next ones `<name>.part-00001` and so on: each is written by one request that
succeeds or fails as a whole, so that a killed process leaves nothing but objects with names. (What a multipart upload leaves has none
in a listing, is paid for, and cannot be found through obstore.) Folders are prefixes, which need not be made.
"""

import contextlib
import io
import queue
import re
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headway.common.object_client import ObjectClient, ObjectInfo, client_of
from headway.errors import ConfigError

PART = 16 * 2**20
"""Bytes of a file in one object."""
THREADS = 4
"""Parts that a process sends or receives at once."""
SCHEMES = ("s3", "gs", "az")
_URL = re.compile(rf"({'|'.join(SCHEMES)})://")
_MANGLED = re.compile(rf"({'|'.join(SCHEMES)}):/(?!/)")
_PART_NAME = re.compile(r"(.+)\.part-\d{5}")


class ObjectPath(type(Path())):  # type: ignore[misc]
    """A place in a bucket: `/`, `name`, `parent` and `with_name` are those of paths, and what it is asked the store answers."""

    def __str__(self) -> str:
        text = super().__str__()
        return _MANGLED.sub(r"\1://", text)

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is in an object store, and has no path in the file system")

    def __rtruediv__(self, other: Any) -> "ObjectPath":
        """Itself: an absolute path, below whatever folder it is looked for."""
        return self

    @property
    def client(self) -> ObjectClient:
        """Its bucket."""
        return client_of(f"{self.parts[0]}//{self.parts[1]}")

    @property
    def key(self) -> str:
        """Its name in the bucket."""
        return "/".join(self.parts[2:])

    def part(self, number: int) -> str:
        """The key of a part of this file."""
        return f"{self.key}.part-{number:05d}" if number else self.key

    def below(self) -> list[tuple[str, ObjectInfo]]:
        """(name relative to this one, object) of all objects below it, in order of their keys."""
        start = len(self.key) + bool(self.key)
        return [(each.key[start:], each) for each in sorted(self.client.list(self.key), key=lambda each: each.key)]

    # ---------------------------------------------------------------- as of a path

    def absolute(self) -> "ObjectPath":
        """It is."""
        return self

    expanduser = resolve = absolute

    def exists(self, **_: Any) -> bool:
        """Is there an object of that name?"""
        return self.client.size(self.key) is not None

    is_file = exists

    def is_dir(self, **_: Any) -> bool:
        """Is there anything below it?"""
        return bool(self.client.list(self.key))

    def iterdir(self) -> "Iterator[ObjectPath]":
        """The files and folders directly below it."""
        names = {name.split("/")[0] for name, _ in self.below()}
        yield from (self / name for name in sorted(names) if not _PART_NAME.fullmatch(name))

    def rglob(self, pattern: str = "*", **_: Any) -> "Iterator[ObjectPath]":
        """All files below it."""
        yield from (self / name for name, _ in self.below() if not _PART_NAME.fullmatch(name))

    def mkdir(self, *_: Any, **__: Any) -> None:
        """Nothing: a prefix is there when something has it."""

    def touch(self, *_: Any, **__: Any) -> None:
        """Write an empty object."""
        self.write_bytes(b"")

    def read_bytes(self) -> bytes:
        """An object's bytes.

        Raises:
            FileNotFoundError: there is none.
        """
        found = self.client.get(self.key)
        if found is None:
            raise FileNotFoundError(f"{self} does not exist")
        return found[0]

    def read_text(self, *_: Any, **__: Any) -> str:
        """The same as text."""
        return self.read_bytes().decode()

    def write_bytes(self, data: Any) -> int:
        """Write an object in one request."""
        self.client.put(self.key, data)
        return len(data)

    def write_text(self, data: str, *_: Any, **__: Any) -> int:
        """The same of text."""
        return self.write_bytes(data.encode())

    def replace(self, target: Any) -> "ObjectPath":
        """Give a small object another name: it is there under one of them at least."""
        target.write_bytes(self.read_bytes())
        self.unlink()
        return target  # type: ignore[no-any-return]

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove an object."""
        self.client.delete([self.key])

    def open(self, mode: str = "rb", *_: Any, **__: Any) -> Any:
        """A file of any length, to be written or read in order: "wb" or "rb"."""
        return PartsWriter(self) if mode == "wb" else PartsReader(self)

    def read_range(self, start: int, end: int) -> Iterator[memoryview]:
        """Those bytes of a file, part by part.

        Raises:
            FileNotFoundError: a part is not there.
        """
        while start < end:
            number, offset = divmod(start, PART)
            count = min(end - start, PART - offset)
            yield memoryview(self.client.get_range(self.part(number), offset, offset + count))
            start += count


def to_path(place: str | Path) -> Path:
    """A path of the file system, or of an object store where the text is such a URL.

    Raises:
        ConfigError: a URL was made a `Path` before, which takes a slash away; or it names no bucket.
    """
    text = str(place)
    if isinstance(place, ObjectPath):
        return place
    if isinstance(place, Path) and _MANGLED.match(text):
        raise ConfigError(f"{place!r} is a URL that lost a slash in Path(); give the URL as text")
    if not _URL.match(text):
        return Path(place)
    path = ObjectPath(text)
    if len(path.parts) < 2:
        raise ConfigError(f"{text!r} names no bucket; give a URL such as s3://bucket/run")
    return path


@contextlib.contextmanager
def writable(place: Path) -> Iterator[Path]:
    """A folder for what opens files by their names: `place` itself, or a temporary one; a block that ends well has sent its files."""
    if not isinstance(place, ObjectPath):
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="headway-") as made:
        yield Path(made)
        for path in sorted(each for each in Path(made).rglob("*") if each.is_file()):
            with path.open("rb") as source, (place / path.relative_to(made)).open("wb") as file:
                shutil.copyfileobj(source, file, PART)


class PartsWriter(io.RawIOBase):
    """Sends a file's parts while the next ones are filled; memory: one part a thread.

    Args:
        path: the file. It is complete when `close` has returned.
    """

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        self._at = self._number = self._made = 0
        self._free: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        self._senders = ThreadPoolExecutor(THREADS, "headway-send")
        self._running: list[Future[None]] = []
        self._buffer, self._filled = self._next_buffer(), 0

    def _next_buffer(self) -> bytearray:
        if self._made < THREADS and self._free.empty():
            self._made += 1
            return bytearray(PART)
        return self._free.get()

    def writable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Bytes written so far."""
        return self._at

    def write(self, data: Any) -> int:
        """Take all of some bytes; returns how many.

        Raises:
            ObjectStoreError: an earlier part could not be sent.
        """
        view = memoryview(data).cast("B")
        count = len(view)
        while view:
            if self._filled == PART:
                self._send()
                self._buffer, self._filled = self._next_buffer(), 0
            taken = view[: PART - self._filled]
            self._buffer[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            self._at += len(taken)
            view = view[len(taken) :]
        return count

    def _send(self) -> None:
        for each in [each for each in self._running if each.done()]:
            self._running.remove(each)
            each.result()
        key, buffer, filled = self._path.part(self._number), self._buffer, self._filled
        self._number += 1

        def act() -> None:
            try:
                self._path.client.put(key, memoryview(buffer)[:filled])
            finally:
                self._free.put(buffer)

        self._running.append(self._senders.submit(act))

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()
        else:
            self._senders.shutdown(cancel_futures=True)
            super().close()

    def close(self) -> None:
        """Send what is left, and wait for all parts.

        Raises:
            ObjectStoreError: one could not be sent.
        """
        if self.closed:
            return
        try:
            self._send()
            for each in self._running:
                each.result()
        finally:
            self._senders.shutdown(cancel_futures=True)
            super().close()


class PartsReader(io.RawIOBase):
    """Reads a file in order, or from where it is sought.

    Args:
        path: the file.

    Raises:
        FileNotFoundError: there is none.
    """

    def __init__(self, path: ObjectPath) -> None:
        names = {name: each.num_bytes for name, each in path.parent.below()}
        if path.name not in names:
            raise FileNotFoundError(f"{path} does not exist")
        parts = [size for name, size in names.items() if name == path.name or name.startswith(f"{path.name}.part-")]
        self._path, self._size, self._at = path, sum(parts), 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place; returns it."""
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read as much as there is room for; returns how much that was."""
        view = memoryview(buffer).cast("B")
        end = min(self._size, self._at + len(view))
        count = 0
        for each in self._path.read_range(self._at, end):
            view[count : count + len(each)] = each
            count += len(each)
        self._at += count
        return count
