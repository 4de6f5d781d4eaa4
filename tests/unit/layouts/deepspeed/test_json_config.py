"""Test reading DeepSpeed's JSON from any source, and its values by dotted names."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.layouts.deepspeed.json_config import HfDeepSpeedConfig

ZERO = {"zero_optimization": {"stage": 2}}


def test_json_is_read_from_any_source(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ZERO))
    encoded = base64.urlsafe_b64encode(json.dumps(ZERO).encode()).decode()
    for given in (ZERO, path, str(path), json.dumps(ZERO), encoded, HfDeepSpeedConfig(ZERO)):
        assert HfDeepSpeedConfig(given).config == ZERO


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
def test_other_sources_are_refused(given: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        HfDeepSpeedConfig(given if given != "[1]" else "[1")


def test_values_are_read_by_dotted_names() -> None:
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
