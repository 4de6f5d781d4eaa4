"""Run tasks on several threads. If several tasks fail, the error of the earliest task in the given order is raised."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor


def run_in_order(tasks: Iterable[Callable[[], None]], num_threads: int) -> None:
    """Run tasks on several threads. If several fail, raise the error of the earliest task in the given order.

    A failure takes effect when all earlier tasks have ended. Tasks that have not started by then are skipped. The error
    is raised after the running tasks have ended.

    Args:
        tasks: Functions to call.
        num_threads: Number of threads, at least 1.
    """
    with ThreadPoolExecutor(num_threads, "headway-read") as readers:
        running = [readers.submit(task) for task in tasks]
        try:
            for task in running:
                task.result()
        finally:
            readers.shutdown(cancel_futures=True)
