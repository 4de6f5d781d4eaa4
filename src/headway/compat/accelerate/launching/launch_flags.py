"""Flags and keys of other launchers that have no meaning here, and what to use in their place."""

from headway.compat.accelerate.launching.layout_words import explain_key
from headway.errors import ConfigError

_SHARDING = "set the layout with --strategy fsdp, and see `headway launch --help-all` for its options"
_DEEPSPEED = "DeepSpeed is a strategy: --strategy zero2, with --deepspeed_config_file where it has a JSON"
_MESH = "sizes are part of the layout: --strategy fsdp+tp=2"
_MEGATRON = "Headway does not drive Megatron-LM"
_FP8 = "float8 runs through torchao: --mixed_precision fp8, and its options in the script: kwargs_handlers=[Float8Options(...)]"
_TPU = "TPUs need torch_xla, which Headway does not drive"
_SAGEMAKER = "Headway does not talk to SageMaker; run `headway launch` inside the job's container"
_MPI = "start the launcher through MPI itself: mpirun -n MACHINES headway launch SCRIPT"

_BY_ANSWER = {
    _SHARDING: "fsdp hsdp",
    _DEEPSPEED: "deepspeed deepspeed_config",
    _MESH: "tp tp_size tensor_parallel_size dp_shard_size dp_replicate_size cp_size pp_size sp_size",
    _MEGATRON: "use_megatron_lm",
    _TPU: "tpu tpu_cluster no_tpu_cluster tpu_use_sudo vm downcast_bf16",
    f"{_TPU}; set variables before the command: NAME=value headway launch SCRIPT": "env",
    f"{_TPU}; other runs start SCRIPT itself": "main_training_function",
    _SAGEMAKER: "aws_access_key_id aws_secret_access_key",
    _MPI: "mpirun_hostfile mpirun_ccl",
    "accelerators are found by themselves; take the flag out": "use_xpu use_mps_device",
    "Intel's extension is part of torch now; take the flag out": "ipex",
    "it has no effect here: machines meet at --main_process_ip and --main_process_port": "same_network",
    "take it out: on one machine the launcher binds a free port by itself": "standalone",
    "use --strategy": "layout",
    "use --fsdp_offload_params true": "offload_params",
    "use -n": "num_gpus",
    "use -n for the processes of all machines together": "nproc_per_node nproc",
    "use --num_machines": "nnodes",
    "use --machine_rank": "node_rank",
    "use --main_process_ip": "master_addr",
    "use --main_process_port": "master_port",
    "use --main_process_ip and --main_process_port": "rdzv_endpoint",
}
_ONE = {name: answer for answer, names in _BY_ANSWER.items() for name in names.split()}
_FAMILIES = {"megatron_lm_": _MEGATRON, "fp8_": _FP8, "sagemaker_": _SAGEMAKER, "tpu_": _TPU}
_OF_FILES = ("compute_environment", "distributed_type", "use_cpu", "commands", "command_file")


def advice(name: str) -> str | None:
    """What to use in the place of the flag or key `name`; None where no other launcher has it either."""
    plain = name.lstrip("-").replace("-", "_")
    if plain in _ONE:
        return _ONE[plain]
    return next((text for prefix, text in _FAMILIES.items() if plain.startswith(prefix)), None)


def explain_file_key(key: str) -> str:
    """What to do about a key of Accelerate's, or a flag of its launcher's, in a config file of Headway's; empty for any other."""
    if key.endswith("_config") or key in _OF_FILES or advice(key):
        return "; this looks like a file of Accelerate's: `headway config import FILE` translates it"
    said = explain_key(key)
    return "" if said is None else f": {said}"


def refuse(flag: str) -> None:
    """Raise where `flag` is one of another launcher.

    Raises:
        ConfigError: the flag is known and has no meaning here; the message says what to use.
    """
    text = advice(flag)
    if text is not None:
        raise ConfigError(f"{flag} is not a flag of `headway launch`: {text}")
