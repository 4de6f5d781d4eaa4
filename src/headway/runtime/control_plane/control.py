"""The control plane: votes, hand-overs and aborts among the ranks, beside the data plane and independent of it.

It speaks over a TCPStore of its own, hosted by the launcher's agent on machine 0, else by rank 0. A vote costs each rank
one message with its values and one counted arrival; who arrives last makes the result known and the others read it, so
the server's work grows with the number of ranks, not with its square. Three keys live for each rank and two for each
vote in progress, whatever the number of votes.
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

from headway.common.callsite import call_site
from headway.common.untrusted import Seal, UnsealedCounter
from headway.errors import CollectiveError, ConfigError, ControlPlaneError
from headway.log import get_logger
from headway.runtime import process, pulse
from headway.runtime.control_plane.store import (
    NOTICE,
    SealedStore,
    StoreLink,
    end_process,
    first_line,
    named,
    wait_and_get,
    wait_for,
    whereabouts,
)
from headway.runtime.group import MARGIN

log = get_logger(__name__)
Op = Literal["any", "min", "max", "sum"]
_FOLDS: dict[str, Callable[[Iterable[float]], float]] = {
    "any": lambda column: float(any(column)),
    "min": min,
    "max": max,
    "sum": math.fsum,
}
_CODES = {op: code for code, op in enumerate(_FOLDS)}
_HEAD = struct.Struct("<qBH")  # number of the vote, operation, how many values
_MISMATCH = -1
_ARRIVED, _WEIGHTY = 1, 1 << 32  # an arrival counts 1; one with a value other than zero counts this too

UNTIL_ENDED = 30.0
"""Seconds in which the launcher ends a process that has aborted the run; then it ends itself."""


class Control:
    """This process's end of the control plane; `current()` gives the process's own.

    Votes come one after the other (from any thread, such as autograd's); `set`, `get`, `has` and `abort` may come from any.

    Args:
        rank, world_size: this process among the others.
        link: the way to the store; None on one process, where every call returns at once.
        timeout: how long a wait lasts where the call does not say.
    """

    def __init__(self, rank: int, world_size: int, link: StoreLink | None, timeout: timedelta) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self._link = link
        # Who watches over the run knows more than this, and speaks first.
        self._limit = timeout + MARGIN if link is not None and link.is_launched else timeout
        self._num_votes = 0
        # One connection for all votes, whatever thread they come from: on it, what was sent first is done first.
        self._channel: SealedStore | None = None
        self._broken = ""
        self._own = SealedStore(HashStore(), "own", Seal(b"", UnsealedCounter(log.warning)))

    # ---------------------------------------------------------------- votes

    def vote(self, values: Sequence[float], op: Op = "max", *, timeout: timedelta | None = None) -> list[float]:
        """Fold `values` over all ranks, element by element; every rank calls it, in the same order.

        Votes in which all values of all ranks are zero - the common case of flags - are the cheapest.

        Args:
            values: as many on each rank.
            op: "any" (1.0 where some rank's value is not zero, else 0.0), "min", "max" or "sum".
            timeout: how long to wait for the others; None: the run's timeout.

        Returns:
            The same list on every rank.

        Raises:
            ConfigError: another operation.
            CollectiveError: ranks voted with another operation or another number of values.
            ControlPlaneError: ranks did not vote in time (the message names them), or the store's host is gone.
        """
        if op not in _FOLDS:
            raise ConfigError(f"vote(op={op!r}) is unknown; allowed: {', '.join(_FOLDS)}")
        if self._link is None:
            return [_FOLDS[op]((float(value),)) for value in values]
        if self._broken:
            raise ControlPlaneError(f"no more votes after one that failed ({self._broken}); end the run")
        self._num_votes += 1
        own = pulse.own()
        entered = own.enter("vote", call_site())
        try:
            if self._channel is None:
                self._channel = self._link.store
            result = self._vote(self._channel, values, op, timeout or self._limit)
            own.leave(entered)
            return result
        except DistError as error:
            self._broken = self._loss(error)
            raise ControlPlaneError(self._broken) from error
        except (ControlPlaneError, CollectiveError) as error:
            self._broken = str(error)
            raise

    def _vote(self, store: SealedStore, values: Sequence[float], op: Op, timeout: timedelta) -> list[float]:
        number = self._num_votes
        head = _HEAD.pack(number, _CODES[op], len(values))
        store.set(f"vote/{self.rank}", head + struct.pack(f"<{len(values)}d", *values))
        tally = store.add("arrived", _ARRIVED + (_WEIGHTY if any(values) else 0))
        if tally % _WEIGHTY == self.world_size:
            result = self._fold(store, head, values, op) if tally >= _WEIGHTY else head
            store.reset("arrived")
            store.set(f"result/{number}", result)
        else:
            if tally % _WEIGHTY == 1:  # who comes first has time; all have read the result before the last one
                store.delete_key(f"result/{number - 2}")
            if not wait_for(store, [f"result/{number}"], timeout):
                raise ControlPlaneError(self._absence(store, number, timeout))
            result = store.get(f"result/{number}")
        return self._read(result, head, values)

    def _fold(self, store: SealedStore, head: bytes, values: Sequence[float], op: Op) -> bytes:
        """The result of a vote in which all have arrived, as the last one makes it known."""
        votes = store.multi_get([f"vote/{rank}" for rank in range(self.world_size)])
        if any(vote[: _HEAD.size] != head for vote in votes):
            said = "; ".join(f"rank {rank}: {_said(vote)}" for rank, vote in enumerate(votes))
            return _HEAD.pack(_MISMATCH, 0, 0) + said.encode()
        rows = [struct.unpack_from(f"<{len(values)}d", vote, _HEAD.size) for vote in votes]
        return head + struct.pack(f"<{len(values)}d", *(_FOLDS[op](column) for column in zip(*rows)))

    def _read(self, result: bytes, head: bytes, values: Sequence[float]) -> list[float]:
        if result[: _HEAD.size] != head:
            said = f"rank {self.rank}: {_said(head)}; others: {_said(result)}"
            if _HEAD.unpack_from(result)[0] == _MISMATCH:
                said = result[_HEAD.size :].decode()
            raise CollectiveError(f"ranks voted about different things: {said}. Let all ranks vote alike, in one order")
        if len(result) == _HEAD.size:
            if any(values):  # the count of arrivals is torch's, and carries no proof
                raise ControlPlaneError(
                    f"vote {self._num_votes} of rank {self.rank} was not counted: another program has changed the control plane's "
                    "counter (docs/security.md)"
                )
            return [0.0] * len(values)
        return list(struct.unpack_from(f"<{len(values)}d", result, _HEAD.size))

    def _absence(self, store: SealedStore, number: int, timeout: timedelta) -> str:
        """Who has voted and who has not."""
        keys = [f"vote/{rank}" for rank in range(self.world_size)]
        numbers = [_HEAD.unpack_from(vote)[0] if (vote := store.find(key)) else 0 for key in keys]
        missing = [rank for rank, seen in enumerate(numbers) if seen < number]
        came = [rank for rank, seen in enumerate(numbers) if seen >= number]
        hosts = [f"rank {rank}: {here}" for rank in missing[:8] if (here := whereabouts(store, rank))]
        return (
            f"vote {number} missed {named(missing) if missing else 'nobody, but its result'} for {timeout.total_seconds():g} s: "
            f"{named(came)} voted{f' ({_where()} here)' if _where() else ''}. See what keeps {'it' if len(missing) == 1 else 'them'} "
            f"({'; '.join(hosts) or 'nothing is known of where'}), or give more time with --timeout"
        )

    def _loss(self, error: DistError) -> str:
        assert self._link is not None
        by = self._link.address.hosted_by
        what = f"{by}, which hosted the control plane, is gone"
        if self._link.has_said_goodbye:
            what = f"{by}, which hosted the control plane, has ended its script; vote as often on every rank"
        return f"{what} ({first_line(error)})"

    # ---------------------------------------------------------------- hand-over

    def set(self, key: str, value: bytes) -> None:
        """Hand `value` over under `key`, which no other attempt of the run sees."""
        self._store.set(f"user/{key}", value)

    def get(self, key: str, timeout: timedelta) -> bytes:
        """The value under `key`, as soon as some rank has set it.

        Raises:
            ControlPlaneError: nobody did within `timeout`.
        """
        return wait_and_get(self._store, f"user/{key}", timeout, key)

    def has(self, key: str) -> bool:
        """Has some rank set `key`?"""
        return self._store.find(f"user/{key}") is not None

    def set_once(self, key: str, value: bytes) -> bytes:
        """Set `key` unless some rank has; returns what it holds, the same on all ranks."""
        return self._store.set_once(f"user/{key}", value)

    def count(self, key: str, number: int = 1) -> int:
        """Add to the counter `key`, 0 to look; returns the sum of all ranks' calls so far. `get` is for values, not for counters."""
        return self._store.add(f"user/{key}", number)

    def delete(self, key: str) -> None:
        """Take `key` and its value away, where it is there."""
        self._store.delete_key(f"user/{key}")

    @property
    def _store(self) -> SealedStore:
        return self._own if self._link is None else self._link.store

    # ---------------------------------------------------------------- ends

    def abort(self, reason: str) -> NoReturn:
        """End the run on every rank at once, with this reason in the report; from any thread.

        Args:
            reason: for people; may have several lines.
        """
        where = _where()
        who = f"rank {self.rank} of {self.world_size} (host {socket.gethostname()}, pid {os.getpid()}" + (
            f", {where})" if where else ")"
        )
        text = f"{who} ended the run: {reason}"
        is_launched = self._link is not None and self._link.is_launched
        try:
            if self._link is not None:
                self._store.set(NOTICE, text.encode())
        except DistError as error:
            is_launched = False
            text += f"\n(the control plane could not be told: {first_line(error)})"
        if is_launched:
            time.sleep(UNTIL_ENDED)  # the agents report it and end all ranks
        elif self.rank == 0 and self.world_size > 1:
            time.sleep(1.0)  # the store goes with this process, and the others look into it every quarter of a second
        end_process(text)


def _said(vote: bytes) -> str:
    number, code, count = _HEAD.unpack_from(vote)
    return f"{list(_FOLDS)[code]} of {count} values in its vote {number}"


def _where() -> str:
    """How far training has come here, in words; empty where it has not begun."""
    reading = pulse.own().read()
    return f"update {reading.update}" if reading.update else ""


def _joined() -> Control:
    runtime = process.current()
    return Control(runtime.rank, runtime.world_size, process.control_link(), runtime.timeout)


def current() -> Control:
    """The control plane of this process, joined on first use.

    Raises:
        LaunchError: its host cannot be reached.
    """
    return process.current().scope.own(_joined)


def note_progress(update: int, micro_step: int) -> None:
    """Note how far training is, for failure and hang reports: a store into mapped memory."""
    pulse.own().note_progress(update, micro_step)
