"""The hang watch of one rank in a run without the launcher's agent (torchrun, a cluster's tasks).

Ranks query one another. A rank that has waited in a collective for longer than the timeout sends a request over the
control plane. Every rank that can still respond sends its state (`RankView`). The requesting rank diagnoses the hang
and ends the run. If a rank does not respond, nothing else is known about this rank, because only the launcher's agent
can inspect a rank from outside.
"""

import json
import math
import threading
import time
from dataclasses import replace
from datetime import timedelta

from headway.core.runtime import heartbeat, heartbeat_file, process
from headway.core.runtime.control_plane.control import Control, current
from headway.errors import ControlPlaneError
from headway.launch.watch import judge, report
from headway.launch.watch.views import RankView, decode_view, encode_view, make_view
from headway.log import get_logger

log = get_logger(__name__)

_ANSWER_TIMEOUT = 4.0
"""Seconds that other ranks have to send their state."""

_REQUEST_KEY = "hang/asked"


def start(runtime: process.ProcessRuntime) -> None:
    """Start the hang watch of this process, unless it is already running. It ends with the process runtime."""
    if not runtime.scope.has(_create_process_watch):
        watch = runtime.scope.get_or_create(_create_process_watch)
        watch.start()
        process.release_at_end(watch.stop)


def _create_process_watch() -> "PeerWatch":
    return PeerWatch(current(), process.current().timeout.total_seconds())


class PeerWatch:
    """Hang watch of one process without the launcher's agent. The watch ends when the control plane is gone.

    Args:
        control: Control plane that connects the ranks.
        timeout: Seconds that a rank may be missing from a collective.
    """

    def __init__(self, control: Control, timeout: float) -> None:
        self._control = control
        self._timeout = timeout
        self._round = 0
        self._last_excuse = -math.inf
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-watch", daemon=True)

    def start(self) -> None:
        """Start the thread that watches this process."""
        heartbeat.start_heartbeat()
        heartbeat.stop_before_shutdown(self.stop)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread before the interpreter shuts down."""
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_ANSWER_TIMEOUT + 2)

    def _run(self) -> None:
        """Check at regular intervals for requests and long waits. Executed by the thread until it is stopped."""
        interval = min(2.0, max(0.2, self._timeout / 8))
        while not self._over.wait(interval):
            try:
                self._check_ranks()
            except (ControlPlaneError, RuntimeError) as error:  # torch raises RuntimeError if the store's host is gone
                if not self._over.is_set():
                    log.info("the hang watch ends with the control plane: %s", str(error).partition("\n")[0])
                return

    def _check_ranks(self) -> None:
        """Answer another rank's request for this rank's state, or request all states if this rank waits too long."""
        own_view = self._read_view()
        if self._control.has_key(f"{_REQUEST_KEY}/{self._round}"):
            self._post_view(own_view)
        elif own_view.wait is not None and own_view.wait_age > self._timeout:
            requested_round = self._round
            self._control.set(f"{_REQUEST_KEY}/{requested_round}", b"")
            self._post_view(own_view)
            self._judge_hang(requested_round)

    def _post_view(self, own_view: RankView) -> None:
        """Send this rank's state to all ranks, and go on to the next round of states."""
        self._control.set(f"hang/{self._round}/{own_view.rank}", json.dumps(encode_view(own_view)).encode())
        self._round += 1

    def _judge_hang(self, requested_round: int) -> None:
        """Collect the states that the ranks send, and end the run on all ranks if the diagnosis is a hang.

        Args:
            requested_round: Number of the round of states that this rank has requested.
        """
        views = []
        deadline = time.monotonic() + _ANSWER_TIMEOUT
        for rank in range(self._control.world_size):
            key = f"hang/{requested_round}/{rank}"
            while not self._control.has_key(key) and time.monotonic() < deadline:
                time.sleep(0.1)
            if self._control.has_key(key):
                views.append(decode_view(json.loads(self._control.get(key, timedelta(seconds=5)))))
            else:
                views.append(RankView(rank, state="?"))
        verdict = judge.diagnose_hang(views, self._timeout)
        if verdict is not None and not self._over.is_set():
            self._control.abort(report.format_report(verdict))

    def _read_view(self) -> RankView:
        """Return the state of this process as a `RankView`.

        A debugger or a file write is a valid reason to keep other ranks waiting. The `excused_age` in the state is the
        time since the process last had such a reason. The other ranks report this rank as missing only if `excused_age`
        also exceeds the timeout.
        """
        now = time.monotonic()
        view = make_view(self._control.rank, heartbeat_file.get_own_file().read(), now)
        if judge.find_excuse(view, self._timeout):
            self._last_excuse = now
        return replace(view, excused_age=now - self._last_excuse)
