"""Storage of shards: find files by path, pattern or URL, and read byte ranges of them.

`http://` and `https://` URLs are read with range requests, URLs of object stores (`s3://`, `gs://`, `az://`) by
Headway's own client, and URLs with other schemes by fsspec. Remote reads are repeated while they fail for a transient
reason.
"""

import fnmatch
import glob
import hashlib
import importlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headway.common.object_client import ObjectClient
from headway.common.object_path import SCHEMES, expand_home
from headway.common.optional import require
from headway.common.range_file import RangeFile
from headway.errors import DataError, ObjectStoreError
from headway.language_data.shards.retry import RetryPolicy, read_with_retries

_WILDCARDS = frozenset("*?[")


@dataclass(frozen=True)
class ShardFile:
    """File that contains records, on this machine or in remote storage.

    Attributes:
        url: Path or URL of the file.
        num_bytes: Size of the file.
        version: Value that changes with the content: modification time or ETag; "" if the storage reports none.
    """

    url: str
    num_bytes: int
    version: str

    @property
    def key(self) -> str:
        """Hash of the file's URL, size and version. Names of cache entries for the file begin with this hash."""
        return hashlib.sha256(f"{self.url}\n{self.num_bytes}\n{self.version}".encode()).hexdigest()[:40]

    @property
    def is_local(self) -> bool:
        """Whether the file is in the file system of this machine."""
        return get_scheme(self.url) == ""


class RangeReader(Protocol):
    """Interface for reading byte ranges of one file."""

    def read_range(self, offset: int, num_bytes: int) -> memoryview:
        """Return `num_bytes` bytes from `offset` on. The result is shorter only at the end of the file."""

    def close(self) -> None:
        """Close the file. Buffers that `read_range` returned stay valid."""


def get_scheme(url: str) -> str:
    """Return the scheme of a URL in lower case, or "" for a local path."""
    scheme, mark, _ = url.partition("://")
    return "" if not mark or scheme.lower() == "file" else scheme.lower()


def join_url(folder: str, name: str) -> str:
    """Return the URL or path of a file in a folder, or `name` unchanged if the folder is ""."""
    return f"{folder.rstrip('/')}/{name}" if folder else name


# -------------------------------------------------------------------- finding files


def find_files(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], policy: RetryPolicy
) -> list[ShardFile]:
    """Return the files that match paths, patterns and URLs, in the order of `paths`.

    The matches of a pattern are sorted.

    Args:
        paths: One path, URL or pattern, or a sequence of them. Patterns contain `*`, `?` or `[...]`, which do not match
            `/`, or `**`, which matches any number of folders. In http(s) URLs, these are ordinary characters.
        policy: Time limits of remote requests.

    Raises:
        DataError: If `paths` is empty, a path matches no file, a file is listed twice, or the name of a bucket is a
            pattern. Also if remote storage refuses the request, or does not respond in time.
        OptionalDependencyMissing: If fsspec is needed and not installed.
    """
    path_list = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files: list[ShardFile] = []
    for path in path_list:
        url = expand_home(os.fspath(path).removeprefix("file://"))
        matches = expand_pattern(url, policy)
        if not matches:
            if os.path.isdir(url):
                raise DataError(f"{url} is a folder; give a pattern, such as {os.path.join(url, '*.jsonl')}")
            raise DataError(f"no file matches {url!r}; give the path, pattern or URL of at least one file")
        files += matches
    if not files:
        raise DataError("the list of shards is empty; give the path, pattern or URL of at least one shard")
    urls: set[str] = set()
    for file in files:
        if file.url in urls:
            raise DataError(f"the file {file.url} is named twice, so its records would be read twice; name it once")
        urls.add(file.url)
    return files


def expand_pattern(url: str, policy: RetryPolicy) -> list[ShardFile]:
    """Return the files that match one path, pattern or URL, sorted. The list can be empty.

    Args:
        url: Path or URL, or a pattern with `*`, `**`, `?` or `[...]`. An http(s) URL is never a pattern.
        policy: Time limits of remote requests.

    Raises:
        DataError: If remote storage refuses the request, or does not respond in time, or the name of a bucket is a
            pattern.
    """
    scheme, has_wildcards = get_scheme(url), not _WILDCARDS.isdisjoint(url)
    if not scheme:
        # The name of an existing file may contain the characters of a pattern.
        is_pattern = has_wildcards and not os.path.exists(url)
        names = sorted(glob.glob(url, recursive=True)) if is_pattern else [url]
        return [_describe_local(name) for name in names if os.path.isfile(name)]
    if scheme in ("http", "https"):
        return [_describe_http(url, policy)]  # "?" and "*" are ordinary characters of such a URL
    if scheme in SCHEMES:
        return _list_bucket(url, has_wildcards, policy)
    return _list_fsspec(url, has_wildcards, policy)


def _describe_local(name: str) -> ShardFile:
    status = os.stat(name)
    return ShardFile(os.path.abspath(name), status.st_size, str(status.st_mtime_ns))


def _describe_http(url: str, policy: RetryPolicy) -> ShardFile:
    """Return an HTTP file with its size and version, as its server reports them for a request of one byte.

    Args:
        url: URL of the file.
        policy: Time limits of the request.

    Raises:
        DataError: If the file cannot be read, or the server does not report its size.
    """

    def request_size() -> ShardFile:
        request = urllib.request.Request(url, headers={"Range": "bytes=0-0", "Accept-Encoding": "identity"})
        with urllib.request.urlopen(request, timeout=policy.attempt_timeout) as response:
            # "bytes 0-0/TOTAL", or no such header from a server that ignores ranges and sends the whole file.
            total = response.headers.get("Content-Range", "").rpartition("/")[2]
            size = total if total.isdigit() else response.headers.get("Content-Length")
            if size is None:
                raise DataError(
                    f"{url}: the server does not report the size of the file, so Headway cannot seek to a record"
                )
            version = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
            return ShardFile(url, int(size), version)

    return read_with_retries(request_size, f"looking at the shard {url}", policy)


def _list_bucket(url: str, has_wildcards: bool, policy: RetryPolicy) -> list[ShardFile]:
    """Return the files of a bucket that a URL refers to, sorted by key, with their sizes and versions.

    Args:
        url: URL of a file, or a pattern.
        has_wildcards: Whether the URL is a pattern.
        policy: Time limits of the requests.

    Raises:
        DataError: If the name of the bucket is a pattern, or the object store refuses a request.
    """
    root, key = split_bucket(url)
    if not _WILDCARDS.isdisjoint(root):
        raise DataError(
            f"{url!r} has a wildcard in the name of the bucket, and buckets are not searched; write the bucket's name, and use "
            "wildcards only in the path after it"
        )
    client = ObjectClient(root, retry_seconds=policy.limit)
    with _raise_as_data_error():
        if not has_wildcards:
            info = client.describe(key)
            return [] if info is None else [ShardFile(url, info.num_bytes, info.version)]
        # Object stores list the keys below a folder, so list the last folder before the first wildcard.
        first_wildcard = min(key.index(mark) for mark in _WILDCARDS if mark in key)
        objects = client.list(key[:first_wildcard].rpartition("/")[0])
    folders = _list_folders(info.key for info in objects)
    files: list[ShardFile] = []
    for info in sorted(objects, key=lambda info: info.key):
        # Consoles create a folder as the empty object "folder/", which is listed without the slash.
        is_folder = info.num_bytes == 0 and info.key in folders
        if not is_folder and _matches_pattern(info.key.split("/"), key.split("/")):
            files.append(ShardFile(f"{root}/{info.key}", info.num_bytes, info.version))
    return files


def _list_folders(keys: Iterable[str]) -> set[str]:
    """Return the folders that contain the keys, and the folders around them."""
    folders: set[str] = set()
    for key in keys:
        folder = key.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    return folders


def _matches_pattern(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether the parts of a key match the parts of a pattern, as in `glob` for local files.

    In contrast to `glob`, wildcards also match a dot at the start of a name.

    Args:
        names: Parts of the key between slashes.
        patterns: Parts of the pattern. The part `**` matches any number of names.
    """
    if not patterns:
        return not names
    first, *rest = patterns
    if first == "**":
        return any(_matches_pattern(names[start:], rest) for start in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], first) and _matches_pattern(names[1:], rest)


@contextmanager
def _raise_as_data_error() -> Iterator[None]:
    """Return a context that raises the error of an object store as DataError, as for all other storage."""
    try:
        yield
    except ObjectStoreError as error:
        raise DataError(str(error)) from error


def split_bucket(url: str) -> tuple[str, str]:
    """Split an object's URL into the URL of its bucket and the key in that bucket."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    return f"{scheme}://{bucket}", key


def _list_fsspec(url: str, has_wildcards: bool, policy: RetryPolicy) -> list[ShardFile]:
    """Return the files that a URL of an fsspec file system refers to, sorted by name, with their sizes and versions.

    Args:
        url: URL of a file, or a pattern.
        has_wildcards: Whether the URL is a pattern.
        policy: Time limits of the requests.
    """
    system, path = open_file_system(url)
    scheme = url.partition("://")[0]

    def list_files() -> list[ShardFile]:
        names = sorted(system.glob(path)) if has_wildcards else [path]
        files = []
        for name in names:
            info = system.info(name)
            if info["type"] != "file":
                continue
            # File systems of fsspec name this value differently.
            version = info.get("ETag") or info.get("etag") or info.get("mtime") or info.get("created") or ""
            files.append(ShardFile(f"{scheme}://{name.lstrip('/')}", int(info["size"]), str(version)))
        return files

    return read_with_retries(list_files, f"listing {url}", policy)


def open_file_system(url: str) -> tuple[Any, str]:
    """Return a pair of (fsspec file system of a URL, path within this file system).

    Raises:
        OptionalDependencyMissing: If fsspec is not installed.
        DataError: If fsspec has no file system for the scheme.
    """
    require("fsspec", f"reading {url} needs", "fsspec")
    try:
        system, path = importlib.import_module("fsspec.core").url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise DataError(f"{url} cannot be read: {error}") from error
    return system, path


# -------------------------------------------------------------------- reading ranges


def open_ranges(file: ShardFile, policy: RetryPolicy) -> RangeReader:
    """Return a reader of byte ranges of a file.

    Raises:
        OSError: If a local file cannot be opened.
        DataError: If fsspec has no file system for the URL's scheme.
        OptionalDependencyMissing: If a package that the storage needs is not installed.
    """
    scheme = get_scheme(file.url)
    if not scheme:
        return LocalFile(file.url)
    fetch: Callable[[int, int], bytes]
    if scheme in ("http", "https"):
        fetch = HttpRanges(file.url, policy.attempt_timeout).fetch
    elif scheme in SCHEMES:
        fetch = BucketRanges(file.url, policy).fetch
    else:
        fetch = FsspecRanges(file.url).fetch
    return RemoteFile(file, fetch, policy)


class LocalFile:
    """Reader of byte ranges of a local file.

    Reads do not use the file's position, so forked workers can share the open file. The file is not memory-mapped,
    because a process that reads a mapped file is killed by a bus error if another process shortens the file.

    Args:
        path: Path of the file.

    Attributes:
        num_bytes: Size of the file.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = -1  # so that `__del__` works if the file cannot be opened
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        self.num_bytes = os.fstat(self._descriptor).st_size

    def read_range(self, offset: int, num_bytes: int) -> memoryview:
        """Return `num_bytes` bytes from `offset` on. The result is shorter only at the end of the file."""
        data = os.pread(self._descriptor, num_bytes, offset)
        while len(data) < num_bytes and (more := os.pread(self._descriptor, num_bytes - len(data), offset + len(data))):
            data += more
        return memoryview(data)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    __del__ = close


class RemoteFile:
    """Reader of byte ranges of a file in remote storage, which retries failed requests.

    Args:
        file: File to read.
        fetch: Function that reads the bytes from one offset up to another (exclusive).
        policy: Time limits.
    """

    def __init__(self, file: ShardFile, fetch: Callable[[int, int], bytes], policy: RetryPolicy) -> None:
        self._file = file
        self._fetch = fetch
        self._policy = policy

    def read_range(self, offset: int, num_bytes: int) -> memoryview:
        """Return `num_bytes` bytes from `offset` on. The result is shorter only at the end of the file.

        Raises:
            DataError: If the read is refused, or still fails when its time limit has passed.
        """
        end = min(offset + num_bytes, self._file.num_bytes)
        if end <= offset:
            return memoryview(b"")

        def fetch_range() -> bytes:
            data = self._fetch(offset, end)
            if len(data) != end - offset:
                raise ConnectionError(f"received {len(data)} bytes instead of {end - offset}")
            return data

        description = f"reading bytes {offset} to {end} of the shard {self._file.url}"
        return memoryview(read_with_retries(fetch_range, description, self._policy))

    def close(self) -> None:
        """Do nothing, because each read opens a separate connection."""


@dataclass(frozen=True)
class HttpRanges:
    """Reader of byte ranges of a file on an HTTP server.

    Attributes:
        url: URL of the file.
        timeout: Seconds that a request may go without receiving data.
    """

    url: str
    timeout: float

    def fetch(self, start: int, end: int) -> bytes:
        """Return the bytes from `start` up to `end` (exclusive).

        A server that does not support range requests sends the whole file. The other bytes are then discarded.
        """
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        request = urllib.request.Request(self.url, headers=headers)
        with urllib.request.urlopen(request, timeout=self.timeout) as response:
            data: bytes = response.read()
            return data if response.status == 206 else data[start:end]


class BucketRanges:
    """Reader of byte ranges of an object in an object store. It uses Headway's own client.

    Args:
        url: URL of the object.
        policy: Time limits.
    """

    def __init__(self, url: str, policy: RetryPolicy) -> None:
        root, self._key = split_bucket(url)
        self._client = ObjectClient(root, retry_seconds=policy.limit)

    def fetch(self, start: int, end: int) -> bytes:
        """Return the bytes of the object from `start` up to `end` (exclusive). The client repeats failed requests.

        Raises:
            DataError: If the object store refuses the request, or does not respond in time.
        """
        with _raise_as_data_error():
            return bytes(self._client.get_range(self._key, start, end))


class FsspecRanges:
    """Reader of byte ranges of a file in any storage for which fsspec has a file system.

    Args:
        url: URL of the file.
    """

    def __init__(self, url: str) -> None:
        self._system, self._path = open_file_system(url)

    def fetch(self, start: int, end: int) -> bytes:
        """Return the bytes of the file from `start` up to `end` (exclusive)."""
        return bytes(self._system.cat_file(self._path, start=start, end=end))


class ReaderFile(RangeFile):
    """Seekable file object over a `RangeReader`.

    Args:
        reader: Reader of the file's bytes.
        num_bytes: Size of the file.
    """

    def __init__(self, reader: RangeReader, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self._reader = reader

    def read_at(self, offset: int, view: memoryview) -> int:
        """Fill `view` with the bytes from `offset` on, and return their number.

        The number is less than `len(view)` only at the end of the file.
        """
        data = self._reader.read_range(offset, len(view))
        view[: len(data)] = data
        return len(data)


def get_cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder for indexes and local copies of shards: `cache_dir`, or `~/.cache/headway/shards` if None."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser().absolute()
    return Path.home() / ".cache" / "headway" / "shards"
