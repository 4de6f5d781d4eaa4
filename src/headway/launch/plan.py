"""Compute the plan of a launch (commands, environment, machines) from settings, without side effects.

`run.py` executes the plan. `headway launch --dry-run` prints its command.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from headway.common import env
from headway.common.untrusted import parse_whole_number
from headway.core.config.launch import SETTINGS
from headway.core.config.load import ResolvedSettings, encode_payload
from headway.core.config.mesh import Layout
from headway.core.runtime import peer_access
from headway.errors import ConfigError
from headway.launch import layouts, stand_in
from headway.launch.clusters import Cluster, ClusterTask, check_agreement
from headway.launch.machine import Machine
from headway.launch.order import AgentOrder, Program, build_order, build_task_order
from headway.launch.selected_devices import choose_visible_variable, select_devices

# Launchers set these for the processes that they start. Otherwise they should not be set.
_WORKER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MAX_PRINTED_COMMANDS = 64
"""Largest number of machines whose commands are printed. Further commands differ only in `--machine_rank`."""


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
        notes: Messages about the settings to show to the user. The plan's `notes` begin with them. Default: none.

    Raises:
        ConfigError: If the settings contradict each other, or request something that the machine cannot do. Also if the
            environment shows that another launcher has started this process as one of several.
    """
    if cluster is None:
        _refuse_nesting(resolved, program, environment)
    else:
        check_agreement(resolved, cluster)
    # What runs where.
    all_device_ids = machine.device_ids
    machine = select_devices(resolved, machine)
    task = cluster.task if cluster is not None else None
    num_machines, num_local = _count_processes(resolved, machine, task)
    world_size = num_machines * num_local
    layout = layouts.resolve_layout(resolved, num_machines, num_local)
    num_threads, sets_omp_threads = _choose_threads(resolved, machine, num_local, environment)

    # The command. A single process needs no agent, unless the agent serves its metrics.
    order: AgentOrder | None = None
    if world_size > 1 or resolved.config.is_set("metrics_port"):
        order = build_order(resolved, program, num_machines, num_local)
        if task is not None:
            order = build_task_order(resolved, order, task, machine)
    if order is not None:
        argv: tuple[str, ...] = (machine.python, "-m", "headway.launch", "agent", order.encode())
    else:
        argv = program.make_command(machine.python)

    # The environment variables of the command.
    additions = {env.PAYLOAD: _encode_settings(resolved, machine, num_machines, num_local)}
    if machine.accelerator and machine.device_ids != all_device_ids:
        additions[choose_visible_variable(resolved, machine)] = ",".join(machine.device_ids)
    if sets_omp_threads:
        additions["OMP_NUM_THREADS"] = str(num_threads)
    if resolved.get("run_as", None) is not None:
        additions.update(stand_in.make_variables(environment))
    if resolved.get("debug", False):
        additions.setdefault("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    if order is not None:
        additions.update(_choose_network_variables(order, machine, environment, num_machines))
        additions.update(_hide_warnings(resolved, environment))
    num_peers = task.local_world_size if task is not None else num_local
    peer_variables = _choose_peer_variables(machine, num_peers, environment)
    additions.update(peer_variables)
    # Set by a launcher that has started this process.
    outer_variables = (*_WORKER_VARIABLES, env.CONTROL)
    removals = tuple(name for name in outer_variables if name in environment and name not in additions)

    # What the user reads.
    is_silent = task is not None and task.rank > 0
    banner = "" if is_silent else _format_banner(resolved, machine, num_machines, num_local, num_threads, layout)
    if peer_variables:
        notes += (peer_access.format_note(machine.broken_transfers, peer_variables),)
    if order is None:
        notes += _list_ignored(resolved)
    notes += layouts.check_options(resolved, layout)
    notes += layouts.list_layouts_after_losses(resolved, layout, num_machines, num_local)
    return LaunchPlan(argv, additions, removals, world_size, num_local, banner, notes, layout)


def _refuse_nesting(resolved: ResolvedSettings, program: Program, environment: Mapping[str, str]) -> None:
    """Check that no other launcher has started this process as one of several. `--force` skips the check.

    Raises:
        ConfigError: If another launcher has started this process.
    """
    if environment.get("WORLD_SIZE", "1") in ("", "1") or resolved.force:
        return
    worker_variables = ", ".join(f"{name}={environment[name]}" for name in _WORKER_VARIABLES if name in environment)
    raise ConfigError(
        f"the environment contains {worker_variables}, so a launcher has already started this process. Start the program itself "
        f"in this process ({shlex.join(program.make_command('python'))}), or unset these variables, or add --force to ignore them"
    )


def _count_processes(resolved: ResolvedSettings, machine: Machine, task: ClusterTask | None) -> tuple[int, int]:
    """Return the number of machines and the number of processes on each machine.

    Args:
        resolved: Resolved settings.
        machine: Hardware of this machine, restricted to the accelerators that the settings allow.
        task: Position of this launcher in a cluster that has started several per machine. None otherwise.

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
    # A cluster's task may see only its own accelerators, which are fewer than the machine has.
    sees_only_own_devices = task is not None and task.has_own_devices(len(machine.device_ids))
    if machine.accelerator and num_local > per_machine and not sees_only_own_devices:
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

    Args:
        resolved: Resolved settings.
        machine: Hardware of this machine.
        num_local: Number of processes on this machine.
        environment: Environment variables of the launcher.
    """
    setting: int | None = resolved.get("num_cpu_threads_per_process")
    if setting is not None:
        return setting, True
    # OpenMP reads a list as one number per level of nested parallelism. PyTorch uses the first level.
    from_environment = parse_whole_number(environment.get("OMP_NUM_THREADS", "").partition(",")[0])
    if from_environment is None and num_local > 1:
        return max(1, machine.num_cores // num_local), True
    return from_environment, False


def _encode_settings(resolved: ResolvedSettings, machine: Machine, num_machines: int, num_local: int) -> str:
    """Return the settings for the worker processes, as the text of the environment variable that contains them.

    Args:
        resolved: Resolved settings.
        machine: Hardware of this machine.
        num_machines: Number of machines.
        num_local: Number of processes on this machine.
    """
    world_size = num_machines * num_local
    min_world_size = min(num_local * resolved.get("min_machines", num_machines), world_size)
    device = None if resolved.get("cpu", False) else machine.torch_device
    return encode_payload(resolved, world_size, min_world_size, device, num_local)


def _choose_network_variables(
    order: AgentOrder, machine: Machine, environment: Mapping[str, str], num_machines: int
) -> dict[str, str]:
    """Return the environment variables by which gloo finds its network interface, and torch its store.

    Args:
        order: Instructions for the agent.
        machine: Hardware of this machine.
        environment: Environment variables of the launcher, which have priority.
        num_machines: Number of machines. In `order`, each of a cluster's tasks counts as a machine.
    """
    variables = {}
    if num_machines == 1 and machine.loopback and "GLOO_SOCKET_IFNAME" not in environment:
        # gloo would resolve the host's own name, which on many machines fails or leads to an isolated interface.
        variables["GLOO_SOCKET_IFNAME"] = machine.loopback
    if order.backend == "c10d":
        # Otherwise the ranks, once restarted, would read the keys that they wrote before.
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return variables


def _hide_warnings(resolved: ResolvedSettings, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that hides C++ warnings about retries and lost sockets, as a dict.

    The launcher itself reports retries and lost sockets. Return {} if the user requests the warnings with torch's own
    variables, `--debug` or `HEADWAY_LOG_LEVEL=debug`.
    """
    has_torch_variable = any(name in environment for name in ("TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG"))
    has_debug_level = environment.get("HEADWAY_LOG_LEVEL", "").strip().lower() in ("debug", "10")
    if has_torch_variable or has_debug_level or resolved.get("debug", False):
        return {}
    return {"TORCH_CPP_LOG_LEVEL": "ERROR"}


def _choose_peer_variables(machine: Machine, num_local: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which NCCL avoids direct transfers between GPUs, if these transfers fail.

    Args:
        machine: Hardware that the run uses.
        num_local: Number of processes on this machine.
        environment: Environment variables of the launcher. Those that are set are left out of the result.
    """
    is_affected = bool(machine.broken_transfers) and machine.accelerator == "cuda" and num_local > 1
    return peer_access.choose_variables(environment) if is_affected else {}


def _list_ignored(resolved: ResolvedSettings) -> tuple[str, ...]:
    """Return a message about settings that have no effect without the launcher's agent; () if there are none."""
    agent_settings = ("enable_cpu_affinity", "max_restarts", "log_dir")
    ignored = [f"{name} ({resolved.get_origin(name)})" for name in agent_settings if resolved.get(name, False)]
    if not ignored:
        return ()
    return (f"no effect, because a single process runs without the launcher's agent: {', '.join(ignored)}",)


def _format_banner(
    resolved: ResolvedSettings,
    machine: Machine,
    num_machines: int,
    num_local: int,
    num_threads: int | None,
    layout: Layout | None,
) -> str:
    """Return the line that the launcher prints: processes, device, layout, precision, global batch size, CPU threads.

    Args:
        resolved: Resolved settings.
        machine: Hardware of this machine.
        num_machines: Number of machines.
        num_local: Number of processes on each machine.
        num_threads: Number of CPU threads of each process. None: not limited.
        layout: Layout of the model. None if the script chooses it.
    """
    world_size = num_machines * num_local
    processes = f"{world_size} process{'es' if world_size > 1 else ''} on {machine.torch_device}"
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
    if num_threads is not None:
        parts.append(f"{num_threads} CPU thread{'s' if num_threads > 1 else ''} each of {machine.num_cores} cores")
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
        if not resolved.config.is_set(name) or name in ("machine_rank", "main_process_ip", "main_process_port"):
            continue
        value = resolved.get(name)
        if setting.kind == "switch":
            words += [setting.flag] if value else []
        elif setting.kind == "truth":
            words += [setting.flag, str(value).lower()]
        else:
            words += [setting.flag, str(value)]
    words += ["--main_process_ip", address, "--main_process_port", str(port)]
    program_words = [program.target, *program.args]
    num_shown = min(resolved.get("num_machines", 1), MAX_PRINTED_COMMANDS)
    return [shlex.join([*words, "--machine_rank", str(rank), *program_words]) for rank in range(num_shown)]
