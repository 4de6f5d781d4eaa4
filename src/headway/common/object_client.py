"""Client for object stores (S3, Google Cloud Storage, Azure) on top of obstore: requests, retries and errors.

A request is retried for a bounded time while it fails for a transient reason: no answer, a server error, a truncated
transfer. A refused request is not retried. obstore takes the endpoint, the region and the credentials from AWS_*,
GOOGLE_* and AZURE_* variables, from a web identity, or from the machine's role. Profiles in ~/.aws work if boto3 is
installed.
"""

import importlib
import os
import random
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from headway.common import env, scope
from headway.common.optional import require
from headway.errors import ConfigError, ObjectStoreError, OptionalDependencyMissing

T = TypeVar("T")

RETRY_SECONDS, REQUEST_TIMEOUT = "HEADWAY_STORE_RETRY_SECONDS", "HEADWAY_STORE_REQUEST_TIMEOUT"
"""Environment variables that bound the time of a request, in seconds.

The first is the total time of retries for one request (default 120), the second is the timeout of one attempt (default
60).
"""
_CREDENTIAL_ERRORS = (
    "ExpiredToken|InvalidToken|InvalidAccessKeyId|SignatureDoesNotMatch|TokenRefreshRequired|AccessDenied"
)
_MAX_PAUSE = 5.0
"""Maximum seconds between two attempts of a request."""

_MAX_CACHED = 4
"""Maximum number of objects whose content a client caches."""


@dataclass(frozen=True)
class ObjectInfo:
    """One object in a listing of a bucket.

    Attributes:
        key: Key of the object in the bucket.
        num_bytes: Size of the object in bytes.
        version: ETag, which changes when the object is replaced. "" if the store reports none.
    """

    key: str
    num_bytes: int
    version: str = ""


class ObjectClient:
    """Client for one bucket (or container).

    All requests raise an `ObjectStoreError` if the store refuses them, or if every attempt within the time for retries
    fails.

    Args:
        root: URL of the bucket, such as "s3://bucket".
        retry_seconds: Total seconds of retries for one request. Default: the value of HEADWAY_STORE_RETRY_SECONDS, or
            120.

    Raises:
        OptionalDependencyMissing: If obstore is not installed.
        ConfigError: If the URL or an environment variable is invalid.
    """

    def __init__(self, root: str, retry_seconds: float | None = None) -> None:
        self._library: Any = require("obstore", f"{root} needs", "headway[s3]")
        self.root = root
        self._cache: dict[str, tuple[bytes, str]] = {}
        self._retry_seconds = _read_seconds(RETRY_SECONDS, 120.0) if retry_seconds is None else retry_seconds
        timeout = timedelta(seconds=_read_seconds(REQUEST_TIMEOUT, 60.0))
        allows_http = any(env.get_bool(f"{maker}_ALLOW_HTTP") for maker in ("AWS", "AZURE", "GOOGLE"))
        profile = _find_profile(root)
        try:
            self._store = importlib.import_module("obstore.store").from_url(
                root,
                client_options={  # these replace all client options that obstore reads from the environment
                    "timeout": timeout,
                    "connect_timeout": min(timeout, timedelta(seconds=10)),
                    "allow_http": allows_http,
                },
                retry_config={"max_retries": 0, "retry_timeout": timeout},
                **profile,
            )
        except Exception as error:  # obstore raises several kinds of errors here
            raise ConfigError(f"{root} cannot be used: {error}") from error

    def get(self, key: str) -> tuple[bytes, str] | None:
        """Return an object's bytes and ETag, or None if it does not exist.

        If `get_cached` has cached the object, it is downloaded only if its ETag has changed.
        """

        def fetch_object() -> tuple[bytes, str]:
            response = self._library.get(self._store, key)
            return bytes(response.bytes()), str(response.meta["e_tag"])

        cached = self._cache.get(key)
        if cached is not None:
            _, cached_etag = cached
            etag = self._get_or_none(lambda: self._library.head(self._store, key)["e_tag"], f"look at {key}")
            if cached_etag == etag:
                return cached
        return self._get_or_none(fetch_object, f"read {key}")

    def get_cached(self, key: str) -> tuple[bytes, str] | None:
        """Return an object's bytes and ETag, or None if it does not exist. Cache them for later calls of `get`.

        Later calls of `get` compare ETags, and download the object again only if it has changed. At most four objects
        are cached.
        """
        found = self.get(key)
        self._cache.pop(key, None)
        if found is not None:
            while len(self._cache) >= _MAX_CACHED:
                oldest = next(iter(self._cache))
                del self._cache[oldest]
            self._cache[key] = found
        return found

    def get_range(self, key: str, start: int, end: int) -> Any:
        """Return the bytes from `start` to `end` (exclusive) of an object, as a buffer.

        Args:
            key: Key of the object.
            start: Offset of the first byte.
            end: Offset after the last byte.

        Raises:
            FileNotFoundError: If the object does not exist.
            ObjectStoreError: If the request still fails after the retries.
        """

        def fetch_range() -> Any:
            content = self._library.get_range(self._store, key, start=start, end=end)
            if len(content) != end - start:
                raise ConnectionError(f"received {len(content)} bytes instead of {end - start}")
            return content

        return self._retry_request(fetch_range, f"read {key}")

    def get_size(self, key: str) -> int | None:
        """Return an object's size in bytes, or None if it does not exist."""
        return self._get_or_none(lambda: int(self._library.head(self._store, key)["size"]), f"look at {key}")

    def describe(self, key: str) -> ObjectInfo | None:
        """Return an object's size and ETag, or None if it does not exist."""

        def read_head() -> ObjectInfo:
            head = self._library.head(self._store, key)
            return ObjectInfo(key, int(head["size"]), str(head["e_tag"] or ""))

        return self._get_or_none(read_head, f"look at {key}")

    def put(self, key: str, data: Any, replaces: str | None = "any") -> str | None:
        """Write a whole object, unconditionally or only if the stored object is the one that `replaces` identifies.

        Args:
            key: Key of the object in the bucket.
            data: Content of the object, as a bytes-like object.
            replaces: ETag of the object to replace. None: Write only if the object does not exist yet. "any": Overwrite
                unconditionally. Default: "any".

        Returns:
            The new ETag. None if the condition failed, which leaves the stored object unchanged.

        Raises:
            ObjectStoreError: If the store refuses the request, the bucket does not exist, or every attempt fails.
        """
        mode: Any = {"e_tag": replaces}
        if replaces == "any":
            mode = "overwrite"
        elif replaces is None:
            mode = "create"
        exceptions = self._library.exceptions
        try:
            result = self._retry_request(
                lambda: self._library.put(self._store, key, data, use_multipart=False, mode=mode), f"write {key}"
            )
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileNotFoundError) as error:
            if isinstance(error, FileNotFoundError) and replaces in (None, "any"):
                raise ObjectStoreError(f"{self.root} does not exist, or is not writable ({error})") from error
            # The request may have been retried after an attempt that succeeded but whose response was lost.
            stored = self.get(key)
            if stored is None:
                return None
            content, etag = stored
            return etag if content == bytes(data) else None
        return str(result["e_tag"])

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Return all objects under a prefix.

        The prefix consists of whole path components: "a/b" matches "a/b/c" but not "a/bc".
        """

        def list_objects() -> "list[ObjectInfo]":
            chunks = self._library.list(self._store, prefix)
            return [
                ObjectInfo(str(each["path"]), int(each["size"]), str(each["e_tag"] or ""))
                for chunk in chunks
                for each in chunk
            ]

        return self._retry_request(list_objects, f"list {prefix}")

    def delete(self, keys: Iterable[str]) -> None:
        """Delete the objects with the given keys. Missing objects are ignored."""
        all_keys = list(keys)
        if all_keys:
            self._get_or_none(lambda: self._library.delete(self._store, all_keys), f"remove {all_keys[0]}")

    def _get_or_none(self, request: Callable[[], T], purpose: str) -> T | None:
        """Run a request with retries, and return its result. Return None if the object does not exist.

        Args:
            request: Function that makes the request.
            purpose: Description of the request, for messages.

        Raises:
            ObjectStoreError: If the bucket does not exist, or the request still fails after the retries.
        """
        try:
            return self._retry_request(request, purpose)
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise ObjectStoreError(f"{self.root} does not exist: create it, or correct the name") from error
            return None

    def _retry_request(self, request: Callable[[], T], purpose: str) -> T:
        """Call `request`, retry it after transient errors until the time for retries is spent, and return its result.

        Args:
            request: Function that makes the request.
            purpose: Verb and object that describe the request in error messages, such as "read a/b".

        Raises:
            ObjectStoreError: If the store refused the request, or every attempt failed.
            FileNotFoundError: If the object does not exist.
            AlreadyExistsError, PreconditionError: If the condition of a conditional write is not met. These classes are
                obstore's.
        """
        exceptions = self._library.exceptions
        start = time.monotonic()
        pause = 0.1
        num_attempts = 0
        caller_errors = (FileNotFoundError, exceptions.AlreadyExistsError, exceptions.PreconditionError)
        while True:
            num_attempts += 1
            try:
                return request()
            except caller_errors as error:
                # S3 returns this error if two conditional writes coincide. A retry can succeed.
                if "ConditionalRequestConflict" not in str(error):
                    raise
                failure: Exception = error
            except (exceptions.BaseError, OSError, ValueError) as error:
                failure = error
            if reason := self._describe_refusal(failure):
                raise ObjectStoreError(f"could not {purpose} in {self.root}: {reason}") from failure
            if time.monotonic() - start + pause > self._retry_seconds:
                raise ObjectStoreError(
                    f"could not {purpose} in {self.root}: {num_attempts} attempts in {time.monotonic() - start:.0f} s failed, the "
                    f"last with: {_shorten_message(failure)}. Check that the store can be reached; {RETRY_SECONDS}=SECONDS "
                    "retries for longer"
                ) from failure
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _MAX_PAUSE)

    def _describe_refusal(self, error: Exception) -> str:
        """Return the reason why a retry of a failed request is pointless, or "" if a retry can succeed."""
        exceptions, text = self._library.exceptions, str(error)
        if "RequestTimeTooSkewed" in text:
            return "this machine's clock differs too much from the store's: set it (with chrony, for example)"
        if "NoSuchBucket" in text:
            return "the bucket does not exist: create it, or correct the name"
        if "BadScheme" in text:
            return "its endpoint uses http, without TLS: set AWS_ALLOW_HTTP=true to allow that"
        is_refused = isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
        if is_refused or re.search(_CREDENTIAL_ERRORS, text):
            return (
                f"the credentials were refused ({_shorten_message(error)}). They have expired, are wrong, or do not "
                "permit this: renew them "
                "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, or the machine's role) and start again from the "
                "last checkpoint"
            )
        is_unusable = isinstance(error, exceptions.NotSupportedError | exceptions.InvalidPathError)
        return _shorten_message(error) if is_unusable else ""


class _ObjectClients(dict[tuple[str, int], ObjectClient]):
    """Cache of clients by bucket and process ID.

    The process ID is part of the key because a client does not survive a fork.
    """


def get_client(root: str) -> ObjectClient:
    """Return this process's client for a bucket such as "s3://bucket", created on first use.

    Raises:
        OptionalDependencyMissing: If obstore is not installed.
        ConfigError: If the URL or an environment variable is invalid.
    """
    clients, key = scope.get_or_create(_ObjectClients), (root, os.getpid())
    if key not in clients:
        clients[key] = ObjectClient(root)
    return clients[key]


def _read_seconds(name: str, default: float) -> float:
    """Return the number of seconds in an environment variable, or `default` if the variable is unset or empty.

    Raises:
        ConfigError: If the value is not a number above 0 and below a million.
    """
    text = env.get(name)
    try:
        value = default if not text else float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise ConfigError(f"the environment variable {name}={text!r} must be a number of seconds above 0")
    return value


def _find_profile(root: str) -> dict[str, Any]:
    """Return the obstore option with the credentials of an AWS profile, or {} if no profile is to be used.

    obstore does not read profiles itself. A profile is used for S3 if AWS_PROFILE is set or ~/.aws/credentials exists,
    unless AWS_ACCESS_KEY_ID is set.

    Raises:
        OptionalDependencyMissing: If a profile is to be used and boto3 is not installed.
    """
    is_named = env.get("AWS_PROFILE") or (Path.home() / ".aws" / "credentials").is_file()
    if not root.startswith("s3:") or env.get("AWS_ACCESS_KEY_ID") or not is_named:
        return {}
    try:
        return {"credential_provider": importlib.import_module("obstore.auth.boto3").Boto3CredentialProvider()}
    except ImportError as error:
        raise OptionalDependencyMissing(
            f"{root}: reading the credentials of a profile in ~/.aws needs boto3, which is not installed: pip install boto3"
        ) from error


def _shorten_message(error: Exception) -> str:
    """Return the text of an error of the library in one line of at most about 300 characters, without debug information."""
    text = " ".join(str(error).split("Debug source:")[0].split())
    return text if len(text) <= 300 else text[:300] + "..."
