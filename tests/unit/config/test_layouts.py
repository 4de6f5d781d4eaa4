"""Layouts that are not there yet: one clear error, and what is fine today."""

import pytest
import torch

import headway
from headway import Accelerator
from headway.config.layouts import ParallelismConfig, TorchDynamoPlugin
from headway.errors import ConfigError, UnsupportedError


@pytest.mark.parametrize(
    ("plugin", "layout"),
    [("FullyShardedDataParallelPlugin", "FSDP"), ("MegatronLMPlugin", "Megatron-LM"),
     ("TorchTensorParallelPlugin", "tensor parallelism")],
)  # fmt: skip
def test_a_plugin_names_its_layout(plugin, layout):
    with pytest.raises(UnsupportedError, match=f"^{layout} .*is not there yet. It is planned; until then"):
        getattr(headway, plugin)(zero_stage=2)
    assert not isinstance(None, getattr(headway, plugin))


@pytest.mark.parametrize(
    ("name", "value", "layout"),
    [("fsdp_plugin", object(), "FSDP"), ("megatron_lm_plugin", object(), "Megatron-LM"),
     ("torch_tp_plugin", object(), "tensor parallelism"), ("dynamo_backend", "inductor", "compilation"),
     ("dynamo_plugin", TorchDynamoPlugin(backend="inductor"), "compilation"),
     ("parallelism_config", ParallelismConfig(tp_size=2), "tensor parallelism")],
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
    with pytest.raises(ConfigError, match="not both"):
        Accelerator(cpu=True, dynamo_backend="no", dynamo_plugin=TorchDynamoPlugin())
    with pytest.raises(ConfigError, match="dynamo_backend='fast' is unknown; allowed: AOT_EAGER"):
        Accelerator(cpu=True, dynamo_backend="fast")
    with pytest.raises(ConfigError, match="parallelism_config is a dict"):
        Accelerator(cpu=True, parallelism_config={"tp_size": 2})
    with pytest.raises(ConfigError, match="dp_replicate_size=2, but the run has 1 processes"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_replicate_size=2))
    with pytest.raises(ConfigError, match="tp_size=0"):
        ParallelismConfig(tp_size=0)


def test_sizes_of_parallelism():
    sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3, tp_size=2)
    assert (sizes.total_size, sizes.data_parallel_size, sizes.non_data_parallel_size) == (12, 6, 2)
    assert (sizes.dp_replicate_enabled, sizes.dp_shard_enabled, sizes.tp_enabled) == (True, True, True)
    assert (sizes.cp_enabled, sizes.sp_enabled, sizes.cp_backend) == (False, False, "torch")


def test_stand_ins_keep_what_they_were_given():
    optimizer = headway.DummyOptim([torch.zeros(1)], lr=0.1, eps=1e-8)
    schedule = headway.DummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=2)
    assert (optimizer.lr, optimizer.weight_decay, optimizer.kwargs) == (0.1, 0, {"eps": 1e-8})
    assert (schedule.optimizer, schedule.total_num_steps, schedule.warmup_num_steps) == (optimizer, 10, 2)


def test_a_model_that_is_compiled_before_is_prepared_as_the_advice_says():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    compiled = accelerator.prepare(torch.compile(model, backend="eager"))
    accelerator.backward(compiled(torch.ones(1, 2)).sum())
    assert model.weight.grad.tolist() == [[1.0, 1.0]]
    assert accelerator.unwrap_model(compiled, keep_torch_compile=False) is model
