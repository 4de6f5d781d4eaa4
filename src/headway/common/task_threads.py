"""Threads that run tasks in the order of submission and end with their `with` block."""

import itertools
import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple


class _Task(NamedTuple):
    """Queued task.

    Attributes:
        number: Number of the task in the order of queueing, from 0.
        call: Function to run.
        is_submitted: Whether the task was queued by `submit` and therefore counts toward `max_waiting`.
    """

    number: int
    call: Callable[[], None]
    is_submitted: bool


class TaskThreads:
    """Pool of threads that run tasks within a `with` block. All tasks have ended when the block is left.

    After an error, later tasks are skipped. `submit`, `wait` and the end of the block raise the error of the earliest
    failed task.

    An executor of `concurrent.futures` refuses tasks once the interpreter has begun to exit. A background save might
    still be running then, so these are plain threads.

    Args:
        num_threads: Number of threads. Fewer are used if the system cannot start that many. If it can start none, the
            `with` statement raises a RuntimeError. 0: the caller's thread runs submitted tasks in `submit`, and added
            tasks in `wait`.
        name: Name of the threads.
        max_waiting: Maximum number of unfinished submitted tasks. `submit` blocks until there are fewer.
    """

    def __init__(self, num_threads: int, name: str, max_waiting: int) -> None:
        self._tasks: queue.Queue[_Task | None] = queue.Queue()  # None ends one thread
        self._free_slots = threading.Semaphore(max_waiting)
        self._numbers = itertools.count()  # of the tasks, in the order of queueing
        self._errors: list[tuple[int, BaseException]] = []  # with the numbers of the tasks that raised them
        self._is_stopped = False  # whether an error has ended the `with` block
        self._num_threads = num_threads
        self._name = name
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> "TaskThreads":
        for _ in range(self._num_threads):
            thread = threading.Thread(target=self._run_tasks, name=self._name)
            try:
                thread.start()
            except RuntimeError:  # a limit on processes or memory
                if not self._threads:
                    raise
                break
            self._threads.append(thread)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._is_stopped = kind is not None
        for _thread in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        if kind is None:
            self.raise_first_error()

    def submit(self, call: Callable[[], None]) -> None:
        """Queue a task. Block while `max_waiting` submitted tasks are unfinished. Without threads, run the task at once.

        Raises:
            BaseException: The error of an earlier task, if one has failed.
        """
        if not self._num_threads:
            call()
            return
        self._free_slots.acquire()
        self._tasks.put(_Task(next(self._numbers), call, is_submitted=True))
        self.raise_first_error()

    def add(self, call: Callable[[], None]) -> None:
        """Queue a task without waiting, regardless of the number of unfinished tasks. A running task may call this."""
        self._tasks.put(_Task(next(self._numbers), call, is_submitted=False))

    def wait(self) -> None:
        """Wait for all tasks, including those that running tasks add. Without threads, run the added tasks here.

        Raises:
            BaseException: The error of the earliest failed task, if one has failed.
        """
        while self._num_threads == 0 and not self._tasks.empty():
            self._tasks.get().call()  # type: ignore[union-attr]
            self._tasks.task_done()
        self._tasks.join()
        self.raise_first_error()

    @property
    def has_failed(self) -> bool:
        """Whether a task has failed, or an error has ended the `with` block. Long tasks read this, to end early."""
        return self._is_stopped or bool(self._errors)

    def raise_first_error(self) -> None:
        """Raise the error of the earliest failed task, if there is one.

        Raises:
            BaseException: The error of that task.
        """
        if self._errors:
            _, earliest = min(self._errors, key=lambda failure: failure[0])
            raise earliest

    def _run_tasks(self) -> None:
        """Run tasks from the queue, as one of the threads, until the queue contains None.

        After the first error of any thread, the remaining tasks are taken from the queue without running them.
        """
        while (task := self._tasks.get()) is not None:
            number, is_submitted = task.number, task.is_submitted
            try:
                if not self.has_failed:
                    task.call()
            except BaseException as error:  # raised by the thread that waits for the tasks
                self._errors.append((number, error))
            finally:
                del task  # it may hold a large tensor, which the next `get` would keep alive
                if is_submitted:
                    self._free_slots.release()
                self._tasks.task_done()
        self._tasks.task_done()
