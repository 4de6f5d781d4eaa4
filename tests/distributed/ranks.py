"""Run a module-level function on several real processes, and return their results or raise their tracebacks."""

import io
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run_rank(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, port: int, folder: str
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    for name in ("HEADWAY_RUN", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    out = Path(folder, f"rank{rank}")
    try:
        import torch

        torch.set_num_threads(1)
        payload = _pack((True, function(*args)))
    except BaseException:
        payload = _pack((False, traceback.format_exc()))
    out.with_suffix(".tmp").write_bytes(payload)
    out.with_suffix(".tmp").rename(out)
    # If a rank exited with its process group open, the other ranks would fail.
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _pack(result: tuple[bool, Any]) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(result, buffer)
    return buffer.getvalue()


def _unpack(path: Path) -> tuple[bool, Any]:
    """Read a rank's result, with its tensors on the CPU."""
    import torch

    found: tuple[bool, Any] = torch.load(path, map_location="cpu", weights_only=False)
    return found


class RankFailed(AssertionError):
    """A rank raised, died or did not finish in time."""


def run_ranks(function: Callable[..., Any], world_size: int = 2, *args: Any, timeout: float = 120) -> list[Any]:
    """Call `function(*args)` on each of `world_size` processes, and return the results by rank.

    Raises:
        RankFailed: If a rank raises, dies or does not finish within `timeout` seconds.
    """
    results = _start_ranks(function, world_size, args, timeout)
    if any("EADDRINUSE" in str(text) for is_fine, text in results.values() if not is_fine):
        results = _start_ranks(function, world_size, args, timeout)  # another program took the port in the meantime
    failures = [f"rank {rank}:\n{text}" for rank, (is_fine, text) in sorted(results.items()) if not is_fine]
    missing = [rank for rank in range(world_size) if rank not in results]
    if missing:
        failures.append(f"ranks {missing} did not finish in {timeout} s or died")
    if failures:
        raise RankFailed("\n".join(failures))
    return [results[rank][1] for rank in range(world_size)]


def _start_ranks(
    function: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout: float
) -> dict[int, tuple[bool, Any]]:
    # A fork server that has imported torch starts each rank in milliseconds. It has no threads or process groups
    # itself.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preloaded"])
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        workers = [
            context.Process(target=_run_rank, args=(function, args, rank, world_size, port, folder))
            for rank in range(world_size)
        ]
        for worker in workers:
            worker.start()
        deadline = time.monotonic() + timeout
        return _collect(workers, Path(folder), deadline)


def _collect(workers: list[Any], folder: Path, deadline: float) -> dict[int, tuple[bool, Any]]:
    results: dict[int, tuple[bool, Any]] = {}
    are_alive = True
    while len(results) < len(workers) and time.monotonic() < deadline and are_alive:
        are_alive = any(
            worker.is_alive() for worker in workers
        )  # checked before the files, so that a rank's last result is read
        for rank, worker in enumerate(workers):
            path = folder / f"rank{rank}"
            if rank not in results and path.exists():
                results[rank] = _unpack(path)
                if not results[rank][0]:  # the other ranks may wait for this rank forever
                    deadline = min(deadline, time.monotonic() + 5)
            elif rank not in results and not worker.is_alive() and not path.exists():
                deadline = min(deadline, time.monotonic() + 5)
        time.sleep(0.01)
    for worker in workers:
        worker.join(max(0.0, min(5.0, deadline - time.monotonic())) if len(results) < len(workers) else 10)
        if worker.is_alive():
            worker.kill()
            worker.join()
    return results
