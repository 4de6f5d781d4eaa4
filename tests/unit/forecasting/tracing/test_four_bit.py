"""Test forecasts of QLoRA and of experts against the models that transformers loads, measured by torch's profiler."""

import pytest
import torch

import headway
from benchmarks.forecast.truth import measure_peak
from headway.forecasting.tracing.four_bit import is_unpacked_four_bit, iterate_scales
from headway.forecasting.tracing.recipe import StepRecipe
from headway.planning.forecast_functions import make_forecast_functions
from headway.planning.sources import find_source

transformers = pytest.importorskip("transformers")
bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 300,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(**SMALL, max_position_embeddings=64, use_cache=False)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def load_model(folder):
    """Load the model as described in QLoRA's guides, on a CPU."""
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=how, device_map="cpu", dtype=torch.bfloat16
    )
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return peft.get_peft_model(model, peft.LoraConfig(r=4)).train()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_qlora_forecast_equals_the_real_model(folder, precision):
    make, batch, loss = make_forecast_functions(find_source(str(folder), 4, 64), dtype="int4", lora=4)
    found = headway.forecast(make, batch, loss=loss, device="cpu", precision=precision, batch_size=4, largest=False)
    model = load_model(folder)
    layers = [module for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    scales = sum(each.nbytes for module in layers for each in iterate_scales(module))
    assert len(layers) == 7 * SMALL["num_hidden_layers"]
    assert scales > 0
    recipe = StepRecipe(torch.optim.AdamW, None, precision)
    # The profiler's sum begins with parameters and buffers, and the scales are neither.
    assert found.allocated == pytest.approx(measure_peak(model, recipe, lambda: batch(4)) + scales, rel=0.001)
    assert not any(map(is_unpacked_four_bit, model.modules()))


def test_single_layer_is_packed_with_and_without_nested_scales():
    for is_nested in (True, False):

        def make_model(is_nested=is_nested):
            return bnb.nn.Linear4bit(256, 512, bias=False, compress_statistics=is_nested, compute_dtype=torch.float32)

        real = make_model().to("cpu")
        held = real.weight.nbytes + sum(each.nbytes for each in iterate_scales(real))
        adapted = lambda make_model=make_model: torch.nn.Sequential(torch.nn.Linear(256, 256), make_model())  # noqa: E731
        found = headway.forecast(
            adapted, lambda n: torch.zeros(n, 256), loss=lambda y, _: y.sum(), device="cpu", batch_size=2, largest=False
        )
        assert found.split["weights"] == held + (256 + 1) * 256 * 4


@pytest.mark.slow
def test_experts_are_grouped_products_in_float32():
    config = transformers.Qwen3MoeConfig(
        **SMALL, num_key_value_heads=2, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, use_cache=False
    )

    def make_model():
        return transformers.Qwen3MoeForCausalLM(config)

    def make_batch(size):
        return dict.fromkeys(("input_ids", "labels"), torch.zeros(size, 32, dtype=torch.long))

    found = headway.forecast(
        make_model, make_batch, optimizer=torch.optim.AdamW, device="cpu", batch_size=4, largest=False
    )
    assert found.allocated == pytest.approx(
        measure_peak(make_model().train(), StepRecipe(torch.optim.AdamW), lambda: make_batch(4)), rel=0.005
    )
