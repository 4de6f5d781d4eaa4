"""Settings of engines and layouts."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig, TorchDynamoPlugin


def sharding_by_default():
    """Read the defaults of FullyShardedDataParallelPlugin."""
    made = FullyShardedDataParallelPlugin()
    names = """
        fsdp_version sharding_strategy backward_prefetch cpu_offload state_dict_type limit_all_gathers use_orig_params
        sync_module_states forward_prefetch activation_checkpointing cpu_ram_efficient_loading transformer_cls_names_to_wrap
        min_num_params reshard_after_forward auto_wrap_policy ignored_modules mixed_precision_policy param_init_fn
    """
    return {name: str(getattr(made, name)) for name in names.split()}


def sharding_of_version_two():
    """Read the defaults with fsdp_version=2."""
    made = FullyShardedDataParallelPlugin(fsdp_version=2)
    return {
        name: str(getattr(made, name))
        for name in ("fsdp_version", "reshard_after_forward", "state_dict_type", "sharding_strategy", "cpu_offload")
    }


def sharding_by_words():
    """Read the settings of an FSDP plugin that was built from strings and a bool."""
    made = FullyShardedDataParallelPlugin(
        sharding_strategy="SHARD_GRAD_OP",
        backward_prefetch="BACKWARD_PRE",
        state_dict_type="SHARDED_STATE_DICT",
        cpu_offload=True,
    )
    return [
        str(getattr(made, name))
        for name in ("sharding_strategy", "backward_prefetch", "state_dict_type", "cpu_offload")
    ]


def sharding_by_the_environment():
    """Read the settings of an FSDP plugin that was built from FSDP_* environment variables."""
    os.environ.update(
        FSDP_VERSION="2",
        FSDP_OFFLOAD_PARAMS="true",
        FSDP_ACTIVATION_CHECKPOINTING="true",
        FSDP_RESHARD_AFTER_FORWARD="false",
    )
    made = FullyShardedDataParallelPlugin()
    return [
        str(getattr(made, name))
        for name in ("fsdp_version", "activation_checkpointing", "reshard_after_forward", "cpu_offload")
    ]


def sharding_set_afterwards():
    """Read the settings of an FSDP plugin after set_state_dict_type and set_mixed_precision."""
    made = FullyShardedDataParallelPlugin()
    made.set_state_dict_type("FULL_STATE_DICT")
    made.set_mixed_precision("bf16")
    return str(made.state_dict_type), str(made.mixed_precision_policy.param_dtype)


def axes_by_the_environment():
    """Read the sizes of a ParallelismConfig that was built from PARALLELISM_CONFIG_* environment variables."""
    os.environ.update(PARALLELISM_CONFIG_DP_SHARD_SIZE="2", PARALLELISM_CONFIG_TP_SIZE="2")
    made = ParallelismConfig()
    return made.dp_shard_size, made.tp_size, made.cp_size, made.dp_replicate_size, made.total_size


def axes():
    """Read the properties of a ParallelismConfig."""
    made = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2)
    return [
        made.total_size,
        made.non_data_parallel_size,
        made.data_parallel_size,
        made.dp_replicate_enabled,
        made.tp_enabled,
        made.cp_enabled,
        made.dp_dim_names,
        made.non_dp_dim_names,
        made.dp_shard_cp_dim_names,
        made.fsdp_dim_names,
        made.active_mesh_dims,
    ]


def no_axes():
    """Read the properties of an empty ParallelismConfig."""
    made = ParallelismConfig()
    return [made.total_size, made.dp_shard_enabled, made.cp_backend, made.sp_backend, made.active_mesh_dims]


def building_a_mesh():
    """Read whether ParallelismConfig has the methods that build a mesh, and the result of _get_mesh."""
    made = ParallelismConfig(dp_shard_size=1)
    return callable(made.build_device_mesh), callable(made.get_device_mesh), made._get_mesh()


def compiling():
    """Read the arguments and the backend of a TorchDynamoPlugin, and whether it is disabled by default."""
    made = TorchDynamoPlugin(backend="eager", mode="default")
    return made.to_kwargs(), str(made.backend), TorchDynamoPlugin().disable


def compiling_at_prepare():
    """Call a model prepared with dynamo_backend, and read its output shape and the unwrapped model's class name."""
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    net = accelerator.prepare(torch.nn.Linear(2, 1))
    return list(net(torch.ones(1, 2)).shape), type(accelerator.unwrap_model(net, keep_torch_compile=False)).__name__


def deepspeed_settings():
    """Read the ZeRO stage of a DeepSpeedPlugin, or the type of the error from building it."""
    try:
        made = DeepSpeedPlugin(zero_stage=2)
    except Exception as error:
        return type(error).__name__
    return made.zero_stage, made.hf_ds_config.get_value("zero_optimization.stage")


def megatron_settings():
    """Read the settings of a MegatronLMPlugin."""
    from accelerate.utils import MegatronLMPlugin

    made = MegatronLMPlugin(tp_degree=1)
    return made.tp_degree, made.pp_degree, made.gradient_clipping


def commands():
    """Read distributed_type from the dict of a ClusterConfig."""
    from accelerate.commands.config.config_args import ClusterConfig

    made = ClusterConfig(
        compute_environment="LOCAL_MACHINE", distributed_type="NO", mixed_precision="no", use_cpu=True, debug=False
    )
    return made.to_dict()["distributed_type"]


def a_config_file():
    """Read a config file through accelerate.commands, as `trl env` and `trl sft` do."""
    from accelerate.commands.config import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command, launch_command_parser

    path = os.path.abspath("of_a_launcher.yaml")
    with open(path, "w") as file:
        file.write(
            "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nmixed_precision: bf16\nnum_processes: 3\n"
        )
        file.write("use_cpu: true\ndebug: false\nmachine_rank: 0\nnum_machines: 1\n")
    made = load_config_from_file(path).to_dict()
    return (
        [str(made[name]) for name in ("distributed_type", "mixed_precision", "num_processes", "use_cpu")],
        isinstance(default_config_file, str), launch_command.__name__, launch_command_parser.__name__,
    )  # fmt: skip


def launcher_names():
    """Import functions of accelerate.utils.launch."""
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    return prepare_simple_launcher_cmd_env.__name__, prepare_multi_gpu_env.__name__


def to_fsdp2():
    """Convert a config with accelerate.commands.to_fsdp2."""
    from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2

    return convert_config_to_fsdp2(
        {
            "distributed_type": "FSDP",
            "fsdp_config": {
                "fsdp_sharding_strategy": "FULL_SHARD",
                "fsdp_use_orig_params": True,
                "fsdp_state_dict_type": "FULL_STATE_DICT",
            },
        }
    )


def megatron_names():
    """Import the dummy classes for Megatron-LM."""
    from accelerate.utils import MegatronLMDummyDataLoader, MegatronLMDummyScheduler

    return MegatronLMDummyDataLoader.__name__, MegatronLMDummyScheduler.__name__
