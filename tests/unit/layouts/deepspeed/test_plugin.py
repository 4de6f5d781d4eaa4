"""Test DeepSpeed's plugin: defaults, fields against the JSON, and the strategy that selects it."""

from typing import Any

import pytest

import headway
from headway.core.config.engines import EngineOptions
from headway.errors import ConfigError, UnsupportedError
from headway.layouts.deepspeed.json_config import HfDeepSpeedConfig
from headway.layouts.deepspeed.plugin import DeepSpeedPlugin, match_plugin

ZERO = {"zero_optimization": {"stage": 2}}


def test_given_dict_stays_unchanged() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config=ZERO, gradient_clipping=1.0)
    assert plugin.deepspeed_config["gradient_clipping"] == 1.0
    assert ZERO == {"zero_optimization": {"stage": 2}}


def test_defaults_equal_accelerates() -> None:
    plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == 2
    assert plugin.is_train_batch_min
    assert plugin.get_value("zero_optimization.stage") == 2


def test_field_fills_an_auto_and_contradicts_another_value() -> None:
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
def test_invalid_plugins_are_refused(options: dict[str, Any], kind: type[Exception], word: str) -> None:
    with pytest.raises(kind, match=word):
        DeepSpeedPlugin(**options)


def test_strategy_selects_the_engine() -> None:
    assert match_plugin("ddp", None) is None
    assert match_plugin("fsdp", None) is None
    assert match_plugin("DeepSpeed", None) is not None
    assert match_plugin("zero3", None).zero_stage == 3  # type: ignore[union-attr]
    assert match_plugin("deepspeed", None).zero_stage == 2  # type: ignore[union-attr]
    plugin = DeepSpeedPlugin(zero_stage=1)
    assert match_plugin("ddp", plugin) is plugin
    assert match_plugin("DDP", plugin) is plugin
    assert match_plugin("ddp", {"only": plugin}) is plugin
    for strategy, given, kind in [
        ("fsdp", plugin, ConfigError), ("zero2", plugin, ConfigError), ("ddp", "zero", ConfigError),
        ("zero", plugin, ConfigError), ("zero-3", plugin, ConfigError),
        ("ddp", {"a": plugin, "b": plugin}, UnsupportedError),
    ]:  # fmt: skip
        with pytest.raises(kind):
            match_plugin(strategy, given)


def test_run_follows_the_json_where_it_has_no_setting() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={**ZERO, "bf16": {"enabled": True}, "gradient_accumulation_steps": 4})
    assert plugin.precision == "bf16"
    assert plugin.num_steps == 4
    assert DeepSpeedPlugin(hf_ds_config={**ZERO, "bf16": {"enabled": "auto"}}).precision is None


def test_torchs_scaler_stays_disabled() -> None:
    options = EngineOptions()
    assert options.scaler.enabled
    assert not options.disable_loss_scaling().scaler.enabled


def test_accelerates_names_are_available() -> None:
    assert headway.DeepSpeedPlugin is DeepSpeedPlugin
    from headway.utils import DummyOptim
    from headway.utils import HfDeepSpeedConfig as Config

    assert Config is HfDeepSpeedConfig
    assert DummyOptim is headway.DummyOptim
