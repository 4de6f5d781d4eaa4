"""Test the layout of a run: requests of script and launcher, contradictions, context parallelism, and lost ranks."""

import json

import pytest

from headway import (
    ActivationCheckpointing,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelPlugin,
)
from headway.compat.accelerate.launching.layout_words import read_size
from headway.compat.accelerate.plugins import get_parallelism_config
from headway.core.config import layout_after_loss
from headway.core.config.engines import EngineOptions, collect_options
from headway.core.config.layout_choice import WHOLE_MODEL_SIZE, RequestedLayout
from headway.core.config.layout_request import LayoutRequest
from headway.core.config.mesh import Layout, parse_layout
from headway.core.config.parallelism import ShardingOptions
from headway.errors import ConfigError, UnsupportedError
from headway.layouts.deepspeed.plugin import DeepSpeedPlugin, read_launched_settings

HERE = "Accelerator(...) at train.py:12"


def make_request(strategy=None, fsdp=None, tensor_parallel=None, parallelism=None, deepspeed=None):
    return RequestedLayout(strategy, HERE, fsdp, parallelism, tensor_parallel, deepspeed_plugin=deepspeed)


def choose_layout(num_ranks=8, options=None, **said):
    return make_request(**said).resolve(options or EngineOptions(), num_ranks, num_ranks)


@pytest.fixture
def launched(monkeypatch):
    """Return a function that sets the launcher's payload: settings by name, from the command line or a file."""
    monkeypatch.delenv("HEADWAY_RUN", raising=False)
    monkeypatch.delenv("HEADWAY_STRATEGY", raising=False)

    def set_payload(by="command line", force=False, more=None, **settings):
        told = {name: {"value": value, "origin": f"{by}: --{name}"} for name, value in settings.items()}
        content = {"version": 1, "settings": told, "num_processes": 8, "force": force, **(more or {})}
        monkeypatch.setenv("HEADWAY_RUN", json.dumps(content))

    return set_payload


pytestmark = pytest.mark.usefixtures("launched")


def test_without_a_request_the_layout_is_ddp():
    chosen = choose_layout()
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
def test_script_requests_a_layout(said, layout):
    chosen = choose_layout(**said)
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
def test_contradicting_requests_are_both_named(said, told):
    with pytest.raises(ConfigError) as raised:
        choose_layout(**said)
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
def test_unsupported_options_are_refused(said, told):
    with pytest.raises(UnsupportedError, match=told):
        choose_layout(**said)


def test_launcher_decides_what_the_script_leaves_open(launched):
    launched(strategy="hsdp=4", fsdp_offload_params=True, fsdp_transformer_layer_cls_to_wrap="Block, Head")
    chosen = choose_layout()
    assert chosen.layout == Layout(replicate=2, shard=4)
    assert chosen.options.sharding == ShardingOptions(cpu_offload=True, units=("Block", "Head"))
    assert get_parallelism_config(chosen).sizes == {"dp_replicate": 2, "dp_shard": 4, "tp": 1, "cp": 1, "sp": 1}


def test_hsdp_without_a_size_uses_the_machine_size(launched):
    launched(strategy="hsdp", more={"ranks_per_machine": 2})
    assert make_request().resolve(EngineOptions(), 8, 1).layout == Layout(replicate=4, shard=2)
    launched(strategy="hsdp")
    assert make_request().resolve(EngineOptions(), 8, 4).layout == Layout(replicate=2, shard=4)


def test_script_against_the_command_line_is_an_error(launched):
    launched(strategy="fsdp")
    with pytest.raises(ConfigError, match=f"{HERE.split('(')[0]}.*against --strategy fsdp on the command line"):
        choose_layout(strategy="tp")
    launched(strategy="fsdp", force=True)
    assert choose_layout(strategy="tp").layout == Layout(shard=8)
    launched(by="file", strategy="fsdp")
    assert choose_layout(strategy="tp").layout == Layout(tp=8)
    launched(strategy="ddp=2+fsdp=4")
    assert choose_layout(strategy="hsdp=4").layout == Layout(
        replicate=2, shard=4
    )  # the same layout in another notation


def test_launcher_sets_the_sizes_for_a_plugin_without_sizes(launched):
    launched(strategy="fsdp+tp=2")
    assert choose_layout(fsdp=FullyShardedDataParallelPlugin()).layout == Layout(shard=4, tp=2)
    launched(strategy="tp")
    with pytest.raises(ConfigError, match=r"fsdp_plugin of Accelerator.*against --strategy tp"):
        choose_layout(fsdp=FullyShardedDataParallelPlugin())


def test_options_follow_the_same_rules_as_the_layout(launched):
    launched(strategy="fsdp", fsdp_reshard_after_forward=True, fsdp_offload_params=True)
    with pytest.raises(ConfigError, match=r"fsdp_plugin.cpu_offload of .*against --fsdp_offload_params on"):
        choose_layout(fsdp=FullyShardedDataParallelPlugin(cpu_offload=False))
    with pytest.raises(ConfigError, match="--fsdp_reshard_after_forward on the command line"):
        choose_layout(options=EngineOptions(sharding=ShardingOptions(reshard_after_forward=False, cpu_offload=True)))
    launched(by="file", strategy="fsdp", fsdp_offload_params=True)
    assert choose_layout(fsdp=FullyShardedDataParallelPlugin(cpu_offload=False)).options.sharding.cpu_offload is False
    assert choose_layout(fsdp=FullyShardedDataParallelPlugin()).options.sharding.cpu_offload is True


@pytest.mark.parametrize(
    ("given", "expected"),
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
        ({"auto_wrap_policy": "no_wrap"}, ShardingOptions(min_num_params=WHOLE_MODEL_SIZE)),
        ({"mixed_precision_policy": "bf16"}, ShardingOptions(param_dtype="bfloat16", reduce_dtype="bfloat16")),
        ({"mixed_precision_policy": {"reduce_dtype": "fp32"}}, ShardingOptions(reduce_dtype="float32")),
    ],
)
def test_fields_of_the_fsdp_plugin_become_options(given, expected):
    assert choose_layout(fsdp=FullyShardedDataParallelPlugin(**given)).options.sharding == expected


def test_no_wrap_refuses_class_names():
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap", transformer_cls_names_to_wrap=["A"])
    with pytest.raises(ConfigError, match="no_wrap does not use classes, but some are named: A"):
        choose_layout(fsdp=plugin)


def test_handlers_and_plugins_cannot_be_mixed():
    with pytest.raises(ConfigError, match=r"ShardingOptions in kwargs_handlers contradicts fsdp_plugin.cpu_offload"):
        choose_layout(
            options=EngineOptions(sharding=ShardingOptions(units=("A",))),
            fsdp=FullyShardedDataParallelPlugin(cpu_offload=True),
        )
    mine = ShardingOptions(units=("A",), reshard_after_forward=2)
    assert choose_layout(strategy="fsdp", options=EngineOptions(sharding=mine)).options.sharding == mine
    with pytest.raises(ConfigError, match=r"reshard_after_forward=3\) does not divide 8 shards"):
        choose_layout(strategy="fsdp", options=EngineOptions(sharding=ShardingOptions(reshard_after_forward=3)))


def test_options_for_another_layout_are_refused(launched):
    launched(fsdp_offload_params=True)
    with pytest.raises(ConfigError, match="needs a layout with shards, but the layout is ddp: 8 replicas; remove it"):
        choose_layout()
    choose_layout(strategy="fsdp")
    choose_layout(num_ranks=1)
    launched(by="file", fsdp_offload_params=True)
    choose_layout()


def test_activation_checkpointing_of_plugin_launcher_and_script_is_merged(launched):
    plugin = FullyShardedDataParallelPlugin(
        activation_checkpointing=True, activation_checkpointing_offload=True, transformer_cls_names_to_wrap=["Block"]
    )
    assert choose_layout(fsdp=plugin).options.checkpointing == ActivationCheckpointing(offload=True, blocks=("Block",))
    launched(activation_checkpointing=True)  # works with any layout
    assert choose_layout().options.checkpointing == ActivationCheckpointing()
    mine = ActivationCheckpointing(every=2)
    assert choose_layout(options=EngineOptions(checkpointing=mine)).options.checkpointing == mine
    launched(activation_checkpointing=False)
    with pytest.raises(ConfigError, match="--activation_checkpointing"):
        choose_layout(options=EngineOptions(checkpointing=mine))
    launched(activation_checkpointing_offload=True)
    with pytest.raises(ConfigError, match="add --activation_checkpointing"):
        choose_layout()


def test_fields_without_effect_are_listed(caplog):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True, backward_prefetch="BACKWARD_PRE")
    assert [text.partition(" ")[0] for text in make_request(fsdp=plugin).request.ignored] == [
        "fsdp_plugin.fsdp_version", "fsdp_plugin.backward_prefetch", "fsdp_plugin.use_orig_params",
    ]  # fmt: skip


def test_launcher_requests_deepspeed(launched):
    launched(strategy="zero3", offload_param_device="cpu", gradient_clipping=1.0)
    chosen = choose_layout()
    assert (chosen.text, chosen.is_deepspeed, get_parallelism_config(chosen)) == ("zero3", True, None)
    assert read_launched_settings() == {"offload_param_device": "cpu", "gradient_clipping": 1.0}
    assert (chosen.engine.zero_stage, chosen.engine.offload_param_device) == (3, "cpu")
    assert chosen.engine.get_value("gradient_clipping") == 1.0
    launched(gradient_clipping=1.0)
    with pytest.raises(ConfigError, match="needs DeepSpeed, but the layout is fsdp: 8 shards; remove it"):
        choose_layout(strategy="fsdp")
    launched(strategy="zero3")
    assert read_launched_settings() == {}
    launched(strategy="zero3", fsdp_offload_params=True)
    with pytest.raises(ConfigError, match="needs a layout with shards, but the layout is zero3"):
        choose_layout()


def test_deepspeed_plugin_is_the_engine_unless_settings_contradict(launched):
    plugin = DeepSpeedPlugin(zero_stage=2)
    assert choose_layout(deepspeed=plugin).engine is plugin
    assert choose_layout(deepspeed=plugin).text == "deepspeed"
    assert choose_layout(deepspeed=plugin, strategy="zero2").text == "zero2"
    launched(strategy="zero2")
    assert choose_layout(deepspeed=plugin).text == "zero2"
    launched(strategy="zero3")
    with pytest.raises(ConfigError, match="strategy='zero3', but the DeepSpeed plugin has zero_stage=2"):
        choose_layout(deepspeed=plugin)
    launched(strategy="fsdp")
    with pytest.raises(ConfigError, match=r"deepspeed_plugin of .*against --strategy fsdp"):
        choose_layout(deepspeed=plugin)
    launched(strategy="zero2", gradient_clipping=1.0)
    with pytest.raises(ConfigError, match=r"deepspeed_plugin of .*against --gradient_clipping 1.0"):
        choose_layout(deepspeed=plugin)
    launched(strategy="zero2", gradient_clipping=1.0, force=True)
    assert choose_layout(deepspeed=plugin).engine.get_value("gradient_clipping") == 1.0
    launched()
    with pytest.raises(ConfigError, match="strategy='fsdp' contradicts 'deepspeed' from deepspeed_plugin"):
        choose_layout(deepspeed=plugin, strategy="fsdp")
    with pytest.raises(
        ConfigError, match=r"DeepSpeed \(deepspeed_plugin\) and torch's own engine \(fsdp_plugin\) are both requested"
    ):
        choose_layout(deepspeed=plugin, fsdp=FullyShardedDataParallelPlugin())
    assert choose_layout(deepspeed=plugin, num_ranks=1).engine is plugin


def resolve_request(
    parallelism: ParallelismConfig | None = None, handlers: list[object] | None = None, strategy: str | None = None
):  # type: ignore[no-untyped-def]
    options = collect_options(handlers) if handlers else EngineOptions()
    return RequestedLayout(strategy, "the script", parallelism_config=parallelism).resolve(options, 8, 8)


def test_sizes_of_accelerate_give_the_layout() -> None:
    handler = TorchContextParallelConfig(cp_comm_strategy="alltoall", labels="y", blocks=["Layer"])
    chosen = resolve_request(ParallelismConfig(dp_shard_size=4, cp_size=2, cp_handler=handler))
    assert chosen.layout == Layout(shard=4, cp=2)
    assert (chosen.layout.num_data_shards, chosen.layout.num_shards) == (4, 8)
    assert chosen.options.context == TorchContextParallelConfig("alltoall", ("y",), ("Layer",))
    sizes = get_parallelism_config(chosen)
    assert sizes is not None
    assert sizes.sizes["cp"] == 2
    assert resolve_request(strategy="cp").layout == Layout(cp=8)
    assert resolve_request(strategy="fsdp+cp=2").options.context == TorchContextParallelConfig()


def test_options_can_be_a_handler_but_not_twice() -> None:
    handler = TorchContextParallelConfig("alltoall")
    assert resolve_request(handlers=[handler], strategy="cp").options.context == handler
    with pytest.raises(ConfigError, match="contain two TorchContextParallelConfig; keep one"):
        resolve_request(ParallelismConfig(cp_size=8, cp_handler=TorchContextParallelConfig()), [handler])


def test_keys_of_accelerates_files_set_the_layout() -> None:
    found = LayoutRequest()
    for name, value in {
        "cp_size": 2,
        "dp_shard_size": 2,
        "cp_comm_strategy": "alltoall",
        "cp_backend": "torch",
    }.items():
        read_size(found, name, value)
    assert found.settings["cp_comm_strategy"] == ("alltoall", "parallelism_config_cp_comm_strategy")
    assert found.find_strategy()[0] == "fsdp=2+cp=2"  # type: ignore[index]
    assert any(text == "not needed: there is no other backend than torch" for _, text in found.lines)
    with pytest.raises(ConfigError, match="cp_backend='ring'; allowed: TORCH"):
        read_size(found, "cp_backend", "ring")


def test_ranks_along_cp_read_the_same_data() -> None:
    layout = Layout(shard=2, cp=2)
    assert layout.data_groups == [[0, 2], [1, 3]]
    assert layout.describe() == "2 shards x 2 parts of a sequence"


@pytest.mark.parametrize(
    ("text", "num_launched", "left", "expected"),
    [
        ("ddp", 8, 7, Layout(replicate=7)), ("ddp=4", 4, 3, Layout(replicate=3)),
        ("fsdp", 8, 7, Layout(shard=7)), ("fsdp=8", 8, 6, Layout(shard=6)), ("zero3", 4, 3, Layout(shard=3)),
        ("hsdp=2", 8, 6, Layout(replicate=3, shard=2)), ("hsdp=2", 4, 3, Layout(shard=3)),
        ("hsdp=4", 8, 6, Layout(shard=6)), ("hsdp=4", 16, 15, Layout(replicate=3, shard=5)),
        ("hsdp=4", 8, 2, Layout(shard=2)), ("ddp=2+fsdp=4", 8, 7, Layout(shard=7)),
        ("fsdp+tp=2", 8, 6, Layout(shard=3, tp=2)), ("fsdp+tp=2", 8, 7, Layout(shard=7)),
        ("fsdp+tp=2", 4, 2, Layout(tp=2)), ("fsdp+tp=2", 4, 1, Layout()), ("fsdp+tp=4", 16, 6, Layout(shard=3, tp=2)),
        ("tp", 4, 3, Layout(shard=3)), ("tp", 4, 2, Layout(tp=2)), ("tp", 8, 6, Layout(shard=3, tp=2)),
        ("tp=4", 4, 3, Layout(shard=3)), ("ddp+tp=4", 8, 6, Layout(replicate=1, shard=3, tp=2)),
        ("pp", 4, 2, Layout(pp=2)), ("pp=4", 4, 2, Layout(shard=2)), ("ddp+pp=2", 8, 6, Layout(replicate=3, pp=2)),
        ("ddp=2+pp=4", 8, 6, Layout(shard=6)), ("fsdp+cp=2", 8, 6, Layout(shard=3, cp=2)), ("cp=2", 2, 1, Layout()),
    ],
)  # fmt: skip
def test_layout_fits_the_remaining_ranks(text, num_launched, left, expected):
    found = layout_after_loss.shrink_layout(parse_layout(text), num_launched, left)
    assert found == expected
    assert found.num_ranks == left


@pytest.mark.parametrize("text", ["hsdp=4", "ddp=4+fsdp=4+tp=2", "hsdp=8+tp=2", "tp=16", "ddp+tp=8", "ddp=32"])
def test_all_ranks_take_part_with_minimal_parts(text):
    num_launched = 32 if "ddp=" in text else 16
    whole = parse_layout(text).resolve(num_launched)
    for left in range(1, num_launched):
        found = layout_after_loss.shrink_layout(parse_layout(text), num_launched, left)
        assert found.num_ranks == left
        assert whole.tp % found.tp == 0
        parts = whole.shard * whole.tp
        assert found.shard * found.tp >= min(parts, left) or found.shard * found.tp == left


def test_hsdp_without_a_size_follows_the_remaining_machines():
    assert layout_after_loss.shrink_layout(parse_layout("hsdp"), 12, 8, 4) == Layout(replicate=2, shard=4)
    assert layout_after_loss.shrink_layout(parse_layout("hsdp"), 12, 4, 4) == Layout(shard=4)


def test_only_a_run_that_has_lost_ranks_gets_another_layout(monkeypatch, caplog):
    def choose_layout(num_ranks):
        return RequestedLayout("hsdp=2", "train.py:1").resolve(EngineOptions(), num_ranks, num_ranks).layout

    with pytest.raises(ConfigError, match="hsdp=2"):
        choose_layout(3)
    payload = {"version": 1, "settings": {}, "num_processes": 4, "min_processes": 2, "force": False}
    monkeypatch.setenv("HEADWAY_RUN", json.dumps(payload))
    assert choose_layout(4) == Layout(replicate=2, shard=2)
    assert not caplog.records
    assert choose_layout(3) == Layout(shard=3)
    assert "layout hsdp=2 of 4 ranks does not fit 3: the run continues with fsdp=3 (3 shards)" in caplog.text
    with pytest.raises(ConfigError, match="hsdp=2"):
        choose_layout(5)
