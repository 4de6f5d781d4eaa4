"""Control plane of a run: votes, key-value exchange and aborts between ranks, independent of the process group.

It uses its own TCPStore. The launcher's agent on machine 0 hosts the store, or rank 0 if there is no launcher. For a
vote, each rank writes its values to the store and increments a counter. The last rank to do so publishes the result,
and the others read it. The server's work therefore grows with the number of ranks, not with its square. The store holds
three keys per rank and two per pending vote, however many votes take place.
"""

import math
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Literal, NoReturn

from torch.distributed import DistError, HashStore  # type: ignore[attr-defined]

from headway.common.callsite import find_call_site
from headway.common.sealing import Seal, UnsealedCounter
from headway.core.runtime import heartbeat_file, process
from headway.core.runtime.control_plane.roll_call import find_process_location, name_ranks
from headway.core.runtime.control_plane.sealed_store import SealedStore
from headway.core.runtime.control_plane.store import (
    NOTICE,
    StoreLink,
    end_process,
    get_first_line,
    wait_for_keys,
    wait_for_value,
)
from headway.core.runtime.group import MARGIN
from headway.errors import CollectiveError, ConfigError, ControlPlaneError
from headway.log import get_logger

log = get_logger(__name__)
Op = Literal["any", "min", "max", "sum"]
_REDUCTIONS: dict[str, Callable[[Iterable[float]], float]] = {
    "any": lambda column: float(any(column)),
    "min": min,
    "max": max,
    "sum": math.fsum,
}
_CODES = {op: code for code, op in enumerate(_REDUCTIONS)}
_HEAD = struct.Struct("<qBH")  # number of the vote, operation, number of values
_MISMATCH = -1
_ARRIVED = 1
"""Number that each rank adds to the counter of arrivals."""

_NONZERO = 1 << 32
"""Number that a rank adds in addition if one of its values is not zero.

If no rank does, the result is known to be zero without reading the values of all ranks.
"""

KILL_TIMEOUT = 30.0
"""Seconds that a process that has aborted the run waits for the launcher to kill it. After that it ends itself."""


class Control:
    """Client of the control plane. `current()` returns the client of this process.

    Only one vote can be in progress at a time, but on any thread (such as autograd's). `set`, `get`, `has_key` and `abort`
    can be called on any thread at any time.

    Args:
        rank: Rank of this process.
        world_size: Number of processes.
        link: Connection to the store; None in a run with a single process, in which every call returns at once.
        timeout: Maximum time that a rank may keep the others waiting. It is the default time limit of votes.
    """

    def __init__(self, rank: int, world_size: int, link: StoreLink | None, timeout: timedelta) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self._link = link
        # The launcher's hang watch has more information, so let it report first.
        self._vote_timeout = timeout + MARGIN if link is not None and link.is_launched else timeout
        self._extension = timedelta()  # added to the time limit of votes
        self._num_votes = 0
        # One connection for the votes of all threads, because requests on a connection are processed in order.
        self._vote_store: SealedStore | None = None
        self._failure = ""  # reason why an earlier vote has failed, after which no vote is possible
        self._local_store = SealedStore(HashStore(), "own", Seal(b"", UnsealedCounter(log.warning)))

    # ---------------------------------------------------------------- votes

    def vote(self, values: Sequence[float], op: Op = "max", *, timeout: timedelta | None = None) -> list[float]:
        """Combine `values` over all ranks, element by element. All ranks make the same votes in the same order.

        A vote is cheapest if all values on all ranks are zero, which is the usual case for flags.

        Args:
            values: Numbers of this rank. Each rank must pass the same number of values.
            op: "any" (1.0 if some rank's value is not zero, else 0.0), "min", "max" or "sum".
            timeout: Maximum time to wait for the other ranks. Default: the run's timeout plus the extension set by
                `extend_limit`. With a launcher, 30 s are added, so that the launcher's hang watch reports first.

        Returns:
            The combined values, equal on every rank.

        Raises:
            ConfigError: If the operation is unknown.
            CollectiveError: If ranks voted with different operations or numbers of values.
            ControlPlaneError: If ranks did not vote in time (the message names them), if the host of the store is gone,
                or if an earlier vote has failed.
        """
        if op not in _REDUCTIONS:
            raise ConfigError(f"vote(op={op!r}) is unknown; allowed: {', '.join(_REDUCTIONS)}")
        if self._link is None:
            return [_REDUCTIONS[op]((float(value),)) for value in values]
        if self._failure:
            raise ControlPlaneError(f"no more votes after one that failed ({self._failure}); end the run")
        self._num_votes += 1
        own = heartbeat_file.get_own_file()
        entered = own.enter_collective("vote", find_call_site())
        try:
            if self._vote_store is None:
                self._vote_store = self._link.store
            result = self._cast_vote(self._vote_store, values, op, timeout or self._vote_timeout + self._extension)
            own.leave_collective(entered)
            return result
        except DistError as error:
            self._failure = self._describe_lost_store(error)
            raise ControlPlaneError(self._failure) from error
        except (ControlPlaneError, CollectiveError) as error:
            self._failure = str(error)
            raise

    def extend_limit(self, seconds: float) -> None:
        """Extend the timeout of every vote that is called without an explicit timeout.

        A later call replaces the extension instead of adding to it.

        Args:
            seconds: Seconds to add to the run's timeout.
        """
        self._extension = timedelta(seconds=seconds)

    def _cast_vote(self, store: SealedStore, values: Sequence[float], op: Op, timeout: timedelta) -> list[float]:
        """Add this rank's numbers to the current vote, and return the combined numbers once all ranks have voted.

        The last rank to arrive computes the result and publishes it. If all numbers of all ranks are 0, it reads none of them.

        Args:
            store: Store of the control plane.
            values: Numbers of this rank.
            op: Operation that combines the numbers of all ranks.
            timeout: Maximum time to wait for the other ranks.

        Raises:
            ControlPlaneError: If ranks have not voted at the timeout.
            CollectiveError: If ranks voted about different things.
        """
        number = self._num_votes
        head = _HEAD.pack(number, _CODES[op], len(values))
        store.set(f"vote/{self.rank}", head + struct.pack(f"<{len(values)}d", *values))
        tally = store.add("arrived", _ARRIVED + (_NONZERO if any(values) else 0))
        num_arrived, has_nonzero = tally % _NONZERO, tally >= _NONZERO
        if num_arrived == self.world_size:
            result = self._combine_values(store, head, values, op) if has_nonzero else head
            store.reset("arrived")
            store.set(f"result/{number}", result)
        else:
            # The first rank to arrive deletes the result of the vote before last, because it has to wait anyway. All
            # ranks have read that result.
            if num_arrived == 1:
                store.delete_key(f"result/{number - 2}")
            if not wait_for_keys(store, [f"result/{number}"], timeout):
                raise ControlPlaneError(self._describe_missing_votes(store, number, timeout))
            result = store.get(f"result/{number}")
        return self._parse_result(result, head, values)

    def _combine_values(self, store: SealedStore, head: bytes, values: Sequence[float], op: Op) -> bytes:
        """Combine the values that all ranks have written for a vote, and return the result as bytes to publish.

        If ranks voted with different operations or numbers of values, the result describes the difference.

        Args:
            store: Store with the votes of all ranks.
            head: Packed number of the vote, operation and number of values, which must be equal on all ranks.
            values: Values of this rank.
            op: Operation of the vote.
        """
        votes = store.multi_get([f"vote/{rank}" for rank in range(self.world_size)])
        if any(vote[: _HEAD.size] != head for vote in votes):
            description = "; ".join(f"rank {rank}: {_describe_vote(vote)}" for rank, vote in enumerate(votes))
            return _HEAD.pack(_MISMATCH, 0, 0) + description.encode()
        rows = [struct.unpack_from(f"<{len(values)}d", vote, _HEAD.size) for vote in votes]
        return head + struct.pack(f"<{len(values)}d", *(_REDUCTIONS[op](column) for column in zip(*rows)))

    def _parse_result(self, result: bytes, head: bytes, values: Sequence[float]) -> list[float]:
        """Return the numbers in a published result.

        Args:
            result: Published bytes: the header of the vote, and the numbers unless all of them are 0.
            head: Header of this rank's own vote.
            values: Numbers of this rank.

        Raises:
            CollectiveError: If the headers differ, because ranks voted about different things.
            ControlPlaneError: If the result contradicts this rank's numbers.
        """
        if result[: _HEAD.size] != head:
            description = f"rank {self.rank}: {_describe_vote(head)}; others: {_describe_vote(result)}"
            if _HEAD.unpack_from(result)[0] == _MISMATCH:
                description = result[_HEAD.size :].decode()
            raise CollectiveError(
                f"ranks voted about different things: {description}. All ranks must make the same votes in the same order"
            )
        if len(result) == _HEAD.size:
            if any(values):  # the counter of arrivals is torch's and has no HMAC
                raise ControlPlaneError(
                    f"vote {self._num_votes} of rank {self.rank} was not counted: another program has changed the control plane's "
                    "counter (docs/security.md)"
                )
            return [0.0] * len(values)
        return list(struct.unpack_from(f"<{len(values)}d", result, _HEAD.size))

    def _describe_missing_votes(self, store: SealedStore, number: int, timeout: timedelta) -> str:
        """Return an error message that names the ranks that have voted and the ranks that have not.

        Args:
            store: Store with the votes of all ranks.
            number: Number of the vote.
            timeout: Time that this rank has waited.
        """
        latest_votes = [_read_vote_number(store, rank) for rank in range(self.world_size)]
        missing = [rank for rank, latest in enumerate(latest_votes) if latest < number]
        present = [rank for rank, latest in enumerate(latest_votes) if latest >= number]
        locations = {rank: find_process_location(store, rank) for rank in missing[:8]}
        hosts = "; ".join(f"rank {rank}: {location}" for rank, location in locations.items() if location)
        progress = _describe_progress()
        what_is_missing = name_ranks(missing) if missing else "nobody, but its result"
        own_progress = f" ({progress} here)" if progress else ""
        pronoun = "it" if len(missing) == 1 else "them"
        return (
            f"vote {number} missed {what_is_missing} for {timeout.total_seconds():g} s: "
            f"{name_ranks(present)} voted{own_progress}. See what keeps {pronoun} "
            f"({hosts or 'nothing is known of where'}), or give more time with --timeout"
        )

    def _describe_lost_store(self, error: DistError) -> str:
        """Return the error message for a store whose host process has ended or cannot be reached."""
        assert self._link is not None
        host_process = self._link.address.hosted_by
        reason = f"{host_process}, which hosted the control plane, is gone"
        if self._link.has_host_finished:
            reason = (
                f"{host_process}, which hosted the control plane, has ended its script; vote as often on every rank"
            )
        return f"{reason} ({get_first_line(error)})"

    # ---------------------------------------------------------------- key-value exchange

    def set(self, key: str, value: bytes) -> None:
        """Publish `value` under `key` for all ranks. After a restart of the run's processes, the value is no longer visible."""
        self._store.set(f"user/{key}", value)

    def get(self, key: str, timeout: timedelta) -> bytes:
        """Wait until some rank has set `key`, and return its value.

        Args:
            key: Key to read.
            timeout: Maximum time to wait.

        Raises:
            ControlPlaneError: If no rank has set the key within `timeout`, or another program has set it.
        """
        return wait_for_value(self._store, f"user/{key}", timeout, key)

    def has_key(self, key: str) -> bool:
        """Whether some rank has set `key`."""
        return self._store.find(f"user/{key}") is not None

    def set_once(self, key: str, value: bytes) -> bytes:
        """Set `key` to `value` if it has no value yet. Return the value of `key`, which is equal on all ranks."""
        return self._store.set_once(f"user/{key}", value)

    def count(self, key: str, number: int = 1) -> int:
        """Add `number` to a counter and return its new total over all ranks. `get` cannot read counters.

        Args:
            key: Key of the counter.
            number: Number to add; 0 only reads the counter.
        """
        return self._store.add(f"user/{key}", number)

    def delete(self, key: str) -> None:
        """Delete `key` and its value, if it exists."""
        self._store.delete_key(f"user/{key}")

    @property
    def _store(self) -> SealedStore:
        return self._local_store if self._link is None else self._link.store

    # ---------------------------------------------------------------- abort

    def abort(self, reason: str) -> NoReturn:
        """End the run on every rank at once, and report the reason. This method may be called on any thread.

        With a launcher, the launcher's agents end the processes. Without one, each process ends itself with exit code
        1.

        Args:
            reason: Text for the user, of one or more lines.
        """
        details = [f"host {socket.gethostname()}", f"pid {os.getpid()}"]
        progress = _describe_progress()
        if progress:
            details.append(progress)
        text = f"rank {self.rank} of {self.world_size} ({', '.join(details)}) ended the run: {reason}"
        is_launched = self._link is not None and self._link.is_launched
        try:
            if self._link is not None:
                self._store.set(NOTICE, text.encode())
        except DistError as error:
            is_launched = False
            text += f"\n(the control plane could not be told: {get_first_line(error)})"
        if is_launched:
            time.sleep(KILL_TIMEOUT)  # the agents print the report and end all ranks
        elif self.rank == 0 and self.world_size > 1:
            time.sleep(1.0)  # the store ends with this process, and the other ranks poll it every 0.25 s
        end_process(text)


def _read_vote_number(store: SealedStore, rank: int) -> int:
    """Return the number of the latest vote of a rank, or 0 if it has not voted."""
    vote = store.find(f"vote/{rank}")
    return int(_HEAD.unpack_from(vote)[0]) if vote else 0


def _describe_vote(vote: bytes) -> str:
    """Return the operation, the number of values and the number of a vote from its header, as text."""
    number, code, count = _HEAD.unpack_from(vote)
    return f"{list(_REDUCTIONS)[code]} of {count} values in its vote {number}"


def _describe_progress() -> str:
    """Return the number of updates that this rank has completed, as text; "" before the first update."""
    reading = heartbeat_file.get_own_file().read()
    return f"update {reading.update}" if reading.update else ""


def _connect_control() -> Control:
    runtime = process.current()
    return Control(runtime.rank, runtime.world_size, process.get_control_link(), runtime.timeout)


def current() -> Control:
    """Return the control plane client of this process, connected on first use.

    Raises:
        LaunchError: If the host of the store cannot be reached.
        ControlPlaneError: If there is no launcher, and rank 0 does not publish the store's address before the timeout.
    """
    return process.current().scope.get_or_create(_connect_control)


def note_progress(update: int, micro_step: int) -> None:
    """Record the progress of training for failure and hang reports.

    This only writes to mapped memory, without a system call.

    Args:
        update: Number of updates so far.
        micro_step: Number of micro-batches in the current accumulation window.
    """
    heartbeat_file.get_own_file().note_progress(update, micro_step)
