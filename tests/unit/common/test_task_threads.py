"""Tasks that threads run, or the calling thread where there are none."""

import threading

import pytest

from headway.common.task_threads import TaskThreads


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_all_tasks_have_ended_after_the_block(num_threads):
    done = []
    with TaskThreads(num_threads, "test-task", 2) as threads:
        for number in range(10):
            threads.submit(lambda number=number: (done.append(number), threads.add(lambda: done.append(-1 - number))))
        threads.wait()
        assert len(done) == 20
    assert sorted(done) == list(range(-10, 10))
    assert not [thread for thread in threading.enumerate() if thread.name == "test-task"]


def test_without_threads_the_caller_runs_tasks_in_order():
    seen = []

    def note(name):
        seen.append((name, threading.current_thread()))

    with TaskThreads(0, "test-task", 1) as threads:
        threads.submit(lambda: (note("a"), threads.add(lambda: note("later"))))
        threads.submit(lambda: note("b"))
        assert [name for name, _ in seen] == ["a", "b"]
        threads.wait()
    assert [name for name, _ in seen] == ["a", "b", "later"]
    assert {thread for _, thread in seen} == {threading.current_thread()}


@pytest.mark.parametrize("num_threads", [0, 2])
def test_the_error_of_a_task_is_raised_and_skips_later_tasks(num_threads):
    def fail():
        raise OSError("full")

    def run():
        with TaskThreads(num_threads, "test-task", 2) as threads:
            threads.add(fail)
            threads.add(lambda: pytest.fail("ran after an error") if num_threads == 0 else None)
            threads.wait()

    with pytest.raises(OSError, match="full"):
        run()
    assert not [thread for thread in threading.enumerate() if thread.name == "test-task"]
