"""Test the plan that settings result in: counts, devices, threads, networks, and an error for every contradiction."""

import json
import os
import subprocess
from dataclasses import replace

import pytest

from headway.core.config.load import SettingValue, merge_layers
from headway.errors import ConfigError
from headway.launch.machine import Machine
from headway.launch.order import AgentOrder, Program
from headway.launch.plan import make_plan

CPU = Machine("box", "/venv/bin/python", 8, loopback="lo")
GPUS = Machine("gpubox", "/venv/bin/python", 8, "cuda", ("0", "1", "2", "3"), "lo")
SCRIPT = Program("train.py", ("--lr", "3e-4", "a b"))


def build_plan(machine=CPU, program=SCRIPT, environment=None, force=False, **settings):
    layer = {name: SettingValue(value, f"command line: --{name}") for name, value in settings.items()}
    return make_plan(merge_layers([layer], force=force), program, machine, environment or {})


def decode_order(made):
    assert made.argv[:4] == ("/venv/bin/python", "-m", "headway.launch", "agent")
    return AgentOrder.decode(made.argv[4])


def test_one_process_is_the_plain_script():
    made = build_plan()
    assert made.argv == ("/venv/bin/python", "train.py", "--lr", "3e-4", "a b")
    assert set(made.additions) == {"HEADWAY_RUN"}
    assert made.world_size == made.num_local == 1
    assert made.banner == "headway: 1 process on cpu"


def test_modules_run_with_python_and_programs_directly():
    assert build_plan(program=Program("pkg.train", ("-x",), "module")).argv == (
        "/venv/bin/python",
        "-m",
        "pkg.train",
        "-x",
    )
    assert build_plan(program=Program("./run.sh", ("-x",), "program")).argv == ("./run.sh", "-x")


def test_several_processes_are_started_by_an_agent():
    made = build_plan(num_processes=2)
    sent = decode_order(made)
    assert (sent.num_local, sent.num_machines, sent.backend, sent.endpoint) == (2, 1, "local", "")
    assert sent.program == SCRIPT
    assert made.additions["OMP_NUM_THREADS"] == "4"
    assert made.additions["GLOO_SOCKET_IFNAME"] == "lo"
    assert json.loads(made.additions["HEADWAY_RUN"])["num_processes"] == 2
    assert "4 CPU threads each of 8 cores" in made.banner


def test_variables_of_the_user_are_kept():
    made = build_plan(num_processes=2, environment={"OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "eth0"})
    assert "OMP_NUM_THREADS" not in made.additions
    assert "GLOO_SOCKET_IFNAME" not in made.additions
    assert "3 CPU threads" in made.banner
    made = build_plan(num_processes=2, num_cpu_threads_per_process=5, environment={"OMP_NUM_THREADS": "3"})
    assert made.additions["OMP_NUM_THREADS"] == "5"


def test_threads_of_one_process_are_not_set_by_default():
    assert "OMP_NUM_THREADS" not in build_plan().additions
    assert build_plan(num_cpu_threads_per_process=2).additions["OMP_NUM_THREADS"] == "2"


def test_more_processes_than_cores_get_one_thread_each():
    assert build_plan(num_processes=20).additions["OMP_NUM_THREADS"] == "1"


def test_all_accelerators_are_used_by_default():
    made = build_plan(GPUS)
    assert decode_order(made).num_local == 4
    assert "4 processes on cuda" in made.banner
    assert "CUDA_VISIBLE_DEVICES" not in made.additions


BROKEN = replace(GPUS, broken_transfers="NVIDIA GeForce RTX 4090 with driver 535.54.03")


def test_cards_whose_direct_transfers_fail_get_the_variables_of_nccl():
    made = build_plan(BROKEN)
    assert (made.additions["NCCL_P2P_DISABLE"], made.additions["NCCL_IB_DISABLE"]) == ("1", "1")
    (note,) = made.notes
    assert (
        "fail on NVIDIA GeForce RTX 4090 with driver 535.54.03, so NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 are" in note
    )
    assert "NCCL_P2P_DISABLE=1" in made.format_shell()  # as `launch --dry_run` prints it


def test_variables_of_nccl_that_the_user_has_set_are_kept():
    made = build_plan(BROKEN, environment={"NCCL_IB_DISABLE": "0"})
    assert "NCCL_IB_DISABLE" not in made.additions
    assert "so NCCL_P2P_DISABLE=1 is set" in made.notes[0]
    made = build_plan(BROKEN, environment={"NCCL_IB_DISABLE": "0", "NCCL_P2P_DISABLE": "0"})
    assert not made.notes
    assert not any("NCCL" in name for name in made.additions)


@pytest.mark.parametrize("settings", [{"cpu": True, "num_processes": 2}, {"num_processes": 1}, {"gpu_ids": "1"}])
def test_runs_without_transfers_between_gpus_get_no_variables_of_nccl(settings):
    made = build_plan(BROKEN, **settings)
    assert not made.notes
    assert not any("NCCL" in name for name in made.additions)


def test_accelerators_may_be_chosen():
    made = build_plan(GPUS, gpu_ids="0, 3")
    assert decode_order(made).num_local == 2
    assert made.additions["CUDA_VISIBLE_DEVICES"] == "0,3"
    assert build_plan(GPUS, gpu_ids="all").num_local == 4
    assert build_plan(GPUS, gpu_ids="2").additions["CUDA_VISIBLE_DEVICES"] == "2"


@pytest.mark.parametrize("kind", ["mps", "npu"])
def test_some_devices_of_a_kind_without_a_known_variable_are_refused(kind):
    """Accelerate's config file contains `gpu_ids: all`."""
    machine = Machine("box", "/venv/bin/python", 8, kind, ("0",), "lo")
    for text in ("all", "0"):
        assert not [name for name in build_plan(machine, gpu_ids=text).additions if "VISIBLE" in name]
    pair = Machine("box", "/venv/bin/python", 8, kind, ("0", "1"), "lo")
    with pytest.raises(ConfigError, match=rf"does not know which variable hides {kind} devices"):
        build_plan(pair, gpu_ids="1")


def test_amds_variable_numbers_the_devices_that_remain_after_rocr():
    left = Machine("amdbox", "/venv/bin/python", 8, "rocm", ("0", "1"), "lo")  # ROCR_VISIBLE_DEVICES=2,3
    assert build_plan(left, gpu_ids="1").additions["HIP_VISIBLE_DEVICES"] == "1"


def test_devices_hidden_by_mistake_cause_no_run_on_the_cpu():
    hidden = Machine("amdbox", "/venv/bin/python", 8, hidden_by="ROCR_VISIBLE_DEVICES='2,3', HIP_VISIBLE_DEVICES='2'")
    with pytest.raises(
        ConfigError, match=r"amdbox has accelerators, but all are hidden by ROCR.*HIP_VISIBLE_DEVICES='2': .*--cpu"
    ):
        build_plan(hidden)
    assert build_plan(hidden, cpu=True).world_size == 1


def test_ranks_get_the_counted_device_type():
    assert json.loads(build_plan(GPUS).additions["HEADWAY_RUN"])["device"] == "cuda"
    assert "device" not in json.loads(build_plan(GPUS, cpu=True).additions["HEADWAY_RUN"])
    assert json.loads(build_plan().additions["HEADWAY_RUN"])["device"] == "cpu"


@pytest.mark.parametrize("text", ["4", "0,0", "0,,1", "x", ","])
def test_missing_accelerators_are_refused(text):
    with pytest.raises(ConfigError, match=r"gpu_ids=.*--gpu_ids.*0, 1, 2, 3"):
        build_plan(GPUS, gpu_ids=text)


def test_gpu_ids_on_a_machine_without_accelerators_are_refused():
    with pytest.raises(ConfigError, match=r"gpu_ids='0,1' .*, but box has no accelerator .*, or remove gpu_ids"):
        build_plan(gpu_ids="0,1")
    assert build_plan(cpu=True, gpu_ids="0,1").world_size == 1


def test_cpu_run_on_a_machine_with_accelerators():
    made = build_plan(GPUS, cpu=True)
    assert made.world_size == 1
    assert json.loads(made.additions["HEADWAY_RUN"])["settings"]["cpu"]["value"] is True
    assert build_plan(GPUS, cpu=True, num_processes=6).num_local == 6


def test_multi_gpu_requires_gpus():
    assert build_plan(GPUS, multi_gpu=True).num_local == 4
    with pytest.raises(ConfigError, match=r"multi_gpu .*box has no accelerator"):
        build_plan(multi_gpu=True)
    with pytest.raises(ConfigError, match=r"multi_gpu \(command line: --multi_gpu\) contradicts cpu"):
        build_plan(GPUS, multi_gpu=True, cpu=True)


def test_affinity_requires_gpus():
    assert decode_order(build_plan(GPUS, enable_cpu_affinity=True)).is_bound_to_cores
    assert "enable_cpu_affinity (command line" in build_plan(GPUS, enable_cpu_affinity=True, num_processes=1).notes[0]
    with pytest.raises(ConfigError, match=r"enable_cpu_affinity .* this run uses none"):
        build_plan(enable_cpu_affinity=True)


def test_more_processes_than_accelerators_are_refused():
    with pytest.raises(ConfigError, match=r"5 processes .*gpubox has 4 \(cuda\); ask for 4 or fewer, or add --cpu"):
        build_plan(GPUS, num_processes=5)


def test_banner_contains_precision_and_accumulation():
    banner = build_plan(num_processes=2, mixed_precision="bf16", gradient_accumulation_steps=4).banner
    assert "precision bf16 (command line: --mixed_precision)" in banner
    assert "global batch = micro-batch x 2 processes x 4 accumulated" in banner


WHERE = {"main_process_ip": "10.0.0.1", "main_process_port": 29400}


class TestMachines:
    def test_processes_are_counted_over_all_machines(self):
        made = build_plan(num_processes=6, num_machines=2, machine_rank=1, **WHERE)
        sent = decode_order(made)
        assert (sent.num_local, sent.num_machines, sent.machine_rank) == (3, 2, 1)
        assert (sent.backend, sent.endpoint) == ("static", "10.0.0.1:29400")
        assert made.world_size == 6
        assert "GLOO_SOCKET_IFNAME" not in made.additions
        assert "3 on each of 2 machines (this is machine 1)" in made.banner

    def test_accelerators_of_all_machines_are_used_by_default(self):
        assert build_plan(GPUS, num_machines=2, **WHERE).world_size == 8
        assert build_plan(CPU, num_machines=2, **WHERE).world_size == 2

    def test_restarts_need_a_repeatable_rendezvous(self):
        made = build_plan(num_machines=2, max_restarts=1, **WHERE)
        assert decode_order(made).backend == "c10d"
        assert made.additions["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
        with pytest.raises(ConfigError, match=r"rdzv_backend=static .*use --rdzv_backend c10d"):
            build_plan(num_machines=2, max_restarts=1, rdzv_backend="static", **WHERE)

    def test_ipv6_address_gets_brackets(self):
        assert (
            decode_order(build_plan(num_machines=2, main_process_ip="fe80::1", main_process_port=1)).endpoint
            == "[fe80::1]:1"
        )

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"num_processes": 3}, "3 processes .* cannot be spread evenly over 2 machines"),
            ({"machine_rank": 2}, "machine_rank=2 .* must be below num_machines=2"),
            ({"main_process_port": 70000}, "main_process_port=70000 .* must be 1 to 65535"),
            ({"rdzv_conf": "timeout"}, "rdzv_conf='timeout' .* key=value"),
            ({"rdzv_conf": "timeout=soon"}, "timeout must be a number of seconds"),
            ({"rdzv_conf": "timeout=-5"}, "timeout must be a number of seconds"),
        ],
    )
    def test_contradictions_are_refused(self, settings, message):
        with pytest.raises(ConfigError, match=message):
            build_plan(num_machines=2, **{**WHERE, **settings})

    def test_rendezvous_address_is_required(self):
        with pytest.raises(ConfigError, match="--main_process_ip ADDRESS --main_process_port PORT"):
            build_plan(num_machines=2, machine_rank=0)


def test_run_may_continue_with_fewer_machines():
    where = {"num_machines": 3, "main_process_ip": "10.0.0.1", "main_process_port": 29400, "num_processes": 6}
    made = build_plan(**where, min_machines=2, max_restarts=1)
    assert (decode_order(made).min_machines, decode_order(made).num_machines, decode_order(made).backend) == (
        2,
        3,
        "c10d",
    )
    told = json.loads(made.additions["HEADWAY_RUN"])
    assert (told["min_processes"], told["num_processes"]) == (4, 6)
    made = build_plan(**where, max_restarts=1)
    assert decode_order(made).min_machines == 3
    assert "min_processes" not in json.loads(made.additions["HEADWAY_RUN"])
    with pytest.raises(ConfigError, match="add --max_restarts N"):
        build_plan(**where, min_machines=2)
    with pytest.raises(ConfigError, match="must be at most num_machines=3"):
        build_plan(**where, min_machines=4, max_restarts=1)


def test_grace_is_passed_to_the_agent():
    assert decode_order(build_plan(num_processes=2)).grace == 300
    assert decode_order(build_plan(num_processes=2, grace=30.0)).grace == 30


def test_launch_inside_a_launch_is_refused():
    inside = {"RANK": "1", "WORLD_SIZE": "4"}
    with pytest.raises(ConfigError, match=r"contains RANK=1, WORLD_SIZE=4, .*python train.py"):
        build_plan(environment=inside)
    made = build_plan(environment=inside, force=True)
    assert made.removals == ("RANK", "WORLD_SIZE")
    assert "RANK" not in made.make_environment(inside)


def test_log_files():
    assert decode_order(build_plan(num_processes=2, log_dir="logs")).tee == "3"
    assert decode_order(build_plan(num_processes=2, log_dir="~/logs")).log_dir == os.path.expanduser("~/logs")
    assert decode_order(build_plan(num_processes=2)).tee == "0"
    with pytest.raises(ConfigError, match=r"tee=1 .*--log_dir"):
        build_plan(num_processes=2, tee="1")


def test_order_is_encoded_and_decoded_unchanged():
    sent = decode_order(
        build_plan(num_processes=2, num_machines=2, main_process_ip="h", main_process_port=5, rdzv_conf="a=1,b=2")
    )
    assert AgentOrder.decode(sent.encode()) == sent
    assert sent.conf == {"a": "1", "b": "2"}


def test_printed_plan_is_a_command_that_a_shell_runs():
    program = Program("printenv", ("HEADWAY_RUN", "it's $HOME"), "program")
    made = build_plan(program=program, environment={"RANK": "0"})
    result = subprocess.run(
        ["sh", "-c", made.format_shell()], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "RANK": "0"}
    )
    assert json.loads(result.stdout.splitlines()[0])["num_processes"] == 1


@pytest.mark.parametrize(
    ("settings", "environment", "is_silent"),
    [
        ({"num_processes": 2}, {}, True),
        ({"num_processes": 2}, {"HEADWAY_LOG_LEVEL": "debug"}, False),
        ({"num_processes": 2}, {"TORCH_DISTRIBUTED_DEBUG": "INFO"}, False),
        ({"num_processes": 2}, {"TORCH_CPP_LOG_LEVEL": "INFO"}, False),
        ({"num_processes": 2, "debug": True}, {}, False),
        ({"num_processes": 1}, {}, False),
    ],
)
def test_warnings_of_backends_are_hidden_unless_requested(settings, environment, is_silent):
    layer = {name: SettingValue(value, "here") for name, value in settings.items()}
    planned = make_plan(
        merge_layers([layer]), Program("train.py"), Machine("box", "/bin/python", 4, loopback="lo"), environment
    )
    assert (planned.additions.get("TORCH_CPP_LOG_LEVEL") == "ERROR") is is_silent
