"""Client for object stores (S3, Google Cloud Storage, Azure), on top of obstore: requests, retries and errors.

Every request is tried again while it fails in a way that may pass (no answer, a server's error, a torn transfer), for a bounded
time; what is refused is not. Endpoint, region and credentials are found by obstore itself: AWS_*, GOOGLE_* and AZURE_* variables, a
web identity, the machine's role; a profile of ~/.aws where boto3 is installed.
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
"""Variables: seconds for which a request that fails is tried again (120), and seconds for one attempt (60)."""
_REFUSED = "ExpiredToken|InvalidToken|InvalidAccessKeyId|SignatureDoesNotMatch|TokenRefreshRequired|AccessDenied"
_LONGEST_PAUSE, _MOST_KEPT = 5.0, 4


@dataclass(frozen=True)
class ObjectInfo:
    """An object of a listing: its key in the bucket, and its bytes."""

    key: str
    num_bytes: int


class ObjectClient:
    """One bucket (or container).

    Args:
        root: such as "s3://bucket".

    Raises:
        OptionalDependencyMissing: obstore is not installed.
        ConfigError: the URL or a variable says what cannot be.
    """

    def __init__(self, root: str) -> None:
        self._library: Any = require("obstore", f"{root} needs", "headway[s3]")
        self.root = root
        self._kept: dict[str, tuple[bytes, str]] = {}
        self._retry_seconds = _seconds(RETRY_SECONDS, 120.0)
        timeout = timedelta(seconds=_seconds(REQUEST_TIMEOUT, 60.0))
        try:
            self._store = importlib.import_module("obstore.store").from_url(
                root,
                client_options={  # given as a whole, in place of what the library would read
                    "timeout": timeout,
                    "connect_timeout": min(timeout, timedelta(seconds=10)),
                    "allow_http": any(env.get_bool(f"{maker}_ALLOW_HTTP") for maker in ("AWS", "AZURE", "GOOGLE")),
                },
                retry_config={"max_retries": 0, "retry_timeout": timeout},
                **_profile(root),
            )
        except Exception as error:  # of whatever kind the library has for it
            raise ConfigError(f"{root} cannot be used: {error}") from error

    def get(self, key: str) -> tuple[bytes, str] | None:
        """An object's bytes and its etag; None where there is none."""

        def act() -> tuple[bytes, str]:
            found = self._library.get(self._store, key)
            return bytes(found.bytes()), str(found.meta["e_tag"])

        known = self._kept.get(key)
        if known is not None:
            now = self._or_none(lambda: self._library.head(self._store, key)["e_tag"], f"look at {key}")
            if known[1] == now:
                return known
        return self._or_none(act, f"read {key}")

    def keep(self, key: str) -> tuple[bytes, str] | None:
        """The same as `get`, of an object that is read several times: held, and asked for again where it has changed."""
        found = self.get(key)
        self._kept.pop(key, None)
        if found is not None:
            while len(self._kept) >= _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = found
        return found

    def get_range(self, key: str, start: int, end: int) -> Any:
        """Those bytes of an object, as a buffer.

        Raises:
            FileNotFoundError: there is no such object.
        """

        def act() -> Any:
            found = self._library.get_range(self._store, key, start=start, end=end)
            if len(found) != end - start:
                raise ConnectionError(f"received {len(found)} bytes instead of {end - start}")
            return found

        return self._tried(act, f"read {key}")

    def size(self, key: str) -> int | None:
        """An object's bytes; None where there is none."""
        return self._or_none(lambda: int(self._library.head(self._store, key)["size"]), f"look at {key}")

    def put(self, key: str, data: Any, replaces: str | None = "any") -> str | None:
        """Write an object whole.

        Args:
            key: its name in the bucket.
            data: its bytes.
            replaces: the etag of what it takes the place of; None: there must be nothing; "any": whatever is there.

        Returns:
            Its etag; None where something else is there, which stays.
        """
        mode: Any = "overwrite" if replaces == "any" else "create" if replaces is None else {"e_tag": replaces}
        exceptions = self._library.exceptions
        try:
            done = self._tried(
                lambda: self._library.put(self._store, key, data, use_multipart=False, mode=mode), f"write {key}"
            )
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileNotFoundError) as error:
            if isinstance(error, FileNotFoundError) and replaces in (None, "any"):
                raise ObjectStoreError(f"{self.root} does not exist, or is not writable ({error})") from error
            found = self.get(key)  # this very request may have come through before its answer was lost
            return found[1] if found is not None and found[0] == bytes(data) else None
        return str(done["e_tag"])

    def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects below a prefix, which is a whole name: "a/b" has "a/b/c", and not "a/bc"."""

        def act() -> "list[ObjectInfo]":
            chunks = self._library.list(self._store, prefix)
            return [ObjectInfo(str(each["path"]), int(each["size"])) for chunk in chunks for each in chunk]

        return self._tried(act, f"list {prefix}")

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; what is not there is not missed."""
        doomed = list(keys)
        if doomed:
            self._or_none(lambda: self._library.delete(self._store, doomed), f"remove {doomed[0]}")

    def _or_none(self, act: Callable[[], T], what: str) -> T | None:
        try:
            return self._tried(act, what)
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise ObjectStoreError(f"{self.root} does not exist: create it, or correct the name") from error
            return None

    def _tried(self, act: Callable[[], T], what: str) -> T:
        """Do it, again and again within bounds.

        Raises:
            ObjectStoreError: it was refused, or failed to the end.
            FileNotFoundError, obstore's errors of conditions: as they come, for who asked.
        """
        exceptions, began, pause, attempts = self._library.exceptions, time.monotonic(), 0.1, 0
        told = (FileNotFoundError, exceptions.AlreadyExistsError, exceptions.PreconditionError)
        while True:
            attempts += 1
            try:
                return act()
            except told as error:
                # S3 says so of two conditional writes at one moment, neither of which has failed for good.
                if "ConditionalRequestConflict" not in str(error):
                    raise
                failure: Exception = error
            except (exceptions.BaseError, OSError, ValueError) as error:
                failure = error
            if why := self._refusal(failure):
                raise ObjectStoreError(f"could not {what} in {self.root}: {why}") from failure
            if time.monotonic() - began + pause > self._retry_seconds:
                raise ObjectStoreError(
                    f"could not {what} in {self.root}: {attempts} attempts in {time.monotonic() - began:.0f} s failed, the last "
                    f"with: {_short(failure)}. Check that the store can be reached; {RETRY_SECONDS}=SECONDS retries for longer"
                ) from failure
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _refusal(self, error: Exception) -> str:
        """Why it is of no use to ask again; "" where it may be."""
        exceptions, text = self._library.exceptions, str(error)
        if "RequestTimeTooSkewed" in text:
            return "this machine's clock differs too much from the store's: set it (with chrony, for example)"
        if "BadScheme" in text:
            return "its endpoint uses http, without TLS: set AWS_ALLOW_HTTP=true to allow that"
        is_refused = isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
        if is_refused or re.search(_REFUSED, text):
            return (
                f"the credentials were refused ({_short(error)}). They have expired, are wrong, or do not permit this: renew them "
                "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, or the machine's role) and start again from the "
                "last checkpoint"
            )
        is_unusable = isinstance(error, exceptions.NotSupportedError | exceptions.InvalidPathError)
        return _short(error) if is_unusable else ""


class _ObjectClients(dict[tuple[str, int], ObjectClient]):
    """The buckets that this process uses, by their roots and its id, which a fork changes."""


def client_of(root: str) -> ObjectClient:
    """This process's client of a root such as "s3://bucket"."""
    known, key = scope.own(_ObjectClients), (root, os.getpid())
    if key not in known:
        known[key] = ObjectClient(root)
    return known[key]


def _seconds(name: str, default: float) -> float:
    text = env.get(name)
    try:
        value = default if not text else float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise ConfigError(f"the environment variable {name}={text!r} must be a number of seconds above 0")
    return value


def _profile(root: str) -> dict[str, Any]:
    """Who gives credentials of a profile, which obstore does not read itself."""
    is_named = env.get("AWS_PROFILE") or (Path.home() / ".aws" / "credentials").is_file()
    if not root.startswith("s3:") or env.get("AWS_ACCESS_KEY_ID") or not is_named:
        return {}
    try:
        return {"credential_provider": importlib.import_module("obstore.auth.boto3").Boto3CredentialProvider()}
    except ImportError as error:
        raise OptionalDependencyMissing(
            f"{root}: reading the credentials of a profile in ~/.aws needs boto3, which is not installed: pip install boto3"
        ) from error


def _short(error: Exception) -> str:
    text = " ".join(str(error).split("Debug source:")[0].split())
    return text if len(text) <= 300 else text[:300] + "..."
