"""Test how each key of DeepSpeed's JSON is handled: filled, added, passed, or refused."""

from typing import Any

import pytest

from headway.core.config.torch_kwargs import GradScalerKwargs
from headway.errors import ConfigError, UnsupportedError
from headway.layouts.deepspeed.config import RunValues, complete_config

ZERO = {"zero_optimization": {"stage": 2}}


RUN_VALUES = RunValues(num_ranks=4, num_steps=3, precision="no", micro_batch=2)


def complete_settings(config: dict[str, Any], run: RunValues = RUN_VALUES) -> Any:
    return complete_config({**ZERO, **config}, run, lambda section: None)


def test_values_known_to_the_run_are_filled_or_added() -> None:
    found = complete_settings({"train_batch_size": "auto", "gradient_clipping": "auto"})
    assert found.config["train_batch_size"] == 24
    assert found.config["train_micro_batch_size_per_gpu"] == 2
    assert found.config["gradient_accumulation_steps"] == 3
    assert found.handling["train_batch_size"] == "filled"
    assert found.handling["train_micro_batch_size_per_gpu"] == "added"
    assert found.handling["zero_optimization.stage"] == "passed"
    assert found.clipping == 0.0
    assert any(line.startswith("filled: train_batch_size=24") for line in found.format_lines())


def test_contradictions_are_reported_together() -> None:
    with pytest.raises(
        ConfigError, match=r"train_batch_size=16 in the JSON, but 24 in this run; fp16.enabled=True.*False"
    ):
        complete_settings({"train_batch_size": 16, "fp16": {"enabled": True}})
    assert complete_settings({"train_batch_size": 24}).handling["train_batch_size"] == "agrees"


def test_batch_size_is_read_from_the_json_without_a_loader() -> None:
    run = RunValues(num_ranks=2, num_steps=2, precision="no")
    assert complete_settings({"train_batch_size": 12}, run).config["train_micro_batch_size_per_gpu"] == 3
    assert complete_settings({}, run).config["train_batch_size"] == 4
    with pytest.raises(ConfigError, match="train_batch_size=13"):
        complete_settings({"train_batch_size": 13}, run)


def test_sizes_depend_on_the_hidden_size_or_are_deepspeeds() -> None:
    sizes = {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    }
    run = RunValues(num_ranks=1, num_steps=1, precision="no", hidden_size=100)
    section = complete_settings({"zero_optimization": sizes}, run).config["zero_optimization"]
    assert section == dict(zip(sizes, (3, 10_000, 9000, 1000)))
    left = complete_settings({"zero_optimization": sizes})
    assert left.config["zero_optimization"] == {"stage": 3}
    assert left.handling["zero_optimization.reduce_bucket_size"] == "left to DeepSpeed's default"


def test_precision_is_set_in_the_json() -> None:
    for precision in ("bf16", "fp16"):
        config = complete_settings({"bf16": {"enabled": "auto"}}, RunValues(2, 1, precision, 1)).config
        assert config["bf16"]["enabled"] == (precision == "bf16")
        assert config.get("fp16", {}).get("enabled", False) == (precision == "fp16")
        assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "data_types" not in complete_settings({"zero_optimization": {"stage": 1}}, RunValues(2, 1, "bf16", 1)).config
    for dtype in ("bfloat16", "bf16", "torch.bfloat16"):
        by_torch = {"torch_autocast": {"enabled": True, "dtype": dtype}}
        assert "bf16" not in complete_settings(by_torch, RunValues(2, 1, "bf16", 1)).config


def test_settings_of_the_fp16_scaler_come_from_the_handler() -> None:
    run = RunValues(2, 1, "fp16", 1, scaler=GradScalerKwargs(init_scale=2.0**10, growth_interval=50))
    section = complete_settings({"fp16": {"enabled": "auto", "loss_scale_window": "auto"}}, run).config["fp16"]
    assert section["loss_scale_window"] == 50
    assert section["initial_scale_power"] == 10
    with pytest.raises(ConfigError, match="initial_scale_power=16 in the JSON, but 10"):
        complete_settings({"fp16": {"initial_scale_power": 16}}, run)


def test_fixed_limit_is_kept_for_the_step() -> None:
    found = complete_settings({"gradient_clipping": 0.5})
    assert found.clipping == 0.5
    assert found.config["gradient_clipping"] == 0.0


def test_unknown_key_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"'gradient_cliping' \(did you mean 'gradient_clipping'\?\)"):
        complete_settings({"gradient_cliping": 1.0})
    with pytest.raises(ConfigError, match=r"'zero_optimization.stagge' \(did you mean 'stage'\?\)"):
        complete_config(
            {"zero_optimization": {"stage": 1, "stagge": 2}}, RUN_VALUES, lambda section: ["stage"] if section else None
        )


@pytest.mark.parametrize(
    "config",
    [
        {"curriculum_learning": {"enabled": True}},
        {"elasticity": {"enabled": True, "max_train_batch_size": 8}},
        {"tensor_parallel": {"autotp_size": 2}},
        {"amp": {"enabled": True}},
        {"dataloader_drop_last": True},
        *(
            {"torch_autocast": {"enabled": True, "dtype": each}}
            for each in ("float16", "torch.float16", "fp16", "half")
        ),
        {"zero_optimization": {"stage": 1, "overlap_comm": True}},
        {"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}, "data_types": {"grad_accum_dtype": "fp32"}},
    ],
)
def test_unsupported_section_is_refused_by_name(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="not supported"):
        complete_settings(config)


def test_disabled_section_is_accepted() -> None:
    complete_settings({"curriculum_learning": {"enabled": False}, "tensor_parallel": {"autotp_size": 1}, "amp": {}})


def test_unknown_auto_is_refused() -> None:
    with pytest.raises(ConfigError, match="wall_clock_breakdown='auto'"):
        complete_settings({"wall_clock_breakdown": "auto"})
    assert (
        complete_settings({"data_types": {"keep_in_fp32_modules": "auto"}}).handling["data_types.keep_in_fp32_modules"]
        == "passed"
    )
