import base64
import json
from pathlib import Path
from typing import Any

import pytest

import headway
from headway.core.config.engines import EngineOptions
from headway.core.config.torch_kwargs import GradScalerKwargs
from headway.errors import ConfigError, UnsupportedError
from headway.layouts.deepspeed.config import Facts, complete_config
from headway.layouts.deepspeed.json_config import HfDeepSpeedConfig
from headway.layouts.deepspeed.known_keys import TOP_LEVEL
from headway.layouts.deepspeed.plugin import DeepSpeedPlugin, match_plugin

ZERO = {"zero_optimization": {"stage": 2}}
FACTS = Facts(num_ranks=4, num_steps=3, precision="no", micro_batch=2)


def account(config: dict[str, Any], facts: Facts = FACTS) -> Any:
    return complete_config({**ZERO, **config}, facts, lambda section: None)


# ---------------------------------------------------------------- the JSON


def test_the_json_is_read_from_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ZERO))
    encoded = base64.urlsafe_b64encode(json.dumps(ZERO).encode()).decode()
    for given in (ZERO, path, str(path), json.dumps(ZERO), encoded, HfDeepSpeedConfig(ZERO)):
        assert HfDeepSpeedConfig(given).config == ZERO


def test_what_was_given_stays_as_it_is() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config=ZERO, gradient_clipping=1.0)
    assert plugin.deepspeed_config["gradient_clipping"] == 1.0
    assert ZERO == {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ("nowhere.json", "no such file"),
        ("{", "not JSON"),
        ("[1]", "neither"),
        (3, "give a dict"),
        ("WzFd", "JSON object"),
    ],
)
def test_other_things_are_refused(given: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        HfDeepSpeedConfig(given if given != "[1]" else "[1")


def test_questions_by_dotted_names() -> None:
    config = HfDeepSpeedConfig(
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "fp16": {"enabled": False}}
    )
    assert config.get_value("zero_optimization.offload_param.device") == "cpu"
    assert config.get_value("zero_optimization.offload_optimizer.device", "none") == "none"
    assert config.is_zero3()
    assert not config.is_zero2()
    assert config.is_offload()
    assert config.is_false("fp16.enabled")
    assert not config.is_true("fp16.enabled")
    assert not config.is_false("bf16.enabled")
    config.del_config_sub_tree("fp16")
    assert "fp16" not in config.config
    with pytest.raises(ConfigError, match="fp16"):
        config.del_config_sub_tree("fp16", must_exist=True)


# ---------------------------------------------------------------- the plugin


def test_the_defaults_are_those_of_accelerate() -> None:
    plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == 2
    assert plugin.is_train_batch_min
    assert plugin.get_value("zero_optimization.stage") == 2


def test_a_field_fills_an_auto_and_contradicts_another_value() -> None:
    plugin = DeepSpeedPlugin(
        hf_ds_config={"zero_optimization": {"stage": "auto"}, "gradient_clipping": "auto"}, zero_stage=3
    )
    assert plugin.zero_stage == 3
    assert plugin.is_auto("gradient_clipping")
    with pytest.raises(
        ConfigError, match=r"gradient_clipping=1.0, but.*0.5.*zero_stage=3, but zero_optimization.stage=2"
    ):
        DeepSpeedPlugin(hf_ds_config={**ZERO, "gradient_clipping": 0.5}, zero_stage=3, gradient_clipping=1.0)


@pytest.mark.parametrize(
    ("options", "kind", "word"),
    [
        ({"zero_stage": 0}, UnsupportedError, "DDP"),
        ({"zero_stage": 4}, ConfigError, "1, 2, 3"),
        ({"zero_stage": True}, ConfigError, "1, 2, 3"),
        ({"enable_msamp": True}, UnsupportedError, "bf16"),
        ({"zero3_init_flag": True, "zero_stage": 3}, UnsupportedError, "fsdp"),
        ({"offload_optimizer_device": "gpu"}, ConfigError, "none, cpu, nvme"),
        ({"offload_optimizer_device": "nvme"}, ConfigError, "nvme_path"),
        ({"offload_param_device": "cpu", "zero_stage": 2}, ConfigError, "stage 3"),
        ({"hf_ds_config": {"zero_optimization": True}}, ConfigError, "oldest form"),
    ],
)
def test_impossible_plugins(options: dict[str, Any], kind: type[Exception], word: str) -> None:
    with pytest.raises(kind, match=word):
        DeepSpeedPlugin(**options)


def test_the_strategy_names_the_engine() -> None:
    assert match_plugin("ddp", None) is None
    assert match_plugin("fsdp", None) is None
    assert match_plugin("DeepSpeed", None) is not None
    assert match_plugin("zero3", None).zero_stage == 3  # type: ignore[union-attr]
    assert match_plugin("deepspeed", None).zero_stage == 2  # type: ignore[union-attr]
    plugin = DeepSpeedPlugin(zero_stage=1)
    assert match_plugin("ddp", plugin) is plugin
    assert match_plugin("ddp", {"only": plugin}) is plugin
    for strategy, given, kind in [
        ("fsdp", plugin, ConfigError), ("zero2", plugin, ConfigError), ("ddp", "zero", ConfigError),
        ("ddp", {"a": plugin, "b": plugin}, UnsupportedError),
    ]:  # fmt: skip
        with pytest.raises(kind):
            match_plugin(strategy, given)


def test_the_run_follows_the_json_where_it_says_nothing() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={**ZERO, "bf16": {"enabled": True}, "gradient_accumulation_steps": 4})
    assert plugin.precision == "bf16"
    assert plugin.num_steps == 4
    assert DeepSpeedPlugin(hf_ds_config={**ZERO, "bf16": {"enabled": "auto"}}).precision is None


def test_torchs_scaler_stays_off() -> None:
    options = EngineOptions()
    assert options.scaler.enabled
    assert not options.without_loss_scaling().scaler.enabled


# ---------------------------------------------------------------- every key accounted for


def test_what_the_run_knows_is_filled_or_added() -> None:
    found = account({"train_batch_size": "auto", "gradient_clipping": "auto"})
    assert found.config["train_batch_size"] == 24
    assert found.config["train_micro_batch_size_per_gpu"] == 2
    assert found.config["gradient_accumulation_steps"] == 3
    assert found.handling["train_batch_size"] == "filled"
    assert found.handling["train_micro_batch_size_per_gpu"] == "added"
    assert found.handling["zero_optimization.stage"] == "passed"
    assert found.clipping == 0.0
    assert any(line.startswith("filled: train_batch_size=24") for line in found.format_lines())


def test_contradictions_are_told_together() -> None:
    with pytest.raises(
        ConfigError, match=r"train_batch_size=16 in the JSON, but 24 in this run; fp16.enabled=True.*False"
    ):
        account({"train_batch_size": 16, "fp16": {"enabled": True}})
    assert account({"train_batch_size": 24}).handling["train_batch_size"] == "agrees"


def test_the_batch_size_comes_from_the_json_where_no_loader_says() -> None:
    facts = Facts(num_ranks=2, num_steps=2, precision="no")
    assert account({"train_batch_size": 12}, facts).config["train_micro_batch_size_per_gpu"] == 3
    assert account({}, facts).config["train_batch_size"] == 4
    with pytest.raises(ConfigError, match="train_batch_size=13"):
        account({"train_batch_size": 13}, facts)


def test_sizes_come_from_the_hidden_size_or_are_deepspeeds() -> None:
    sizes = {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    }
    facts = Facts(num_ranks=1, num_steps=1, precision="no", hidden_size=100)
    section = account({"zero_optimization": sizes}, facts).config["zero_optimization"]
    assert section == dict(zip(sizes, (3, 10_000, 9000, 1000)))
    left = account({"zero_optimization": sizes})
    assert left.config["zero_optimization"] == {"stage": 3}
    assert left.handling["zero_optimization.reduce_bucket_size"] == "left to DeepSpeed's default"


def test_precision() -> None:
    for precision in ("bf16", "fp16"):
        config = account({"bf16": {"enabled": "auto"}}, Facts(2, 1, precision, 1)).config
        assert config["bf16"]["enabled"] == (precision == "bf16")
        assert config.get("fp16", {}).get("enabled", False) == (precision == "fp16")
        assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "data_types" not in account({"zero_optimization": {"stage": 1}}, Facts(2, 1, "bf16", 1)).config
    by_torch = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    assert "bf16" not in account(by_torch, Facts(2, 1, "bf16", 1)).config


def test_the_scaler_of_fp16() -> None:
    facts = Facts(2, 1, "fp16", 1, scaler=GradScalerKwargs(init_scale=2.0**10, growth_interval=50))
    section = account({"fp16": {"enabled": "auto", "loss_scale_window": "auto"}}, facts).config["fp16"]
    assert section["loss_scale_window"] == 50
    assert section["initial_scale_power"] == 10
    with pytest.raises(ConfigError, match="initial_scale_power=16 in the JSON, but 10"):
        account({"fp16": {"initial_scale_power": 16}}, facts)


def test_a_fixed_limit_is_kept_for_the_step() -> None:
    found = account({"gradient_clipping": 0.5})
    assert found.clipping == 0.5
    assert found.config["gradient_clipping"] == 0.0


def test_unknown_keys_get_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"'gradient_cliping' \(did you mean 'gradient_clipping'\?\)"):
        account({"gradient_cliping": 1.0})
    with pytest.raises(ConfigError, match=r"'zero_optimization.stagge' \(did you mean 'stage'\?\)"):
        complete_config(
            {"zero_optimization": {"stage": 1, "stagge": 2}}, FACTS, lambda section: ["stage"] if section else None
        )


@pytest.mark.parametrize(
    "config",
    [
        {"curriculum_learning": {"enabled": True}},
        {"elasticity": {"enabled": True, "max_train_batch_size": 8}},
        {"tensor_parallel": {"autotp_size": 2}},
        {"amp": {"enabled": True}},
        {"dataloader_drop_last": True},
        {"torch_autocast": {"enabled": True, "dtype": "float16"}},
        {"zero_optimization": {"stage": 1, "overlap_comm": True}},
        {"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}, "data_types": {"grad_accum_dtype": "fp32"}},
    ],
)
def test_what_is_not_served_is_refused_by_name(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="not supported"):
        account(config)


def test_what_is_switched_off_passes() -> None:
    account({"curriculum_learning": {"enabled": False}, "tensor_parallel": {"autotp_size": 1}, "amp": {}})


def test_an_auto_that_nobody_knows() -> None:
    with pytest.raises(ConfigError, match="wall_clock_breakdown='auto'"):
        account({"wall_clock_breakdown": "auto"})
    assert (
        account({"data_types": {"keep_in_fp32_modules": "auto"}}).handling["data_types.keep_in_fp32_modules"]
        == "passed"
    )


def test_accelerates_names_are_there() -> None:
    assert headway.DeepSpeedPlugin is DeepSpeedPlugin
    from headway.utils import DummyOptim
    from headway.utils import HfDeepSpeedConfig as Config

    assert Config is HfDeepSpeedConfig
    assert DummyOptim is headway.DummyOptim


def test_the_list_of_sections_is_of_deepspeeds_version() -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: pip install deepspeed")
    from deepspeed.runtime import constants

    named = {
        value
        for name, value in vars(constants).items()
        if isinstance(value, str) and name.endswith(("_BATCH_SIZE", "_GPU"))
    }
    assert {value for value in named if value.isidentifier()} <= TOP_LEVEL
