"""Layouts that are not there yet: one clear error, and what is fine today."""

import accelerate
import pytest
import torch

import headway
from headway import Accelerator
from headway.compat.accelerate.plugins import ParallelismConfig
from headway.config.engines import TorchDynamoPlugin
from headway.config.layout_request import LayoutRequest
from headway.errors import ConfigError, UnsupportedError


@pytest.mark.parametrize(
    ("name", "value", "layout"),
    [("megatron_lm_plugin", object(), "Megatron-LM"), ("megatron_lm_plugin", headway.MegatronLMPlugin(2), "Megatron-LM")],
)  # fmt: skip
def test_an_argument_names_the_layout_that_it_asks_for(name, value, layout):
    with pytest.raises(UnsupportedError, match=f"{layout} .*is not there yet. It is planned; until then"):
        Accelerator(cpu=True, **{name: value})


def test_what_asks_for_nothing_is_fine():
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=None, deepspeed_plugin=None, deepspeed_plugins=None, megatron_lm_plugin=None,
        torch_tp_plugin=None, dynamo_backend="no", parallelism_config=ParallelismConfig(),
    )  # fmt: skip
    assert accelerator.state.dynamo_plugin.backend == "NO"
    assert accelerator.parallelism_config.total_size == 1
    assert accelerator.state.parallelism_config is accelerator.parallelism_config
    assert Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin()).torch_device_mesh is None


def test_settings_that_contradict_each_other():
    with pytest.raises(ConfigError, match="parallelism_config is of type dict"):
        Accelerator(cpu=True, parallelism_config={"tp_size": 2})
    with pytest.raises(ConfigError, match="strategy 'ddp=2' takes 2 ranks, but the run has 1"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_replicate_size=2))
    for wrong, told in {"tp_size": "tp_size=0", "dp_shard_size": "dp_shard_size=0"}.items():
        with pytest.raises(ConfigError, match=told):
            ParallelismConfig(**{wrong: 0})
    with pytest.raises(ConfigError, match="cp_size=2 and sp_size=2 both cut sequences"):
        ParallelismConfig(cp_size=2, sp_size=2)
    with pytest.raises(ConfigError, match="cp_backend='ring'; allowed: 'torch'"):
        ParallelismConfig(cp_backend="ring")
    with pytest.raises(ConfigError, match=r"cp_handler is a TorchTensorParallelConfig; give a headway.TorchContext"):
        ParallelismConfig(cp_size=2, cp_handler=headway.TorchTensorParallelConfig())
    with pytest.raises(ConfigError, match="cp_comm_strategy='ring'; allowed: allgather, alltoall"):
        headway.TorchContextParallelConfig(cp_comm_strategy="ring")
    with pytest.raises(ConfigError, match="sp_seq_length_is_variable=False needs sp_seq_length"):
        headway.DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False)


def test_sizes_of_parallelism():
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
def test_names_of_axes_are_the_peers(given):
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
    for name in names:
        assert getattr(ours, name) == getattr(theirs, name), name


def test_a_mesh_has_to_be_asked_for():
    assert ParallelismConfig().build_device_mesh("cpu") is None
    assert ParallelismConfig(tp_size=2).device_mesh is None
    with pytest.raises(ConfigError, match="say for which devices"):
        ParallelismConfig(tp_size=2).get_device_mesh()


def test_one_process_is_not_sharded():
    plugin = headway.FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    assert (accelerator.is_fsdp2, accelerator.distributed_type, accelerator.state.fsdp_plugin) == (False, "NO", None)
    assert accelerator.options.sharding.reshard_after_forward is False
    ranks = ("tensor_parallel_rank", "context_parallel_rank", "data_parallel_rank", "data_parallel_shard_rank")
    assert [getattr(accelerator, name) for name in (*ranks, "pipeline_parallel_rank")] == [0] * 5


def test_the_plugins_fields_after_it_was_made():
    plugin = headway.FullyShardedDataParallelPlugin(sharding_strategy="SHARD_GRAD_OP", fsdp_version=1)
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.cpu_offload) == (2, False, False)
    assert (plugin.state_dict_type, plugin.activation_checkpointing) == ("SHARDED_STATE_DICT", False)
    plugin.set_state_dict_type("FULL_STATE_DICT")  # before the last save, in many scripts
    plugin.set_auto_wrap_policy(torch.nn.Linear(1, 1))
    assert plugin.state_dict_type == "FULL_STATE_DICT"
    plugin.set_mixed_precision("bf16")
    plugin.set_mixed_precision("fp16")
    assert plugin.mixed_precision_policy == "bf16"
    plugin.set_mixed_precision("fp16", override=True)
    plugin.request_layout(request := LayoutRequest())
    assert request.dtypes["param_dtype"] == "fp16"


@pytest.mark.parametrize(
    ("given", "told"),
    [({"fsdp_version": 3}, "fsdp_version=3; allowed: 1, 2"),
     ({"sharding_strategy": "HALF"}, "FullyShardedDataParallelPlugin.sharding_strategy='HALF'; allowed: FULL_SHARD"),
     ({"fsdp_version": 2, "reshard_after_forward": "FULL_SHARD"}, "a value of FSDP1; with fsdp_version=2 give True or False"),
     ({"activation_checkpointing_offload": True}, "needs activation_checkpointing=True"),
     ({"min_num_params": -1}, "whole number, 0 or more"), ({"auto_wrap_policy": "x"}, "allowed: TRANSFORMER_BASED_WRAP")],
)  # fmt: skip
def test_the_plugin_checks_its_fields(given, told):
    with pytest.raises(ConfigError, match=told):
        headway.FullyShardedDataParallelPlugin(**given)


def test_stand_ins_keep_what_they_were_given():
    optimizer = headway.DummyOptim([torch.zeros(1)], lr=0.1, eps=1e-8)
    schedule = headway.DummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=2)
    assert (optimizer.lr, optimizer.weight_decay, optimizer.kwargs) == (0.1, 0, {"eps": 1e-8})
    assert (schedule.optimizer, schedule.total_num_steps, schedule.warmup_num_steps) == (optimizer, 10, 2)
