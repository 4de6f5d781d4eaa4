"""The layout of a run: requests of the script and the launcher, and the error if they contradict each other."""

import json

import pytest

from headway import (
    ActivationCheckpointing,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchTensorParallelPlugin,
)
from headway.compat.accelerate.plugins import get_parallelism_config
from headway.core.config.engines import EngineOptions
from headway.core.config.layout_choice import WHOLE_MODEL, RequestedLayout
from headway.core.config.mesh import Layout
from headway.core.config.parallelism import ShardingOptions
from headway.errors import ConfigError, UnsupportedError
from headway.layouts.deepspeed.plugin import DeepSpeedPlugin, read_launched_settings

HERE = "Accelerator(...) at train.py:12"


def request(strategy=None, fsdp=None, tensor_parallel=None, parallelism=None, deepspeed=None):
    return RequestedLayout(strategy, HERE, fsdp, parallelism, tensor_parallel, deepspeed_plugin=deepspeed)


def decide(num_ranks=8, options=None, **said):
    return request(**said).resolve(options or EngineOptions(), num_ranks, num_ranks)


@pytest.fixture
def launched(monkeypatch):
    """Function that sets the launcher's payload: settings by name, from the command line or a file."""
    monkeypatch.delenv("HEADWAY_RUN", raising=False)
    monkeypatch.delenv("HEADWAY_STRATEGY", raising=False)

    def tell(by="command line", force=False, more=None, **settings):
        told = {name: {"value": value, "origin": f"{by}: --{name}"} for name, value in settings.items()}
        content = {"version": 1, "settings": told, "num_processes": 8, "force": force, **(more or {})}
        monkeypatch.setenv("HEADWAY_RUN", json.dumps(content))

    return tell


pytestmark = pytest.mark.usefixtures("launched")


def test_without_any_request():
    chosen = decide()
    assert (chosen.text, chosen.layout) == ("ddp", Layout(replicate=8))
    assert chosen.options.sharding == ShardingOptions()
    assert get_parallelism_config(chosen) is None


@pytest.mark.parametrize(
    ("said", "layout"),
    [
        ({"strategy": "FSDP + tp=2"}, Layout(shard=4, tp=2)),
        ({"fsdp": FullyShardedDataParallelPlugin()}, Layout(shard=8)),
        ({"fsdp": FullyShardedDataParallelPlugin(sharding_strategy="NO_SHARD")}, Layout(replicate=8)),
        ({"parallelism": ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)}, Layout(replicate=2, shard=4)),
        ({"tensor_parallel": TorchTensorParallelPlugin(tp_size=8)}, Layout(tp=8)),
        (
            {"fsdp": FullyShardedDataParallelPlugin(), "parallelism": ParallelismConfig(dp_shard_size=4, tp_size=2)},
            Layout(shard=4, tp=2),
        ),
        (
            {
                "tensor_parallel": TorchTensorParallelPlugin(tp_size=2),
                "parallelism": ParallelismConfig(dp_shard_size=4),
            },
            Layout(shard=4, tp=2),
        ),
        ({"strategy": "fsdp+tp=2", "fsdp": FullyShardedDataParallelPlugin()}, Layout(shard=4, tp=2)),
        ({"strategy": "hsdp=4", "fsdp": FullyShardedDataParallelPlugin()}, Layout(replicate=2, shard=4)),
        ({"strategy": "fsdp", "parallelism": ParallelismConfig(dp_shard_size=8)}, Layout(shard=8)),
        ({"strategy": "tp", "parallelism": ParallelismConfig()}, Layout(tp=8)),
    ],
)
def test_the_script_requests_a_layout(said, layout):
    chosen = decide(**said)
    assert chosen.layout == layout
    if get_parallelism_config(chosen) is not None:
        assert get_parallelism_config(chosen).total_size == 8
        assert get_parallelism_config(chosen).tp_size == layout.tp


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            {"strategy": "ddp", "fsdp": FullyShardedDataParallelPlugin()},
            "strategy='ddp' contradicts 'fsdp' from fsdp_plugin",
        ),
        (
            {"strategy": "fsdp", "parallelism": ParallelismConfig(dp_shard_size=4, tp_size=2)},
            "strategy='fsdp' contradicts 'fsdp=4+tp=2' from parallelism_config.dp_shard_size, parallelism_config.tp_size",
        ),
        (
            {"strategy": "fsdp", "fsdp": FullyShardedDataParallelPlugin(sharding_strategy="HYBRID_SHARD")},
            "contradicts 'hsdp' from fsdp_plugin, fsdp_plugin.sharding_strategy",
        ),
        (
            {"strategy": "fsdp", "fsdp": FullyShardedDataParallelPlugin(sharding_strategy="NO_SHARD")},
            "contradicts 'ddp' from",
        ),
        (
            {"fsdp": FullyShardedDataParallelPlugin(), "parallelism": ParallelismConfig(tp_size=8)},
            "fsdp_plugin asks for a sharded model, but with parallelism_config.tp_size no processes are left to shard across",
        ),
        (
            {"tensor_parallel": TorchTensorParallelPlugin(tp_size=4), "parallelism": ParallelismConfig(tp_size=2)},
            "parallelism_config.tp_size=2 contradicts torch_tp_plugin.tp_size=4; keep one of them",
        ),
        (
            {"parallelism": ParallelismConfig(dp_shard_size=4)},
            "takes 4 ranks, but the run has 8; the nearest that fit 8: fsdp=8",
        ),
        ({"strategy": "fspd"}, "'fspd' is unknown; did you mean fsdp?"),
        ({"strategy": 8}, "strategy is of type int; give strategy='fsdp'"),
        (
            {"fsdp": {"fsdp_version": 2}},
            "fsdp_plugin is of type dict; give fsdp_plugin=headway.FullyShardedDataParallelPlugin",
        ),
        ({"parallelism": {"tp_size": 2}}, "parallelism_config is of type dict"),
    ],
)
def test_what_contradicts_itself_names_both(said, told):
    with pytest.raises(ConfigError) as raised:
        decide(**said)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            {"parallelism": ParallelismConfig(sp_size=2, dp_shard_size=4)},
            "parallelism_config.sp_size: DeepSpeed's sequence",
        ),
        (
            {"fsdp": FullyShardedDataParallelPlugin(ignored_modules="head")},
            "fsdp_plugin.ignored_modules: name the frozen",
        ),
        (
            {"tensor_parallel": TorchTensorParallelPlugin(2, torch_device_mesh=object())},
            "the Accelerator creates the mesh",
        ),
    ],
)
def test_what_is_refused(said, told):
    with pytest.raises(UnsupportedError, match=told):
        decide(**said)


def test_the_launcher_decides_where_the_script_does_not(launched):
    launched(strategy="hsdp=4", fsdp_offload_params=True, fsdp_transformer_layer_cls_to_wrap="Block, Head")
    chosen = decide()
    assert chosen.layout == Layout(replicate=2, shard=4)
    assert chosen.options.sharding == ShardingOptions(cpu_offload=True, units=("Block", "Head"))
    assert get_parallelism_config(chosen).sizes == {"dp_replicate": 2, "dp_shard": 4, "tp": 1, "cp": 1, "sp": 1}


def test_a_bare_hsdp_knows_the_machines(launched):
    launched(strategy="hsdp", more={"ranks_per_machine": 2})
    assert request().resolve(EngineOptions(), 8, 1).layout == Layout(replicate=4, shard=2)
    launched(strategy="hsdp")
    assert request().resolve(EngineOptions(), 8, 4).layout == Layout(replicate=2, shard=4)


def test_code_against_the_command_line(launched):
    launched(strategy="fsdp")
    with pytest.raises(ConfigError, match=f"{HERE.split('(')[0]}.*against --strategy fsdp on the command line"):
        decide(strategy="tp")
    launched(strategy="fsdp", force=True)
    assert decide(strategy="tp").layout == Layout(shard=8)
    launched(by="file", strategy="fsdp")
    assert decide(strategy="tp").layout == Layout(tp=8)
    launched(strategy="ddp=2+fsdp=4")
    assert decide(strategy="hsdp=4").layout == Layout(replicate=2, shard=4)  # the same in other words


def test_with_a_plugin_alone_the_launcher_sets_the_sizes(launched):
    launched(strategy="fsdp+tp=2")
    assert decide(fsdp=FullyShardedDataParallelPlugin()).layout == Layout(shard=4, tp=2)
    launched(strategy="tp")
    with pytest.raises(ConfigError, match=r"fsdp_plugin of Accelerator.*against --strategy tp"):
        decide(fsdp=FullyShardedDataParallelPlugin())


def test_options_by_the_same_rules(launched):
    launched(strategy="fsdp", fsdp_reshard_after_forward=True, fsdp_offload_params=True)
    with pytest.raises(ConfigError, match=r"fsdp_plugin.cpu_offload of .*against --fsdp_offload_params on"):
        decide(fsdp=FullyShardedDataParallelPlugin(cpu_offload=False))
    with pytest.raises(ConfigError, match="--fsdp_reshard_after_forward on the command line"):
        decide(options=EngineOptions(sharding=ShardingOptions(reshard_after_forward=False, cpu_offload=True)))
    launched(by="file", strategy="fsdp", fsdp_offload_params=True)
    assert decide(fsdp=FullyShardedDataParallelPlugin(cpu_offload=False)).options.sharding.cpu_offload is False
    assert decide(fsdp=FullyShardedDataParallelPlugin()).options.sharding.cpu_offload is True


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, ShardingOptions()),
        ({"reshard_after_forward": True}, ShardingOptions()),
        ({"reshard_after_forward": False}, ShardingOptions(reshard_after_forward=False)),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, ShardingOptions(reshard_after_forward=False)),
        ({"cpu_offload": True}, ShardingOptions(cpu_offload=True)),
        ({"transformer_cls_names_to_wrap": ["A", "B"]}, ShardingOptions(units=("A", "B"))),
        ({"auto_wrap_policy": "transformer_based_wrap"}, ShardingOptions()),
        ({"auto_wrap_policy": "size_based_wrap", "min_num_params": 7}, ShardingOptions(min_num_params=7)),
        ({"auto_wrap_policy": "size_based_wrap"}, ShardingOptions(min_num_params=100_000_000)),
        ({"min_num_params": 7}, ShardingOptions(min_num_params=7)),
        ({"auto_wrap_policy": "no_wrap"}, ShardingOptions(min_num_params=WHOLE_MODEL)),
        ({"mixed_precision_policy": "bf16"}, ShardingOptions(param_dtype="bfloat16", reduce_dtype="bfloat16")),
        ({"mixed_precision_policy": {"reduce_dtype": "fp32"}}, ShardingOptions(reduce_dtype="float32")),
    ],
)
def test_a_plugins_fields(given, wanted):
    assert decide(fsdp=FullyShardedDataParallelPlugin(**given)).options.sharding == wanted


def test_classes_and_sizes_are_two_rules():
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap", transformer_cls_names_to_wrap=["A"])
    with pytest.raises(ConfigError, match="no_wrap does not use classes, but some are named: A"):
        decide(fsdp=plugin)


def test_handlers_and_plugins_are_not_mixed():
    with pytest.raises(ConfigError, match=r"ShardingOptions in kwargs_handlers contradicts fsdp_plugin.cpu_offload"):
        decide(
            options=EngineOptions(sharding=ShardingOptions(units=("A",))),
            fsdp=FullyShardedDataParallelPlugin(cpu_offload=True),
        )
    mine = ShardingOptions(units=("A",), reshard_after_forward=2)
    assert decide(strategy="fsdp", options=EngineOptions(sharding=mine)).options.sharding == mine
    with pytest.raises(ConfigError, match=r"reshard_after_forward=3\) does not divide 8 shards"):
        decide(strategy="fsdp", options=EngineOptions(sharding=ShardingOptions(reshard_after_forward=3)))


def test_options_that_were_typed_for_another_layout(launched):
    launched(fsdp_offload_params=True)
    with pytest.raises(ConfigError, match="needs a layout with shards, but the layout is ddp: 8 replicas; remove it"):
        decide()
    decide(strategy="fsdp")
    decide(num_ranks=1)
    launched(by="file", fsdp_offload_params=True)
    decide()


def test_activation_checkpointing(launched):
    plugin = FullyShardedDataParallelPlugin(
        activation_checkpointing=True, activation_checkpointing_offload=True, transformer_cls_names_to_wrap=["Block"]
    )
    assert decide(fsdp=plugin).options.checkpointing == ActivationCheckpointing(offload=True, blocks=("Block",))
    launched(activation_checkpointing=True)  # with any layout
    assert decide().options.checkpointing == ActivationCheckpointing()
    mine = ActivationCheckpointing(every=2)
    assert decide(options=EngineOptions(checkpointing=mine)).options.checkpointing == mine
    launched(activation_checkpointing=False)
    with pytest.raises(ConfigError, match="--activation_checkpointing"):
        decide(options=EngineOptions(checkpointing=mine))
    launched(activation_checkpointing_offload=True)
    with pytest.raises(ConfigError, match="add --activation_checkpointing"):
        decide()


def test_what_changes_nothing_is_said_once(caplog):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True, backward_prefetch="BACKWARD_PRE")
    assert [text.partition(" ")[0] for text in request(fsdp=plugin).request.ignored] == [
        "fsdp_plugin.fsdp_version", "fsdp_plugin.backward_prefetch", "fsdp_plugin.use_orig_params",
    ]  # fmt: skip


def test_the_launcher_requests_deepspeed(launched):
    launched(strategy="zero3", offload_param_device="cpu", gradient_clipping=1.0)
    chosen = decide()
    assert (chosen.text, chosen.is_deepspeed, get_parallelism_config(chosen)) == ("zero3", True, None)
    assert read_launched_settings() == {"offload_param_device": "cpu", "gradient_clipping": 1.0}
    assert (chosen.engine.zero_stage, chosen.engine.offload_param_device) == (3, "cpu")
    assert chosen.engine.get_value("gradient_clipping") == 1.0
    launched(gradient_clipping=1.0)
    with pytest.raises(ConfigError, match="needs DeepSpeed, but the layout is fsdp: 8 shards; remove it"):
        decide(strategy="fsdp")
    launched(strategy="zero3")
    assert read_launched_settings() == {}
    launched(strategy="zero3", fsdp_offload_params=True)
    with pytest.raises(ConfigError, match="needs a layout with shards, but the layout is zero3"):
        decide()


def test_a_plugin_of_deepspeeds(launched):
    plugin = DeepSpeedPlugin(zero_stage=2)
    assert decide(deepspeed=plugin).engine is plugin
    assert decide(deepspeed=plugin).text == "deepspeed"
    assert decide(deepspeed=plugin, strategy="zero2").text == "zero2"
    launched(strategy="zero2")
    assert decide(deepspeed=plugin).text == "zero2"
    launched(strategy="zero3")
    with pytest.raises(ConfigError, match="strategy='zero3', but the DeepSpeed plugin has zero_stage=2"):
        decide(deepspeed=plugin)
    launched(strategy="fsdp")
    with pytest.raises(ConfigError, match=r"deepspeed_plugin of .*against --strategy fsdp"):
        decide(deepspeed=plugin)
    launched(strategy="zero2", gradient_clipping=1.0)
    with pytest.raises(ConfigError, match=r"deepspeed_plugin of .*against --gradient_clipping 1.0"):
        decide(deepspeed=plugin)
    launched(strategy="zero2", gradient_clipping=1.0, force=True)
    assert decide(deepspeed=plugin).engine.get_value("gradient_clipping") == 1.0
    launched()
    with pytest.raises(ConfigError, match="strategy='fsdp' contradicts 'deepspeed' from deepspeed_plugin"):
        decide(deepspeed=plugin, strategy="fsdp")
    with pytest.raises(
        ConfigError, match=r"DeepSpeed \(deepspeed_plugin\) and torch's own engine \(fsdp_plugin\) are both requested"
    ):
        decide(deepspeed=plugin, fsdp=FullyShardedDataParallelPlugin())
    assert decide(deepspeed=plugin, num_ranks=1).engine is plugin
