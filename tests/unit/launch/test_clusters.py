"""Test variables of SLURM, Open MPI, MPICH, SkyPilot and Kubernetes, and how they combine with other settings."""

import json
from dataclasses import replace

import pytest

from headway.core.config.load import SettingValue, merge_layers
from headway.errors import ConfigError
from headway.launch.clusters import ClusterTask, check_agreement, detect_cluster, parse_first_host
from headway.launch.machine import Machine
from headway.launch.order import AgentOrder, Program
from headway.launch.plan import format_commands, make_plan

CPU = Machine("box", "/venv/bin/python", 8, loopback="lo")
GPUS = Machine("gpubox", "/venv/bin/python", 8, "cuda", ("0", "1", "2", "3"), "lo")

# srun on two nodes with one task each
SLURM = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "gpu[07-08]",
}  # fmt: skip


def list_values(environment):
    return {name: entry.value for name, entry in detect_cluster(environment).layer.items()}


def make_cluster_plan(environment, machine=CPU, **settings):
    cluster = detect_cluster(environment)
    layer = {name: SettingValue(value, f"command line: --{name}") for name, value in settings.items()}
    return make_plan(merge_layers([layer, cluster.layer]), Program("train.py"), machine, environment, cluster)


def test_no_cluster_is_detected_in_a_plain_environment():
    assert detect_cluster({"PATH": "/bin"}) is None


class TestSlurm:
    def test_one_task_per_machine(self):
        assert list_values(SLURM) == {
            "num_machines": 2, "machine_rank": 1, "main_process_ip": "gpu07", "main_process_port": 24711,
        }  # fmt: skip
        assert detect_cluster(SLURM).layer["num_machines"].origin == "SLURM: SLURM_STEP_NUM_NODES"
        order = AgentOrder.decode(make_cluster_plan(SLURM, GPUS).argv[-1])
        assert (order.num_local, order.machine_rank, order.endpoint) == (4, 1, "gpu07:24711")

    def test_several_tasks_per_machine_are_the_processes(self):
        environment = {**SLURM, "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "6", "SLURM_LOCALID": "2"}
        assert detect_cluster(environment).task == ClusterTask(6, 8, 2, 4)
        made = make_cluster_plan(environment, GPUS)
        order = AgentOrder.decode(made.argv[-1])
        assert (order.num_local, order.num_machines, order.machine_rank, order.unit) == (1, 8, 6, "task")
        assert order.endpoint == "gpu07:24711"
        assert order.variables == {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}
        assert made.banner == ""  # only rank 0 prints it
        assert json.loads(made.additions["HEADWAY_RUN"])["num_processes"] == 8

    def test_several_tasks_on_one_machine(self):
        environment = {**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_PROCID": "0"}
        made = make_cluster_plan(environment)
        assert AgentOrder.decode(made.argv[-1]).endpoint == "127.0.0.1:24711"
        assert made.additions["GLOO_SOCKET_IFNAME"] == "lo"
        assert made.banner.startswith("headway: 2 processes on cpu")

    def test_one_task_on_one_machine_is_an_ordinary_launch(self):
        environment = {**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}
        assert list_values(environment) == {}
        assert make_cluster_plan(environment, GPUS).world_size == 4

    @pytest.mark.parametrize(
        ("said", "visible", "local"),
        [
            ({}, ("0", "1", "2", "3"), "2"),
            ({"SLURM_GPUS_PER_TASK": "1"}, ("0",), "0"),
            ({}, ("0",), "0"),  # set by --gpu-bind
            ({"SLURM_GPUS_PER_TASK": "h100:4"}, ("0", "1", "2", "3"), "0"),
            ({"SLURM_GPUS_PER_TASK": "1"}, ("0", "1", "2", "3"), "2"),  # with --gpu-bind=none each task sees all GPUs
        ],
    )
    def test_task_with_its_own_accelerators_counts_them_from_0(self, said, visible, local):
        environment = {**SLURM, "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "6", "SLURM_LOCALID": "2", **said}
        order = AgentOrder.decode(make_cluster_plan(environment, replace(GPUS, device_ids=visible)).argv[-1])
        assert order.variables["LOCAL_RANK"] == local
        assert order.variables["LOCAL_WORLD_SIZE"] == ("1" if local == "0" else "4")

    def test_cores_of_a_task_are_used(self):
        environment = {**SLURM, "SLURM_STEP_NUM_TASKS": "8", "SLURM_CPUS_PER_TASK": "6"}
        assert make_cluster_plan(environment, GPUS).additions["OMP_NUM_THREADS"] == "6"
        assert "OMP_NUM_THREADS" not in make_cluster_plan({**environment, "OMP_NUM_THREADS": "3"}, GPUS).additions

    def test_allocation_without_a_task_is_no_task(self):
        assert detect_cluster({"SLURM_JOB_ID": "1", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "a,b"}) is None
        # The body of an sbatch script has a rank but no step.
        assert detect_cluster({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NNODES": "2"}) is None

    def test_uneven_tasks_are_refused(self):
        with pytest.raises(ConfigError, match="SLURM started 3 tasks on 2 machines"):
            detect_cluster({**SLURM, "SLURM_STEP_NUM_TASKS": "3"})

    def test_number_of_tasks_and_processes_must_agree(self):
        environment = {**SLURM, "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "6", "SLURM_LOCALID": "2"}
        with pytest.raises(ConfigError, match=r"4 processes .*the cluster has started 8 tasks, 4 on each machine"):
            make_cluster_plan(environment, GPUS, num_processes=4)

    def test_tasks_cannot_become_fewer(self):
        environment = {**SLURM, "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "6", "SLURM_LOCALID": "2"}
        with pytest.raises(ConfigError, match=r"min_machines .* needs one launcher per machine"):
            make_cluster_plan(environment, GPUS, min_machines=1, max_restarts=1)

    def test_invalid_value_is_named(self):
        with pytest.raises(ConfigError, match="SLURM sets SLURM_NODEID='one'"):
            detect_cluster({**SLURM, "SLURM_NODEID": "one"})
        for name in ("SLURM_NODEID", "SLURM_PROCID", "SLURM_JOB_ID"):
            with pytest.raises(ConfigError, match=rf"{name}='9+\.\.\. \(5002 characters\), which"):
                detect_cluster({**SLURM, "SLURM_STEP_NUM_TASKS": "8", name: "9" * 5000})

    @pytest.mark.parametrize(
        ("nodes", "first"),
        [
            ("gpu7", "gpu7"),
            ("gpu7,gpu8", "gpu7"),
            ("gpu[07-09,12],cpu1", "gpu07"),
            ("gpu[3,5]", "gpu3"),
            ("rack1-[10-20]-ib", "rack1-10-ib"),
            ("", None),
        ],
    )
    def test_first_host_of_a_node_list(self, nodes, first):
        assert parse_first_host(nodes) == first


class TestOpenMpi:
    environment = {  # noqa: RUF012
        "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_MCA_orte_hnp_uri": "314900480.0;tcp://10.0.0.5,172.17.0.1:40001",
    }  # fmt: skip

    def test_two_tasks_per_machine(self):
        cluster = detect_cluster(self.environment)
        assert cluster.task == ClusterTask(3, 4, 1, 2)
        made = make_cluster_plan(self.environment)
        assert AgentOrder.decode(made.argv[-1]).endpoint == f"10.0.0.5:{20000 + 314900480 % 12000}"

    def test_one_task_for_each_machine(self):
        environment = {**self.environment, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
        order = AgentOrder.decode(make_cluster_plan(environment).argv[-1])
        assert (order.num_machines, order.machine_rank, order.num_local) == (4, 3, 1)

    def test_rendezvous_address_can_be_given(self):
        environment = {name: value for name, value in self.environment.items() if "uri" not in name}
        with pytest.raises(ConfigError, match="--main_process_ip ADDRESS"):
            make_cluster_plan(environment)
        assert make_cluster_plan(environment, main_process_ip="h", main_process_port=5).argv[-1].count('"h:5"') == 1


class TestMPICH:
    # As MPICH 4.0 sets them for the last of four tasks on two machines
    environment = {  # noqa: RUF012
        "PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "8",
    }  # fmt: skip

    def test_tasks_are_the_processes(self):
        cluster = detect_cluster(self.environment)
        assert (cluster.name, cluster.task) == ("MPICH", ClusterTask(3, 4, 1, 2))
        assert list_values(self.environment) == {"num_machines": 2, "machine_rank": 1, "num_processes": 4}

    @pytest.mark.parametrize("num_machines", [1, 2])
    def test_rendezvous_must_be_given(self, num_machines):
        environment = {**self.environment, "MPI_LOCALNRANKS": "2" if num_machines == 2 else "4"}
        with pytest.raises(ConfigError, match="--main_process_port"):
            make_cluster_plan(environment)
        made = make_cluster_plan(environment, main_process_ip="h", main_process_port=5)
        order = AgentOrder.decode(made.argv[-1])
        assert (order.num_local, order.num_machines, order.machine_rank, order.unit) == (1, 4, 3, "task")
        assert order.endpoint == ("h:5" if num_machines == 2 else "127.0.0.1:5")

    def test_one_task_for_each_machine(self):
        environment = {**self.environment, "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}
        made = make_cluster_plan(environment, GPUS, main_process_ip="h", main_process_port=5)
        order = AgentOrder.decode(made.argv[-1])
        assert (order.num_machines, order.machine_rank, order.num_local) == (4, 3, 4)

    def test_srun_that_also_sets_these_variables_is_slurm(self):
        assert detect_cluster({**self.environment, **SLURM}).name == "SLURM"

    def test_uneven_tasks_are_refused(self):
        with pytest.raises(ConfigError, match="not the same number on each"):
            detect_cluster({**self.environment, "MPI_LOCALNRANKS": "3"})


class TestSkyPilot:
    environment = {  # noqa: RUF012
        "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5\n", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "4", "SKYPILOT_TASK_ID": "sky-2026-12-01-10-00-00-000000_train_1",
    }  # fmt: skip

    def test_nodes_are_machines(self):
        order = AgentOrder.decode(make_cluster_plan(self.environment, GPUS).argv[-1])
        assert (order.num_machines, order.machine_rank, order.num_local) == (2, 1, 4)
        address, port = order.endpoint.split(":")
        assert address == "10.0.0.4"
        assert 20000 <= int(port) < 32000

    def test_port_depends_on_the_task_only(self):
        first = list_values(self.environment)["main_process_port"]
        assert list_values({**self.environment, "SKYPILOT_NODE_RANK": "0"})["main_process_port"] == first
        later = {**self.environment, "SKYPILOT_TASK_ID": "sky-2026-12-01-10-00-00-000000_train_2"}
        assert list_values(later)["main_process_port"] != first

    def test_pods_of_skypilot_are_its_nodes(self):
        assert detect_cluster({**POD, **self.environment}).name == "SkyPilot"

    def test_task_on_one_node_is_an_ordinary_launch(self):
        one = {
            **self.environment,
            "SKYPILOT_NODE_IPS": "10.0.0.4",
            "SKYPILOT_NODE_RANK": "0",
            "SKYPILOT_NUM_NODES": "1",
        }
        assert detect_cluster(one) is None


POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}


class TestKubernetes:
    def test_pytorch_job(self):
        environment = {
            **POD, "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4",
            "PET_MASTER_ADDR": "job-master-0", "PET_MASTER_PORT": "23456",
        }  # fmt: skip
        order = AgentOrder.decode(make_cluster_plan(environment, GPUS).argv[-1])
        assert (order.num_machines, order.machine_rank, order.num_local, order.endpoint) == (
            2,
            1,
            4,
            "job-master-0:23456",
        )

    def test_older_operator_that_sets_torchs_variables(self):
        environment = {
            **POD, "WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "m", "MASTER_PORT": "23456",
        }  # fmt: skip
        made = make_cluster_plan(environment, GPUS)
        assert made.world_size == 8
        assert made.removals == ("RANK", "WORLD_SIZE")

    def test_indexed_job(self):
        environment = {**POD, "JOB_COMPLETION_INDEX": "3"}
        assert list_values(environment) == {"machine_rank": 3}

    def test_ordinary_pod_is_an_ordinary_machine(self):
        assert detect_cluster(POD) is None


def test_file_that_contradicts_the_cluster_names_both():
    cluster = detect_cluster(SLURM)
    file = {"machine_rank": SettingValue(0, "file: c.yaml key machine_rank")}
    with pytest.raises(ConfigError, match=r"machine_rank=0 \(file: c.yaml .*contradicts 1 \(SLURM: SLURM_NODEID\)"):
        check_agreement(merge_layers([file, cluster.layer]), cluster)
    check_agreement(merge_layers([file, cluster.layer], force=True), cluster)


def test_without_a_cluster_each_machine_has_its_command():
    layer = {
        "num_machines": SettingValue(2, "x"), "num_processes": SettingValue(4, "x"),
        "cpu": SettingValue(True, "x"), "quiet": SettingValue(False, "x"),
    }  # fmt: skip
    texts = format_commands(merge_layers([layer]), Program("train.py", ("a b",)), "box", 4242)
    assert texts == [
        "headway launch --num_processes 4 --cpu --num_machines 2 --main_process_ip box --main_process_port 4242 "
        f"--machine_rank {rank} train.py 'a b'"
        for rank in (0, 1)
    ]
