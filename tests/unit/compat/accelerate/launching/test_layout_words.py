"""Test Accelerate's options for layouts: each is supported, unneeded or refused, and none is missing."""

from functools import partial

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, CPUOffloadPolicy, OffloadPolicy, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy

from headway.compat.accelerate.launching.layout_words import DEEPSPEED_KEYS, FSDP_KEYS, SIZE_KEYS, read_fsdp, read_size
from headway.core.config.launch import SETTINGS
from headway.core.config.layout_request import LayoutRequest
from headway.core.config.values import check_file_value
from headway.errors import ConfigError


def read_fsdp_options(**fsdp):
    found = LayoutRequest()
    for name, value in fsdp.items():
        read_fsdp(found, name, value)
    return found


def get_settings(found):
    return {name: value for name, (value, _) in found.settings.items()}


def test_all_layout_flags_of_accelerate_launch_are_known():
    flags = {action.dest for action in launch_command_parser()._actions}
    fsdp = {flag.removeprefix("fsdp_") for flag in flags if flag.startswith("fsdp_")}
    sizes = {flag.removeprefix("parallelism_config_") for flag in flags if flag.startswith("parallelism_config_")}
    assert len(fsdp) >= 14
    assert len(sizes) >= 11
    deepspeed = {flag for flag in flags if flag.startswith(("deepspeed_", "zero", "offload_", "gradient_clipping"))}
    assert len(deepspeed) >= 14
    assert deepspeed - set(DEEPSPEED_KEYS) == set()
    assert fsdp - set(FSDP_KEYS) == set()
    assert sizes - set(SIZE_KEYS) == set()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("reshard_after_forward", "false", {"fsdp_reshard_after_forward": False}),
        ("reshard_after_forward", True, {"fsdp_reshard_after_forward": True}),
        ("reshard_after_forward", ShardingStrategy.SHARD_GRAD_OP, {"fsdp_reshard_after_forward": False}),
        ("reshard_after_forward", "NO_RESHARD", {"fsdp_reshard_after_forward": False}),
        ("sharding_strategy", ShardingStrategy.FULL_SHARD, {}),
        ("sharding_strategy", 2, {"fsdp_reshard_after_forward": False}),
        ("cpu_offload", True, {"fsdp_offload_params": True}),
        ("cpu_offload", CPUOffload(offload_params=True), {"fsdp_offload_params": True}),
        ("cpu_offload", CPUOffloadPolicy(), {"fsdp_offload_params": True}),
        ("cpu_offload", OffloadPolicy(), {"fsdp_offload_params": False}),
        ("offload_params", "false", {"fsdp_offload_params": False}),
        ("auto_wrap_policy", "SIZE_BASED_WRAP", {"fsdp_auto_wrap_policy": "size_based_wrap"}),
        ("auto_wrap_policy", "no_wrap", {"fsdp_auto_wrap_policy": "no_wrap"}),
        ("auto_wrap_policy", transformer_auto_wrap_policy, {"fsdp_auto_wrap_policy": "transformer_based_wrap"}),
        (
            "auto_wrap_policy",
            ModuleWrapPolicy({torch.nn.Linear, torch.nn.GELU}),
            {"fsdp_auto_wrap_policy": "transformer_based_wrap", "fsdp_transformer_layer_cls_to_wrap": "GELU,Linear"},
        ),
        (
            "auto_wrap_policy",
            partial(transformer_auto_wrap_policy, transformer_layer_cls={torch.nn.Linear}),
            {"fsdp_auto_wrap_policy": "transformer_based_wrap", "fsdp_transformer_layer_cls_to_wrap": "Linear"},
        ),
        (
            "auto_wrap_policy",
            partial(size_based_auto_wrap_policy, min_num_params=500),
            {"fsdp_auto_wrap_policy": "size_based_wrap", "fsdp_min_num_params": 500},
        ),
        ("transformer_cls_names_to_wrap", ["A", "B"], {"fsdp_transformer_layer_cls_to_wrap": "A,B"}),
        ("transformer_layer_cls_to_wrap", "A, B", {"fsdp_transformer_layer_cls_to_wrap": "A,B"}),
        ("min_num_params", "2000", {"fsdp_min_num_params": 2000}),
        ("activation_checkpointing", "true", {"activation_checkpointing": True}),
        ("activation_checkpointing_offload", False, {"activation_checkpointing_offload": False}),
    ],
)
def test_supported_option_becomes_a_setting(name, value, expected):
    found = read_fsdp_options(**{name: value})
    assert get_settings(found) == expected
    assert found.refused == {}
    for setting, decided in expected.items():  # a config file accepts the value, too
        assert check_file_value(SETTINGS[setting], decided, "") == decided


@pytest.mark.parametrize(
    ("name", "value"),
    [("version", 1), ("version", "2"), ("backward_prefetch", BackwardPrefetch.BACKWARD_POST), ("backward_prefetch", "1"),
     ("backward_prefetch", "NO_PREFETCH"), ("forward_prefetch", "true"), ("use_orig_params", False),
     ("sync_module_states", True), ("cpu_ram_efficient_loading", "true"), ("limit_all_gathers", False),
     ("state_dict_type", "FULL_STATE_DICT"), ("state_dict_config", object()), ("optim_state_dict_config", object()),
     ("min_num_params", 0)],
)  # fmt: skip
def test_option_without_effect_gets_a_reason(name, value):
    found = read_fsdp_options(**{name: value})
    assert get_settings(found) == found.refused == {}
    [(key, text)] = found.lines
    assert (key, text.partition(": ")[0]) == (f"fsdp_{name}", "not needed")


@pytest.mark.parametrize(
    ("name", "value"),
    [("ignored_modules", "head"), ("param_init_fn", print), ("auto_wrap_policy", lambda *a: True)],
)
def test_refused_option_gets_a_remedy(name, value):
    assert len(read_fsdp_options(**{name: value}).refused[f"fsdp_{name}"].split()) > 8


def test_mixed_precision_policies_become_dtypes():
    assert read_fsdp_options(mixed_precision_policy="bf16").dtypes == {"param_dtype": "bf16", "reduce_dtype": "bf16"}
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert read_fsdp_options(mixed_precision_policy=policy).dtypes == {
        "param_dtype": torch.bfloat16,
        "reduce_dtype": torch.float32,
    }
    assert read_fsdp_options(mixed_precision_policy={"output_dtype": torch.float32}).dtypes == {
        "output_dtype": torch.float32
    }
    with pytest.raises(ConfigError, match="has 'dtype'; allowed: param_dtype"):
        read_fsdp_options(mixed_precision_policy={"dtype": torch.float32})


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [("version", 3, "fsdp_version=3; allowed: 1, 2"), ("sharding_strategy", "HALF", "allowed: FULL_SHARD, SHARD_GRAD_OP"),
     ("sharding_strategy", 6, "'6'; allowed"), ("cpu_offload", "maybe", "give True or False"),
     ("min_num_params", "1e8", "whole number"),
     ("auto_wrap_policy", "BY_SIZE", "allowed: TRANSFORMER_BASED_WRAP"), ("activation_checkpointing", 3, "give true or false"),
     ("state_dict_type", "SHARDED", "allowed: FULL_STATE_DICT"), ("backward_prefetch", "PRE", "allowed: BACKWARD_PRE"),
     ("sharding", "x", "fsdp_sharding is not an FSDP option")],
)  # fmt: skip
def test_invalid_option_is_refused(name, value, told):
    with pytest.raises(ConfigError, match=told):
        read_fsdp_options(**{name: value})


def test_sizes_and_sharding_are_combined():
    found = LayoutRequest()
    found.use_shards("--use_fsdp")
    assert found.find_strategy() == ("fsdp", "--use_fsdp")
    read_fsdp(found, "sharding_strategy", "HYBRID_SHARD")
    assert found.find_strategy()[0] == "hsdp"
    for name, size in {"dp_replicate_size": 2, "dp_shard_size": "4", "tp_size": 1, "cp_size": 1}.items():
        read_size(found, name, size)
    text, keys = found.find_strategy()
    assert (text, keys) == ("ddp=2+fsdp=4", "parallelism_config_dp_replicate_size, parallelism_config_dp_shard_size")


def test_contradicting_layouts_are_refused():
    with pytest.raises(ConfigError, match="ask for different layouts"):
        read_fsdp_options(sharding_strategy="NO_SHARD", reshard_after_forward="HYBRID_SHARD").find_strategy()
    with pytest.raises(
        ConfigError, match="requests fsdp_reshard_after_forward=False, but fsdp_reshard_after_forward requests True"
    ):
        read_fsdp_options(sharding_strategy="SHARD_GRAD_OP", reshard_after_forward=True)
    found = LayoutRequest()
    found.use_shards("fsdp_plugin")
    read_size(found, "tp_size", 8)
    with pytest.raises(ConfigError, match="no processes are left to shard across"):
        found.find_strategy()
