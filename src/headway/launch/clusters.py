"""Detection of clusters (SLURM, MPI, SkyPilot, Kubernetes): the number of machines and this machine's rank.

Everything is read from the environment variables that the cluster sets.
"""

import re
import zlib
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
        name: "SLURM", "Open MPI", "MPICH", "SkyPilot" or "Kubernetes".
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
    # SLURM comes first, because srun also sets MPICH's variables. SkyPilot comes before Kubernetes, on which it can run.
    return (
        _detect_slurm(environment)
        or _detect_open_mpi(environment)
        or _detect_mpich(environment)
        or _detect_skypilot(environment)
        or _detect_kubernetes(environment)
    )


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

    def read_text(self, name: str) -> str:
        """Return the value of a variable without surrounding spaces. Empty if it is not set."""
        return self._environment.get(name, "").strip()

    def read_number(self, name: str) -> int | None:
        """Return the value of a variable as an integer. None if it is not set or empty.

        Raises:
            ConfigError: If the value is not a whole number.
        """
        text = self.read_text(name)
        if not text:
            return None
        number = parse_whole_number(text)
        if number is None:
            raise ConfigError(
                f"{self._cluster} sets {name}={shorten_repr(text)}, which should be a whole number; correct or unset it"
            )
        return number

    def add_setting(self, setting: str, value: object, *variables: str) -> None:
        """Add a setting to the layer, with the names of the variables as its origin. Do nothing if the value is None."""
        if value is not None:
            self.layer[setting] = SettingValue(value, f"{self._cluster}: {', '.join(variables)}")

    def add_machines(self, num_machines: int, machine_rank: int, *variables: str) -> None:
        """Add the number of machines and this machine's rank to the layer. Do nothing in a run on one machine.

        Args:
            num_machines: Number of machines.
            machine_rank: Rank of this machine.
            *variables: Names of the two variables that contain these numbers.
        """
        if num_machines > 1:
            self.add_setting("num_machines", num_machines, variables[0])
            self.add_setting("machine_rank", machine_rank, variables[1])

    def add_port(self, job: int | None, variable: str) -> None:
        """Add the rendezvous port (20000 to 31999) to the layer, derived from the job's number.

        This number is equal on all machines of a job and differs between jobs.

        Args:
            job: Number of the job. None if the cluster does not set it; nothing is added then.
            variable: Environment variable that contains the job's number. It is recorded as the origin of the setting.
        """
        if job is not None:
            self.add_setting("main_process_port", 20000 + job % 12000, variable)


def _detect_slurm(environment: Mapping[str, str]) -> Cluster | None:
    """Return the SLURM cluster if srun started this process, or None if it did not.

    A shell in an allocation (from salloc, or an sbatch script) was not started by srun and does not count.

    Raises:
        ConfigError: If a variable is not a whole number, or if the tasks are not spread evenly over the machines.
    """
    if "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return None
    variables = _ClusterVariables("SLURM", environment)
    num_machines = variables.read_number("SLURM_STEP_NUM_NODES") or variables.read_number("SLURM_NNODES") or 1
    num_tasks = variables.read_number("SLURM_STEP_NUM_TASKS") or variables.read_number("SLURM_NTASKS") or num_machines
    if num_tasks % num_machines:
        raise ConfigError(
            f"SLURM started {num_tasks} tasks on {num_machines} machines, which is not the same number on each; "
            "start one launcher per machine (srun --ntasks-per-node=1), or as many tasks on each as it has processes"
        )
    local_world_size = num_tasks // num_machines
    variables.add_machines(
        num_machines, variables.read_number("SLURM_NODEID") or 0, "SLURM_STEP_NUM_NODES", "SLURM_NODEID"
    )
    task = None
    if local_world_size > 1:
        variables.add_setting("num_processes", num_tasks, "SLURM_STEP_NUM_TASKS")
        if "OMP_NUM_THREADS" not in environment:
            variables.add_setting(
                "num_cpu_threads_per_process", variables.read_number("SLURM_CPUS_PER_TASK"), "SLURM_CPUS_PER_TASK"
            )
        gpus_per_task = variables.read_text("SLURM_GPUS_PER_TASK")  # "2" and "h100:2" mean two
        task = ClusterTask(
            rank=variables.read_number("SLURM_PROCID") or 0,
            world_size=num_tasks,
            local_rank=variables.read_number("SLURM_LOCALID") or 0,
            local_world_size=local_world_size,
            num_devices=parse_whole_number(gpus_per_task.rpartition(":")[2]) or 0,
        )
    if num_machines > 1:
        nodes = variables.read_text("SLURM_STEP_NODELIST") or variables.read_text("SLURM_JOB_NODELIST")
        variables.add_setting("main_process_ip", parse_first_host(nodes), "SLURM_STEP_NODELIST")
    if num_tasks > 1:
        variables.add_port(variables.read_number("SLURM_JOB_ID"), "SLURM_JOB_ID")
    return Cluster("SLURM", variables.layer, task)


def _detect_open_mpi(environment: Mapping[str, str]) -> Cluster | None:
    """Return the Open MPI cluster if mpirun started this process, or None if it did not.

    Raises:
        ConfigError: If a variable is not a whole number, or if the tasks are not spread evenly over the machines.
    """
    if "OMPI_COMM_WORLD_SIZE" not in environment:
        return None
    variables = _ClusterVariables("Open MPI", environment)
    num_tasks, task = _read_mpi_tasks(
        variables,
        size="OMPI_COMM_WORLD_SIZE",
        rank="OMPI_COMM_WORLD_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        one_per_machine="mpirun --map-by ppr:1:node",
    )
    uri = variables.read_text("OMPI_MCA_orte_hnp_uri")  # "JOB.0;tcp://ADDRESS,...:PORT": the address of mpirun itself
    address = re.search(r"tcp://([0-9.]+)", uri)
    if "num_machines" in variables.layer and address is not None:
        variables.add_setting("main_process_ip", address[1], "OMPI_MCA_orte_hnp_uri")
    if num_tasks > 1:
        job = re.match(r"\d{1,18}", uri)
        variables.add_port(int(job[0]) if job else None, "OMPI_MCA_orte_hnp_uri")
    return Cluster("Open MPI", variables.layer, task)


def _read_mpi_tasks(
    variables: _ClusterVariables, *, size: str, rank: str, local_size: str, local_rank: str, one_per_machine: str
) -> tuple[int, ClusterTask | None]:
    """Add the machines and processes of an MPI job to the layer.

    Args:
        variables: Reader of the environment variables.
        size: Variable with the number of tasks on all machines.
        rank: Variable with this task's rank.
        local_size: Variable with the number of tasks on this machine.
        local_rank: Variable with this task's rank on its machine.
        one_per_machine: Command that starts one task on each machine, for the error message.

    Returns:
        Number of tasks, and the position of this launcher if there are several on each machine, otherwise None.

    Raises:
        ConfigError: If a variable is not a whole number, or if the tasks are not spread evenly over the machines.
    """
    num_tasks, num_local = variables.read_number(size) or 1, variables.read_number(local_size) or 1
    own_rank = variables.read_number(rank) or 0
    if num_tasks % num_local:
        raise ConfigError(
            f"mpirun started {num_tasks} processes, {num_local} of them on this machine, so not the same number on each; "
            f"start one launcher per machine: {one_per_machine} headway launch SCRIPT"
        )
    # mpirun fills one machine after the other by default.
    variables.add_machines(num_tasks // num_local, own_rank // num_local, size, rank)
    if num_local == 1:
        return num_tasks, None
    variables.add_setting("num_processes", num_tasks, size)
    return num_tasks, ClusterTask(own_rank, num_tasks, variables.read_number(local_rank) or 0, num_local)


def _detect_mpich(environment: Mapping[str, str]) -> Cluster | None:
    """Return the MPICH cluster if MPICH's or Intel MPI's mpirun (Hydra) started this process, or None if it did not.

    Hydra sets no variable with an address or a job number, so the user chooses the rendezvous address and port.

    Raises:
        ConfigError: If a variable is not a whole number, or if the tasks are not spread evenly over the machines.
    """
    if "PMI_SIZE" not in environment or "MPI_LOCALNRANKS" not in environment:
        return None
    variables = _ClusterVariables("MPICH", environment)
    _, task = _read_mpi_tasks(
        variables,
        size="PMI_SIZE",
        rank="PMI_RANK",
        local_size="MPI_LOCALNRANKS",
        local_rank="MPI_LOCALRANKID",
        one_per_machine="mpirun -ppn 1",
    )
    return Cluster("MPICH", variables.layer, task)


def _detect_skypilot(environment: Mapping[str, str]) -> Cluster | None:
    """Return the SkyPilot cluster if this process runs in a task with several nodes, or None if it does not.

    SkyPilot runs the task's `run` commands once on each node.

    Raises:
        ConfigError: If a variable is not a whole number.
    """
    variables = _ClusterVariables("SkyPilot", environment)
    addresses = variables.read_text("SKYPILOT_NODE_IPS").split()  # one line for each node
    num_machines = variables.read_number("SKYPILOT_NUM_NODES") or len(addresses)
    rank = variables.read_number("SKYPILOT_NODE_RANK")
    if num_machines < 2 or rank is None:
        return None
    variables.add_machines(num_machines, rank, "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK")
    if addresses:
        variables.add_setting("main_process_ip", addresses[0], "SKYPILOT_NODE_IPS")
    task_id = variables.read_text("SKYPILOT_TASK_ID")
    variables.add_port(zlib.crc32(task_id.encode()) if task_id else None, "SKYPILOT_TASK_ID")
    return Cluster("SkyPilot", variables.layer)


def _detect_kubernetes(environment: Mapping[str, str]) -> Cluster | None:
    """Return the Kubernetes cluster if this process runs in a pod of a PyTorchJob or an Indexed Job, or None.

    The PyTorchJob operator sets PET_* variables, or torch's own variables such as WORLD_SIZE.
    """
    if "KUBERNETES_SERVICE_HOST" not in environment:
        return None
    variables = _ClusterVariables("Kubernetes", environment)
    # Names of variables: first those of the operator, then torch's own.
    for size, rank, address, port in (
        ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
        ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"),
    ):
        if not variables.read_text(address):
            continue
        num_machines = variables.read_number(size)
        if num_machines is None:
            continue
        variables.add_machines(num_machines, variables.read_number(rank) or 0, size, rank)
        if num_machines > 1:
            variables.add_setting("main_process_ip", variables.read_text(address), address)
            variables.add_setting("main_process_port", variables.read_number(port), port)
        # The value can also be a word such as "auto", which sets nothing.
        num_local = parse_whole_number(variables.read_text("PET_NPROC_PER_NODE"))
        if size == "PET_NNODES" and num_local is not None:
            variables.add_setting("num_processes", num_machines * num_local, "PET_NNODES", "PET_NPROC_PER_NODE")
        return Cluster("Kubernetes", variables.layer)
    index = variables.read_number("JOB_COMPLETION_INDEX")
    if index is None:
        return None
    variables.add_setting("machine_rank", index, "JOB_COMPLETION_INDEX")
    return Cluster("Kubernetes", variables.layer)


def parse_first_host(nodes: str) -> str | None:
    """Return the first host of a SLURM node list, or None for an empty list: 'gpu[07-09,12],cpu1' -> 'gpu07'."""
    match = re.match(r"(?P<prefix>[^\[,]+)(?:\[(?P<numbers>[^\]]+)\])?(?P<suffix>[^,\[]*)", nodes)
    if match is None:
        return None
    first_number = re.split(r"[-,]", match["numbers"])[0] if match["numbers"] else ""
    return match["prefix"] + first_number + match["suffix"]
