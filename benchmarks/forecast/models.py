"""Models whose memory is forecast: a small one of each kind, with its batches."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.forecast.workload import Workload

LENGTH = 64


def _make_tokens(size: int) -> dict[str, torch.Tensor]:
    tokens = torch.ones(size, LENGTH, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens.clone()}


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.drop(self.down(nn.functional.gelu(self.up(self.norm(inputs)))))


def _build_mlp() -> nn.Module:
    return nn.Sequential(*[_Layer(256) for _ in range(3)], nn.Linear(256, 10))


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.norms[0](self.first(images)))
        return torch.relu(images + self.norms[1](self.second(inner)))


def _build_cnn() -> nn.Module:
    blocks = [_Residual(64) for _ in range(3)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(nn.Conv2d(3, 64, 7, stride=2, padding=3), nn.MaxPool2d(2), *blocks, *head)


def _build_gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=256, n_layer=3, n_head=4, vocab_size=2000, use_cache=False)
    )


def _build_bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            hidden_size=256, num_hidden_layers=3, num_attention_heads=4, intermediate_size=1024, vocab_size=2000,
            attn_implementation="eager",
        )
    )  # fmt: skip


def _build_t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=256, d_kv=64, num_heads=4, d_ff=1024, num_layers=2, vocab_size=2000, use_cache=False,
            decoder_start_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


def _build_vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=192, num_hidden_layers=3, num_attention_heads=3, intermediate_size=768, image_size=64, patch_size=8,
            num_labels=10,
        )
    )  # fmt: skip


def _build_llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=256, intermediate_size=688, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4,
            vocab_size=2000, use_cache=False,
        )
    )  # fmt: skip


def _build_lora() -> nn.Module:
    import peft

    plan = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return peft.get_peft_model(_build_llama(), plan)  # type: ignore[return-value, arg-type]


def _make_images(side: int) -> Callable[[int], Any]:
    return lambda size: (torch.zeros(size, 3, side, side), torch.zeros(size, dtype=torch.long))


CASES: dict[str, Workload] = {
    "MLP": Workload(
        _build_mlp,
        lambda n: (torch.zeros(n * 64, 256), torch.zeros(n * 64, dtype=torch.long)),
        nn.functional.cross_entropy,
    ),
    "CNN": Workload(_build_cnn, _make_images(64), nn.functional.cross_entropy),
    "GPT-2": Workload(_build_gpt2, _make_tokens),
    "BERT": Workload(_build_bert, _make_tokens),
    "T5": Workload(_build_t5, _make_tokens),
    "ViT": Workload(
        _build_vit, lambda n: {"pixel_values": torch.zeros(n, 3, 64, 64), "labels": torch.zeros(n, dtype=torch.long)}
    ),
    "Llama": Workload(_build_llama, _make_tokens),
    "LoRA": Workload(_build_lora, _make_tokens),
}
