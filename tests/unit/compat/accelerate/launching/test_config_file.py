"""Test the translation of Accelerate's config files: the setting that each key becomes, and keys that are lost."""

import pytest
import yaml

from headway.compat.accelerate.launching.config_file import translate_config
from headway.core.config.launch import LaunchConfig
from headway.errors import ConfigError

# File that `accelerate config` writes for a machine with eight GPUs.
GPUS = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def translate_text(text):
    return translate_config(yaml.safe_load(text), "a.yaml")


def test_usual_file_is_translated_without_loss():
    made = translate_text(GPUS)
    assert made.num_lost == 0
    assert [key for key, _ in made.lines] == list(yaml.safe_load(GPUS))
    assert made.config == LaunchConfig(
        debug=False, enable_cpu_affinity=False, gpu_ids="all", machine_rank=0, mixed_precision="bf16", num_machines=1,
        num_processes=8, rdzv_backend="static", cpu=False,
    )  # fmt: skip


DEEPSPEED = """
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: false
  zero3_save_16bit_model: true
  zero_stage: 3
"""


def test_all_keys_of_deepspeed_are_reported():
    made = translate_text(DEEPSPEED)
    assert made.num_lost == 0
    assert set(dict(made.lines)) == {f"deepspeed_config.{key}" for key in yaml.safe_load(DEEPSPEED)["deepspeed_config"]} | {
        "distributed_type", "together",
    }  # fmt: skip
    assert made.config == LaunchConfig(
        strategy="zero3", gradient_accumulation_steps=4, gradient_clipping=1.0, offload_optimizer_device="cpu"
    )


def test_deepspeed_config_file_is_kept():
    made = translate_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json, zero3_init_flag: true}"
    )
    assert made.num_lost == 1
    assert "supports models on the meta device" in dict(made.lines)["deepspeed_config.zero3_init_flag"]
    assert made.config == LaunchConfig(strategy="deepspeed", deepspeed_config_file="ds.json")


def test_automatic_accumulation_steps_stay_unset():
    assert translate_text("deepspeed_config: {gradient_accumulation_steps: auto}").config == LaunchConfig()


def test_multi_cpu_becomes_cpu():
    assert translate_text("distributed_type: MULTI_CPU\nnum_processes: 4\nuse_cpu: true\n").config == LaunchConfig(
        cpu=True, num_processes=4
    )


@pytest.mark.parametrize("kind", ["MULTI_GPU", "MULTI_NPU", "MULTI_HPU"])
def test_all_accelerator_types_are_left_to_the_launcher(kind):
    made = translate_text(f"distributed_type: {kind}\n")
    assert made.num_lost == 0
    assert "one process per accelerator" in dict(made.lines)["distributed_type"]


def test_undecided_values_stay_unset():
    assert translate_text("num_processes: -1\nmain_process_ip: null\n").config == LaunchConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("compute_environment: AMAZON_SAGEMAKER", "SageMaker"),
        ("num_procesess: 2", "num_procesess .*is not a key of Accelerate's config files; did you mean num_processes"),
        ("num_processes: many", "num_processes='many' .* whole number"),
        ("fsdp_config: 3", "must contain settings"),
        (
            "fsdp_config: {fsdp_sharding_strategy: HALF}",
            "fsdp_config.fsdp_sharding_strategy='HALF'; allowed: FULL_SHARD",
        ),
        ("fsdp_config: {fsdp_offload_params: maybe}", "fsdp_config.fsdp_offload_params='maybe'; give True or False"),
        ("parallelism_config: {parallelism_config_tp_size: 0}", "give a whole number, 1 or more"),
        (
            "distributed_type: FSDP\nparallelism_config: {parallelism_config_tp_size: 8}",
            "distributed_type asks for a sharded model, but with parallelism_config.parallelism_config_tp_size",
        ),
        ("rdzv_backend: etcd", "rdzv_backend='etcd'"),
    ],
)
def test_invalid_file_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        translate_text(text)


def test_fp8_is_kept_and_its_engine_and_tpus_are_reported_as_lost():
    made = translate_text("mixed_precision: fp8\nfp8_config:\n  backend: TE\ndistributed_type: XLA\ntpu_name: mine\n")
    assert made.config.mixed_precision == "fp8"
    assert made.num_lost == 3
    assert "float8 runs through torchao" in dict(made.lines)["fp8_config.backend"]
    assert "TPU" in dict(made.lines)["tpu_name"]


# File that `accelerate config` writes for FSDP version 1.
SHARDED = """
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_reshard_after_forward: SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer, LlamaMLP
  fsdp_use_orig_params: true
  fsdp_version: 1
"""


def test_all_keys_of_fsdp_are_reported():
    made = translate_text(SHARDED)
    assert made.num_lost == 0
    told = dict(made.lines)
    keys = {f"fsdp_config.{key}" for key in yaml.safe_load(SHARDED)["fsdp_config"]}
    assert set(told) == keys | {"distributed_type", "together"}
    assert told["together"] == "strategy: 'fsdp'"
    assert told["fsdp_config.fsdp_use_orig_params"].startswith("not needed: ")
    assert made.config == LaunchConfig(
        strategy="fsdp", fsdp_reshard_after_forward=False, fsdp_offload_params=False, activation_checkpointing=True,
        fsdp_auto_wrap_policy="transformer_based_wrap", fsdp_transformer_layer_cls_to_wrap="LlamaDecoderLayer,LlamaMLP",
    )  # fmt: skip


def test_sizes_give_the_layout():
    made = translate_text(
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_min_num_params: 2000, fsdp_auto_wrap_policy: SIZE_BASED_WRAP}\n"
        "parallelism_config: {parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 4, "
        "parallelism_config_tp_size: 2, parallelism_config_cp_size: 1}\n"
    )
    assert made.num_lost == 0
    assert made.config == LaunchConfig(
        strategy="ddp=2+fsdp=4+tp=2", fsdp_min_num_params=2000, fsdp_auto_wrap_policy="size_based_wrap"
    )


@pytest.mark.parametrize(
    ("word", "strategy", "reshards"),
    [("FULL_SHARD", "fsdp", None), ("1", "fsdp", None), (2, "fsdp", False), ("NO_SHARD", "ddp", None),
     ("HYBRID_SHARD", "hsdp", None), ("hybrid_shard_zero2", "hsdp", False)],
)  # fmt: skip
def test_sharding_strategies_of_fsdp_1_give_layouts(word, strategy, reshards):
    config = translate_text(f"fsdp_config: {{fsdp_sharding_strategy: {word}}}").config
    assert config.strategy == strategy
    assert (config.fsdp_reshard_after_forward if config.is_set("fsdp_reshard_after_forward") else None) is reshards


def test_unsupported_keys_are_counted_and_explained():
    made = translate_text(
        "distributed_type: FSDP\nfsdp_config: {fsdp_ignored_modules: head, fsdp_shard_more: 1, fsdp_min_num_params: 0}\n"
        "parallelism_config: {parallelism_config_sp_size: 2, parallelism_config_sp_backend: deepspeed}\n"
    )
    told = dict(made.lines)
    assert made.num_lost == 3
    assert told["fsdp_config.fsdp_ignored_modules"].startswith("NOT KEPT: name the frozen modules")
    assert told["fsdp_config.fsdp_shard_more"] == "NOT KEPT: Accelerate's files have no such key"
    assert told["fsdp_config.fsdp_min_num_params"].startswith("not needed: no size")
    assert told["parallelism_config.parallelism_config_sp_size"].startswith(
        "NOT KEPT: DeepSpeed's sequence parallelism"
    )
