"""Test Accelerate's plugins and parallelism settings: supported fields, contradictions, and unsupported layouts."""

from dataclasses import fields

import accelerate
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, CPUOffloadPolicy, ShardingStrategy, StateDictType

import headway
from headway import Accelerator
from headway.common import env
from headway.compat.accelerate.plugins import FullyShardedDataParallelPlugin, ParallelismConfig
from headway.core.config.compilation import TorchDynamoPlugin
from headway.core.config.layout_request import LayoutRequest
from headway.errors import ConfigError, UnsupportedError


@pytest.mark.parametrize(
    ("name", "value", "layout"),
    [("megatron_lm_plugin", object(), "Megatron-LM"), ("megatron_lm_plugin", headway.MegatronLMPlugin(2), "Megatron-LM")],
)  # fmt: skip
def test_unsupported_layout_is_named(name, value, layout):
    with pytest.raises(UnsupportedError, match=f"{layout} .*is not supported yet. Leave the plugin out"):
        Accelerator(cpu=True, **{name: value})


def test_plugins_without_an_effect_are_accepted():
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=None, deepspeed_plugin=None, deepspeed_plugins=None, megatron_lm_plugin=None,
        torch_tp_plugin=None, dynamo_backend="no", parallelism_config=ParallelismConfig(),
    )  # fmt: skip
    assert accelerator.state.dynamo_plugin.backend == "NO"
    assert accelerator.parallelism_config.total_size == 1
    assert accelerator.state.parallelism_config is accelerator.parallelism_config
    assert Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin()).torch_device_mesh is None


def test_contradicting_settings_are_refused():
    with pytest.raises(ConfigError, match="parallelism_config is of type dict"):
        Accelerator(cpu=True, parallelism_config={"tp_size": 2})
    with pytest.raises(ConfigError, match="strategy 'ddp=2' takes 2 ranks, but the run has 1"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_replicate_size=2))
    for wrong, told in {"tp_size": "tp_size=0", "dp_shard_size": "dp_shard_size=0"}.items():
        with pytest.raises(ConfigError, match=told):
            ParallelismConfig(**{wrong: 0})
    with pytest.raises(ConfigError, match="cp_size=2 and sp_size=2 both shard sequences"):
        ParallelismConfig(cp_size=2, sp_size=2)
    with pytest.raises(ConfigError, match="cp_backend='ring'; allowed: 'torch'"):
        ParallelismConfig(cp_backend="ring")
    with pytest.raises(ConfigError, match=r"cp_handler is a TorchTensorParallelConfig; give a headway.TorchContext"):
        ParallelismConfig(cp_size=2, cp_handler=headway.TorchTensorParallelConfig())
    with pytest.raises(ConfigError, match="cp_comm_strategy='ring'; allowed: allgather, alltoall"):
        headway.TorchContextParallelConfig(cp_comm_strategy="ring")
    with pytest.raises(ConfigError, match="sp_seq_length_is_variable=False needs sp_seq_length"):
        headway.DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False)


def test_parallelism_config_multiplies_its_sizes():
    sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3, tp_size=2)
    assert (sizes.total_size, sizes.data_parallel_size, sizes.non_data_parallel_size) == (12, 6, 2)
    assert (sizes.dp_replicate_enabled, sizes.dp_shard_enabled, sizes.tp_enabled) == (True, True, True)
    assert (sizes.cp_enabled, sizes.sp_enabled, sizes.cp_backend) == (False, False, "torch")
    assert isinstance(sizes.tp_handler, headway.TorchTensorParallelConfig)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"dp_replicate_size": 2, "dp_shard_size": 4},
        {"dp_shard_size": 2, "tp_size": 2},
        {"cp_size": 2, "dp_shard_size": 2},
    ],
)
def test_axis_names_equal_accelerates(given):
    theirs, ours = accelerate.ParallelismConfig(**given), ParallelismConfig(**given)
    names = [
        "dp_dim_names",
        "non_dp_dim_names",
        "dp_shard_cp_dim_names",
        "dp_cp_dim_names",
        "fsdp_dim_names",
        "active_mesh_dims",
        "total_size",
        "non_data_parallel_size",
        "data_parallel_size",
        "cp_backend",
        "sp_backend",
    ]
    assert ours._get_mesh() == theirs._get_mesh()
    for name in names:
        assert getattr(ours, name) == getattr(theirs, name), name


def test_device_mesh_needs_a_device_type():
    assert ParallelismConfig().build_device_mesh("cpu") is None
    assert ParallelismConfig(tp_size=2).device_mesh is None
    with pytest.raises(ConfigError, match="the first call needs a device type"):
        ParallelismConfig(tp_size=2).get_device_mesh()


def test_single_process_is_not_sharded():
    plugin = headway.FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    assert (accelerator.is_fsdp2, accelerator.distributed_type, accelerator.state.fsdp_plugin) == (False, "NO", None)
    assert accelerator.options.sharding.reshard_after_forward is False
    ranks = ("tensor_parallel_rank", "context_parallel_rank", "data_parallel_rank", "data_parallel_shard_rank")
    assert [getattr(accelerator, name) for name in (*ranks, "pipeline_parallel_rank")] == [0] * 5


WORDS = {
    "fsdp_version": [1, 2],
    "sharding_strategy": ["SHARD_GRAD_OP", "hybrid_shard", "3", ShardingStrategy.NO_SHARD],
    "backward_prefetch": ["BACKWARD_PRE", "no_prefetch", "2", BackwardPrefetch.BACKWARD_POST],
    "state_dict_type": ["SHARDED_STATE_DICT", "full_state_dict", "1", StateDictType.SHARDED_STATE_DICT],
    "cpu_offload": [True, False],
    "auto_wrap_policy": ["transformer_based_wrap", "SIZE_BASED_WRAP", "no_wrap"],
    "transformer_cls_names_to_wrap": ["A,B"],
    "min_num_params": [7],
    "use_orig_params": [True, False],
    "activation_checkpointing": [True, False],
    "cpu_ram_efficient_loading": [False],
    "mixed_precision_policy": ["bf16", "fp32"],
}
VARIABLES = {
    "FSDP_VERSION": ["1", "2"],
    "FSDP_SHARDING_STRATEGY": ["SHARD_GRAD_OP", "2"],
    "FSDP_RESHARD_AFTER_FORWARD": ["false", "true"],
    "FSDP_OFFLOAD_PARAMS": ["true", "false"],
    "FSDP_BACKWARD_PREFETCH": ["BACKWARD_PRE", "NO_PREFETCH"],
    "FSDP_STATE_DICT_TYPE": ["FULL_STATE_DICT", "SHARDED_STATE_DICT"],
    "FSDP_AUTO_WRAP_POLICY": ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"],
    "FSDP_TRANSFORMER_CLS_TO_WRAP": ["A,B"],
    "FSDP_MIN_NUM_PARAMS": ["100"],
    "FSDP_ACTIVATION_CHECKPOINTING": ["true"],
    "FSDP_USE_ORIG_PARAMS": ["true"],
}


def sample_some(choices):
    return st.fixed_dictionaries({}, optional={name: st.sampled_from(each) for name, each in choices.items()})


@settings(max_examples=200, deadline=None)
@given(given=sample_some(WORDS), variables=sample_some(VARIABLES), later=st.sampled_from([None, "FULL_STATE_DICT"]))
def test_fsdp_plugin_fields_equal_accelerates(given, variables, later):
    if "sharding_strategy" in given and 2 in (given.get("fsdp_version"), int(variables.get("FSDP_VERSION", 1))):
        given = {**given, "fsdp_version": 1}  # an error in Accelerate, but valid in Headway
    written = "FSDP_CPU_RAM_EFFICIENT_LOADING"  # Accelerate's plugin sets this variable
    with env.patch_variables({**dict.fromkeys([*VARIABLES, written]), **variables}):
        made = [kind(**given) for kind in (accelerate.FullyShardedDataParallelPlugin, FullyShardedDataParallelPlugin)]
    for each in made:
        if later:
            each.set_state_dict_type(later)
            each.set_mixed_precision("fp16", override=True)
    theirs, ours = ({field.name: getattr(each, field.name) for field in fields(each)} for each in made)
    assert str(ours.pop("cpu_offload")) == str(
        theirs.pop("cpu_offload")
    )  # policies of version 2 are not equal by value
    assert ours == theirs


def test_changed_fsdp_plugin_requests_its_current_values():
    plugin = FullyShardedDataParallelPlugin(sharding_strategy="SHARD_GRAD_OP")
    plugin.set_auto_wrap_policy(torch.nn.Linear(1, 1))
    plugin.set_mixed_precision("fp16")
    plugin.set_mixed_precision("bf16")  # has no effect, because a policy is set
    plugin.cpu_offload = CPUOffload(offload_params=True)
    plugin.request_layout(request := LayoutRequest())
    assert request.dtypes["param_dtype"] == torch.float16
    assert {name: value for name, (value, _) in request.settings.items()} == {
        "fsdp_reshard_after_forward": False, "fsdp_offload_params": True,
    }  # fmt: skip
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.backward_prefetch) == (2, False, None)
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    with pytest.raises(ConfigError, match="'HALF' is no StateDictType; allowed: FULL_STATE_DICT"):
        plugin.set_state_dict_type("HALF")


@pytest.mark.parametrize(
    ("given", "told"),
    [({"fsdp_version": 3}, "fsdp_version=3; allowed: 1, 2"),
     ({"sharding_strategy": "HALF"}, "FullyShardedDataParallelPlugin.sharding_strategy='HALF'; allowed: FULL_SHARD"),
     ({"fsdp_version": 2, "reshard_after_forward": "FULL_SHARD"}, "a value of FSDP1; with fsdp_version=2 give True or False"),
     ({"activation_checkpointing_offload": True}, "needs activation_checkpointing=True"),
     ({"min_num_params": -1}, "whole number, 0 or more"), ({"auto_wrap_policy": "x"}, "allowed: TRANSFORMER_BASED_WRAP")],
)  # fmt: skip
def test_fsdp_plugin_checks_its_fields(given, told):
    with pytest.raises(ConfigError, match=told):
        headway.FullyShardedDataParallelPlugin(**given)


def test_dummy_optimizer_and_scheduler_keep_their_arguments():
    optimizer = headway.DummyOptim([torch.zeros(1)], lr=0.1, eps=1e-8)
    schedule = headway.DummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=2)
    assert (optimizer.lr, optimizer.weight_decay, optimizer.kwargs) == (0.1, 0, {"eps": 1e-8})
    assert (schedule.optimizer, schedule.total_num_steps, schedule.warmup_num_steps) == (optimizer, 10, 2)
