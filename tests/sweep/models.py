"""Small models that the tests of layouts do not use, each with its data and loss. All are created from configurations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, LENGTH, ROWS = 64, 16, 24
PADDING = -100
Rows = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A model, its data and its loss.

    Attributes:
        make: Builds the model, with weights from torch's current seed.
        rows: Returns the data as tensors with `ROWS` rows.
        loss: Returns the summed loss of a batch and its divisor. Both are added up over all ranks.
        is_by_rank: Whether each rank's rows are normalized separately (BatchNorm), also in the loop by hand.
    """

    make: Callable[[], nn.Module]
    rows: Callable[[], Rows]
    loss: Callable[..., tuple[torch.Tensor, int]]
    is_by_rank: bool = False


# ---------------------------------------------------------------- data and losses


def _make_generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _ragged_texts() -> Rows:
    """Return token IDs, and targets that end at a different position in each row."""
    ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=_make_generator())
    lengths = torch.randint(2, LENGTH, (ROWS, 1), generator=_make_generator(4))
    return ids, ids.roll(-1, 1).masked_fill(torch.arange(LENGTH) >= lengths, PADDING)


def _translations() -> Rows:
    """Return inputs, decoder inputs and targets for translation models."""
    ids, targets = _ragged_texts()
    return ids, torch.where(targets == PADDING, 1, targets).roll(1, 1), targets


def _texts() -> Rows:
    return torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=_make_generator()), torch.arange(ROWS) % 3


def _images() -> Rows:
    return torch.randn(ROWS, 3, 16, 16, generator=_make_generator()), torch.arange(ROWS) % 3


def _audio() -> Rows:
    return torch.randn(ROWS, 8, 2 * LENGTH, generator=_make_generator()), *_translations()[1:]


def _noisy_images() -> Rows:
    pictures, _ = _images()
    return pictures, torch.randn(ROWS, 3, 16, 16, generator=_make_generator(5))


def _get_logits(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out.logits  # type: ignore[no-any-return]


def _sum_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    flat = logits.float().reshape(-1, logits.shape[-1])
    return functional.cross_entropy(flat, targets.reshape(-1), ignore_index=PADDING, reduction="sum"), int(
        (targets != PADDING).sum()
    )


def causal_loss(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return _sum_cross_entropy(_get_logits(model(ids)), targets)


def class_loss(model: nn.Module, given: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return _sum_cross_entropy(_get_logits(model(given)), targets)


def translation_loss(
    model: nn.Module, given: torch.Tensor, before: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, int]:
    return _sum_cross_entropy(model(given, decoder_input_ids=before).logits, targets)


def noise_loss(model: nn.Module, pictures: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (model(pictures + noise) - noise).square().sum(), noise.numel()


# ---------------------------------------------------------------- models of transformers


def _hub(name: str, config: str = "", **sizes: Any) -> Callable[[], nn.Module]:
    """Return a function that builds a transformers model from a configuration with these sizes."""

    def make() -> nn.Module:
        import transformers

        settings = getattr(transformers, config or name.replace("ForCausalLM", "Config"))(**sizes)
        return getattr(transformers, name)(settings)  # type: ignore[no-any-return]

    return make


_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
_LLAMA = {
    **_TOKENS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "use_cache": False,
}  # fmt: skip
_BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32, "num_labels": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_VIT = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4,
    "num_labels": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_HEAD = {**_LLAMA, "head_dim": 4}
_LATENT = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 8,
    "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
}  # fmt: skip


def _build_llama_with_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.0)
    return get_peft_model(_hub("LlamaForCausalLM", **_LLAMA)(), config)  # type: ignore[arg-type, return-value]


def _build_part_frozen_llama() -> nn.Module:
    model: Any = _hub("LlamaForCausalLM", **_LLAMA)()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model  # type: ignore[no-any-return]


# ---------------------------------------------------------------- models by hand


class UNet(nn.Module):
    """A U-Net with two levels, GroupNorm and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.down = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.GroupNorm(2, 16), nn.SiLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.out = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        high = self.into(pictures)
        out: torch.Tensor = self.out(torch.cat([high, self.up(self.down(high))], 1))
        return out


class Recurrent(nn.Module):
    """A language model with two LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(VOCABULARY, 16), nn.LSTM(16, 16, 2, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(self.tokens(ids))[0])
        return logits


def _build_cnn_with_batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def _make_moe_case(name: str, **sizes: Any) -> Case:
    return Case(_hub(name, **{**_LLAMA, **sizes}), _ragged_texts, causal_loss)


def _make_text_case(name: str, sizes: dict[str, Any], config: str = "") -> Case:
    return Case(_hub(name, config, **sizes), _ragged_texts, causal_loss)


CASES: dict[str, Case] = {
    "Llama": _make_text_case("LlamaForCausalLM", _LLAMA),
    "Llama, tied": _make_text_case("LlamaForCausalLM", {**_LLAMA, "tie_word_embeddings": True}),
    "Llama, part frozen": Case(_build_part_frozen_llama, _ragged_texts, causal_loss),
    "Llama, LoRA": Case(_build_llama_with_lora, _ragged_texts, causal_loss),
    "Qwen2": _make_text_case("Qwen2ForCausalLM", _LLAMA),
    "Qwen3": _make_text_case("Qwen3ForCausalLM", _HEAD),
    "Mistral": _make_text_case("MistralForCausalLM", {**_HEAD, "sliding_window": 8}),
    "Phi-3": _make_text_case("Phi3ForCausalLM", _LLAMA),
    "OLMo 2": _make_text_case("Olmo2ForCausalLM", _LLAMA),
    "Gemma 2": _make_text_case("Gemma2ForCausalLM", {**_HEAD, "sliding_window": 8}),
    "Gemma 3": _make_text_case("Gemma3ForCausalLM", {**_HEAD, "sliding_window": 8}, "Gemma3TextConfig"),
    "GPT-2": _make_text_case("GPT2LMHeadModel", {
        **_TOKENS, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "use_cache": False,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "GPT2Config"),
    "GPT-NeoX": _make_text_case("GPTNeoXForCausalLM", {
        **_TOKENS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 32, "use_cache": False}),
    "Mamba": _make_text_case("MambaForCausalLM", {
        **_TOKENS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 2, "use_cache": False}),
    "Mixtral": _make_moe_case("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2),
    "Qwen3-MoE": _make_moe_case("Qwen3MoeForCausalLM", head_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8),
    "OLMoE": _make_moe_case("OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2),
    "DeepSeek-V3": _make_moe_case("DeepseekV3ForCausalLM", num_key_value_heads=4, **_LATENT),
    "BERT": Case(_hub("BertForSequenceClassification", "BertConfig", **_BERT), _texts, class_loss),
    "RoBERTa": Case(_hub("RobertaForSequenceClassification", "RobertaConfig", **_BERT, pad_token_id=0), _texts, class_loss),
    "DistilBERT": Case(_hub("DistilBertForSequenceClassification", "DistilBertConfig", vocab_size=VOCABULARY, dim=16, hidden_dim=32,
                            n_layers=2, n_heads=4, max_position_embeddings=32, num_labels=3, dropout=0.0, attention_dropout=0.0,
                            seq_classif_dropout=0.0), _texts, class_loss),
    "T5": Case(_hub("T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=32, num_layers=2,
                    num_heads=4, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0), _translations, translation_loss),
    "BART": Case(_hub("BartForConditionalGeneration", "BartConfig", vocab_size=VOCABULARY, d_model=16, encoder_layers=2,
                      decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32,
                      max_position_embeddings=32, dropout=0.0, use_cache=False), _translations, translation_loss),
    "Whisper": Case(_hub("WhisperForConditionalGeneration", "WhisperConfig", vocab_size=VOCABULARY, num_mel_bins=8, d_model=16,
                         encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32,
                         decoder_ffn_dim=32, max_source_positions=LENGTH, max_target_positions=32, dropout=0.0, use_cache=False,
                         pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
                         begin_suppress_tokens=None), _audio, translation_loss),
    "ViT": Case(_hub("ViTForImageClassification", "ViTConfig", **_VIT), _images, class_loss),
    "ConvNeXt": Case(_hub("ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 16], depths=[1, 2], num_stages=2,
                          patch_size=2, image_size=16, num_labels=3), _images, class_loss),
    "Swin": Case(_hub("SwinForImageClassification", "SwinConfig", image_size=16, patch_size=2, embed_dim=8, depths=[1, 2],
                      num_heads=[2, 4], window_size=4, num_labels=3, drop_path_rate=0.0), _images, class_loss),
    "U-Net": Case(UNet, _noisy_images, noise_loss),
    "CNN, BatchNorm": Case(_build_cnn_with_batch_norm, _images, class_loss, is_by_rank=True),
    "LSTM": Case(Recurrent, _ragged_texts, causal_loss),
}  # fmt: skip
