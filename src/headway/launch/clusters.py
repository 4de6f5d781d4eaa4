"""Detection of clusters (SLURM, Open MPI, Kubernetes): the number of machines and this machine's rank.

Everything is read from the environment variables that the cluster sets.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from headway.common.untrusted import parse_whole_number, shorten_repr
from headway.core.config.load import ResolvedSettings, SettingValue
from headway.errors import ConfigError


@dataclass(frozen=True)
class ClusterTask:
    """Position of this launcher in a cluster that has started more than one launcher (task) on each machine.

    Each of these launchers manages one process.

    Attributes:
        rank: Global rank of this task.
        world_size: Number of tasks on all machines.
        local_rank: Rank of this task on its machine.
        local_world_size: Number of tasks on this machine.
        num_devices: Number of accelerators that the cluster has assigned to each task exclusively; 0 if unknown.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    num_devices: int = 0

    def has_own_devices(self, num_visible: int) -> bool:
        """Whether each task sees only its own accelerators, not all accelerators of the machine.

        This is inferred from the number of accelerators. False if the task sees none.

        Args:
            num_visible: Number of accelerators that this task sees.
        """
        return num_visible > 0 and (num_visible < self.local_world_size or num_visible == self.num_devices)


@dataclass(frozen=True)
class Cluster:
    """Cluster that started this process, as described by its environment variables.

    Attributes:
        name: "SLURM", "Open MPI" or "Kubernetes".
        layer: Settings that the cluster determines.
        task: Position of this launcher, if the cluster has started more than one launcher on each machine. Otherwise
            None.
    """

    name: str
    layer: Mapping[str, SettingValue]
    task: ClusterTask | None = None


def detect_cluster(environment: Mapping[str, str]) -> Cluster | None:
    """Return the cluster that started this process, or None if no cluster did.

    Args:
        environment: Environment variables of this process.

    Raises:
        ConfigError: If a variable that must be a whole number is not one, or if the tasks are not spread evenly over
            the machines.
    """
    return _detect_slurm(environment) or _detect_open_mpi(environment) or _detect_kubernetes(environment)


def check_agreement(resolved: ResolvedSettings, cluster: Cluster) -> None:
    """Raise an error if a config file contradicts the cluster.

    Machines often share a config file, so a value in it might be meant for another machine. `force` in the settings
    skips the check.

    Args:
        resolved: Resolved settings.
        cluster: Detected cluster.

    Raises:
        ConfigError: If a config file contradicts the cluster; the message names both sources.
    """
    for name, value in cluster.layer.items():
        origin = resolved.get_origin(name)
        if origin.startswith("file") and resolved.get(name) != value.value and not resolved.force:
            raise ConfigError(
                f"{name}={resolved.get(name)!r} ({origin}) contradicts {value.value!r} ({value.origin}): remove it from the "
                "file, choose another file with --config_file, or add --force to use the file's value"
            )


class _ClusterVariables:
    """Reader of a cluster's environment variables. Error messages and the origins of settings name the cluster.

    Attributes:
        layer: Settings that have been read, each with its origin.
    """

    def __init__(self, cluster: str, environment: Mapping[str, str]) -> None:
        self._cluster = cluster
        self._environment = environment
        self.layer: dict[str, SettingValue] = {}

    def text(self, name: str) -> str:
        return self._environment.get(name, "").strip()

    def number(self, name: str) -> int | None:
        text = self.text(name)
        if not text:
            return None
        number = parse_whole_number(text)
        if number is None:
            raise ConfigError(
                f"{self._cluster} says {name}={shorten_repr(text)}, which should be a whole number; correct or unset it"
            )
        return number

    def decide(self, setting: str, value: object, *variables: str) -> None:
        if value is not None:
            self.layer[setting] = SettingValue(value, f"{self._cluster}: {', '.join(variables)}")

    def decide_machines(self, num_machines: int, machine_rank: int, *variables: str) -> None:
        if num_machines > 1:
            self.decide("num_machines", num_machines, variables[0])
            self.decide("machine_rank", machine_rank, variables[1])

    def decide_port(self, job: int | None, variable: str) -> None:
        """Derive the rendezvous port (20000 to 31999) from the job's number. Do nothing if the number is None.

        The number is equal on all machines of a job and differs between jobs.

        Args:
            job: Number of the job, or None if the cluster does not set it.
            variable: Environment variable that contains the job's number. It is recorded as the origin of the setting.
        """
        if job is not None:
            self.decide("main_process_port", 20000 + job % 12000, variable)


def _detect_slurm(environment: Mapping[str, str]) -> Cluster | None:
    """Return the SLURM cluster if srun started this process, or None if it did not.

    A shell in an allocation (from salloc, or an sbatch script) was not started by srun and does not count.

    Raises:
        ConfigError: If a variable is not a whole number, or if the tasks are not spread evenly over the machines.
    """
    if "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return None
    read = _ClusterVariables("SLURM", environment)
    num_machines = read.number("SLURM_STEP_NUM_NODES") or read.number("SLURM_NNODES") or 1
    num_tasks = read.number("SLURM_STEP_NUM_TASKS") or read.number("SLURM_NTASKS") or num_machines
    if num_tasks % num_machines:
        raise ConfigError(
            f"SLURM started {num_tasks} tasks on {num_machines} machines, which is not the same number on each; "
            "start one launcher per machine (srun --ntasks-per-node=1), or as many tasks on each as it has processes"
        )
    here = num_tasks // num_machines
    read.decide_machines(num_machines, read.number("SLURM_NODEID") or 0, "SLURM_STEP_NUM_NODES", "SLURM_NODEID")
    task = None
    if here > 1:
        read.decide("num_processes", num_tasks, "SLURM_STEP_NUM_TASKS")
        if "OMP_NUM_THREADS" not in environment:
            read.decide("num_cpu_threads_per_process", read.number("SLURM_CPUS_PER_TASK"), "SLURM_CPUS_PER_TASK")
        task = ClusterTask(
            read.number("SLURM_PROCID") or 0,
            num_tasks,
            read.number("SLURM_LOCALID") or 0,
            here,
            parse_whole_number(read.text("SLURM_GPUS_PER_TASK").rpartition(":")[2]) or 0,  # "2" and "h100:2" mean two
        )
    if num_machines > 1:
        nodes = read.text("SLURM_STEP_NODELIST") or read.text("SLURM_JOB_NODELIST")
        read.decide("main_process_ip", parse_first_host(nodes), "SLURM_STEP_NODELIST")
    if num_tasks > 1:
        read.decide_port(read.number("SLURM_JOB_ID"), "SLURM_JOB_ID")
    return Cluster("SLURM", read.layer, task)


def _detect_open_mpi(environment: Mapping[str, str]) -> Cluster | None:
    if "OMPI_COMM_WORLD_SIZE" not in environment:
        return None
    read = _ClusterVariables("Open MPI", environment)
    num_tasks = read.number("OMPI_COMM_WORLD_SIZE") or 1
    here = read.number("OMPI_COMM_WORLD_LOCAL_SIZE") or 1
    rank = read.number("OMPI_COMM_WORLD_RANK") or 0
    if num_tasks % here:
        raise ConfigError(
            f"mpirun started {num_tasks} processes, {here} of them on this machine, so not the same number on each; "
            "start one launcher per machine: mpirun --map-by ppr:1:node headway launch SCRIPT"
        )
    # mpirun fills one machine after the other by default.
    read.decide_machines(num_tasks // here, rank // here, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    task = None
    if here > 1:
        read.decide("num_processes", num_tasks, "OMPI_COMM_WORLD_SIZE")
        task = ClusterTask(rank, num_tasks, read.number("OMPI_COMM_WORLD_LOCAL_RANK") or 0, here)
    uri = read.text("OMPI_MCA_orte_hnp_uri")  # "JOB.0;tcp://ADDRESS,...:PORT": the address of mpirun itself
    address = re.search(r"tcp://([0-9.]+)", uri)
    if num_tasks > here and address is not None:
        read.decide("main_process_ip", address[1], "OMPI_MCA_orte_hnp_uri")
    if num_tasks > 1:
        job = re.match(r"\d{1,18}", uri)
        read.decide_port(int(job[0]) if job else None, "OMPI_MCA_orte_hnp_uri")
    return Cluster("Open MPI", read.layer, task)


def _detect_kubernetes(environment: Mapping[str, str]) -> Cluster | None:
    """Return the Kubernetes cluster if this process runs in a pod of a PyTorchJob or an Indexed Job, or None.

    The PyTorchJob operator sets PET_* variables, or torch's own variables such as WORLD_SIZE.
    """
    if "KUBERNETES_SERVICE_HOST" not in environment:
        return None
    read = _ClusterVariables("Kubernetes", environment)
    for size, rank, address, port in (
        ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
        ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"),
    ):
        num_machines = read.number(size) if read.text(address) else None
        if num_machines is None:
            continue
        read.decide_machines(num_machines, read.number(rank) or 0, size, rank)
        if num_machines > 1:
            read.decide("main_process_ip", read.text(address), address)
            read.decide("main_process_port", read.number(port), port)
        per_machine = parse_whole_number(read.text("PET_NPROC_PER_NODE"))
        if size == "PET_NNODES" and per_machine is not None:
            read.decide("num_processes", num_machines * per_machine, "PET_NNODES", "PET_NPROC_PER_NODE")
        return Cluster("Kubernetes", read.layer)
    index = read.number("JOB_COMPLETION_INDEX")
    if index is None:
        return None
    read.decide("machine_rank", index, "JOB_COMPLETION_INDEX")
    return Cluster("Kubernetes", read.layer)


def parse_first_host(nodes: str) -> str | None:
    """Return the first host of a SLURM node list, or None for an empty list: 'gpu[07-09,12],cpu1' -> 'gpu07'."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]+)\])?([^,\[]*)", nodes)
    if match is None:
        return None
    return match[1] + (re.split(r"[-,]", match[2])[0] if match[2] else "") + match[3]
