"""Exit codes and termination of the ranks' processes.

A signal ends the launcher even if its main thread is blocked. Each rank leads its own session. Every process that a
rank starts (a data-loading worker, a program) belongs to this session, unless the process leaves it on purpose
(`setsid`). So the agent can also end processes that the ranks leave behind when a run fails.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from subprocess import Popen
from typing import Any, Protocol

import psutil

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_DEAD = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

LEFTOVER_GRACE = 2.0
"""Seconds that processes left behind by the ranks have to end after SIGTERM. After that they are killed."""


class Stoppable(Protocol):
    """Interface of the launcher's agent for the functions in this module that handle signals.

    Attributes:
        forwarded_signal: Signal that the agent has forwarded to the ranks so that they save a checkpoint. None if there was
            none.
        code_when_stuck: Exit code to use if a signal arrives when the ranks have already ended and the agent then fails
            to end. None if no such signal has arrived.
    """

    forwarded_signal: signal.Signals | None
    code_when_stuck: int | None

    def find_resume_advice(self) -> str:
        """Return advice on how to continue the run from its last checkpoint. Empty if there is none."""

    def kill_workers(self) -> None:
        """Kill the workers and their children immediately."""


def get_exit_code(process: Popen[Any]) -> int | None:
    """Return the exit code of a process, or None while it runs. If signal n ended the process, the code is -n.

    This function can be called in a signal handler, even if the signal has interrupted `poll`.
    """
    if process.returncode is not None or not hasattr(os, "waitid"):
        return process.returncode
    try:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0  # reaped by the interrupted `poll` below this handler, which will report its exit code
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def ignore_signals() -> None:
    """Ignore all signals that end a launcher.

    Call this when the run is over and its exit code is known, so that no signal changes the code while Python shuts
    down.
    """
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def kill_when_stuck(agent: Stoppable, save_grace: float, end_grace: float, print_line: Callable[[str], None]) -> None:
    """Start a thread that kills the workers and ends this process if a signal has not ended the run after some time.

    The thread works even if the main thread waits for a dead machine.

    Args:
        agent: Agent whose workers are killed.
        save_grace: Seconds between the signal and the kill if the ranks save a checkpoint.
        end_grace: Seconds between the signal and the kill if the ranks do not save a checkpoint.
        print_line: Function that prints a line.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)

    def watch_signals() -> None:
        """Wait for a signal that ends the run, and after the grace period kill the workers and end this process."""
        # The closure keeps the sender alive; otherwise it would be closed when this function returns.
        while sender.fileno() >= 0 and receiver.recv(1)[0] not in ENDING_SIGNALS:
            pass
        began = time.monotonic()
        # `forwarded_signal` is read in each round, because the main thread's handler may set it after this thread woke up.
        while time.monotonic() - began < (end_grace if agent.forwarded_signal is None else save_grace):
            time.sleep(0.2)
        if agent.forwarded_signal is not None:
            print_line(
                f"headway: the ranks have not saved within {save_grace:g} s of {agent.forwarded_signal.name}, and are killed"
            )
            if resume_advice := agent.find_resume_advice():
                print_line(resume_advice)
        agent.kill_workers()
        code = agent.code_when_stuck
        if code is None:
            # Only a forwarded signal is recorded. Any other one is reported as SIGTERM.
            code = 128 + (agent.forwarded_signal or signal.SIGTERM)
        os._exit(code)

    threading.Thread(target=watch_signals, name="kill-when-stuck", daemon=True).start()


def end_sessions(leaders: Iterable[int], seconds: float = LEFTOVER_GRACE) -> list[int]:
    """End the remaining processes in the sessions of ranks that have ended.

    On systems other than Linux, kill the ranks' process groups immediately.

    Args:
        leaders: Process IDs of the ranks.
        seconds: Seconds between SIGTERM and SIGKILL. Default: `LEFTOVER_GRACE`.

    Returns:
        IDs of the processes that had to be killed after SIGTERM. Always empty on systems other than Linux.
    """
    wanted = set(leaders)
    if sys.platform != "linux":
        for leader in wanted:
            with suppress(OSError):
                os.killpg(leader, signal.SIGKILL)
        return []
    left = list_session_members(wanted)
    for pid in left:
        for number in (signal.SIGTERM, signal.SIGCONT):  # a stopped process receives SIGTERM only after SIGCONT
            _send_signal(pid, number)
    deadline = time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = list_session_members(wanted)
    for pid in left:
        _send_signal(pid, signal.SIGKILL)
    return left


def list_session_members(leaders: Iterable[int]) -> list[int]:
    """Return the process IDs of all running processes in the given sessions.

    Args:
        leaders: Process IDs of the processes that lead the sessions.
    """
    wanted, found = set(leaders), []
    for process in psutil.process_iter(["status"]):
        with suppress(OSError):
            if os.getsid(process.pid) in wanted and process.info["status"] not in _DEAD:
                found.append(process.pid)
    return found


def _send_signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
