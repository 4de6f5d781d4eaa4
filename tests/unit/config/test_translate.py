"""Files of Accelerate's: what each key becomes."""

import pytest
import yaml

from headway.config.launch import LaunchConfig
from headway.config.translate import translate
from headway.errors import ConfigError

# What the peer's `config` writes for a machine with eight GPUs.
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


def of(text):
    return translate(yaml.safe_load(text), "a.yaml")


def test_an_ordinary_file_is_kept_whole():
    made = of(GPUS)
    assert made.num_lost == 0
    assert [key for key, _ in made.lines] == list(yaml.safe_load(GPUS))
    assert made.config == LaunchConfig(
        debug=False, enable_cpu_affinity=False, gpu_ids="all", machine_rank=0, mixed_precision="bf16", num_machines=1,
        num_processes=8, rdzv_backend="static", cpu=False,
    )  # fmt: skip


def test_sharding_is_said_to_be_lost():
    made = of("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_offload_params: false\n")
    assert made.num_lost == 2
    told = dict(made.lines)
    assert told["distributed_type"].startswith("NOT KEPT: FSDP: sharded training")
    assert told["fsdp_config.fsdp_version"].startswith("NOT KEPT")
    assert told["fsdp_config.fsdp_offload_params"] == "nothing to keep: off"


def test_accumulation_hides_in_deepspeeds_section():
    made = of("deepspeed_config:\n  gradient_accumulation_steps: 4\n  zero_stage: 2\n  gradient_clipping: 1.0\n")
    assert made.config.gradient_accumulation_steps == 4
    assert made.num_lost == 2
    assert "clip_grad_norm_" in dict(made.lines)["deepspeed_config.gradient_clipping"]


def test_processes_on_the_cpu():
    assert of("distributed_type: MULTI_CPU\nnum_processes: 4\nuse_cpu: true\n").config == LaunchConfig(
        cpu=True, num_processes=4
    )


@pytest.mark.parametrize("kind", ["MULTI_GPU", "MULTI_NPU", "MULTI_HPU"])
def test_every_kind_of_accelerator_is_found_by_the_launch(kind):
    made = of(f"distributed_type: {kind}\n")
    assert made.num_lost == 0
    assert "one process per accelerator" in dict(made.lines)["distributed_type"]


def test_undecided_stays_undecided():
    assert of("num_processes: -1\nmain_process_ip: null\n").config == LaunchConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("compute_environment: AMAZON_SAGEMAKER", "SageMaker"),
        ("num_procesess: 2", "num_procesess .*is not a key of Accelerate's config files; did you mean num_processes"),
        ("num_processes: many", "num_processes='many' .* whole number"),
        ("fsdp_config: 3", "must hold settings"),
        ("rdzv_backend: etcd", "rdzv_backend='etcd'"),
    ],
)
def test_what_cannot_be(text, message):
    with pytest.raises(ConfigError, match=message):
        of(text)


def test_fp8_and_tpus_are_lost_by_name():
    made = of("mixed_precision: fp8\ndistributed_type: XLA\ntpu_name: mine\n")
    assert made.num_lost == 3
    assert "float8" in dict(made.lines)["mixed_precision"]
    assert "TPU" in dict(made.lines)["tpu_name"]
