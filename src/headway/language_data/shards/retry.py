"""Retries of reads from storage that fail for a transient reason: HTTP 429 and 5xx, timeouts, and broken connections.

A read is repeated with growing pauses until its time limit has passed. If a server sends `Retry-After`, the next
attempt waits that long.
"""

import email.utils
import http.client
import random
import time
import urllib.error
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from headway.errors import DataError
from headway.log import get_logger

log = get_logger(__name__)

T = TypeVar("T")

TRANSIENT_STATUSES = frozenset([408, 409, 425, 429, 500, 502, 503, 504])
"""HTTP status codes after which a read is repeated."""

_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 30.0
_FINAL_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


@dataclass(frozen=True)
class RetryPolicy:
    """Time limits of reads from remote storage.

    Attributes:
        limit: Seconds for which one read is repeated before it fails with an error. `ShardedDataset` calls this limit
            `stall_limit`.
        attempt_timeout: Seconds that one attempt may go without receiving data.
    """

    limit: float = 300.0
    attempt_timeout: float = 30.0


def read_with_retries(read: Callable[[], T], description: str, policy: RetryPolicy) -> T:
    """Call `read` and return its result. The call is repeated while it fails for a transient reason.

    Errors of `read` other than OSError and HTTPException are passed on at once.

    Args:
        read: Function that reads once.
        description: Description of the read, with the name of the shard, for messages.
        policy: Time limits.

    Raises:
        DataError: If the storage refuses the read, or another attempt would exceed the limit. The message contains
            `description` and the last error.
    """
    start = time.monotonic()
    pause, num_attempts = _FIRST_PAUSE, 0
    while True:
        num_attempts += 1
        try:
            return read()
        except (OSError, http.client.HTTPException) as error:
            failure = error
        if not is_transient(failure):
            raise DataError(f"{description} failed: {describe_error(failure)}") from failure
        retry_after = read_retry_after(failure)
        # Random pauses keep the ranks from repeating their requests at the same time.
        delay = pause * random.uniform(0.5, 1.0) if retry_after is None else retry_after
        elapsed = time.monotonic() - start
        if elapsed + delay > policy.limit:
            raise DataError(
                f"{description} failed {num_attempts} times in {elapsed:.0f} s, the last time with: {describe_error(failure)}. Check "
                f"that the storage responds, or allow more than stall_limit={policy.limit:g} seconds"
            ) from failure
        log.warning_once(
            "%s failed and is repeated for up to %g s: %s", description, policy.limit, describe_error(failure)
        )
        time.sleep(delay)
        pause = min(2 * pause, _LONGEST_PAUSE)


def is_transient(error: Exception) -> bool:
    """Whether a read error is transient, which means that a retry of the read might succeed."""
    status = getattr(error, "code", None) or getattr(error, "status", None)
    if isinstance(status, int):
        return status in TRANSIENT_STATUSES
    return not isinstance(error, _FINAL_ERRORS)


def read_retry_after(error: Exception) -> float | None:
    """Return the seconds that the server's `Retry-After` header asks to wait, or None without a valid header."""
    headers = getattr(error, "headers", None)
    text = headers.get("Retry-After") if headers is not None else None
    if not text:
        return None
    if text.strip().isdigit():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None


def describe_error(error: Exception) -> str:
    """Return the type and the message of an error in one line."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return f"{type(error.reason).__name__}: {error.reason}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
