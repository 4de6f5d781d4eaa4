"""One attempt of `find_executable_batch_size`: a call of the training function with one batch size.

`find_executable_batch_size` calls the user's training function with several batch sizes. Each call is an attempt. If
memory runs out on any rank, the attempt ends on all ranks, and all of them continue with the next size.

A rank that runs out of memory must leave no peer waiting in a collective:

- In an attempt's first updates, gradient reductions are delayed until all ranks have computed their gradients and voted
  (`delay_reductions`). Memory peaks in these updates, because the first step creates the optimizer state.
- Memory can also run out in a later update, in prepare(), or while peers wait in a collective that the user's code
  started. Then the failing rank announces it on the control plane (a key-value store that works without the process
  group) and leaves the process group, and the thread of `group_aborter.py` frees its peers. If another object keeps the
  group open, peers wait until their collective times out, and the hang watch extends its limit accordingly.

In the end all ranks free the memory, vote, and join a new process group (`_end_with_peers`).
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from headway.common import env, scope
from headway.core.memory.group_aborter import GroupAborter
from headway.core.memory.object_owners import list_owners, list_prepared_objects
from headway.core.memory.oom import clear_device_cache, drop_frames, is_out_of_memory
from headway.core.runtime import heartbeat_file, process
from headway.core.runtime.control_plane import control
from headway.core.runtime.device import CPU, Hardware
from headway.core.runtime.seed import read_rng_states, write_rng_states
from headway.errors import PeerOutOfMemory, StateError
from headway.log import get_logger

log = get_logger(__name__)

NUM_DELAYED = 3
"""Number of gradient reductions per model that are delayed until all ranks have voted.

Memory has reached its peak by then: the first optimizer step creates the optimizer state, and later steps use it.
"""
_TIME_TO_VOTE = timedelta(seconds=10)
"""Time that a peer gets to vote after its collective has timed out, before the hang watch reports it as missing."""
_VOTE_TIMEOUT_MARGIN = timedelta(seconds=60)
"""Time added to the timeout of a vote, so that the hang watch, whose report has more details, reports first."""
CommunicationHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
"""DDP's communication hook: a function of a state and a gradient bucket that starts the bucket's reduction."""
_current: ContextVar["SizeAttempt | None"] = ContextVar("attempt", default=None)
"""Attempt that the calling code runs in, or None."""


@dataclass(frozen=True)
class Outcome:
    """Result of an attempt to run a function with one batch size.

    Attributes:
        fits: Whether the function ran to its end on every rank.
        result: Return value of the function.
        error: Error that made the attempt fail, without stack frames. None if the attempt succeeded.
        ranks: Ranks that ran out of memory.
    """

    fits: bool
    result: Any = None
    error: BaseException | None = None
    ranks: tuple[int, ...] = ()


class SizeAttempt:
    """One call of the script's function with one batch size. All ranks make the same attempts in the same order.

    Creating the object records the state to which a failed attempt returns: RNG states, update counters, and the objects
    that are prepared already.

    Args:
        size: Batch size, equal on all ranks. `run` raises StateError otherwise.

    Attributes:
        size: Batch size.
        earlier_objects: Objects that were prepared before the attempt: their names for messages, by `id`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.earlier_objects = list_prepared_objects()
        # Attempts have equal numbers on all ranks, because each process counts its attempts in `scope`.
        self._key = f"out_of_memory/{next(scope.get_or_create(_count_attempts))}"  # key on the control plane
        self._aborter = GroupAborter(self._key)
        # State to which a failed attempt returns. An owner keeps an Accelerator's prepared objects and counters.
        self._rng_states = read_rng_states(_get_hardware())
        self._progress = [(owner, owner.read_progress()) for owner in list_owners()]
        self._has_ended = False
        self._failed_ranks: tuple[int, ...] = ()  # ranks that ran out of memory, once a vote has found them

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
        """Call `function(size, *args, **kwargs)` and return the outcome.

        An error of the function is raised to the caller unless it was caused by lack of memory on this or another rank.

        Args:
            function: Function that trains with the batch size of this attempt.
            args: Positional arguments after the size.
            kwargs: Keyword arguments.

        Raises:
            StateError: If ranks try different sizes, or make different numbers of updates.
            UnsupportedError: If memory runs out in a run on several processes whose process group was not created by
                Headway.
        """
        if not has_peers():
            return self._run(function, args, kwargs)
        self._aborter.start()
        try:
            return self._run(function, args, kwargs)
        finally:
            self._aborter.stop()

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
        """Call `function(size, *args, **kwargs)` and return the outcome, without listening for failures of other ranks.

        Args:
            function: Function that trains with the batch size of this attempt.
            args: Positional arguments after the size.
            kwargs: Keyword arguments.
        """
        token = _current.set(self)
        try:
            result = function(self.size, *args, **kwargs)
        except Exception as error:
            # A pipeline's ranks exchange errors, so a peer's error may arrive here before the peer announces it.
            is_known_failure = bool(self._failed_ranks) or (isinstance(error, PeerOutOfMemory) and has_peers())
            if not is_known_failure and not is_out_of_memory(error) and not self._has_peer_failed():
                raise
            return self._end_with_peers(error) if has_peers() else self._end_alone(error)
        finally:
            _current.reset(token)
            self._has_ended = True
        # `_failed_ranks` is set if the function has caught `PeerOutOfMemory`.
        if self._failed_ranks or (has_peers() and self._vote_on_failure(is_done=True)):
            del result  # it may keep the memory that is about to be freed
            return self._end_with_peers(None)
        return Outcome(True, result)

    # ---------------------------------------------------------------- delayed reductions

    def delay_reductions(self, hook: CommunicationHook) -> CommunicationHook:
        """Wrap DDP's communication hook so that a gradient reduction waits for the vote of all ranks.

        In the vote, each rank reports whether it has run out of memory. Only the reductions of the first updates wait.

        Args:
            hook: Communication hook, which starts the reduction of one bucket of gradients.
        """
        delayed: list[tuple[GradBucket, torch.futures.Future[torch.Tensor]]] = []
        num_delayed = 0

        def reduce_after_vote(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            nonlocal num_delayed
            if self._has_ended or num_delayed == NUM_DELAYED:
                return hook(state, bucket)
            device = bucket.buffer().device
            promise: torch.futures.Future[torch.Tensor] = torch.futures.Future(
                devices=None if device.type == "cpu" else [device]
            )
            delayed.append((bucket, promise))
            if bucket.is_last():  # this rank has computed all gradients of the update
                num_delayed += 1
                buckets = list(delayed)
                delayed.clear()
                if self._vote_on_failure():
                    raise self._make_peer_error()
                for delayed_bucket, delayed_promise in buckets:
                    _resolve_with(delayed_promise, hook(state, delayed_bucket))
            return promise

        return reduce_after_vote

    # ---------------------------------------------------------------- votes

    def _vote_on_failure(self, *, is_out: bool = False, is_done: bool = False) -> bool:
        """Vote with all ranks whether memory ran out on any of them.

        All ranks vote at the same points: before delayed reductions, at the function's end, and after a failure.

        Args:
            is_out: Whether memory ran out on this rank. Default: False.
            is_done: Whether the function has ended on this rank. Default: False.

        Returns:
            Whether memory ran out on any rank.

        Raises:
            StateError: If ranks try different sizes, or if the function has ended on some ranks only.
        """
        runtime = process.current()
        own_failure = [float(is_out and rank == runtime.rank) for rank in range(runtime.world_size)]
        # The vote returns the maximum over all ranks of each number. The maximum of -x gives the minimum of x.
        votes = [float(is_out), float(is_done), float(not is_done), float(self.size), -float(self.size), *own_failure]
        is_any_out, is_any_done, is_any_running, largest, smallest_negated, *failures = control.current().vote(
            votes, "max", timeout=runtime.timeout + process.get_group_timeout() + _VOTE_TIMEOUT_MARGIN
        )
        if largest != -smallest_negated:
            raise StateError(
                f"ranks try batch sizes from {-smallest_negated:g} to {largest:g} at once; call the function on every rank, with "
                "equal settings"
            )
        if is_any_out:
            self._failed_ranks = tuple(rank for rank, has_failed in enumerate(failures) if has_failed)
            return True
        if is_any_done and is_any_running:
            raise StateError(
                "some ranks returned from the function while others still reduce gradients; every rank must make the same updates"
            )
        return False

    def _has_peer_failed(self) -> bool:
        """Whether this rank's error is a consequence of another rank's failure.

        The other rank announces its failure before it leaves the group.
        """
        return has_peers() and control.current().has_key(self._key)

    def _make_peer_error(self) -> PeerOutOfMemory:
        """Return the error with which a rank ends its attempt because other ranks ran out of memory."""
        ranks = ", ".join(map(str, self._failed_ranks))
        return PeerOutOfMemory(
            f"rank {ranks} ran out of memory with a batch size of {self.size}; the attempt ends on every rank. Do not catch this "
            "error, because find_executable_batch_size handles it"
        )

    # ---------------------------------------------------------------- the end of a failed attempt

    def _end_alone(self, error: BaseException) -> Outcome:
        """End a failed attempt of a single-process run: free its memory, and restore RNG states and update counters.

        Args:
            error: Error of this process.
        """
        drop_frames(error)
        earlier_names = self._list_earlier_names()
        self.release_objects()
        clear_device_cache(garbage_collection=True)
        self.restore_progress()
        if earlier_names:
            _warn_of_earlier_objects(
                earlier_names, "they keep their memory, and whatever the failed attempt did to them"
            )
        return Outcome(False, error=error)

    def _end_with_peers(self, error: BaseException | None) -> Outcome:
        """End a failed attempt together with all ranks. Meanwhile the hang watch allows for peers that arrive late.

        Args:
            error: Error of this rank, or None if only other ranks failed.
        """
        process.current()  # joins the other processes, if memory ran out before the script's Accelerator did so
        # A peer can arrive as late as the run's timeout allows. It can then wait in a collective that this rank has
        # left until that collective times out.
        heartbeat_file.get_own_file().set_timeout_extension(
            (process.get_group_timeout() + _TIME_TO_VOTE).total_seconds()
        )
        try:
            return self._free_and_rejoin(error)
        finally:
            heartbeat_file.get_own_file().set_timeout_extension(0.0)

    def _free_and_rejoin(self, error: BaseException | None) -> Outcome:
        """Free the memory that a failed attempt used, vote with all ranks, and join a new process group.

        RNG states and update counters return to their values from before the attempt. All prepared objects are released,
        also those from before the attempt, because they refer to the old process group.

        Args:
            error: Error of this rank, or None if only other ranks failed.
        """
        is_own_failure = error is not None and is_out_of_memory(error)
        if is_own_failure:
            control.current().set(self._key, str(error)[:1000].encode())
        if error is not None:
            drop_frames(error)
        earlier_names = self._list_earlier_names()
        self.release_objects(only_new=False)
        self._aborter.wait()  # a new process group must not begin while the old one is being aborted
        process.leave_group()
        clear_device_cache(garbage_collection=True)
        if not self._failed_ranks:  # otherwise, a vote has already found them
            self._vote_on_failure(is_out=is_own_failure)
        process.join_group()
        self.restore_progress()
        if earlier_names:
            _warn_of_earlier_objects(
                earlier_names, "Accelerators forgot them, because they belong to the process group that ended"
            )
        return Outcome(False, error=error if is_own_failure else self._make_peer_error(), ranks=self._failed_ranks)

    def _list_earlier_names(self) -> list[str]:
        """Return the names of the objects that were prepared before the attempt and still are."""
        return [name for key, name in list_prepared_objects().items() if key in self.earlier_objects]

    def restore_progress(self) -> None:
        """Restore the RNG states and update counters that were recorded at the start of the attempt."""
        write_rng_states(self._rng_states, _get_hardware())
        for owner, progress in self._progress:
            owner.restore_progress(progress)

    def release_objects(self, only_new: bool = True) -> None:
        """Release the prepared objects of all Accelerators.

        Args:
            only_new: Whether to release only objects that were prepared inside the attempt. False: release all.
                Default: True.
        """
        for owner in list_owners():
            owner.release(self.earlier_objects if only_new else ())


def is_attempt_in_progress() -> bool:
    """Whether the calling code runs inside a batch-size attempt that it makes together with other processes."""
    return _current.get() is not None and has_peers()


def delay_reductions(hook: CommunicationHook) -> CommunicationHook:
    """Wrap DDP's communication hook so that it waits until all ranks have reported whether they ran out of memory.

    It waits only in the first updates of the current attempt. Outside an attempt, or in a single-process run, the hook
    is returned unchanged.

    Args:
        hook: Communication hook, which starts the reduction of one bucket of gradients.
    """
    attempt = _current.get()
    return attempt.delay_reductions(hook) if attempt is not None and has_peers() else hook


def has_peers() -> bool:
    """Whether there are other processes in the run, even if this process has not joined them yet."""
    return (process.current().world_size if process.is_started() else env.get_world_size()) > 1


def _count_attempts() -> "count[int]":
    """Return the counter that numbers the attempts of this process.

    Every rank makes the same attempts in the same order, so a number identifies the same attempt on all ranks.
    """
    return count()


def _get_hardware() -> Hardware:
    """Return the hardware that this process computes on, or the CPU if its runtime has not started yet.

    The Accelerator that the training function creates may be the first to start the runtime.
    """
    return process.current().hardware if process.is_started() else CPU


def _resolve_with(promise: torch.futures.Future[torch.Tensor], reduction: torch.futures.Future[torch.Tensor]) -> None:
    """Give `promise` the result or the error of `reduction` as soon as that is done."""

    def resolve(done: torch.futures.Future[torch.Tensor]) -> None:
        try:
            promise.set_result(done.value())
        except Exception as error:
            promise.set_exception(error)  # type: ignore[arg-type]

    reduction.add_done_callback(resolve)


def _warn_of_earlier_objects(names: list[str], consequence: str) -> None:
    """Warn once that objects were prepared before the search, so that a failed attempt could not undo their changes.

    Args:
        names: Names of the objects.
        consequence: What the failed attempt means for these objects.
    """
    log.warning_once(
        "these objects were prepared before the batch-size search, not inside its function: %s. An attempt ran out of memory: "
        "%s. Make and prepare them inside the function",
        ", ".join(names),
        consequence,
    )
