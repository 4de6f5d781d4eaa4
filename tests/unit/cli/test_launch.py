"""Test the command line of `headway launch`: spellings of flags, script arguments, config files, and errors."""

import re
import subprocess

import pytest

from headway.cli import launch, main
from headway.compat.accelerate.launching.config_file import find_alternative
from headway.launch.machine import Machine

MACHINE = Machine("box", "/venv/bin/python", 8, loopback="lo")

# All flags of `accelerate launch` 1.15. `headway launch` accepts each flag or names an alternative.
PEER = """
aws_access_key_id aws_secret_access_key config_file cpu debug deepspeed_config_file deepspeed_exclusion_filter
deepspeed_hostfile deepspeed_inclusion_filter deepspeed_moe_layer_cls_names deepspeed_multinode_launcher
downcast_bf16 dynamo_backend dynamo_mode dynamo_use_dynamic dynamo_use_fullgraph
dynamo_use_regional_compilation enable_cpu_affinity env fp8_amax_compute_algo fp8_amax_history_len fp8_backend
fp8_enable_fsdp_float8_all_gather fp8_format fp8_interval fp8_margin fp8_opt_level
fp8_override_linear_precision fp8_pad_inner_dim fp8_use_autocast_during_eval fsdp_activation_checkpointing
fsdp_activation_checkpointing_offload fsdp_auto_wrap_policy fsdp_backward_prefetch
fsdp_cpu_ram_efficient_loading fsdp_forward_prefetch fsdp_min_num_params fsdp_offload_params
fsdp_reshard_after_forward fsdp_sharding_strategy fsdp_state_dict_type fsdp_sync_module_states
fsdp_transformer_layer_cls_to_wrap fsdp_use_orig_params fsdp_version gpu_ids gradient_accumulation_steps
gradient_clipping log_dir machine_rank main_process_ip main_process_port main_training_function max_restarts
megatron_lm_attention_backend megatron_lm_attention_dropout megatron_lm_attention_softmax_in_fp32
megatron_lm_calculate_per_token_loss megatron_lm_context_parallel_size
megatron_lm_decoder_last_pipeline_num_layers megatron_lm_eod_mask_loss megatron_lm_expert_model_parallel_size
megatron_lm_expert_tensor_parallel_size megatron_lm_gradient_clipping megatron_lm_hidden_dropout
megatron_lm_no_load_optim megatron_lm_no_save_optim megatron_lm_num_micro_batches
megatron_lm_optimizer_cpu_offload megatron_lm_overlap_cpu_optimizer_d2h_h2d megatron_lm_pp_degree
megatron_lm_recompute_activations megatron_lm_recompute_granularity megatron_lm_recompute_method
megatron_lm_recompute_num_layers megatron_lm_sequence_parallelism megatron_lm_tp_degree
megatron_lm_use_custom_fsdp megatron_lm_use_distributed_optimizer megatron_lm_use_precision_aware_optimizer
megatron_lm_use_rotary_position_embeddings mixed_precision module monitor_interval mpirun_hostfile multi_gpu
no_python no_tpu_cluster num_cpu_threads_per_process num_machines num_processes offload_optimizer_device
offload_optimizer_nvme_path offload_param_device offload_param_nvme_path parallelism_config_cp_backend
parallelism_config_cp_comm_strategy parallelism_config_cp_size parallelism_config_dp_replicate_size
parallelism_config_dp_shard_size parallelism_config_sp_attn_implementation parallelism_config_sp_backend
parallelism_config_sp_seq_length parallelism_config_sp_seq_length_is_variable parallelism_config_sp_size
parallelism_config_tp_size quiet rdzv_backend rdzv_conf role same_network tee tpu tpu_cluster tpu_use_sudo
use_deepspeed use_fsdp use_megatron_lm use_parallelism_config vm zero3_init_flag zero3_save_16bit_model
zero_stage
""".split()  # noqa: SIM905


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Return a function that runs `headway launch` and returns the plan it would execute, or stderr if there is none."""
    plans = []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "HEADWAY_RUN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("headway.launch.machine.inspect_machine", lambda environment: MACHINE)
    monkeypatch.setattr("headway.launch.run.execute_plan", lambda plan, environment, is_quiet: plans.append(plan))

    def run_launch(*args):
        plans.clear()
        with pytest.raises(SystemExit) as exc_info:
            main.main(["launch", *args])
        said = capsys.readouterr()
        assert exc_info.value.code == (0 if plans else 2), said.err
        return plans[0] if plans else said.err

    return run_launch


def test_arguments_after_the_script_belong_to_the_script(run):
    args = ("--num_processes", "2", "-n", "--", "-h", "--help", "a=b", "", "--cpu")
    assert run("train.py", *args).argv == ("/venv/bin/python", "train.py", *args)


def test_double_dash_ends_the_flags(run):
    assert run("--cpu", "--", "train.py", "--x").argv == ("/venv/bin/python", "train.py", "--x")


@pytest.mark.parametrize("flag", ["--num_processes", "--num-processes", "-n"])
def test_flags_accept_dashes_and_underscores(run, flag):
    assert run(flag, "2", "train.py").world_size == 2
    assert (
        run("--gradient-accumulation_steps", "4", "train.py").additions["HEADWAY_RUN"].count("accumulation_steps") == 2
    )


def test_earlier_name_of_a_flag_is_accepted(run):
    assert '"timeout":{"value":9.0' in run("-n", "2", "--patience", "9", "train.py").additions["HEADWAY_RUN"]


@pytest.mark.parametrize("flag", [["--activation_checkpointing"], ["--fsdp_activation_checkpointing", "true"]])
def test_activation_checkpointing_is_a_switch_as_in_estimate(run, monkeypatch, flag):
    assert '"activation_checkpointing":{"value":true' in run(*flag, "train.py").additions["HEADWAY_RUN"]
    monkeypatch.setenv("HEADWAY_FSDP_ACTIVATION_CHECKPOINTING", "true")  # the earlier name of the variable
    assert '"activation_checkpointing":{"value":true' in run("train.py").additions["HEADWAY_RUN"]


def test_flag_with_equals_sign_is_accepted(run):
    assert run("--num-processes=2", "train.py").world_size == 2


def test_modules_and_programs_are_run(run, tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/train.py").touch()
    assert run("-m", "pkg.train", "-x").argv == ("/venv/bin/python", "-m", "pkg.train", "-x")
    assert run("--no-python", "echo", "-x").argv == ("echo", "-x")
    assert "--module" in run("-m", "--no_python", "x")


def test_settings_come_from_environment_and_file(run, monkeypatch, tmp_path):
    monkeypatch.setenv("HEADWAY_NUM_PROCESSES", "3")
    assert run("train.py").world_size == 3
    assert run("-n", "2", "train.py").world_size == 2
    monkeypatch.delenv("HEADWAY_NUM_PROCESSES")
    (tmp_path / "c.yaml").write_text("num_processes: 4\n")
    assert run("--config_file", "c.yaml", "train.py").world_size == 4
    assert run("train.py").world_size == 1
    assert "file: c.yaml key num_procesess) is not a setting; did you mean num_processes" in (
        (tmp_path / "c.yaml").write_text("num_procesess: 4\n") and run("--config_file", "c.yaml", "train.py")
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--num_proceses", "2", "train.py"], "there is no flag --num_proceses; did you mean --num_processes?"),
        (["--xyzzy", "train.py"], "there is no flag --xyzzy"),
        (
            ["-n", "two", "train.py"],
            "num_processes='two' (command line: --num_processes) must be a whole number, 1 or more",
        ),
        (["-n", "0", "train.py"], "must be a whole number, 1 or more"),
        (["--mixed_precision", "fp4", "train.py"], "must be one of no, bf16, fp16, fp8"),
        (["missing.py"], "there is no script 'missing.py'"),
        (["trian.py"], "there is no script 'trian.py' (looked in "),
        (["trian.py"], "; did you mean train.py?"),
        (["x" * 3000], f"the script '{'x' * 60}... (3000 characters)' cannot be read: File name too long"),
        (["--main_process_port", "99999", "train.py"], "must be a whole number, 0 to 65535"),
        ([], "Missing argument 'SCRIPT'"),
        (
            ["--use-megatron-lm", "train.py"],
            "--use_megatron_lm is not a flag of `headway launch`: Headway does not drive",
        ),
        (
            ["--dynamo_backend", "fast", "train.py"],
            "dynamo_backend='fast' (command line: --dynamo_backend) must be one of no, eager",
        ),
        (["--nproc_per_node", "2", "train.py"], "use -n"),
    ],
)
def test_invalid_command_line_is_refused_without_a_traceback(run, args, message):
    output = run(*args)
    assert message in output
    assert "Traceback" not in output


def test_each_flag_of_accelerate_is_accepted_or_explained():
    accepted = {parameter.name for parameter in launch.command.params}
    assert [name for name in PEER if name not in accepted and find_alternative(name) is None] == []
    assert [name for name in accepted if find_alternative(str(name)) is not None] == []


def test_dry_run_prints_a_command_and_starts_nothing(run, capsys, monkeypatch):
    monkeypatch.setattr("headway.launch.run.execute_plan", lambda *a, **k: pytest.fail("started"))
    with pytest.raises(SystemExit) as exc_info:
        main.main(["launch", "--dry-run", "-n", "2", "train.py", "it's"])
    assert exc_info.value.code == 0
    output = capsys.readouterr().out
    assert output.startswith("# headway: 2 processes on cpu")
    assert "OMP_NUM_THREADS=4" in output
    assert subprocess.run(["sh", "-n", "-c", output], capture_output=True).returncode == 0


def test_help_names_every_setting_once(capsys):
    with pytest.raises(SystemExit):
        main.main(["launch", "--help-all"])
    output = capsys.readouterr().out
    for parameter in launch.command.params:
        if parameter.name not in ("script", "script_args", "help_all") and not getattr(parameter, "hidden", False):
            assert f"--{parameter.name}" in output.split(), parameter.name  # a long flag has a line of its own
    assert "Examples:\n  headway launch train.py" in output


def test_misspelled_command_gets_a_suggestion(capsys):
    with pytest.raises(SystemExit) as exc_info:
        main.main(["lanch", "train.py"])
    assert exc_info.value.code == 2
    assert "'lanch' is not a command of headway; did you mean launch?" in capsys.readouterr().err


def test_dry_run_with_very_many_machines_abbreviates_the_commands(run, capsys):
    with pytest.raises(SystemExit) as exc_info:
        main.main(["launch", "--cpu", "--num_machines", "2147483647", "--dry-run", "train.py"])
    assert exc_info.value.code == 2
    shown = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"export HEADWAY_SECRET=[0-9a-f]{32}", shown[1])
    assert shown[3].endswith("--machine_rank 0 train.py")
    assert shown[-1] == "# ... up to machine 2147483646, each with its own --machine_rank"
    assert len(shown) < 200


def test_config_file_of_accelerate_is_read_under_its_name(run, tmp_path):
    file = tmp_path / "accelerate.yaml"
    file.write_text(
        "distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\nmixed_precision: bf16\nsame_network: true\n"
    )
    plan = run("--as", "accelerate", "--config_file", str(file), "train.py")
    assert plan.world_size == 2
    assert '"bf16"' in plan.additions["HEADWAY_RUN"]
    assert "on_path" in plan.additions["PYTHONPATH"]
    assert "headway config import" in run("--config_file", str(file), "train.py")
