"""Launching a function instead of a script: from a notebook cell, or from a test.

The function travels by cloudpickle to processes of their own, kept by the same agent as `headway launch`: nothing that the
notebook has done, such as touching a device, can get in their way. Their output appears as it is written.
"""

import contextlib
import operator
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.common import env
from headway.common.optional import require
from headway.common.text import format_bytes
from headway.config.launch import SETTINGS
from headway.config.load import Value, resolve
from headway.config.values import from_file
from headway.errors import ConfigError, LaunchError
from headway.launch import machine, plan
from headway.launch.plan import LaunchPlan, Program
from headway.log import get_logger

logger = get_logger(__name__)

DEFAULT_PORT, LOOPBACK = "29500", "127.0.0.1"
"""What Accelerate's notebook_launcher has for the port and the address; one machine needs neither."""

_GRACE = 30.0
"""Seconds that a run gets to end in after an interrupt; the launcher itself needs up to 20 where ranks do not listen."""


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str | None = None,
    use_port: str | int = DEFAULT_PORT,
    master_addr: str = LOOPBACK,
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    *,
    cpu: bool = False,
) -> list[Any]:
    """Call `function(*args)` on every accelerator of this machine, or on `num_processes` processes.

    Args:
        function: any function, also one defined in a cell; it builds its own Accelerator.
        args: its arguments.
        num_processes: on this machine; None: one per accelerator; without one, a single process.
        mixed_precision: as for `headway launch`.
        num_nodes, node_rank: notebooks that run this cell together, each on a machine of its own, and which of them this is.
        master_addr, use_port: where they meet: machine 0's address, and a free port there.
        rdzv_endpoint: the same as one text, "address:port".
        rdzv_backend, rdzv_conf, rdzv_id: as for `headway launch`. With num_nodes=1 nothing meets, and these, the address and
            the port change nothing: the launcher binds a free port.
        max_restarts: how often all processes are started again after a failure.
        monitor_interval: seconds between looks at the processes.
        log_line_prefix_template: taken for compatibility; a rank's lines appear in the cell as they are written, without a prefix.
        cpu: compute on the CPU even where there is an accelerator.

    Returns:
        What the function returned, by rank (None where that cannot be pickled, and for ranks on other machines).

    Raises:
        LaunchError: a process failed; the exception that ended the run first is its cause.
        ConfigError: an argument is of another type or out of range, or this process is itself one of several.
    """
    cloudpickle = require("cloudpickle", "notebook_launcher needs", "cloudpickle")
    if not callable(function):
        raise ConfigError(
            f"notebook_launcher got {function!r}; give the function itself: notebook_launcher(train, (1, 2))"
        )
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise ConfigError(
            f"notebook_launcher got args={args!r}; give the function's arguments as a tuple: args=({args!r},)"
        )
    if log_line_prefix_template is not None:
        logger.warning_once("log_line_prefix_template has no effect: lines of ranks have no prefix in a notebook")
    given: dict[str, Any] = {
        "num_processes": num_processes,
        "mixed_precision": mixed_precision,
        "cpu": cpu or None,
        "max_restarts": max_restarts or None,
        "monitor_interval": None if monitor_interval == 0.1 else monitor_interval,
    }
    given |= _meeting(num_nodes, node_rank, master_addr, use_port, rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id)
    layer = {name: _checked(name, value) for name, value in given.items() if value is not None}
    layer["module"] = Value(True, "notebook_launcher")
    if num_processes is not None and num_nodes > 1:
        layer["num_processes"] = Value(layer["num_processes"].value * num_nodes, layer["num_processes"].origin)
    with tempfile.TemporaryDirectory(prefix="headway-cell-") as folder:
        Path(folder, "call").write_bytes(cloudpickle.dumps((function, tuple(args))))
        environment = env.snapshot()
        # The function's module must be found as it is here.
        environment["PYTHONPATH"] = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        program = Program("headway.launch.cell", (folder,), "module")
        planned = plan.make(resolve([layer]), program, machine.look(environment), environment)
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
        ConfigError: fewer than one process, or no number.
    """
    return notebook_launcher(function, args, num_processes, cpu=True)


_NAMES = {
    "num_machines": "num_nodes",
    "machine_rank": "node_rank",
    "main_process_ip": "master_addr",
    "main_process_port": "use_port",
}
"""What notebook_launcher calls a setting, where that is another name."""


def _checked(name: str, value: Any) -> Value:
    """A setting that code gave, by the rules of a config file; whole numbers of other libraries are numbers.

    Raises:
        ConfigError: it has another type or is out of range.
    """
    origin = f"notebook_launcher({_NAMES.get(name, name)}=...)"
    if not isinstance(value, (bool, str)) and hasattr(value, "__index__"):
        value = operator.index(value)
    return Value(from_file(SETTINGS[name], value, origin), origin)


def _meeting(
    num_nodes: int,
    node_rank: int,
    master_addr: str,
    use_port: str | int,
    rdzv_backend: str,
    rdzv_endpoint: str,
    rdzv_conf: Mapping[str, Any] | None,
    rdzv_id: str,
) -> dict[str, Any]:
    """The settings by which several notebooks meet; none for one, where a free port is taken."""
    if num_nodes == 1 and node_rank == 0:
        unused = {
            "use_port": (use_port, DEFAULT_PORT),
            "master_addr": (master_addr, LOOPBACK),
            "rdzv_endpoint": (rdzv_endpoint, ""),
            "rdzv_backend": (rdzv_backend, "static"),
            "rdzv_conf": (rdzv_conf or None, None),
        }
        named = [f"{name}={given!r}" for name, (given, default) in unused.items() if str(given) != str(default)]
        if named:
            logger.warning_once(
                f"{', '.join(named)}: not needed, since on one machine the launcher binds a free port by itself"
            )
        return {}
    address, port = (rdzv_endpoint.rpartition(":")[::2]) if rdzv_endpoint else (master_addr, use_port)
    if not str(port).isdecimal():
        raise ConfigError(
            f"notebook_launcher got {f'rdzv_endpoint={rdzv_endpoint!r}' if rdzv_endpoint else f'use_port={use_port!r}'}; give a "
            "port as a number: use_port=29500, or rdzv_endpoint='10.0.0.1:29500'"
        )
    if num_nodes > 1 and address == LOOPBACK:
        raise ConfigError(
            f"notebook_launcher(num_nodes={num_nodes}) meets at master_addr={address!r}, which every machine takes for itself; give "
            "the address of the machine with node_rank=0 by which the others reach it"
        )
    conf = ",".join(f"{key}={value}" for key, value in (rdzv_conf or {}).items())
    return {
        "num_machines": num_nodes,
        "machine_rank": node_rank,
        "main_process_ip": address,
        "main_process_port": int(port),
        "rdzv_backend": None if rdzv_backend == "static" else rdzv_backend,
        "rdzv_conf": conf or None,
        "rdzv_id": None if rdzv_id == "none" else rdzv_id,
    }


def _tell_what_is_taken() -> None:
    """Name what this process holds on a GPU, and the cell that began it: the ranks, new processes, have so much less."""
    device, torch = sys.modules.get("headway.runtime.device"), sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    place = (device.scope.own(device.FirstUse).place if device is not None else None) or "before Headway was imported"
    held = torch.cuda.memory_reserved()
    print(
        f"headway: this process uses the GPU itself, since {place}. The ranks are new processes and start all the same; they "
        f"have {format_bytes(held)} less (del what is there, then torch.cuda.empty_cache())",
        file=sys.stderr,
        flush=True,
    )


def _run(planned: LaunchPlan, environment: dict[str, str]) -> int:
    """Start the plan's command, copy its output to this process's (which may be a cell's), and wait."""
    under = (sys.executable, "-m", "headway.launch", "under", str(os.getpid()))
    child = subprocess.Popen(
        (*under, *planned.argv),
        env=planned.environment(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        bufsize=1,
    )
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
