"""Launching a function instead of a script: from a notebook cell, or from a test.

The function travels by cloudpickle to processes of their own, kept by the same agent as `headway launch`: nothing that the
notebook has done - a device it has touched, say - can stand in their way. Their output appears as it is written.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headway import env
from headway.config.load import Value, resolve
from headway.errors import ConfigError, LaunchError
from headway.launch import machine, plan
from headway.launch.plan import Plan, Program
from headway.optional import require
from headway.units import format_bytes

_GRACE = 30.0
"""Seconds that a run gets to end in after an interrupt; the launcher itself needs up to 20 where ranks do not listen."""


def notebook_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int | None = None,
                      mixed_precision: str | None = None, *, cpu: bool = False, max_restarts: int = 0) -> list[Any]:  # fmt: skip
    """Call `function(*args)` on every accelerator of this machine, or on `num_processes` processes.

    Args:
        function: any function, also one defined in a cell; it builds its own Accelerator.
        args: its arguments.
        num_processes: None: one per accelerator; without one, a single process.
        mixed_precision: as for `headway launch`.
        cpu: compute on the CPU even where there is an accelerator.
        max_restarts: how often all processes are started anew after a failure.

    Returns:
        What the function returned, by rank (None where that cannot be pickled).

    Raises:
        LaunchError: a process failed; the exception that ended the run first is its cause.
        ConfigError: a setting is out of range, or this process is itself one of several.
    """
    cloudpickle = require("cloudpickle", "notebook_launcher needs", "cloudpickle")
    given = {"num_processes": num_processes, "mixed_precision": mixed_precision, "cpu": cpu or None,
             "max_restarts": max_restarts or None, "module": True}  # fmt: skip
    layer = {name: Value(value, f"notebook_launcher({name}=...)") for name, value in given.items() if value is not None}
    with tempfile.TemporaryDirectory(prefix="headway-cell-") as folder:
        Path(folder, "call").write_bytes(cloudpickle.dumps((function, tuple(args))))
        environment = env.snapshot()
        # The function's module must be found as it is here.
        environment["PYTHONPATH"] = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        planned = plan.make(
            resolve([layer]),
            Program("headway.launch.cell", (folder,), "module"),
            machine.look(environment),
            environment,
        )
        _tell_what_is_taken()
        code = _run(planned, environment)
        if code:
            raise LaunchError(
                f"the run of {getattr(function, '__name__', function)!r} on {planned.world_size} processes ended with exit code "
                f"{code}; the report above names the rank"
            ) from _first_error(folder, planned.world_size)
        return [_read(Path(folder, f"result{rank}")) for rank in range(planned.world_size)]


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> list[Any]:
    """Call `function(*args)` on `num_processes` CPU processes, to try distributed code without accelerators.

    Args:
        function: as for `notebook_launcher`.
        args: its arguments.
        num_processes: at least 1.

    Returns:
        What the function returned, by rank.

    Raises:
        LaunchError: a process failed.
        ConfigError: fewer than one process.
    """
    if num_processes < 1:
        raise ConfigError(f"debug_launcher got num_processes={num_processes}; give 1 or more")
    return notebook_launcher(function, args, num_processes, cpu=True)


def _tell_what_is_taken() -> None:
    """Name what this process holds on a GPU, and the cell that began it: the ranks, new processes, have so much less."""
    origin, torch = sys.modules.get("headway.runtime.origin"), sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    place = getattr(origin, "first_use", lambda: None)() or "before Headway was imported"
    held = torch.cuda.memory_reserved()
    print(
        f"headway: this process uses the GPU itself, since {place}. The ranks are new processes and start all the same; they "
        f"have {format_bytes(held)} less (del what is there, then torch.cuda.empty_cache())",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def _run(planned: Plan, environment: dict[str, str]) -> int:
    """Start the plan's command, copy its output to this process's (which may be a cell's), and wait."""
    under = (sys.executable, "-m", "headway.launch", "under", str(os.getpid()))
    child = subprocess.Popen(
        (*under, *planned.argv), env=planned.environment(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", bufsize=1,
    )  # fmt: skip
    assert child.stdout is not None
    try:
        for line in child.stdout:
            print(line, end="", flush=True)
        return child.wait()
    except KeyboardInterrupt:
        # Where the whole group got the signal, the child has it already; once more does no harm.
        child.send_signal(signal.SIGINT)
        _see_it_end(child)
        raise
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        child.stdout.close()


def _see_it_end(child: "subprocess.Popen[str]") -> None:
    """Show what an interrupted run still says; after a while, or at a second interrupt, it is killed by the caller."""
    assert child.stdout is not None
    timer = threading.Timer(_GRACE, child.kill)
    timer.daemon = True
    timer.start()
    with contextlib.suppress(KeyboardInterrupt):
        for line in child.stdout:
            print(line, end="", flush=True)
        child.wait()
    timer.cancel()


def _read(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _first_error(folder: str, world_size: int) -> BaseException | None:
    found = [path for rank in range(world_size) if (path := Path(folder, f"error{rank}")).exists()]
    first = min(found, key=lambda path: path.stat().st_mtime_ns, default=None)
    error = None if first is None else _read(first)
    return error if isinstance(error, BaseException) else None
