"""Test packed sequences, for which transformers builds a mask, against torch's profiler."""

import pytest
import torch

import headway
from benchmarks.forecast.truth import measure_peak
from headway.forecasting.tracing.recipe import StepRecipe

transformers = pytest.importorskip("transformers")


def make_model():
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_hidden_layers": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=100, use_cache=False))


def make_batch(size):
    tokens = torch.zeros(size, 256, dtype=torch.long)
    places = torch.cat([torch.arange(100), torch.arange(156)]).expand(size, 256).contiguous()
    return {"input_ids": tokens, "labels": tokens, "position_ids": places}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_mask_of_packed_sequences_is_counted_and_reported(precision):
    found = headway.forecast(make_model, make_batch, device="cpu", precision=precision, batch_size=4, largest=False)
    taken = measure_peak(make_model().train(), StepRecipe(torch.optim.AdamW, None, precision), lambda: make_batch(4))
    assert found.allocated == pytest.approx(taken, rel=0.005)
    assert "position_ids" in " ".join(found.caveats)

    def make_plain_batch(size):
        return {name: tensor for name, tensor in make_batch(size).items() if name != "position_ids"}

    whole = headway.forecast(
        make_model, make_plain_batch, device="cpu", precision=precision, batch_size=4, largest=False
    )
    assert whole.allocated < 0.99 * found.allocated
    assert not whole.caveats
