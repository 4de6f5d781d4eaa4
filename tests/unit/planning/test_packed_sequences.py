"""Test `headway estimate --packing`: forecasts of sequences that contain several documents."""

from pathlib import Path
from typing import Any

import pytest
import torch

import headway
from headway.errors import ConfigError
from headway.planning.sources import find_source, make_forecast_functions

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_hidden_layers": 2}


def make_batch(size: int) -> dict[str, Any]:
    tokens = torch.zeros(size, 256, dtype=torch.long)
    places = torch.cat([torch.arange(100), torch.arange(156)]).expand(size, 256).contiguous()
    return {"input_ids": tokens, "labels": tokens, "position_ids": places}


def test_forecast_includes_the_mask(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES, vocab_size=100, use_cache=False)
    config.save_pretrained(tmp_path)
    make, batch, loss = make_forecast_functions(find_source(str(tmp_path), 4, 256), is_packed=True)
    found = headway.forecast(make, batch, loss=loss, device="cpu", batch_size=4, largest=False)
    expected = headway.forecast(
        lambda: transformers.LlamaForCausalLM(config), make_batch, device="cpu", batch_size=4, largest=False
    )
    assert found.allocated == expected.allocated


def test_model_without_positions_is_an_error() -> None:
    source = find_source("mamba", 1, 16)
    with pytest.raises(ConfigError, match="takes no position_ids"):
        make_forecast_functions(source, is_packed=True)
