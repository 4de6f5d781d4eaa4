"""Models that the tests of layouts do not use, each with rows of its own and a loss; all small, made from configurations."""

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
        make: builds it, from the seed that is set.
        rows: tensors of as many rows.
        loss: from the model and a batch: the sum, and what it is divided by, as it counts over all ranks.
        is_by_rank: each rank's rows are normalized alone (BatchNorm), and so they are in the hand-written loop.
    """

    make: Callable[[], nn.Module]
    rows: Callable[[], Rows]
    loss: Callable[..., tuple[torch.Tensor, int]]
    is_by_rank: bool = False


# ---------------------------------------------------------------- data and losses


def _drawn(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _ragged() -> Rows:
    """Text, and targets that end somewhere else in each row."""
    ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=_drawn())
    lengths = torch.randint(2, LENGTH, (ROWS, 1), generator=_drawn(4))
    return ids, ids.roll(-1, 1).masked_fill(torch.arange(LENGTH) >= lengths, PADDING)


def _pairs() -> Rows:
    ids, targets = _ragged()
    return ids, torch.where(targets == PADDING, 1, targets).roll(1, 1), targets


def _classes() -> Rows:
    return torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=_drawn()), torch.arange(ROWS) % 3


def _pictures() -> Rows:
    return torch.randn(ROWS, 3, 16, 16, generator=_drawn()), torch.arange(ROWS) % 3


def _sounds() -> Rows:
    return torch.randn(ROWS, 8, 2 * LENGTH, generator=_drawn()), *_pairs()[1:]


def _noisy() -> Rows:
    pictures, _ = _pictures()
    return pictures, torch.randn(ROWS, 3, 16, 16, generator=_drawn(5))


def _logits(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out.logits  # type: ignore[no-any-return]


def _entropy(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    flat = logits.float().reshape(-1, logits.shape[-1])
    return functional.cross_entropy(flat, targets.reshape(-1), ignore_index=PADDING, reduction="sum"), int(
        (targets != PADDING).sum()
    )


def causal(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return _entropy(_logits(model(ids)), targets)


def classified(model: nn.Module, given: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return _entropy(_logits(model(given)), targets)


def translated(
    model: nn.Module, given: torch.Tensor, before: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, int]:
    return _entropy(model(given, decoder_input_ids=before).logits, targets)


def denoised(model: nn.Module, pictures: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (model(pictures + noise) - noise).square().sum(), noise.numel()


# ---------------------------------------------------------------- transformers' models


def _hub(name: str, config: str = "", **sizes: Any) -> Callable[[], nn.Module]:
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


def _adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.0)
    return get_peft_model(_hub("LlamaForCausalLM", **_LLAMA)(), config)  # type: ignore[arg-type, return-value]


def _frozen() -> nn.Module:
    model: Any = _hub("LlamaForCausalLM", **_LLAMA)()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model  # type: ignore[no-any-return]


# ---------------------------------------------------------------- models by hand


class UNet(nn.Module):
    """Two levels, GroupNorm, and a path that skips the lower one."""

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
    """A language model of two LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(VOCABULARY, 16), nn.LSTM(16, 16, 2, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(self.tokens(ids))[0])
        return logits


def _normalized() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def _experts(name: str, **sizes: Any) -> Case:
    return Case(_hub(name, **{**_LLAMA, **sizes}), _ragged, causal)


def _text(name: str, sizes: dict[str, Any], config: str = "") -> Case:
    return Case(_hub(name, config, **sizes), _ragged, causal)


CASES: dict[str, Case] = {
    "Llama": _text("LlamaForCausalLM", _LLAMA),
    "Llama, tied": _text("LlamaForCausalLM", {**_LLAMA, "tie_word_embeddings": True}),
    "Llama, part frozen": Case(_frozen, _ragged, causal),
    "Llama, LoRA": Case(_adapted, _ragged, causal),
    "Qwen2": _text("Qwen2ForCausalLM", _LLAMA),
    "Qwen3": _text("Qwen3ForCausalLM", _HEAD),
    "Mistral": _text("MistralForCausalLM", {**_HEAD, "sliding_window": 8}),
    "Phi-3": _text("Phi3ForCausalLM", _LLAMA),
    "OLMo 2": _text("Olmo2ForCausalLM", _LLAMA),
    "Gemma 2": _text("Gemma2ForCausalLM", {**_HEAD, "sliding_window": 8}),
    "Gemma 3": _text("Gemma3ForCausalLM", {**_HEAD, "sliding_window": 8}, "Gemma3TextConfig"),
    "GPT-2": _text("GPT2LMHeadModel", {
        **_TOKENS, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "use_cache": False,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "GPT2Config"),
    "GPT-NeoX": _text("GPTNeoXForCausalLM", {
        **_TOKENS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 32, "use_cache": False}),
    "Mamba": _text("MambaForCausalLM", {
        **_TOKENS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 2, "use_cache": False}),
    "Mixtral": _experts("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2),
    "Qwen3-MoE": _experts("Qwen3MoeForCausalLM", head_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8),
    "OLMoE": _experts("OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2),
    "DeepSeek-V3": _experts("DeepseekV3ForCausalLM", num_key_value_heads=4, **_LATENT),
    "BERT": Case(_hub("BertForSequenceClassification", "BertConfig", **_BERT), _classes, classified),
    "RoBERTa": Case(_hub("RobertaForSequenceClassification", "RobertaConfig", **_BERT, pad_token_id=0), _classes, classified),
    "DistilBERT": Case(_hub("DistilBertForSequenceClassification", "DistilBertConfig", vocab_size=VOCABULARY, dim=16, hidden_dim=32,
                            n_layers=2, n_heads=4, max_position_embeddings=32, num_labels=3, dropout=0.0, attention_dropout=0.0,
                            seq_classif_dropout=0.0), _classes, classified),
    "T5": Case(_hub("T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=32, num_layers=2,
                    num_heads=4, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0), _pairs, translated),
    "BART": Case(_hub("BartForConditionalGeneration", "BartConfig", vocab_size=VOCABULARY, d_model=16, encoder_layers=2,
                      decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32,
                      max_position_embeddings=32, dropout=0.0, use_cache=False), _pairs, translated),
    "Whisper": Case(_hub("WhisperForConditionalGeneration", "WhisperConfig", vocab_size=VOCABULARY, num_mel_bins=8, d_model=16,
                         encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32,
                         decoder_ffn_dim=32, max_source_positions=LENGTH, max_target_positions=32, dropout=0.0, use_cache=False,
                         pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
                         begin_suppress_tokens=None), _sounds, translated),
    "ViT": Case(_hub("ViTForImageClassification", "ViTConfig", **_VIT), _pictures, classified),
    "ConvNeXt": Case(_hub("ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 16], depths=[1, 2], num_stages=2,
                          patch_size=2, image_size=16, num_labels=3), _pictures, classified),
    "Swin": Case(_hub("SwinForImageClassification", "SwinConfig", image_size=16, patch_size=2, embed_dim=8, depths=[1, 2],
                      num_heads=[2, 4], window_size=4, num_labels=3, drop_path_rate=0.0), _pictures, classified),
    "U-Net": Case(UNet, _noisy, denoised),
    "CNN, BatchNorm": Case(_normalized, _pictures, classified, is_by_rank=True),
    "LSTM": Case(Recurrent, _ragged, causal),
}  # fmt: skip
