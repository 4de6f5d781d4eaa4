"""Test models on packed documents: those that separate documents pass, and all others are refused before an update."""

from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from headway import PackingCollator, check_document_boundaries
from headway.errors import PrepareError
from headway.language_data.boundary_check import BoundaryVerdict, ProbeOutputs, judge_boundaries
from headway.language_data.document_attention import make_document_mask

WIDTH = 16


class Attending(nn.Module):
    """Small decoder with one block, written by hand.

    Args:
        is_masked: Whether documents are masked from each other.
        starts_again: Whether positions start again at 0 in each document.
        routes: Whether tokens pass through one of two experts, with all tokens of an expert in one product.

    """

    def __init__(self, is_masked: bool = True, starts_again: bool = True, routes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(32, WIDTH)
        self.places = nn.Embedding(32, WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 32)
        self.dropout = nn.Dropout(0.5)
        self.is_masked, self.starts_again, self.routes = is_masked, starts_again, routes

    def forward(self, input_ids: Any, position_ids: Any = None) -> Any:
        places = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        given = places if position_ids is None else position_ids
        hidden = self.tokens(input_ids) + self.places(given if self.starts_again else places)
        query, key, value = self.mixed(hidden)[:, None].chunk(3, -1)
        mask = make_document_mask(given if self.is_masked else places)
        hidden = self.dropout(hidden + scaled_dot_product_attention(query, key, value, attn_mask=mask)[:, 0])
        if self.routes:
            first = hidden[..., 0] > 0
            routed = torch.empty_like(hidden)
            routed[first], routed[~first] = self.experts[0](hidden[first]), self.experts[1](hidden[~first])
            hidden = hidden + routed
        return {"logits": self.head(hidden)}


class Scoring(Attending):
    """Decoder that gets labels and returns only its loss."""

    def forward(self, input_ids: Any, position_ids: Any, labels: Any) -> Any:  # type: ignore[override]
        logits = super().forward(input_ids, position_ids)["logits"]
        return {"loss": cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())}


class Recurrent(nn.Module):
    """Recurrence over all tokens that accepts `position_ids` among its keyword arguments, as state-space models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(32, WIDTH)
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, input_ids: Any, **kwargs: Any) -> Any:
        return (self.cell(self.tokens(input_ids))[0],)


class TokenOnlyModel(nn.Module):
    """Model whose forward accepts only token IDs, and no document boundaries."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, WIDTH)

    def forward(self, input_ids: Any) -> Any:
        return self.tokens(input_ids)


@pytest.mark.parametrize("kind", [Attending, Scoring])
@pytest.mark.parametrize("routes", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_check_refuses_handwritten_models_that_ignore_document_boundaries(
    kind: type[Attending], routes: bool, dtype: torch.dtype
) -> None:
    collate = PackingCollator()
    model = kind(routes=routes).to(dtype)
    model.head.eval()
    check_document_boundaries(model, collate)
    assert model.training
    assert not model.head.training
    with pytest.raises(PrepareError, match=f"{kind.__name__} ignores the boundaries"):
        check_document_boundaries(kind(is_masked=False, routes=routes).to(dtype), collate)
    if kind is Attending:
        with pytest.raises(PrepareError, match="Attending computes other outputs for a packed document"):
            check_document_boundaries(kind(starts_again=False, routes=routes).to(dtype), collate)


class Merging(nn.Linear):
    """Layer that merges its weights in evaluation mode, as the LoRA layers of some libraries do."""

    is_merged = False

    def train(self, mode: bool = True) -> "Merging":
        self.is_merged = not mode
        return super().train(mode)


def test_layers_that_merge_weights_in_evaluation_mode_separate_them_again() -> None:
    model = Attending()
    model.head.__class__ = Merging
    check_document_boundaries(model, PackingCollator())
    assert not model.head.is_merged


def test_models_that_get_no_boundaries_are_refused() -> None:
    with pytest.raises(PrepareError, match="Recurrent ignores the boundaries"):
        check_document_boundaries(Recurrent(), PackingCollator())
    with pytest.raises(
        PrepareError, match=r"TokenOnlyModel.forward\(input_ids: Any\) -> Any cannot be called with .*position_ids"
    ):
        check_document_boundaries(TokenOnlyModel(), PackingCollator())


def test_model_with_uninformative_outputs_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = Attending()
    nn.init.zeros_(model.head.weight)
    with caplog.at_level("WARNING"):
        check_document_boundaries(model, PackingCollator())
    assert "it is unknown whether it separates packed documents" in caplog.text


def test_rounding_is_distinguished_from_a_leak() -> None:
    packed, other = torch.ones(4, 8), torch.full((4, 8), 1.5)
    noisy = packed + 1e-6
    nan = packed * float("nan")
    assert judge_boundaries(ProbeOutputs(packed, noisy, other, noisy, noisy), False) is BoundaryVerdict.SEPARATE
    assert judge_boundaries(ProbeOutputs(packed, noisy, other, packed, noisy), False) is BoundaryVerdict.LEAK
    assert judge_boundaries(ProbeOutputs(packed, packed + 0.01, other, noisy, None), False) is BoundaryVerdict.LEAK
    assert judge_boundaries(ProbeOutputs(packed, nan, other, None, None), True) is BoundaryVerdict.LEAK


transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
MORE = {"intermediate_size": 32, "num_key_value_heads": 2}
STATES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
HYBRID = {
    **SIZES, **MORE, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
    "num_experts_per_tok": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
}  # fmt: skip
IS_FALCON_SPLIT = Version(transformers.__version__) >= Version("5.24")
"""Whether Falcon separates documents by their position_ids. It does since transformers 5.24."""
FAMILIES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "LlamaForCausalLM": ({**SIZES, **MORE}, {"position_ids", "mask", "varlen"}),
    "Qwen3ForCausalLM": ({**SIZES, **MORE, "head_dim": 8}, {"position_ids", "mask", "varlen"}),
    "MixtralForCausalLM": ({**SIZES, **MORE, "num_local_experts": 4}, {"position_ids", "mask", "varlen"}),
    "GPT2LMHeadModel": ({**SIZES, "bos_token_id": 1, "eos_token_id": 2}, {"position_ids", "mask", "varlen"}),
    "FalconForCausalLM": (SIZES, {"mask", "position_ids", "varlen"} if IS_FALCON_SPLIT else {"mask"}),
    "MambaForCausalLM": (STATES, set()),
    "JambaForCausalLM": (HYBRID, set()),
    "RwkvForCausalLM": ({"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2}, set()),
}
"""Class of transformers: its sizes, and the forms of boundaries that separate documents in it."""


def make_model(name: str, **more: Any) -> Any:
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    return kind(kind.config_class(**FAMILIES[name][0], **{"use_cache": False, **more}))


@pytest.mark.parametrize("name", FAMILIES)
def test_check_accepts_each_family_of_transformers_only_in_its_forms(name: str) -> None:
    for form in ("position_ids", "mask", "varlen"):
        model = make_model(name)
        if form in FAMILIES[name][1]:
            check_document_boundaries(model, PackingCollator(form))
        elif (name, form) != ("MambaForCausalLM", "mask"):  # fails with torch's error
            with pytest.raises(PrepareError, match=f"{name} ignores the boundaries"):
                check_document_boundaries(model, PackingCollator(form))


class MaskingCollator(PackingCollator):
    """Collator that adds the mask that tokenizers return."""

    def __call__(self, sequences: Any) -> dict[str, Any]:
        batch = super().__call__(sequences)
        return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def test_settings_that_make_transformers_ignore_the_boundaries_are_refused() -> None:
    for implementation in ("sdpa", "eager"):
        check_document_boundaries(make_model("LlamaForCausalLM", attn_implementation=implementation), PackingCollator())
    with pytest.raises(PrepareError, match="LlamaForCausalLM ignores"):
        check_document_boundaries(make_model("LlamaForCausalLM", use_cache=True), PackingCollator())
    with pytest.raises(PrepareError, match="LlamaForCausalLM ignores"):
        check_document_boundaries(make_model("LlamaForCausalLM"), MaskingCollator())
    eager = make_model("LlamaForCausalLM", attn_implementation="eager")  # adds a boolean mask to the scores as a number
    with pytest.raises(PrepareError, match="LlamaForCausalLM"):
        check_document_boundaries(eager, PackingCollator("mask"))


def test_encoders_need_a_mask_in_both_directions() -> None:
    config = transformers.BertConfig(**SIZES, intermediate_size=32)
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config)
    check_document_boundaries(model, PackingCollator("mask", is_causal=False))
    for collate in (PackingCollator("mask"), PackingCollator()):
        with pytest.raises(PrepareError, match="BertForMaskedLM"):
            check_document_boundaries(model, collate)


def test_changed_document_leaves_the_losses_of_others_equal_bit_for_bit() -> None:
    documents = [[5, 9, 7, 6], [8, 4, 4, 10, 11], [20, 21, 22]]
    changed = [[15, 19, 17, 16], *documents[1:]]
    for name in ("LlamaForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel"):
        model = make_model(name).eval()
        losses = []
        for each in (documents, changed):
            batch = {
                "input_ids": torch.tensor([[token for document in each for token in document]]),
                "position_ids": torch.tensor([[*range(4), *range(5), *range(3)]]),
            }
            logits = model(**batch).logits[0]
            losses.append(cross_entropy(logits[:-1], batch["input_ids"][0, 1:], reduction="none"))
        assert torch.equal(losses[0][4:], losses[1][4:])
        assert not torch.equal(losses[0][:3], losses[1][:3])
