"""Signals set flags at once, and handlers that were installed before still run."""

import os
import signal
import threading
import time

import pytest

from headway.core.runtime.signals import SignalFlags
from headway.errors import StateError


@pytest.fixture
def flags():
    made = SignalFlags()
    yield made
    made.stop()


def seen(flags, number, seconds=20.0):
    deadline = time.monotonic() + seconds
    while flags.first != number and time.monotonic() < deadline:
        time.sleep(0.005)
    return flags.first == number


def test_nothing_is_installed_before_start_and_nothing_stays():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    flags = SignalFlags()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
    flags.start()
    flags.start()
    flags.stop()
    flags.stop()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_becomes_a_flag(flags):
    flags.start()
    assert flags.list_flags() == [0.0, 0.0]
    os.kill(os.getpid(), signal.SIGTERM)
    assert seen(flags, signal.SIGTERM)
    assert flags.list_flags() == [1.0, 0.0]
    flags.clear_flag(signal.SIGTERM)
    assert flags.list_flags() == [0.0, 0.0]


def test_the_thread_hears_it_while_the_main_thread_does_not():
    """A handler in Python needs the main thread's next instruction; the pipe does not."""
    flags = SignalFlags((signal.SIGUSR1,))
    flags.start()
    heard = []
    watcher = threading.Thread(target=lambda: heard.append(seen(flags, signal.SIGUSR1)))
    watcher.start()
    # A thread that is blocked in C: the lock is only released when the flag has been seen.
    threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
    watcher.join()
    flags.stop()
    assert heard == [True]


def test_a_handler_of_the_users_runs_too(flags):
    told = []
    former = signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    former_fd = signal.set_wakeup_fd(sender)
    try:
        flags.start()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen(flags, signal.SIGUSR1)
        assert os.read(receiver, 1) == bytes([signal.SIGUSR1])
        flags.stop()
        assert told == [signal.SIGUSR1]
    finally:
        signal.set_wakeup_fd(former_fd)
        signal.signal(signal.SIGUSR1, former)
        os.close(receiver)
        os.close(sender)


def test_only_the_main_thread_may_ask():
    found = []

    def start():
        try:
            SignalFlags().start()
        except StateError as error:
            found.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert found == ["signals can be handled only in the main thread; make this call in the main thread"]


def test_a_forked_child_is_ended_by_the_signal_and_the_parent_hears_nothing(flags):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    flags.start()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # what a pool's worker is
        os.write(writer, b"!")
        signal.pause()
        os._exit(0)
    assert os.read(reader, 1) == b"!"
    os.close(reader)
    os.close(writer)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert flags.first is None


def test_who_is_about_to_end_hears_no_more_signals():
    flags = SignalFlags((signal.SIGUSR1,))
    flags.start()
    flags.stop(then_ignore=True)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)  # would end this process
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
