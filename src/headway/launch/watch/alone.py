"""The hang watch of a process that no agent of Headway's watches (torchrun, a cluster's tasks): ranks ask one another.

Who has waited in a collective for longer than the patience asks over the control plane; every rank that still can posts
where it is, and the asker's verdict ends the run. A rank that does not answer is named as such: only the launcher's agent
can look at it from outside.
"""

import json
import math
import threading
import time
from dataclasses import replace
from datetime import timedelta

from headway.errors import ControlPlaneError
from headway.launch.watch import judge
from headway.launch.watch.views import RankView, decode, encode, view_of
from headway.log import get_logger
from headway.runtime import heartbeat, process, pulse
from headway.runtime.control_plane.control import Control, current

_ANSWER = 4.0
"""Seconds for the others to post where they are."""

_ASKED = "hang/asked"

log = get_logger(__name__)


class PeerWatch:
    """One process's watch; it lives as long as the control plane.

    Args:
        control: the way to the other ranks.
        patience: seconds that a rank may be missing from a collective.
    """

    def __init__(self, control: Control, patience: float) -> None:
        self._control = control
        self._patience = patience
        self._round = 0
        self._excused = -math.inf
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        heartbeat.start()
        heartbeat.before_shutdown(self.stop)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, before the interpreter is taken down."""
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_ANSWER + 2)

    def _run(self) -> None:
        interval = min(2.0, max(0.2, self._patience / 8))
        while not self._over.wait(interval):
            try:
                self._check_ranks()
            except (ControlPlaneError, RuntimeError) as error:  # torch's DistError among them: its host is gone
                if not self._over.is_set():
                    log.info("the hang watch ends with the control plane: %s", str(error).splitlines()[0])
                return

    def _check_ranks(self) -> None:
        me = self._read_view()
        if self._control.has(f"{_ASKED}/{self._round}"):
            self._post_view(me)
        elif me.wait is not None and (me.wait.age or 0.0) > self._patience:
            asked = self._round
            self._control.set(f"{_ASKED}/{asked}", b"")
            self._post_view(me)
            self._judge(asked)

    def _post_view(self, me: RankView) -> None:
        self._control.set(f"hang/{self._round}/{me.rank}", json.dumps(encode(me)).encode())
        self._round += 1

    def _judge(self, asked: int) -> None:
        views = []
        deadline = time.monotonic() + _ANSWER
        for rank in range(self._control.world_size):
            key = f"hang/{asked}/{rank}"
            while not self._control.has(key) and time.monotonic() < deadline:
                time.sleep(0.1)
            is_there = self._control.has(key)
            content = self._control.get(key, timedelta(seconds=5)) if is_there else b""
            views.append(decode(json.loads(content)) if is_there else RankView(rank, state="?"))
        verdict = judge.judge(views, self._patience)
        if verdict is not None and not self._over.is_set():
            self._control.abort(judge.text(verdict))

    def _read_view(self) -> RankView:
        """Where this process is; a debugger excuses it for another patience."""
        now = time.monotonic()
        view = view_of(self._control.rank, pulse.own().read(), now)
        if judge.excuse(view, self._patience):
            self._excused = now
        return replace(view, excused_age=now - self._excused)


def _of_this_process() -> PeerWatch:
    return PeerWatch(current(), process.current().patience.total_seconds())


def start(runtime: process.ProcessRuntime) -> None:
    """Watch this process until its runtime ends."""
    if not runtime.scope.has(_of_this_process):
        watch = runtime.scope.own(_of_this_process)
        watch.start()
        process.at_end(watch.stop)
