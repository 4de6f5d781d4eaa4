"""Worker processes that apply a function to tasks, whose results come back in the order of the tasks."""

import multiprocessing
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, NoReturn, TypeVar

from headway.common import env
from headway.common.untrusted import PARSE_ERRORS
from headway.errors import HeadwayError, StateError

Task = TypeVar("Task")
Result = TypeVar("Result")

_TASKS_PER_WORKER = 4
"""Number of tasks per worker that may be finished or running before their turn. It limits the memory of their results."""


def map_in_order(
    function: Callable[[Task], Result], tasks: Sequence[Task], num_workers: int
) -> Generator[Result, None, None]:
    """Apply a function to tasks in worker processes, and yield the results in the order of the tasks.

    The processes are spawned, because a fork would copy the locks of threads. They end with the generator, or when this
    process dies. Ctrl-C is left to this process.

    Args:
        function: Function to apply. It must be picklable.
        tasks: Arguments of the calls. They must be picklable.
        num_workers: Number of processes.

    Raises:
        HeadwayError: If the function raised one.
        StateError: If the function raised another error, or a worker process ended.
    """
    workers = _WorkerPool(function, num_workers)
    try:
        yield from workers.map(tasks)
    finally:
        workers.close()


class _WorkerPool(Generic[Task, Result]):
    """Worker processes that apply a function to tasks.

    Call `map` only once. After an error, the connections may still hold results of unfinished tasks.

    Args:
        function: Function to apply. It must be picklable.
        num_workers: Number of processes.
    """

    def __init__(self, function: Callable[[Task], Result], num_workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes: list[SpawnProcess] = []
        self._connections: list[Connection] = []
        # Each worker is one process of several, so threads inside of the library would only compete.
        with env.patch_variables({"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}), _block_interrupts():
            for _ in range(num_workers):
                connection, child_connection = context.Pipe()
                process = context.Process(target=_serve_tasks, args=(function, child_connection), daemon=True)
                process.start()
                child_connection.close()  # so that the connection ends when the process does
                self._processes.append(process)
                self._connections.append(connection)

    def map(self, tasks: Sequence[Task]) -> Iterator[Result]:
        """Yield the result of each task, in order.

        Raises:
            HeadwayError: If the function raised one.
            StateError: If the function raised another error, or a worker process ended.
        """
        results: dict[int, Result] = {}  # finished tasks whose turn has not come
        idle = list(range(len(self._connections)))
        running: dict[int, int] = {}  # index of the task by index of the worker
        next_task = 0
        for turn in range(len(tasks)):
            while turn not in results:
                while idle and next_task < min(len(tasks), turn + _TASKS_PER_WORKER * len(self._connections)):
                    worker = idle.pop()
                    running[worker] = next_task
                    self._send(worker, tasks[next_task])
                    next_task += 1
                ready = wait([self._connections[worker] for worker in running])
                for worker in [each for each in running if self._connections[each] in ready]:
                    results[running.pop(worker)] = self._receive(worker)
                    idle.append(worker)
            yield results.pop(turn)

    def _send(self, worker: int, task: Task) -> None:
        try:
            self._connections[worker].send(task)
        except OSError:
            self._raise_end(worker)

    def _receive(self, worker: int) -> Result:
        try:
            answer = self._connections[worker].recv()
        except (EOFError, OSError):
            self._raise_end(worker)
        if isinstance(answer, BaseException):
            raise answer
        result: Result = answer
        return result

    def _raise_end(self, worker: int) -> NoReturn:
        """Raise a `StateError` with the exit code or signal with which a worker process ended."""
        process = self._processes[worker]
        process.join(10)
        reason = f"exit code {process.exitcode}"
        if process.exitcode is not None and process.exitcode < 0:
            reason = signal.Signals(-process.exitcode).name
        hint = "; if its memory ran out, use fewer processes" if reason == "SIGKILL" else ""
        raise StateError(f"worker process {worker} ended with {reason}{hint}")

    def close(self) -> None:
        """Terminate all worker processes, including busy ones."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.terminate()
            process.join()


@contextmanager
def _block_interrupts() -> Iterator[None]:
    """Return a context in which new processes start with SIGINT blocked. This process receives it after the block.

    Otherwise, Ctrl-C during the start of a worker makes Python print "Failed to import the site module".
    """
    resource_tracker.ensure_running()  # the start of the first process would do this, and unblock SIGINT
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _serve_tasks(function: Callable[[Any], Any], connection: Connection) -> None:
    """Apply a function to tasks from a connection, and send back results or errors, until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        answer: Any
        try:
            answer = function(task)
        except HeadwayError as error:
            answer = error
        except (OSError, RuntimeError, *PARSE_ERRORS) as error:
            answer = StateError(f"{type(error).__name__} in a worker process: {error}")
        try:
            connection.send(answer)
        except OSError:
            return  # the main process has ended
