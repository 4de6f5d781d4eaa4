"""Flags and keys of other launchers that have no meaning here, and what to use in their place."""

from headway.compat.accelerate.layout_words import explain_key
from headway.errors import ConfigError

_SHARDING = "set the layout with --strategy fsdp, and see `headway launch --help` for its options"
_DEEPSPEED = "DeepSpeed is a strategy: --strategy zero2, with --deepspeed_config_file where it has a JSON"
_MESH = "sizes are part of the layout: --strategy fsdp+tp=2"
_MEGATRON = "Headway does not drive Megatron-LM"
_FP8 = "float8 runs through torchao: --mixed_precision fp8, and its options in the script: kwargs_handlers=[Float8Options(...)]"
_TPU = "TPUs need torch_xla, which Headway does not drive"
_SAGEMAKER = "Headway does not talk to SageMaker; run `headway launch` inside the job's container"
_MPI = "start the launcher through MPI itself: mpirun -n MACHINES headway launch SCRIPT"
_TORCHRUN_RANKS = "use -n for the processes of all machines together"

_ONE = {
    "use_megatron_lm": _MEGATRON,
    "tp_size": _MESH,
    "tensor_parallel_size": _MESH,
    "dp_shard_size": _MESH,
    "dp_replicate_size": _MESH,
    "cp_size": _MESH,
    "pp_size": _MESH,
    "sp_size": _MESH,
    "fsdp": _SHARDING,
    "deepspeed": _DEEPSPEED,
    "deepspeed_config": _DEEPSPEED,
    "hsdp": _SHARDING,
    "tp": _MESH,
    "layout": "use --strategy",
    "tpu": _TPU,
    "tpu_cluster": _TPU,
    "no_tpu_cluster": _TPU,
    "tpu_use_sudo": _TPU,
    "vm": _TPU,
    "env": f"{_TPU}; set variables before the command: NAME=value headway launch SCRIPT",
    "main_training_function": f"{_TPU}; other runs start SCRIPT itself",
    "downcast_bf16": _TPU,
    "same_network": "it has no effect here: machines meet at --main_process_ip and --main_process_port",
    "ipex": "Intel's extension is part of torch now; take the flag out",
    "use_xpu": "accelerators are found by themselves; take the flag out",
    "use_mps_device": "accelerators are found by themselves; take the flag out",
    "mpirun_hostfile": _MPI,
    "mpirun_ccl": _MPI,
    "offload_params": "use --fsdp_offload_params true",
    "nproc_per_node": _TORCHRUN_RANKS,
    "nproc": _TORCHRUN_RANKS,
    "nnodes": "use --num_machines",
    "node_rank": "use --machine_rank",
    "master_addr": "use --main_process_ip",
    "master_port": "use --main_process_port",
    "rdzv_endpoint": "use --main_process_ip and --main_process_port",
    "standalone": "take it out: on one machine the launcher binds a free port by itself",
    "aws_access_key_id": _SAGEMAKER,
    "aws_secret_access_key": _SAGEMAKER,
    "num_gpus": "use -n",
}

_FAMILIES = {
    "megatron_lm_": _MEGATRON,
    "fp8_": _FP8,
    "sagemaker_": _SAGEMAKER,
    "tpu_": _TPU,
}


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
