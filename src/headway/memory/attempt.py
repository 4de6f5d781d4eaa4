"""One attempt at a batch size: where memory runs out on any rank it ends on all of them, and they go on together.

The first gradients of an attempt are held back: nothing travels before all ranks have computed them and voted, so a rank
that fails leaves nobody waiting (in its first updates memory reaches its peak: optimizer state is made by the first
one). Elsewhere - a later update, prepare(), a collective of the user's own - the failing rank says so on the
control plane and leaves the process group, which wakes the peers on gloo; on NCCL all abort their groups together (`together`). Where
something else holds the group they wait until its timeout ends their collective, and the hang watch is told to let them. All
ranks meet in a vote, and begin a new group.

A process group that all ranks abort at once, so that what waits in it on the device comes back.

Where a rank leaves a gloo group, its peers hear of it. A kernel of NCCL's waits on for a rank that ran out of memory, and its
timeout ends the process, not the wait. So who fails announces it on the control plane; a thread of every rank hears of it while
the main thread stands in C code, and when all have, each aborts its own group.
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
from headway.errors import HeadwayError, PeerOutOfMemory, StateError
from headway.log import get_logger
from headway.memory.oom import clear_device_cache, drop_frames, is_out_of_memory
from headway.runtime import process, pulse
from headway.runtime.control_plane import control
from headway.runtime.device import CPU, Hardware
from headway.runtime.seed import read_rng_states, write_rng_states

log = get_logger(__name__)

_LOOK = 0.1
"""Seconds between two looks for an announcement."""

_MEETING = 5.0
"""Seconds in which all ranks hear of it; who has not by then is not waited for."""

_ABORT = 60.0
"""Seconds that aborting may take."""


class GroupAborter:
    """One attempt's; on every rank, from its begin to its end.

    Args:
        key: what the rank that fails sets on the control plane.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._over = threading.Event()
        self._is_heard = threading.Event()
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-alarm", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def stop(self) -> None:
        """The attempt is over."""
        self._over.set()
        self._thread.join()

    def wait(self) -> None:
        """The failure has been announced: wait until this rank's group is aborted, where that is needed."""
        # Halfway through the abort there is no group any more to ask, and a new one would be torn down with it.
        if self._is_heard.is_set() or process.waits_for_peers():
            self._is_done.wait(_MEETING + _ABORT)

    def _run(self) -> None:
        try:
            while not self._over.wait(_LOOK):
                # A script's Accelerator starts the runtime, by its own settings; until then there is no group either.
                is_joined = process.has_control_link() and process.waits_for_peers()
                if is_joined and control.current().has(self._key):
                    self._is_heard.set()
                    self._meet(control.current())
                    process.abort_group()
                    return
        except (HeadwayError, RuntimeError) as error:  # the plane's host is gone, and the run ends
            log.debug("no longer listening for failed attempts: %s", error)
        finally:
            self._is_done.set()

    def _meet(self, plane: control.Control) -> None:
        ready, deadline = f"{self._key}/ready", time.monotonic() + _MEETING
        num_ready = plane.count(ready)
        while num_ready < plane.world_size and time.monotonic() < deadline:
            time.sleep(0.01)
            num_ready = plane.count(ready, 0)


NUM_HELD = 3
"""How many reductions of each model's gradients wait for a vote: the first makes optimizer state, the later ones run beside it."""

_TO_VOTE = timedelta(seconds=10)
"""How long a peer may take from the timeout of its collective to the vote, before the hang watch calls it missing."""

_MARGIN = timedelta(seconds=60)
"""How much longer a vote waits than the hang watch, which knows more and is to speak first."""

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

_current: ContextVar["Attempt | None"] = ContextVar("attempt", default=None)


class ObjectOwner(Protocol):
    """What keeps prepared objects alive (an Accelerator's preparation)."""

    def held(self) -> Mapping[int, str]:
        """The objects' ids and what to call them."""

    def release(self, kept: Container[int] = ()) -> None:
        """Forget all objects but those."""


def _numbers() -> "count[int]":
    """Numbers the attempts of this process; every rank makes the same ones."""
    return count()


class _ObjectOwners(weakref.WeakSet[ObjectOwner]):
    """What keeps prepared objects in this process."""


def register(holder: ObjectOwner) -> None:
    """Let attempts know of what keeps prepared objects; it is not kept alive by this."""
    scope.own(_ObjectOwners).add(holder)


def is_in_progress() -> bool:
    """Is the code that calls this inside an attempt that other processes make too?"""
    return _current.get() is not None and is_several()


def hold_back(hook: Hook) -> Hook:
    """DDP's reduction `hook`, which waits for a vote in the first updates of the attempt in progress; itself outside one."""
    attempt = _current.get()
    return attempt.hold_back(hook) if attempt is not None and is_several() else hook


def is_several() -> bool:
    """Is this process one of several?"""
    return (process.current().world_size if process.is_started() else env.world_size()) > 1


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        fits: it ran through on every rank.
        result: what the function returned.
        error: why it did not fit, without its frames.
        ranks: those that ran out of memory.
    """

    fits: bool
    result: Any = None
    error: BaseException | None = None
    ranks: tuple[int, ...] = ()


class Attempt:
    """A call of the user's function with one batch size. Every rank makes the same attempts in the same order.

    Args:
        size: the batch size; ranks that try different ones are told so.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.outside = held()
        self._key = f"out_of_memory/{next(scope.own(_numbers))}"
        self._alarm = GroupAborter(self._key)
        self._rng_states = read_rng_states(_hardware())
        self._is_over = False
        self._lost: tuple[int, ...] = ()

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
        """Call `function(size, ...)`; an error that is not an out-of-memory error of any rank is raised."""
        if not is_several():
            return self._run(function, args, kwargs)
        self._alarm.start()
        try:
            return self._run(function, args, kwargs)
        finally:
            self._alarm.stop()

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
        token = _current.set(self)
        try:
            result = function(self.size, *args, **kwargs)
        except Exception as error:
            # A pipeline's agreement brings a peer's error here before that peer has said so on the control plane.
            is_known = bool(self._lost) or (isinstance(error, PeerOutOfMemory) and is_several())
            if not is_known and not is_out_of_memory(error) and not self._has_peer_failed():
                raise
            return self._end(error)
        finally:
            _current.reset(token)
            self._is_over = True
        if self._lost or (is_several() and self._vote(is_done=True)):
            del result
            return self._end(None)
        return Outcome(True, result)

    # ---------------------------------------------------------------- gradients held back

    def hold_back(self, hook: Hook) -> Hook:
        """Collect the buckets of each of the first reductions, vote at its last one, and only then reduce them."""
        waiting: list[tuple[GradBucket, torch.futures.Future[torch.Tensor]]] = []
        num_held = 0

        def held_back(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            nonlocal num_held
            if self._is_over or num_held == NUM_HELD:
                return hook(state, bucket)
            device = bucket.buffer().device
            promise: torch.futures.Future[torch.Tensor] = torch.futures.Future(
                devices=None if device.type == "cpu" else [device]
            )
            waiting.append((bucket, promise))
            if bucket.is_last():
                num_held += 1
                ready = list(waiting)
                waiting.clear()
                if self._vote():
                    raise self._peer_error()
                for each, kept in ready:
                    _fulfil(kept, hook(state, each))
            return promise

        return held_back

    # ---------------------------------------------------------------- votes

    def _vote(self, *, is_out: bool = False, is_done: bool = False) -> bool:
        """Did memory run out anywhere? All ranks ask at the same points: held gradients, the function's end, a failure."""
        runtime = process.current()
        failed = [float(is_out and rank == runtime.rank) for rank in range(runtime.world_size)]
        votes = [float(is_out), float(is_done), float(not is_done), float(self.size), -float(self.size), *failed]
        out, done, running, most, least, *failed = control.current().vote(
            votes, "max", timeout=runtime.timeout + process.group_timeout() + _MARGIN
        )
        if most != -least:
            raise StateError(
                f"ranks try batch sizes from {-least:g} to {most:g} at once; call the function on every rank, with equal settings"
            )
        if out:
            self._lost = tuple(rank for rank, each in enumerate(failed) if each)
            return True
        if done and running:
            raise StateError(
                "some ranks returned from the function while others still reduce gradients; every rank must make the same updates"
            )
        return False

    def _has_peer_failed(self) -> bool:
        """Is the error at hand the echo of another rank's? That one says so before it leaves the group."""
        return is_several() and control.current().has(self._key)

    def _peer_error(self) -> PeerOutOfMemory:
        ranks = ", ".join(map(str, self._lost))
        return PeerOutOfMemory(
            f"rank {ranks} ran out of memory with a batch size of {self.size}; the attempt ends on every rank. Let this error "
            "pass: find_executable_batch_size catches it"
        )

    # ---------------------------------------------------------------- the end of a failed attempt

    def _end(self, error: BaseException | None) -> Outcome:
        if not is_several():
            return self._free(error, several=False)
        process.current()  # memory may run out before the script's Accelerator joined the others
        # A peer may come late by the run's timeout, and then sit out the timeout of a collective that this rank has left.
        pulse.own().set_lenience((process.group_timeout() + _TO_VOTE).total_seconds())
        try:
            return self._free(error, several=True)
        finally:
            pulse.own().set_lenience(0.0)

    def _free(self, error: BaseException | None, several: bool) -> Outcome:
        """Free what the attempt held, agree, and begin a new group."""
        is_own = error is not None and is_out_of_memory(error)
        if several and is_own:
            control.current().set(self._key, str(error)[:1000].encode())
        if error is not None:
            drop_frames(error)
        names = [name for each, name in held().items() if each in self.outside]
        self.let_go(only_new=not several)
        if several:
            self._alarm.wait()
            process.leave_group()
        clear_device_cache(garbage_collection=True)
        if several:
            if not self._lost:
                self._vote(is_out=is_own)
            process.join_group()
        write_rng_states(self._rng_states, _hardware())
        if names:
            _warn(names, several)
        if several and not is_own:
            error = self._peer_error()
        return Outcome(False, error=error, ranks=self._lost)

    def let_go(self, only_new: bool = True) -> None:
        """Make Accelerators forget what was prepared in the attempt, or (`only_new=False`) everything."""
        for holder in list(scope.own(_ObjectOwners)):
            holder.release(self.outside if only_new else ())


def held() -> dict[int, str]:
    """All prepared objects of this process: their ids and names."""
    return {each: name for holder in list(scope.own(_ObjectOwners)) for each, name in holder.held().items()}


def _hardware() -> Hardware:
    # An attempt's own Accelerator may be the first to start the runtime.
    return process.current().hardware if process.is_started() else CPU


def _fulfil(promise: torch.futures.Future[torch.Tensor], reduction: torch.futures.Future[torch.Tensor]) -> None:
    def pass_on(done: torch.futures.Future[torch.Tensor]) -> None:
        try:
            promise.set_result(done.value())
        except Exception as error:
            promise.set_exception(error)  # type: ignore[arg-type]

    reduction.add_done_callback(pass_on)


def _warn(names: list[str], several: bool) -> None:
    fate = (
        "Accelerators forgot them, because they belong to the process group that ended"
        if several
        else "they keep their memory, and whatever the failed attempt did to them"
    )
    log.warning_once(
        "these objects were prepared before the batch-size search, not inside its function: %s. An attempt ran out of memory: "
        "%s. Make and prepare them inside the function",
        ", ".join(names),
        fate,
    )
