"""Test that signals set flags at once, and that handlers installed earlier still run."""

import os
import signal
import threading
import time

import pytest

from headway.core.runtime.signals import SignalFlags
from headway.errors import StateError


@pytest.fixture
def flags():
    """Signal flags that are stopped after the test."""
    made = SignalFlags()
    yield made
    made.stop()


def wait_for_flag(flags, number, seconds=20.0):
    """Wait for a signal and return whether it was the first one."""
    deadline = time.monotonic() + seconds
    while flags.lowest_signal != number and time.monotonic() < deadline:
        time.sleep(0.005)
    return flags.lowest_signal == number


def test_handlers_are_installed_by_start_and_removed_by_stop():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    flags = SignalFlags()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
    flags.start()
    flags.start()
    flags.stop()
    flags.stop()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_signal_sets_a_flag(flags):
    flags.start()
    assert flags.lowest_signal is None
    os.kill(os.getpid(), signal.SIGTERM)
    assert wait_for_flag(flags, signal.SIGTERM)


def test_thread_sees_the_flag_while_the_main_thread_is_blocked():
    """A handler in Python needs the main thread's next instruction, but the pipe does not."""
    flags = SignalFlags((signal.SIGUSR1,))
    flags.start()
    heard = []
    watcher = threading.Thread(target=lambda: heard.append(wait_for_flag(flags, signal.SIGUSR1)))
    watcher.start()
    # The main thread is blocked in C by join() until the other thread has seen the flag.
    threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
    watcher.join()
    flags.stop()
    assert heard == [True]


def test_earlier_handler_of_the_user_runs_too(flags):
    told = []
    former = signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    former_fd = signal.set_wakeup_fd(sender)
    try:
        flags.start()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert wait_for_flag(flags, signal.SIGUSR1)
        assert os.read(receiver, 1) == bytes([signal.SIGUSR1])
        flags.stop()
        assert told == [signal.SIGUSR1]
    finally:
        signal.set_wakeup_fd(former_fd)
        signal.signal(signal.SIGUSR1, former)
        os.close(receiver)
        os.close(sender)


def test_only_the_main_thread_may_start_flags():
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


def test_forked_child_is_ended_by_the_signal_and_sets_no_flag_in_the_parent(flags):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    flags.start()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # like a worker of a pool
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
    assert flags.lowest_signal is None


def test_signals_can_be_ignored_after_the_stop():
    flags = SignalFlags((signal.SIGUSR1,))
    flags.start()
    flags.stop(then_ignore=True)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)  # would end this process
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
