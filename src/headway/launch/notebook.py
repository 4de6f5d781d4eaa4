"""Launch a function instead of a script, from a notebook cell or a test.

cloudpickle sends the function to new processes. The launcher's agent manages them like those of `headway launch`. State
of the notebook, such as an initialized device, therefore cannot interfere. The processes' output is shown while it is
written.
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
from headway.core.config.launch import SETTINGS
from headway.core.config.load import SettingValue, merge_layers, read_function_layer
from headway.core.config.values import check_file_value
from headway.errors import ConfigError, LaunchError
from headway.launch import machine, plan
from headway.launch.order import Program
from headway.launch.plan import LaunchPlan
from headway.log import get_logger

logger = get_logger(__name__)

DEFAULT_PORT = "29500"
"""Default port of Accelerate's notebook_launcher. A run on one machine does not need it."""
LOOPBACK = "127.0.0.1"
"""Default address of Accelerate's notebook_launcher. A run on one machine does not need it."""

_GRACE_SECONDS = 30.0
"""Seconds that a run has to end after an interrupt. The launcher needs up to 20 if ranks ignore the signal."""
_ARGUMENT_NAMES = {
    "num_machines": "num_nodes",
    "machine_rank": "node_rank",
    "main_process_ip": "master_addr",
    "main_process_port": "use_port",
}
"""Mapping from a setting's name to the name of its notebook_launcher argument, for settings whose two names differ."""


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
    """Call `function(*args)` on every accelerator of this machine, or in `num_processes` processes.

    Each process is one rank. The call waits until all processes have ended, and shows their output. It works in notebooks
    and in scripts. The function and its arguments are sent to new processes by cloudpickle, so the caller's objects do
    not change.

    HEADWAY_* variables, such as HEADWAY_TIMEOUT, set what the arguments leave open. Those for several machines are ignored.

    Args:
        function: Any function, including one defined in a cell. It creates its own Accelerator.
        args: Positional arguments of the function. Default: none.
        num_processes: Number of processes on this machine. None (the default): one per accelerator, or one if there is no
            accelerator.
        mixed_precision: Precision of the computation: "no", "bf16", "fp16" or "fp8". None (the default): the function
            chooses.
        use_port: Free port on machine 0 for the rendezvous. Default: "29500".
        master_addr: Address of machine 0 for the rendezvous. Default: "127.0.0.1".
        node_rank: Rank of this machine, from 0. Default: 0.
        num_nodes: Number of machines, each with a notebook that runs this cell. Default: 1.
        rdzv_backend: Rendezvous backend, as for `headway launch`. With `num_nodes=1` there is no rendezvous: the
            launcher binds a free port, and all `rdzv_*` arguments, `use_port` and `master_addr` have no effect.
            With several machines, "static" (the default) becomes "c10d" if `max_restarts` is above 0.
        rdzv_endpoint: Address and port of the rendezvous in one string, "address:port". Default: "", `master_addr` and
            `use_port` are used.
        rdzv_conf: Options of the rendezvous backend, as for `headway launch`. Default: None, no options.
        rdzv_id: ID of the run, as for `headway launch`. Default: "none".
        max_restarts: Number of times that all processes are restarted after a failure. Default: 0.
        monitor_interval: Seconds between two checks of the processes. Default: 0.1.
        log_line_prefix_template: Ignored, with a warning. Accepted for compatibility with Accelerate. Lines of ranks
            appear in the cell without a prefix.
        cpu: Whether to compute on the CPU even if there is an accelerator. Default: False.

    Returns:
        Return values of the function by rank. None for values that cannot be pickled and for ranks on other machines.

    Raises:
        LaunchError: If a process failed. The error's cause is the exception of the function that was recorded first,
            if there is one and it can be pickled.
        ConfigError: If an argument has a wrong type or is out of range, or a launcher has started this process itself
            as one of several.
        OptionalDependencyMissing: If cloudpickle is not installed.

    Example::

        def train(lr):
            accelerator = Accelerator()
            ...
            return lr

        results = notebook_launcher(train, (1e-3,), num_processes=2)  # one result per rank
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
    settings: dict[str, Any] = {  # None: not set, so that an environment variable decides
        "num_processes": num_processes,
        "mixed_precision": mixed_precision,
        "cpu": cpu or None,
        "max_restarts": max_restarts or None,
        "monitor_interval": None if monitor_interval == 0.1 else monitor_interval,
    }
    settings |= _build_endpoint(
        num_nodes, node_rank, master_addr, use_port, rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id
    )
    layer = {name: _check_option(name, value) for name, value in settings.items() if value is not None}
    layer["module"] = SettingValue(True, "notebook_launcher")
    if num_processes is not None and num_nodes > 1:  # the setting counts the processes of all machines
        layer["num_processes"] = SettingValue(layer["num_processes"].value * num_nodes, layer["num_processes"].origin)
    with tempfile.TemporaryDirectory(prefix="headway-cell-") as folder:
        Path(folder, "call").write_bytes(cloudpickle.dumps((function, tuple(args))))
        environment = env.copy_variables()
        # The new processes must find the function's module, so they get this process's sys.path.
        environment["PYTHONPATH"] = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        program = Program("headway.launch.cell", (folder,), "module")
        resolved = merge_layers([layer, read_function_layer(environment)])
        planned = plan.make_plan(resolved, program, machine.inspect_machine(environment), environment)
        _report_used_memory()
        code = _run(planned, environment)
        if code:
            raise LaunchError(
                f"the run of {getattr(function, '__name__', function)!r} on {planned.world_size} processes ended with exit code "
                f"{code}; the report above names the rank"
            ) from _find_first_error(folder, planned.world_size)
        return [_read_pickle(Path(folder, f"result{rank}")) for rank in range(planned.world_size)]


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> list[Any]:
    """Call `function(*args)` in `num_processes` CPU processes, to try distributed code without accelerators.

    Each process is one rank. The call waits until all processes have ended. It is `notebook_launcher` with `cpu=True`.

    Args:
        function: Any function, including one defined in a cell. It creates its own Accelerator.
        args: Positional arguments of the function. Default: none.
        num_processes: Number of processes, at least 1. Default: 2.

    Returns:
        Return values of the function by rank. None for values that cannot be pickled.

    Raises:
        LaunchError: If a process failed.
        ConfigError: If `num_processes` is not an integer of at least 1, or if `function` or `args` has a wrong type.
            Also if a launcher has started this process itself as one of several.
        OptionalDependencyMissing: If cloudpickle is not installed.

    Example::

        def count(bonus):
            return Accelerator().num_processes + bonus

        assert debug_launcher(count, (1,), num_processes=2) == [3, 3]
    """
    return notebook_launcher(function, args, num_processes, cpu=True)


def _check_option(name: str, value: Any) -> SettingValue:
    """Return a setting given in code, validated like one in a config file.

    Integer types of other libraries are accepted.

    Args:
        name: Name of the setting.
        value: Value to check.

    Raises:
        ConfigError: If the value has a wrong type or is out of range.
    """
    origin = f"notebook_launcher({_ARGUMENT_NAMES.get(name, name)}=...)"
    if not isinstance(value, (bool, str)) and hasattr(value, "__index__"):
        value = operator.index(value)
    return SettingValue(check_file_value(SETTINGS[name], value, origin), origin)


def _build_endpoint(
    num_nodes: int,
    node_rank: int,
    master_addr: str,
    use_port: str | int,
    rdzv_backend: str,
    rdzv_endpoint: str,
    rdzv_conf: Mapping[str, Any] | None,
    rdzv_id: str,
) -> dict[str, Any]:
    """Return the rendezvous settings of several notebooks by name, or {} for a single notebook, which uses a free port.

    For a single notebook, warn about rendezvous arguments that were given but have no effect.

    Args:
        num_nodes, node_rank, master_addr, use_port, rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id: As in
            `notebook_launcher`.

    Raises:
        ConfigError: If the port is not a number, or if several machines would meet at a loopback address.
    """
    if num_nodes == 1 and node_rank == 0:
        values_and_defaults: dict[str, tuple[object, object]] = {
            "use_port": (use_port, DEFAULT_PORT),
            "master_addr": (master_addr, LOOPBACK),
            "rdzv_endpoint": (rdzv_endpoint, ""),
            "rdzv_backend": (rdzv_backend, "static"),
            "rdzv_conf": (rdzv_conf or None, None),
        }
        unneeded = [
            f"{name}={value!r}" for name, (value, default) in values_and_defaults.items() if str(value) != str(default)
        ]
        if unneeded:
            logger.warning_once(
                f"{', '.join(unneeded)}: not needed, since on one machine the launcher binds a free port by itself"
            )
        return {}
    if rdzv_endpoint:
        address, _, port = rdzv_endpoint.rpartition(":")
        port_argument = f"rdzv_endpoint={rdzv_endpoint!r}"
    else:
        address, port = master_addr, str(use_port)
        port_argument = f"use_port={use_port!r}"
    if not port.isdecimal():
        raise ConfigError(
            f"notebook_launcher got {port_argument}; give a port as a number: use_port=29500, or rdzv_endpoint='10.0.0.1:29500'"
        )
    if num_nodes > 1 and address == LOOPBACK:
        raise ConfigError(
            f"notebook_launcher(num_nodes={num_nodes}) meets at master_addr={address!r}, which every machine resolves to itself; "
            "give the address at which the other machines reach the machine with node_rank=0"
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


def _report_used_memory() -> None:
    """Print how much GPU memory this process holds and where it first used the GPU.

    The ranks share the GPU with this process, so this memory is not available to them. Do nothing if this process has
    not initialized CUDA.
    """
    first_use = sys.modules.get("headway.core.runtime.first_use")
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    place = None if first_use is None else first_use.scope.get_or_create(first_use.FirstUse).place
    place = place or "before Headway was imported"
    reserved = torch.cuda.memory_reserved()
    print(
        f"headway: this process uses the GPU itself, since {place}. The ranks are new processes and start anyway, but have "
        f"{format_bytes(reserved)} less memory. To free it, delete the tensors, then call torch.cuda.empty_cache()",
        file=sys.stderr,
        flush=True,
    )


def _run(planned: LaunchPlan, environment: dict[str, str]) -> int:
    """Start the plan's command, copy its output to this process's output, and wait until the command ends.

    After a KeyboardInterrupt, send SIGINT to the command, wait for its end, and raise the KeyboardInterrupt again.

    Returns:
        Exit code of the command.
    """
    under = (sys.executable, "-m", "headway.launch", "under", str(os.getpid()))
    child = subprocess.Popen(
        (*under, *planned.argv),
        env=planned.make_environment(environment),
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
        # If the terminal sent the signal to the whole process group, the child has it already. A second one does no harm.
        child.send_signal(signal.SIGINT)
        _wait_for_child(child)
        raise
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        child.stdout.close()


def _wait_for_child(child: "subprocess.Popen[str]") -> None:
    """Show the remaining output of an interrupted run.

    Return when the run has ended, after `_GRACE_SECONDS` seconds, or at a second interrupt. The caller then kills the remaining
    processes.
    """
    assert child.stdout is not None
    timer = threading.Timer(_GRACE_SECONDS, child.kill)
    timer.daemon = True
    timer.start()
    with contextlib.suppress(KeyboardInterrupt):
        for line in child.stdout:
            print(line, end="", flush=True)
        child.wait()
    timer.cancel()


def _read_pickle(path: Path) -> Any:
    """Return the object that a rank has pickled to a file, or None if the file does not exist."""
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _find_first_error(folder: str, world_size: int) -> BaseException | None:
    """Return the exception that a rank recorded first. None if no rank did, or the exception could not be pickled."""
    paths = [Path(folder, f"error{rank}") for rank in range(world_size)]
    error_files = [path for path in paths if path.exists()]
    if not error_files:
        return None
    oldest_file = min(error_files, key=lambda path: path.stat().st_mtime_ns)
    error = _read_pickle(oldest_file)
    return error if isinstance(error, BaseException) else None
