"""The models whose memory is forecast: small ones of each kind, with their batches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

LENGTH = 64


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained.

    Attributes:
        make: makes it.
        batch: gives a batch of so many samples.
        loss: from outputs and targets; None: the model returns it.
        enable: switches activation checkpointing on; None: it has none.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], torch.Tensor] | None = None


def _tokens(size: int) -> dict[str, torch.Tensor]:
    tokens = torch.ones(size, LENGTH, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens.clone()}


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.drop(self.down(nn.functional.gelu(self.up(self.norm(inputs)))))


def _mlp() -> nn.Module:
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


def _cnn() -> nn.Module:
    blocks = [_Residual(64) for _ in range(3)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(nn.Conv2d(3, 64, 7, stride=2, padding=3), nn.MaxPool2d(2), *blocks, *head)


def _gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=256, n_layer=3, n_head=4, vocab_size=2000, use_cache=False)
    )


def _bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            hidden_size=256, num_hidden_layers=3, num_attention_heads=4, intermediate_size=1024, vocab_size=2000,
            attn_implementation="eager",
        )
    )  # fmt: skip


def _t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=256, d_kv=64, num_heads=4, d_ff=1024, num_layers=2, vocab_size=2000, use_cache=False,
            decoder_start_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


def _vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=192, num_hidden_layers=3, num_attention_heads=3, intermediate_size=768, image_size=64, patch_size=8,
            num_labels=10,
        )
    )  # fmt: skip


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=256, intermediate_size=688, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4,
            vocab_size=2000, use_cache=False,
        )
    )  # fmt: skip


def _lora() -> nn.Module:
    import peft

    plan = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return peft.get_peft_model(_llama(), plan)  # type: ignore[return-value, arg-type]


def _images(side: int) -> Callable[[int], Any]:
    return lambda size: (torch.zeros(size, 3, side, side), torch.zeros(size, dtype=torch.long))


CASES: dict[str, Case] = {
    "MLP": Case(
        _mlp, lambda n: (torch.zeros(n * 64, 256), torch.zeros(n * 64, dtype=torch.long)), nn.functional.cross_entropy
    ),
    "CNN": Case(_cnn, _images(64), nn.functional.cross_entropy),
    "GPT-2": Case(_gpt2, _tokens),
    "BERT": Case(_bert, _tokens),
    "T5": Case(_t5, _tokens),
    "ViT": Case(
        _vit, lambda n: {"pixel_values": torch.zeros(n, 3, 64, 64), "labels": torch.zeros(n, dtype=torch.long)}
    ),
    "Llama": Case(_llama, _tokens),
    "LoRA": Case(_lora, _tokens),
}
