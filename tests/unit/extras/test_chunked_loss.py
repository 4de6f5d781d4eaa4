"""Test the chunked loss against the loss of transformers with the same weights."""

import copy

import pytest
import torch
from torch import nn

import headway
from benchmarks.forecast.truth import measure_peak
from headway import chunk_loss
from headway.errors import PrepareError, UnsupportedError
from headway.forecasting.tracing.recipe import StepRecipe

transformers = pytest.importorskip("transformers")
if not hasattr(nn.functional, "linear_cross_entropy"):
    pytest.skip("torch 2.13 brings linear_cross_entropy", allow_module_level=True)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 500,
}
CASES = {
    "Llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "Qwen3": {"num_key_value_heads": 2},
    "Mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True},
    "Phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "GPTNeoX": {},
}


def build_model(name="Llama", **more):
    config = getattr(transformers, f"{name}Config")(**SIZES, **CASES.get(name, {}), use_cache=False, **more)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).train()


def make_batch(size=3, length=40):
    tokens = torch.randint(1, 500, (size, length), generator=torch.Generator().manual_seed(size))
    labels = tokens.clone()
    labels[:, :5] = -100
    return {"input_ids": tokens, "labels": labels}


def chunk_model(model, tokens=32):
    return chunk_loss(
        model, nn.LinearCrossEntropyOptions(batch_chunk_size=tokens, chunking_method=None, acc_policy="accurate")
    )


@pytest.mark.parametrize("given", [{}, {"num_items_in_batch": 77}])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_those_of_whole_logits(name, given):
    plain = build_model(name)
    ours = chunk_model(copy.deepcopy(plain))
    assert list(ours.state_dict()) == list(plain.state_dict())
    expected, outputs = plain(**make_batch(), **given), ours(**make_batch(), **given)
    assert outputs.logits is None
    assert outputs.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    expected.loss.backward()
    outputs.loss.backward()
    for (key, one), other in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert torch.allclose(other.grad, one.grad, rtol=1e-5, atol=1e-7), key


def test_loss_keeps_its_precision_under_autocast():
    plain = build_model()
    ours = chunk_model(copy.deepcopy(plain))
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = plain(**make_batch()).loss, ours(**make_batch()).loss
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(
        expected.item(), rel=5e-4
    )  # transformers averages losses that are rounded individually
    expected.backward()
    found.backward()
    one, other = (model.lm_head.weight.grad for model in (plain, ours))
    assert (other - one).norm() < 0.01 * one.norm()


def test_evaluation_generation_and_calls_without_labels_are_unchanged():
    plain = build_model()
    ours = chunk_model(copy.deepcopy(plain))
    tokens = make_batch()["input_ids"]
    assert torch.equal(ours(input_ids=tokens).logits, plain(input_ids=tokens).logits)
    as_tuple = [model(**make_batch(), return_dict=False)[1] for model in (ours, plain)]
    assert torch.equal(*as_tuple)
    ours.eval()
    plain.eval()
    found, expected = ours(**make_batch()), plain(**make_batch())
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(ours.generate(tokens[:1], max_new_tokens=4), plain.generate(tokens[:1], max_new_tokens=4))


def test_failed_forward_leaves_the_model_unchanged():
    ours = chunk_model(build_model())
    with pytest.raises(Exception, match="index"):
        ours(input_ids=torch.full((1, 4), 10_000), labels=torch.zeros(1, 4, dtype=torch.long))
    assert ours(input_ids=make_batch()["input_ids"]).logits.shape == (3, 40, 500)


@pytest.mark.parametrize("name", ["Gemma2", "Granite"])
def test_model_that_changes_its_logits_is_refused(name):
    more = {"final_logit_softcapping": 30.0} if name == "Gemma2" else {"logits_scaling": 2.0}
    with pytest.raises(UnsupportedError, match="changes its logits after the head"):
        chunk_model(build_model(name, num_key_value_heads=2, **more))(**make_batch())


def build_bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))


@pytest.mark.parametrize("model", [lambda: nn.Linear(2, 2), lambda: chunk_loss(build_model()), build_bert])
def test_other_models_are_refused(model):
    with pytest.raises(PrepareError, match="causal language model"):
        chunk_loss(model())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_memory_is_that_of_a_chunk_and_is_forecast(precision):
    def build_small(is_chunked=True):
        model = build_model("Llama", max_position_embeddings=256)
        return chunk_model(model, 64) if is_chunked else model

    recipe = StepRecipe(torch.optim.AdamW, None, precision)
    taken, whole = (measure_peak(build_small(each), recipe, lambda: make_batch(8, 256)) for each in (True, False))
    assert taken < 0.6 * whole
    found = headway.forecast(
        build_small, lambda size: make_batch(size, 256), device="cpu", precision=precision, batch_size=8, largest=False
    )
    assert found.allocated == pytest.approx(taken, rel=0.02)
    assert not found.caveats
