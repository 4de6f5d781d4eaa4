"""One attempt at a batch size. If memory runs out on any rank, the attempt ends on all ranks, and all of them continue.

`find_executable_batch_size` calls the user's training function with several batch sizes. Each call is an attempt.

Gradient reductions of an attempt's first updates are delayed until all ranks have computed their gradients and voted.
A rank that runs out of memory then leaves no peer waiting in a collective. Memory peaks in these updates, because
the first step creates the optimizer state.

Memory can also run out in a later update, in prepare(), or while peers wait in a collective that the user's code
started. Then the failing rank announces it on the control plane and leaves the process group. On gloo this wakes its
peers. On NCCL a kernel keeps waiting for the missing rank, and a timeout would end the process. So a thread on every
rank (`GroupAborter`) listens for the announcement while the main thread is blocked in C code. All ranks then abort
their groups together. If another object keeps the group open, peers wait until their collective times out, and
the hang watch extends its limit accordingly. In the end all ranks vote and join a new group.
"""

import threading
import time
import weakref
from collections.abc import Callable, Container, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, Protocol

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from headway.common import env, scope
from headway.core.memory.oom import clear_device_cache, drop_frames, is_out_of_memory
from headway.core.runtime import process, pulse
from headway.core.runtime.control_plane import control
from headway.core.runtime.device import CPU, Hardware
from headway.core.runtime.seed import read_rng_states, write_rng_states
from headway.errors import HeadwayError, PeerOutOfMemory, StateError
from headway.log import get_logger

log = get_logger(__name__)

_POLL_INTERVAL = 0.1
"""Seconds between two checks of the control plane for an announced failure."""

_MAX_WAIT_FOR_PEERS = 5.0
"""Maximum time in seconds that ranks wait for each other to see the announcement of a failed attempt."""

_MAX_ABORT_TIME = 60.0
"""Maximum time in seconds for aborting a process group."""
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
_current: ContextVar["Attempt | None"] = ContextVar("attempt", default=None)
"""Attempt that the calling code runs in, or None."""


class GroupAborter:
    """Background thread that aborts this rank's process group when another rank announces that its attempt has failed.

    The thread runs on every rank for the duration of one attempt.

    Args:
        key: Key on the control plane that the failing rank sets.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._should_stop = threading.Event()
        self._was_failure_seen = threading.Event()
        self._has_run_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-group-aborter", daemon=True)

    def start(self) -> None:
        """Start listening for failed attempts of other ranks."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening for failed attempts of other ranks, and wait until the listening thread has ended."""
        self._should_stop.set()
        self._thread.join()

    def wait(self) -> None:
        """Wait, for a limited time, until the process group has been aborted.

        Returns at once if no failure was announced and this process can leave the group without waiting for peers.
        """
        # During the abort the group can no longer be queried, and a new group would be destroyed with it.
        if self._was_failure_seen.is_set() or process.does_exit_block_peers():
            self._has_run_ended.wait(_MAX_WAIT_FOR_PEERS + _MAX_ABORT_TIME)

    def _run(self) -> None:
        """Wait for the announcement of a failure until `stop` is called, and abort the process group then."""
        try:
            while not self._should_stop.wait(_POLL_INTERVAL):
                # The script's Accelerator starts the runtime, with its own settings. Until then there is no group.
                is_joined = process.has_control_link() and process.does_exit_block_peers()
                if is_joined and control.current().has_key(self._key):
                    self._was_failure_seen.set()
                    self._wait_for_peers(control.current())
                    process.abort_group()
                    return
        except (HeadwayError, RuntimeError) as error:  # the host of the control plane is gone, so the run ends
            log.debug("no longer listening for failed attempts: %s", error)
        finally:
            self._has_run_ended.set()

    def _wait_for_peers(self, plane: control.Control) -> None:
        """Wait, for at most 5 seconds, until all ranks have seen the announcement, so that they abort together."""
        ready, deadline = f"{self._key}/ready", time.monotonic() + _MAX_WAIT_FOR_PEERS
        num_ready = plane.count(ready)
        while num_ready < plane.world_size and time.monotonic() < deadline:
            time.sleep(0.01)
            num_ready = plane.count(ready, 0)


class ObjectOwner(Protocol):
    """Interface of an object that keeps prepared models, optimizers and loaders alive, such as `Preparation`."""

    def list_prepared_objects(self) -> Mapping[int, str]:
        """Return a dict from the `id` of each prepared object to its name for messages."""

    def release(self, kept_ids: Container[int] = ()) -> None:
        """Release all prepared objects whose IDs are not in `kept_ids`. By default, release all."""

    def read_progress(self) -> dict[str, Any]:
        """Return the state of the update counter."""

    def restore_progress(self, progress: dict[str, Any]) -> None:
        """Restore the state of the update counter."""


def _count_attempts() -> "count[int]":
    """Return the counter that numbers the attempts of this process.

    Every rank makes the same attempts in the same order, so a number identifies the same attempt on all ranks.
    """
    return count()


class _ObjectOwners(weakref.WeakSet[ObjectOwner]):
    """Registry of the owners of prepared objects in this process, as weak references."""


def register_owner(owner: ObjectOwner) -> None:
    """Register an owner of prepared objects, so that a failed attempt can release them.

    Only a weak reference is kept.
    """
    scope.get_or_create(_ObjectOwners).add(owner)


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


class Attempt:
    """One call of the user's function with one batch size. Every rank makes the same attempts in the same order.

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
        self._key = f"out_of_memory/{next(scope.get_or_create(_count_attempts))}"  # key on the control plane
        self._aborter = GroupAborter(self._key)
        self._rng_states = read_rng_states(_get_hardware())
        self._progress = [(owner, owner.read_progress()) for owner in list(scope.get_or_create(_ObjectOwners))]
        self._has_ended = False
        self._failed_ranks: tuple[int, ...] = ()  # ranks that ran out of memory, once a vote has found them

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
        """Call `function(size, *args, **kwargs)` and return the outcome.

        An error of the function is raised to the caller unless it was caused by lack of memory on this or another rank.

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
        """Implement `run`, without the thread that listens for failures of other ranks."""
        token = _current.set(self)
        try:
            result = function(self.size, *args, **kwargs)
        except Exception as error:
            # A pipeline's ranks exchange errors, so a peer's error may arrive here before the peer announces it.
            is_known_failure = bool(self._failed_ranks) or (isinstance(error, PeerOutOfMemory) and has_peers())
            if not is_known_failure and not is_out_of_memory(error) and not self._has_peer_failed():
                raise
            return self._end_on_all_ranks(error)
        finally:
            _current.reset(token)
            self._has_ended = True
        if self._failed_ranks or (has_peers() and self._vote_on_failure(is_done=True)):
            del result  # it may keep the memory that is about to be freed
            return self._end_on_all_ranks(None)
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

    def _end_on_all_ranks(self, error: BaseException | None) -> Outcome:
        """End a failed attempt together with all ranks. Meanwhile the hang watch allows for peers that arrive late.

        Args:
            error: Error of this rank, or None if only other ranks failed.
        """
        if not has_peers():
            return self._free_memory(error, has_peers=False)
        process.current()  # memory may have run out before the script's Accelerator joined the other processes
        # A peer can arrive as late as the run's timeout allows. It can then wait in a collective that this rank has
        # left until that collective times out.
        pulse.get_own_pulse().set_timeout_extension((process.get_group_timeout() + _TIME_TO_VOTE).total_seconds())
        try:
            return self._free_memory(error, has_peers=True)
        finally:
            pulse.get_own_pulse().set_timeout_extension(0.0)

    def _free_memory(self, error: BaseException | None, has_peers: bool) -> Outcome:
        """Free the memory that a failed attempt used, vote with all ranks, and join a new process group.

        RNG states and update counters return to their values from before the attempt. In a run on several processes, all
        prepared objects are released, because they refer to the old process group.

        Args:
            error: Error of this rank, or None if only other ranks failed.
            has_peers: Whether the run has other ranks, which vote too.

        Returns:
            Outcome of the failed attempt.
        """
        is_own_failure = error is not None and is_out_of_memory(error)
        if has_peers and is_own_failure:
            control.current().set(self._key, str(error)[:1000].encode())
        if error is not None:
            drop_frames(error)
        names = [name for key, name in list_prepared_objects().items() if key in self.earlier_objects]
        self.release_objects(only_new=not has_peers)
        if has_peers:
            self._aborter.wait()
            process.leave_group()
        clear_device_cache(garbage_collection=True)
        if has_peers:
            if not self._failed_ranks:
                self._vote_on_failure(is_out=is_own_failure)
            process.join_group()
        self.restore_progress()
        if names:
            _warn_of_earlier_objects(names, has_peers)
        if has_peers and not is_own_failure:
            return Outcome(False, error=self._make_peer_error(), ranks=self._failed_ranks)
        return Outcome(False, error=error, ranks=self._failed_ranks)

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
        for owner in list(scope.get_or_create(_ObjectOwners)):
            owner.release(self.earlier_objects if only_new else ())


def list_prepared_objects() -> dict[int, str]:
    """Return a dict from the `id` of each prepared object of this process to its name for messages."""
    names: dict[int, str] = {}
    for owner in list(scope.get_or_create(_ObjectOwners)):
        names.update(owner.list_prepared_objects())
    return names


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


def _warn_of_earlier_objects(names: list[str], has_peers: bool) -> None:
    """Warn once that objects were prepared before the search, so that a failed attempt could not undo their changes.

    Args:
        names: Names of the objects.
        has_peers: Whether the run has other ranks. The objects were then released.
    """
    fate = (
        "Accelerators forgot them, because they belong to the process group that ended"
        if has_peers
        else "they keep their memory, and whatever the failed attempt did to them"
    )
    log.warning_once(
        "these objects were prepared before the batch-size search, not inside its function: %s. An attempt ran out of memory: "
        "%s. Make and prepare them inside the function",
        ", ".join(names),
        fate,
    )
