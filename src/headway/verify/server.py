"""Server of forked runs: imports torch and Headway once, and forks a process for each rank of a run on the CPU.

A process that is not forked needs about three seconds for these imports. Forking is safe because the server has
neither threads nor process groups. Each rank gets the environment that `headway launch` would set, newly seeded random
number generators, and a separate session.

Orders are JSON lines on stdin: a `StartOrder` starts a run, and an `EndOrder` ends it. The server writes {"is_ready"} to
stdout at its start, and {"id", "code"} when a run has ended.
"""

import contextlib
import faulthandler
import json
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO, TypedDict, final

from headway.common import env
from headway.verify.request import read_request
from headway.verify.stacks import get_stack_file

_GRACE_SECONDS = 4.0
"""Seconds that the other ranks of a run may continue after one rank has failed, before they are killed."""


@final
class StartOrder(TypedDict):
    """Order that starts a run.

    Attributes:
        id: ID of the run.
        variables: All environment variables of the ranks, except those that describe the process group.
        program: Kind of the program ("script" or "module"), its path or name, and its arguments.
        num_processes: Number of ranks.
        output: Path of the file to which the ranks append their output.
        folder: Working directory of the ranks.
    """

    id: int
    variables: dict[str, str]
    program: list[str]
    num_processes: int
    output: str
    folder: str


@final
class EndOrder(TypedDict):
    """Order that ends a run.

    Attributes:
        id: ID of the run.
        end: Always True.
    """

    id: int
    end: bool


@dataclass
class ForkedRun:
    """Forked processes of one run, one per rank.

    Attributes:
        run_id: ID of the run.
        alive: Process IDs of the ranks that have not ended.
        code: Exit code of the first rank that failed, or 0 if none failed. A negative code means that the rank was ended
            by this signal: -9 for SIGKILL.
        deadline: Time (`time.monotonic()`) at which the remaining ranks are killed; None while no rank has failed.
    """

    run_id: int
    alive: set[int] = field(default_factory=set)
    code: int = 0
    deadline: float | None = None


def main() -> None:
    """Execute orders from stdin until it is closed, then kill the remaining runs."""
    import numpy  # noqa: F401
    import torch
    import torch.distributed
    import torch.nn.parallel
    import torch.utils.data  # noqa: F401

    import headway.accelerator
    import headway.launch.worker
    import headway.verify.recorder  # noqa: F401

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with contextlib.suppress(OSError):  # the client has ended meanwhile, which the end of the input shows below
        answers.write(json.dumps({"is_ready": True}) + "\n")
    runs: dict[int, ForkedRun] = {}
    is_open = True
    buffer = b""
    while is_open or runs:
        if is_open and select.select([0], [], [], 0.02)[0]:
            read = os.read(0, 1 << 20)
            is_open = bool(read)
            *lines, buffer = (buffer + read).split(b"\n")  # the last item is an incomplete line
            for line in lines:
                _execute_order(json.loads(line), runs, answers)
        elif not is_open:
            for run in runs.values():
                _kill_run(run)
            time.sleep(0.02)
        for run in list(runs.values()):
            _reap_ranks(run)
            if not run.alive:
                del runs[run.run_id]
                with contextlib.suppress(OSError):
                    answers.write(json.dumps({"id": run.run_id, "code": run.code}) + "\n")


def _execute_order(order: StartOrder | EndOrder, runs: dict[int, ForkedRun], answers: TextIO) -> None:
    """Execute an order: start or end a run.

    Args:
        order: Order from the client.
        runs: Runs that have not ended, by ID.
        answers: Pipe to the client. A forked rank closes its copy.
    """
    if "end" in order:
        if order["id"] in runs:
            _kill_run(runs[order["id"]])
        return
    run = runs[order["id"]] = ForkedRun(order["id"])
    port = _find_free_port()
    for rank in range(order["num_processes"]):
        pid = os.fork()
        if not pid:
            try:
                # The client sees the end of this pipe only once every copy of it is closed.
                with contextlib.suppress(OSError):  # from text that could not be written, because the client has ended
                    answers.close()
                _become_rank(order, rank, port)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:  # the exit handlers belong to the server
                os._exit(1)
        run.alive.add(pid)


def _become_rank(order: StartOrder, rank: int, port: int) -> None:
    """Run the user's program as one rank in this forked process. Does not return.

    Args:
        order: Order that starts the run.
        rank: Rank of this process.
        port: Free port for the rendezvous.
    """
    parent = os.getppid()
    os.setsid()

    import numpy
    import torch

    from headway.launch import worker
    from headway.verify.compilation import turn_off_compilation
    from headway.verify.listings import reverse_listings_if_asked
    from headway.verify.sources import get_source_watch

    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(order["folder"])
    # The value None unsets a variable, so that the rank has only the variables of the order.
    variables: dict[str, str | None] = dict.fromkeys(env.copy_variables())
    variables.update(order["variables"])
    world_size = order["num_processes"]
    if world_size > 1:
        variables.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    env.apply_changes(variables)
    _prepend_search_paths(env.get("PYTHONPATH") or "")
    torch.set_num_threads(1)
    # Forks inherit equal generator states. The processes of a launch start with random ones.
    random.seed()
    numpy.random.seed(None)
    torch.seed()
    reverse_listings_if_asked()
    _watch_start(rank)
    get_source_watch().install_watches()
    turn_off_compilation(read_request())
    kind, target, *args = order["program"]
    worker.main([str(parent), kind, "merge", target, *args])


def _prepend_search_paths(paths: str) -> None:
    """Put the folders of PYTHONPATH first in `sys.path`, in their order, as in a process that is not forked.

    A folder that is already in `sys.path` is added again. If it were left out, those after it would be searched before
    it.

    Args:
        paths: Value of the environment variable.
    """
    sys.path[:0] = [each for each in paths.split(os.pathsep) if each]


def _watch_start(rank: int) -> None:
    """Make this process write its stack after `RunRequest.patience` seconds if there is no Accelerator by then."""
    request = read_request()
    if request is not None and request.patience:
        folder = Path(request.folder)
        folder.mkdir(parents=True, exist_ok=True)
        file = get_stack_file(folder, rank).open("a")  # faulthandler needs an open file
        faulthandler.dump_traceback_later(request.patience, file=file)


def _reap_ranks(run: ForkedRun) -> None:
    """Collect the exit codes of ranks that have ended, and kill the other ranks `_GRACE_SECONDS` seconds after a failure."""
    for pid in list(run.alive):
        done, status = os.waitpid(pid, os.WNOHANG)
        if not done:
            continue
        run.alive.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not run.code:
            run.code = code
            run.deadline = time.monotonic() + _GRACE_SECONDS
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # DataLoader workers of the rank
    if run.alive and run.deadline is not None and time.monotonic() > run.deadline:
        _kill_run(run)


def _kill_run(run: ForkedRun) -> None:
    """Kill the ranks of a run that have not ended, with all of their child processes."""
    run.code = run.code or -signal.SIGKILL
    for pid in run.alive:
        with contextlib.suppress(PermissionError):
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:  # the rank has not made its process group yet
                os.kill(pid, signal.SIGKILL)


def _find_free_port() -> int:
    """Return a TCP port of this machine that is free at present."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
    os._exit(0)  # torch's exit handlers take a second, for which Ctrl-C would wait
