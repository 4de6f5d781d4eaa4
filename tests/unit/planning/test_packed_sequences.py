"""Test `headway estimate --packing`: forecasts of sequences that contain several documents."""

from pathlib import Path
from typing import Any

import pytest
import torch

import headway
from headway.errors import ConfigError
from headway.planning.forecast_functions import make_forecast_functions
from headway.planning.sources import find_source

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


class EncodedStep:
    """Training step on a batch as transformers' tokenizers return it."""

    def inputs(self) -> Any:
        return transformers.BatchEncoding(make_batch(4))

    def loss(self, model: Any, inputs: Any) -> Any:
        return model(**inputs).loss

    def __call__(self, model: Any) -> Any:
        return self.loss(model, self.inputs())


def test_mask_is_also_built_for_a_batch_that_is_no_dict() -> None:
    """A BatchEncoding is a mapping, but no dict."""
    # Few words, so that the mask is larger than the logits.
    config = transformers.LlamaConfig(**{**SIZES, "num_attention_heads": 8}, vocab_size=8, use_cache=False)

    def make_model() -> Any:
        return transformers.LlamaForCausalLM(config)

    batch_functions = (make_batch, lambda size: transformers.BatchEncoding(make_batch(size)))
    plain, encoded = (
        headway.forecast(make_model, each, device="cpu", batch_size=4, largest=False) for each in batch_functions
    )
    assert encoded.allocated == plain.allocated
    assert any("position_ids" in caveat for caveat in encoded.caveats)

    class DictStep(EncodedStep):
        def inputs(self) -> Any:
            return make_batch(4)

    expected, found = (headway.plan(make_model, "ddp", 2, step=step) for step in (DictStep(), EncodedStep()))
    assert found.peak == expected.peak


def test_models_of_the_same_config_keep_their_attention() -> None:
    """Forecasts and plans switch the attention of their own models only. Other models would ignore padding."""
    config = transformers.LlamaConfig(**SIZES, vocab_size=8, use_cache=False)

    def make_model() -> Any:
        return transformers.LlamaForCausalLM(config)

    def make_unpacked(size: int) -> dict[str, Any]:
        return {name: tensor for name, tensor in make_batch(size).items() if name != "position_ids"}

    class UnpackedStep(EncodedStep):
        def inputs(self) -> Any:
            return make_unpacked(4)

    expected = headway.forecast(make_model, make_batch, device="cpu", batch_size=4, largest=False)
    headway.forecast(make_model, make_unpacked, device="cpu", batch_size=4, largest=False)
    headway.plan(make_model, "ddp", 2, step=UnpackedStep())
    assert config._attn_implementation == "sdpa"
    found = headway.forecast(make_model, make_batch, device="cpu", batch_size=4, largest=False)
    assert found.allocated == expected.allocated

    torch.manual_seed(0)
    model = make_model().eval()
    tokens, mask = torch.randint(8, (1, 6)), torch.tensor([[0, 0, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 0, 0, 1, 2, 3]])
    with torch.no_grad():
        padded = model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits[:, 2:]
        alone = model(input_ids=tokens[:, 2:]).logits
    torch.testing.assert_close(padded, alone)


def test_model_without_positions_is_an_error() -> None:
    source = find_source("mamba", 1, 16)
    with pytest.raises(ConfigError, match="takes no position_ids"):
        make_forecast_functions(source, is_packed=True)
