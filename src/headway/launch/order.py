"""Instructions from the launcher for the agent of one machine, and the settings from which they are built."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from headway.common.object_path import expand_home
from headway.core.config.launch import DEFAULT_GRACE
from headway.core.config.load import ResolvedSettings
from headway.errors import ConfigError
from headway.launch.clusters import ClusterTask
from headway.launch.machine import Machine

_NO_ENDPOINT = (
    "{num_machines} machines ({origin}) meet on machine 0, whose address is not known: add "
    "--main_process_ip ADDRESS --main_process_port PORT (a free port there, 1 to 65535) on all machines"
)


@dataclass(frozen=True)
class Program:
    """The user's program: a script, a module or an executable, with its arguments.

    Attributes:
        target: Path of a script, name of a module, or name of an executable.
        args: Arguments of the program.
        kind: "script", "module" or "program".
    """

    target: str
    args: tuple[str, ...] = ()
    kind: str = "script"

    def make_command(self, python: str) -> tuple[str, ...]:
        """Return the command that runs the program as one plain process.

        Args:
            python: Path of the Python interpreter.
        """
        interpreter = {"script": (python,), "module": (python, "-m"), "program": ()}[self.kind]
        return (*interpreter, self.target, *self.args)


@dataclass(frozen=True)
class AgentOrder:
    """Instructions for the agent of one machine, passed to it as one JSON argument.

    Attributes:
        program: Program that each rank runs.
        num_local: Number of processes on this machine.
        num_machines: Number of machines.
        machine_rank: Rank of this machine.
        backend: Rendezvous backend: "static", "c10d", or "local" (one machine, with its own store on a free port).
        endpoint: Address and port of the rendezvous, "address:port". Empty for "local".
        conf: Options of the rendezvous backend.
        run_id: ID of the run.
        max_restarts: Number of times that all processes are restarted after a failure.
        monitor_interval: Seconds between two checks of the processes.
        log_dir: Folder for the ranks' output and failure.json. None to write only to the screen.
        tee: Streams that are also written to log files. "0": none. "1": stdout. "2": stderr. "3": both.
        role: Name of the workers in the prefix of each line that they print.
        is_bound_to_cores: Whether to bind each process to the CPU cores near its GPU.
        machine_timeout: Seconds without a heartbeat after which another machine counts as lost.
        unit: Word for a machine in messages: "machine", or "task" if the cluster starts one agent for each process.
        variables: Environment variables of each worker in addition to those that torch sets.
        min_machines: Smallest number of machines with which the run continues.
        grace: Seconds that ranks have to save a checkpoint after a signal to the launcher.
        secret_file: File that contains the run's secret. If None, HEADWAY_SECRET is read; without it there is no
            secret.
        metrics_port: Port on which the agent serves the run's metrics. None to serve no metrics.
    """

    program: Program
    num_local: int
    num_machines: int = 1
    machine_rank: int = 0
    backend: str = "local"
    endpoint: str = ""
    conf: Mapping[str, str] = field(default_factory=dict)
    run_id: str = "headway"
    max_restarts: int = 0
    monitor_interval: float = 0.1
    log_dir: str | None = None
    tee: str = "0"
    role: str = "rank"
    is_bound_to_cores: bool = False
    machine_timeout: float = 30.0
    unit: str = "machine"
    variables: Mapping[str, str] = field(default_factory=dict)
    min_machines: int = 1
    grace: float = DEFAULT_GRACE
    secret_file: str | None = None
    metrics_port: int | None = None

    def encode(self) -> str:
        """Return these instructions as JSON text."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> "AgentOrder":
        """Parse the instructions from JSON text that `encode` has returned."""
        content: dict[str, Any] = json.loads(text)
        program = content.pop("program")
        return cls(program=Program(program["target"], tuple(program["args"]), program["kind"]), **content)


def build_order(resolved: ResolvedSettings, program: Program, num_machines: int, num_local: int) -> AgentOrder:
    """Return the instructions for the agent of this machine.

    Raises:
        ConfigError: If settings of the rendezvous, the restarts or the log files are invalid or contradict each other.
    """
    max_restarts = resolved.get("max_restarts", 0)
    backend, endpoint = "local", ""
    if num_machines > 1:
        backend = resolved.get("rdzv_backend", "c10d" if max_restarts else "static")
        if backend == "static" and max_restarts:
            raise ConfigError(
                f"rdzv_backend=static ({resolved.get_origin('rdzv_backend')}) cannot restart several machines "
                f"(max_restarts={max_restarts}); use --rdzv_backend c10d"
            )
        endpoint = _build_endpoint(resolved, num_machines)
    log_dir = expand_home(resolved.get("log_dir"))
    tee = resolved.get("tee", "3" if log_dir else "0")
    if tee != "0" and log_dir is None:
        raise ConfigError(f"tee={tee} ({resolved.get_origin('tee')}) needs a folder for its log files; add --log_dir")
    same_name_settings = (
        "machine_rank",
        "max_restarts",
        "monitor_interval",
        "role",
        "machine_timeout",
        "grace",
    )
    return AgentOrder(
        program,
        num_local,
        num_machines,
        backend=backend,
        endpoint=endpoint,
        conf=_parse_conf(resolved),
        run_id=resolved.get("rdzv_id", "headway"),
        tee=tee,
        is_bound_to_cores=resolved.get("enable_cpu_affinity", False),
        min_machines=_choose_min_machines(resolved, num_machines, backend),
        secret_file=resolved.get("secret"),
        log_dir=log_dir,
        metrics_port=resolved.get("metrics_port"),
        **{name: resolved.get(name) for name in same_name_settings if resolved.config.is_set(name)},
    )


def build_task_order(resolved: ResolvedSettings, order: AgentOrder, task: ClusterTask, machine: Machine) -> AgentOrder:
    """Return the instructions for an agent that manages the single process of a task started by the cluster.

    Raises:
        ConfigError: If the requested processes are not the cluster's tasks, if no port was given for a run on one
            machine, or if `min_machines` is set.
    """
    world_size = order.num_machines * order.num_local
    if (world_size, order.num_local) != (task.world_size, task.local_world_size):
        raise ConfigError(
            f"{world_size} processes ({resolved.get_origin('num_processes')}), but the cluster has started "
            f"{task.world_size} tasks, {task.local_world_size} on each machine; start one task per machine to choose here"
        )
    endpoint = order.endpoint
    if order.num_machines == 1:
        port = resolved.get("main_process_port")
        if not port:
            raise ConfigError(
                f"the {task.world_size} tasks ({resolved.get_origin('num_processes')}) meet at a port of this machine, which is not "
                "known: add --main_process_port PORT (a free port, 1 to 65535), or start one launcher for all of them: "
                f"headway launch -n {task.world_size} SCRIPT"
            )
        endpoint = f"127.0.0.1:{port}"
    if resolved.config.is_set("min_machines"):
        raise ConfigError(
            f"min_machines ({resolved.get_origin('min_machines')}) needs one launcher per machine, but the cluster has started "
            f"{task.local_world_size} tasks on each; start one task per machine"
        )
    # If a task sees only its own accelerators, their indices start at 0, and so must the local rank that selects one.
    if task.has_own_devices(len(machine.device_ids)):
        local_rank, local_world_size = 0, 1
    else:
        local_rank, local_world_size = task.local_rank, task.local_world_size
    return replace(
        order,
        num_local=1,
        num_machines=task.world_size,
        machine_rank=task.rank,
        endpoint=endpoint,
        unit="task",
        min_machines=task.world_size,
        backend=resolved.get("rdzv_backend", "c10d" if order.max_restarts else "static"),
        variables={"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(local_world_size)},
    )


def _choose_min_machines(resolved: ResolvedSettings, num_machines: int, backend: str) -> int:
    """Return the smallest number of machines with which the run continues after it has lost one.

    Args:
        resolved: Resolved settings.
        num_machines: Number of machines at the start of the run.
        backend: Rendezvous backend.

    Raises:
        ConfigError: If the number exceeds `num_machines`, or if the run cannot be restarted with fewer machines.
    """
    min_machines: int = resolved.get("min_machines", num_machines)
    origin = resolved.get_origin("min_machines")
    if min_machines > num_machines:
        raise ConfigError(f"min_machines={min_machines} ({origin}) must be at most num_machines={num_machines}")
    can_restart = backend == "c10d" and resolved.get("max_restarts", 0)
    if min_machines < num_machines and not can_restart:
        raise ConfigError(
            f"min_machines={min_machines} ({origin}) restarts the processes with fewer machines: add --max_restarts N, and "
            "leave --rdzv_backend static out"
        )
    return min_machines


def _build_endpoint(resolved: ResolvedSettings, num_machines: int) -> str:
    """Return the address and port at which the machines meet, as "address:port". An IPv6 address is put in brackets.

    Raises:
        ConfigError: If the address or the port is missing, or the port is too large.
    """
    address, port = resolved.get("main_process_ip"), resolved.get("main_process_port")
    if address is None or not port:
        raise ConfigError(_NO_ENDPOINT.format(num_machines=num_machines, origin=resolved.get_origin("num_machines")))
    if port > 65535:
        raise ConfigError(f"main_process_port={port} ({resolved.get_origin('main_process_port')}) must be 1 to 65535")
    is_bare_ipv6 = ":" in address and not address.startswith("[")
    return f"[{address}]:{port}" if is_bare_ipv6 else f"{address}:{port}"


def _parse_conf(resolved: ResolvedSettings) -> dict[str, str]:
    """Return the options of the rendezvous backend by name, from the text of the setting `rdzv_conf`.

    Raises:
        ConfigError: If the text is not a list of key=value, or `timeout` is not a number of at least 0.
    """
    text = resolved.get("rdzv_conf")
    if text is None:
        return {}
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if any(not name.strip() or not equals or not value.strip() for name, equals, value in pairs):
        raise ConfigError(
            f"rdzv_conf={text!r} ({resolved.get_origin('rdzv_conf')}) must be key=value,key=value, such as timeout=300"
        )
    options = {name.strip(): value.strip() for name, _, value in pairs}
    if not _is_duration(options.get("timeout", "0")):
        raise ConfigError(
            f"rdzv_conf={text!r} ({resolved.get_origin('rdzv_conf')}): timeout must be a number of seconds, such as timeout=300"
        )
    return options


def _is_duration(text: str) -> bool:
    """Whether the text is a number of at least 0."""
    try:
        return float(text) >= 0
    except ValueError:
        return False
