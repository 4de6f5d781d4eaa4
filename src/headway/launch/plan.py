"""Plan of a launch, which a pure function computes from settings. `--dry-run` prints the plan's command.

`run.py` executes the plan.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from headway.common import env
from headway.common.object_path import expand_home
from headway.common.untrusted import parse_whole_number
from headway.core.config.launch import DEFAULT_GRACE, SETTINGS
from headway.core.config.load import ResolvedSettings, encode_payload
from headway.core.config.mesh import Layout
from headway.errors import ConfigError
from headway.launch import layouts, stand_in
from headway.launch.clusters import Cluster, ClusterTask, check_agreement
from headway.launch.machine import Machine
from headway.launch.visible_devices import VISIBLE_DEVICES_VARIABLES

# Launchers set these for the processes that they start. Otherwise they should not be set.
_WORKER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

MAX_PRINTED_COMMANDS = 64
"""Largest number of machines whose commands are printed. Further commands differ only in `--machine_rank`."""


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
        how = {"script": (python,), "module": (python, "-m"), "program": ()}[self.kind]
        return (*how, self.target, *self.args)


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


@dataclass(frozen=True)
class LaunchPlan:
    """A launch that is ready to be executed.

    Attributes:
        argv: Command that replaces the launcher's process.
        additions: Environment variables to set in addition to the launcher's.
        removals: Names of environment variables that the command must not inherit.
        world_size: Number of processes on all machines.
        num_local: Number of processes on this machine.
        banner: Line that describes the launch. Empty on a cluster's tasks other than task 0. No notes are printed then.
        notes: Messages for the user that are printed after the banner.
        layout: Layout of the model. None if the script chooses it, or if another package defines the strategy.
    """

    argv: tuple[str, ...]
    additions: Mapping[str, str]
    removals: tuple[str, ...]
    world_size: int
    num_local: int
    banner: str
    notes: tuple[str, ...] = ()
    layout: Layout | None = None

    def format_shell(self) -> str:
        """Return the plan as a command line for a POSIX shell."""
        parts = ["env"]
        parts += [f"-u {name}" for name in self.removals]
        parts += [f"{name}={shlex.quote(value)}" for name, value in self.additions.items()]
        return " \\\n  ".join([*parts, shlex.join(self.argv)])

    def make_environment(self, current: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the command.

        Args:
            current: Environment of the launcher.
        """
        kept = {name: value for name, value in current.items() if name not in self.removals}
        return {**kept, **self.additions}


def make_plan(
    resolved: ResolvedSettings,
    program: Program,
    machine: Machine,
    environment: Mapping[str, str],
    cluster: Cluster | None = None,
    notes: tuple[str, ...] = (),
) -> LaunchPlan:
    """Plan the launch of `program`.

    Args:
        resolved: Resolved settings.
        program: Program to start.
        machine: Hardware of this machine.
        environment: Environment variables of the launcher.
        cluster: Cluster that started the launcher. Its settings are already contained in `resolved`. Default: None, no
            cluster started it.
        notes: Messages about the settings to show to the user. The plan's `notes` begin with them.

    Raises:
        ConfigError: If the settings contradict each other, or request something that the machine cannot do. Also if the
            environment shows that another launcher has started this process as one of several.
    """
    if cluster is None:
        _refuse_nesting(resolved, program, environment)
    else:
        check_agreement(resolved, cluster)
    present, machine = machine, _select_devices(resolved, machine)
    task = cluster.task if cluster is not None else None
    num_machines, num_local = _count_processes(resolved, machine, task)
    world_size = num_machines * num_local
    layout = layouts.resolve_layout(resolved, num_machines, num_local)
    num_threads, sets_omp_threads = _choose_threads(resolved, machine, num_local, environment)
    fewest = num_local * resolved.get("min_machines", num_machines)
    device = None if resolved.get("cpu", False) else machine.torch_device
    additions = {env.PAYLOAD: encode_payload(resolved, world_size, min(fewest, world_size), device, num_local)}
    if machine.accelerator and machine.device_ids != present.device_ids:
        additions[_choose_visible_variable(resolved, machine)] = ",".join(machine.device_ids)
    if sets_omp_threads:
        additions["OMP_NUM_THREADS"] = str(num_threads)
    if resolved.get("run_as", None) is not None:
        additions.update(stand_in.make_variables(environment))
    if resolved.get("debug", False):
        additions.setdefault("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    if world_size == 1 and not resolved.config.is_set("metrics_port"):
        argv = program.make_command(machine.python)
    else:
        order = _build_order(resolved, program, num_machines, num_local)
        if task is not None:
            order = _build_task_order(resolved, order, task, machine)
        argv = (machine.python, "-m", "headway.launch", "agent", order.encode())
        additions.update(_set_network(order, machine, environment, num_machines))
        additions.update(_hide_warnings(resolved, environment))
    inherited = (*_WORKER_VARIABLES, env.CONTROL)
    removals = tuple(name for name in inherited if name in environment and name not in additions)
    is_silent = task is not None and task.rank > 0
    banner = "" if is_silent else _format_banner(resolved, machine, num_machines, num_local, num_threads, layout)
    notes = (*notes, *_list_ignored(resolved, argv), *layouts.check_options(resolved, layout))
    notes += layouts.list_layouts_after_losses(resolved, layout, num_machines, num_local)
    return LaunchPlan(argv, additions, removals, world_size, num_local, banner, notes, layout)


def _refuse_nesting(resolved: ResolvedSettings, program: Program, environment: Mapping[str, str]) -> None:
    if environment.get("WORLD_SIZE", "1") in ("", "1") or resolved.force:
        return
    found = ", ".join(f"{name}={environment[name]}" for name in _WORKER_VARIABLES if name in environment)
    raise ConfigError(
        f"{found} are in the environment, so a launcher has already started this process. Start the program itself in this process "
        f"({shlex.join(program.make_command('python'))}), or unset these variables, or add --force to ignore them"
    )


_NO_ACCELERATOR = "{} has no accelerator that torch can use; check the driver and CUDA_VISIBLE_DEVICES"


def _select_devices(resolved: ResolvedSettings, machine: Machine) -> Machine:
    """Return the description of the machine with only those accelerators that the settings allow.

    Raises:
        ConfigError: If the settings request accelerators that the machine does not have or that are hidden, or if they
            contradict each other.
    """
    on_cpu = bool(resolved.get("cpu", False))
    if machine.hidden_by and not on_cpu:
        raise ConfigError(
            f"{machine.hostname} has accelerators, but all are hidden by {machine.hidden_by}: name devices that exist (on ROCm, "
            "HIP_VISIBLE_DEVICES numbers those that ROCR_VISIBLE_DEVICES leaves, from 0), unset it, or add --cpu"
        )
    if resolved.get("multi_gpu", False):
        if on_cpu:
            raise ConfigError(
                f"multi_gpu ({resolved.get_origin('multi_gpu')}) contradicts cpu ({resolved.get_origin('cpu')}); remove one of them"
            )
        if machine.accelerator is None:
            raise ConfigError(
                f"multi_gpu ({resolved.get_origin('multi_gpu')}), but {_NO_ACCELERATOR.format(machine.hostname)}, or take "
                "--multi_gpu out to run on the CPU"
            )
    if resolved.get("enable_cpu_affinity", False) and (on_cpu or machine.torch_device != "cuda"):
        raise ConfigError(
            f"enable_cpu_affinity ({resolved.get_origin('enable_cpu_affinity')}) binds processes to the cores near their "
            "NVIDIA GPUs, but this run uses none; remove it"
        )
    ids = machine.device_ids
    text = resolved.get("gpu_ids", "all")
    if text != "all" and not on_cpu:
        origin = resolved.get_origin("gpu_ids")
        if not ids:
            raise ConfigError(
                f"gpu_ids={text!r} ({origin}), but {_NO_ACCELERATOR.format(machine.hostname)}, or remove gpu_ids to run on the CPU"
            )
        asked = tuple(part.strip() for part in text.split(","))
        unknown = [part for part in asked if part not in ids]
        if unknown or len(set(asked)) != len(asked):
            raise ConfigError(
                f"gpu_ids={text!r} ({origin}) must list different accelerators of this machine: {', '.join(ids)}"
            )
        ids = asked
    return replace(
        machine, accelerator=None if on_cpu else machine.accelerator, device_ids=() if on_cpu else ids, hidden_by=""
    )


def _choose_visible_variable(resolved: ResolvedSettings, machine: Machine) -> str:
    variables = VISIBLE_DEVICES_VARIABLES.get(machine.accelerator or "")
    if not variables:
        raise ConfigError(
            f"gpu_ids ({resolved.get_origin('gpu_ids')}): Headway does not know which variable hides {machine.accelerator} devices "
            "from a process; remove it and set the vendor's own variable, or start fewer processes with -n"
        )
    return variables[0]


def _count_processes(resolved: ResolvedSettings, machine: Machine, task: ClusterTask | None) -> tuple[int, int]:
    """Return the number of machines and the number of processes on each machine.

    Raises:
        ConfigError: If the processes cannot be spread evenly over the machines, if there are more processes than
            accelerators, or if the machine's rank is too large.
    """
    num_machines = resolved.get("num_machines", 1)
    per_machine = len(machine.device_ids) or 1
    total = resolved.get("num_processes", num_machines * per_machine)
    origin = resolved.get_origin("num_processes")
    if total % num_machines:
        raise ConfigError(
            f"{total} processes ({origin}) cannot be spread evenly over {num_machines} machines "
            f"({resolved.get_origin('num_machines')}); --num_processes counts the processes of all machines together"
        )
    num_local = total // num_machines
    has_own = task is not None and task.has_own_devices(len(machine.device_ids))
    if machine.accelerator and num_local > per_machine and not has_own:
        raise ConfigError(
            f"{num_local} processes per machine ({origin}) need one accelerator each, but {machine.hostname} has "
            f"{per_machine} ({machine.torch_device}); ask for {per_machine * num_machines} or fewer, or add --cpu"
        )
    if resolved.get("machine_rank", 0) >= num_machines:
        raise ConfigError(
            f"machine_rank={resolved.get('machine_rank')} ({resolved.get_origin('machine_rank')}) must be below "
            f"num_machines={num_machines} ({resolved.get_origin('num_machines')})"
        )
    return num_machines, num_local


def _choose_threads(
    resolved: ResolvedSettings, machine: Machine, num_local: int, environment: Mapping[str, str]
) -> tuple[int | None, bool]:
    """Return the number of CPU threads per process, and whether the plan must set OMP_NUM_THREADS to it.

    The setting `num_cpu_threads_per_process` has priority over OMP_NUM_THREADS. If both are missing, the cores are
    divided equally among several processes. For a single process, the number is then None.
    """
    chosen: int | None = resolved.get("num_cpu_threads_per_process")
    # OpenMP reads a list as one number per level of nested parallelism. PyTorch uses the first level.
    from_environment = parse_whole_number(environment.get("OMP_NUM_THREADS", "").partition(",")[0])
    if chosen is None and from_environment is None and num_local > 1:
        chosen = max(1, machine.num_cores // num_local)
    return (from_environment, False) if chosen is None else (chosen, True)


def _build_order(resolved: ResolvedSettings, program: Program, num_machines: int, num_local: int) -> AgentOrder:
    max_restarts = resolved.get("max_restarts", 0)
    backend, endpoint = "local", ""
    if num_machines > 1:
        backend = resolved.get("rdzv_backend", "c10d" if max_restarts else "static")
        if backend == "static" and max_restarts:
            raise ConfigError(
                f"rdzv_backend=static ({resolved.get_origin('rdzv_backend')}) cannot start several machines again "
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


def _choose_min_machines(resolved: ResolvedSettings, num_machines: int, backend: str) -> int:
    """Return the smallest number of machines with which the run continues after it has lost one.

    Raises:
        ConfigError: If the number exceeds `num_machines`, or if the run cannot be restarted with fewer machines.
    """
    fewest: int = resolved.get("min_machines", num_machines)
    origin = resolved.get_origin("min_machines")
    if fewest > num_machines:
        raise ConfigError(f"min_machines={fewest} ({origin}) must be at most num_machines={num_machines}")
    if fewest < num_machines and (backend != "c10d" or not resolved.get("max_restarts", 0)):
        raise ConfigError(
            f"min_machines={fewest} ({origin}) starts the processes again with fewer machines: add --max_restarts N, and leave "
            "--rdzv_backend static out"
        )
    return fewest


def _build_task_order(resolved: ResolvedSettings, order: AgentOrder, task: ClusterTask, machine: Machine) -> AgentOrder:
    """Return the instructions for an agent that manages the single process of a task started by the cluster.

    Raises:
        ConfigError: If the requested processes are not the cluster's tasks, if no port was given for a run on one
            machine, or if `min_machines` is set.
    """
    num_asked = order.num_machines * order.num_local
    if (num_asked, order.num_local) != (task.world_size, task.local_world_size):
        raise ConfigError(
            f"{num_asked} processes ({resolved.get_origin('num_processes')}), but the cluster has started "
            f"{task.world_size} tasks, {task.local_world_size} on each machine; start one task per machine to choose here"
        )
    endpoint = order.endpoint
    if order.num_machines == 1:
        port = resolved.get("main_process_port")
        if not port:
            raise ConfigError(
                _NO_ENDPOINT.format(num_machines="the tasks of 1", origin=resolved.get_origin("num_processes"))
            )
        endpoint = f"127.0.0.1:{port}"
    if resolved.config.is_set("min_machines"):
        raise ConfigError(
            f"min_machines ({resolved.get_origin('min_machines')}) needs one launcher per machine, but the cluster has started "
            f"{task.local_world_size} tasks on each; start one task per machine"
        )
    # If a task sees only its own accelerators, their indices start at 0, and so must the local rank that selects one.
    local = (0, 1) if task.has_own_devices(len(machine.device_ids)) else (task.local_rank, task.local_world_size)
    return replace(
        order,
        num_local=1,
        num_machines=task.world_size,
        machine_rank=task.rank,
        endpoint=endpoint,
        unit="task",
        min_machines=task.world_size,
        backend=resolved.get("rdzv_backend", "c10d" if order.max_restarts else "static"),
        variables={"LOCAL_RANK": str(local[0]), "LOCAL_WORLD_SIZE": str(local[1])},
    )


_NO_ENDPOINT = (
    "{num_machines} machines ({origin}) meet on machine 0, whose address is not known: add "
    "--main_process_ip ADDRESS --main_process_port PORT (a free port there, 1 to 65535) on all machines"
)


def _list_ignored(resolved: ResolvedSettings, argv: tuple[str, ...]) -> tuple[str, ...]:
    is_kept_by_agent = "headway.launch" in argv
    ignored = ["enable_cpu_affinity", "max_restarts", "log_dir"] if not is_kept_by_agent else []
    named = [f"{name} ({resolved.get_origin(name)})" for name in ignored if resolved.get(name, False)]
    if not named:
        return ()
    return (f"no effect, because a single process runs without the launcher's agent: {', '.join(named)}",)


def _build_endpoint(resolved: ResolvedSettings, num_machines: int) -> str:
    address, port = resolved.get("main_process_ip"), resolved.get("main_process_port")
    if address is None or not port:
        raise ConfigError(_NO_ENDPOINT.format(num_machines=num_machines, origin=resolved.get_origin("num_machines")))
    if port > 65535:
        raise ConfigError(f"main_process_port={port} ({resolved.get_origin('main_process_port')}) must be 1 to 65535")
    return f"[{address}]:{port}" if ":" in address and not address.startswith("[") else f"{address}:{port}"


def _parse_conf(resolved: ResolvedSettings) -> dict[str, str]:
    text = resolved.get("rdzv_conf")
    if text is None:
        return {}
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if any(not name.strip() or not equals or not value.strip() for name, equals, value in pairs):
        raise ConfigError(
            f"rdzv_conf={text!r} ({resolved.get_origin('rdzv_conf')}) must be key=value,key=value, such as timeout=300"
        )
    found = {name.strip(): value.strip() for name, _, value in pairs}
    if not _is_time(found.get("timeout", "0")):
        raise ConfigError(
            f"rdzv_conf={text!r} ({resolved.get_origin('rdzv_conf')}): timeout must be a number of seconds, such as timeout=300"
        )
    return found


def _is_time(text: str) -> bool:
    try:
        return float(text) >= 0
    except ValueError:
        return False


def _set_network(
    order: AgentOrder, machine: Machine, environment: Mapping[str, str], num_machines: int
) -> dict[str, str]:
    additions = {}
    if num_machines == 1 and machine.loopback and "GLOO_SOCKET_IFNAME" not in environment:
        # gloo would resolve the host's own name, which on many machines fails or leads to an isolated interface.
        additions["GLOO_SOCKET_IFNAME"] = machine.loopback
    if order.backend == "c10d":
        # Otherwise a restarted attempt would read the keys of the previous one.
        additions["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return additions


def _hide_warnings(resolved: ResolvedSettings, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that hides C++ warnings about retries and lost sockets, as a dict.

    The launcher itself reports retries and lost sockets. Return {} if the user requests the warnings with torch's own
    variables, `--debug` or `HEADWAY_LOG_LEVEL=debug`.
    """
    is_asked_for = any(name in environment for name in ("TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG"))
    is_debugging = environment.get("HEADWAY_LOG_LEVEL", "").strip().lower() in ("debug", "10")
    return {} if is_asked_for or is_debugging or resolved.get("debug", False) else {"TORCH_CPP_LOG_LEVEL": "ERROR"}


def _format_banner(
    resolved: ResolvedSettings,
    machine: Machine,
    num_machines: int,
    num_local: int,
    threads: int | None,
    layout: Layout | None,
) -> str:
    world_size = num_machines * num_local
    device = machine.torch_device
    processes = f"{world_size} process{'es' if world_size > 1 else ''} on {device}"
    if num_machines > 1:
        processes += (
            f", {num_local} on each of {num_machines} machines (this is machine {resolved.get('machine_rank', 0)})"
        )
    parts = [processes, *layouts.describe_layout(resolved, layout)]
    precision, steps = resolved.get("mixed_precision"), resolved.get("gradient_accumulation_steps")
    if precision is not None:
        parts.append(f"precision {precision} ({resolved.get_origin('mixed_precision')})")
    if world_size > 1 or steps is not None:
        factors = ["micro-batch", layouts.count_data_shards(world_size, layout)]
        factors.append(f"{steps} accumulated" if steps is not None else "the script's accumulation")
        parts.append("global batch = " + " x ".join(factors))
    if threads is not None:
        parts.append(f"{threads} CPU thread{'s' if threads > 1 else ''} each of {machine.num_cores} cores")
    return "headway: " + "; ".join(parts)


def format_commands(resolved: ResolvedSettings, program: Program, own_address: str, free_port: int) -> list[str]:
    """Return the commands to type on the machines of a run without a cluster, for at most `MAX_PRINTED_COMMANDS` machines.

    Args:
        resolved: Resolved settings. All are repeated, because the other machines have neither this environment nor this
            config file.
        program: Program to start.
        own_address: Address of this machine. It becomes machine 0 unless the settings contain another address.
        free_port: Port for the rendezvous, unless the settings contain a port.
    """
    address = resolved.get("main_process_ip", own_address)
    port = resolved.get("main_process_port") or free_port
    words = ["headway", "launch"]
    for name, setting in SETTINGS.items():
        if resolved.config.is_set(name) and name not in ("machine_rank", "main_process_ip", "main_process_port"):
            value = resolved.get(name)
            words += (
                ([setting.flag] if value else [])
                if setting.kind == "switch"
                else [setting.flag, str(value).lower() if setting.kind == "truth" else str(value)]
            )
    words += ["--main_process_ip", address, "--main_process_port", str(port)]
    tail = [program.target, *program.args]
    num_shown = min(resolved.get("num_machines", 1), MAX_PRINTED_COMMANDS)
    return [shlex.join([*words, "--machine_rank", str(rank), *tail]) for rank in range(num_shown)]
