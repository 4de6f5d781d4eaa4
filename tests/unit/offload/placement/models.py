"""Small random transformers models, and modules for placements."""

import torch
import transformers
from torch import nn

_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _build_config(kind, **options):
    return getattr(transformers, kind)(**options)


MODELS = {
    "llama": ("LlamaForCausalLM", lambda: _build_config("LlamaConfig", **_SIZES, vocab_size=100)),
    "llama-tied": (
        "LlamaForCausalLM",
        lambda: _build_config("LlamaConfig", **_SIZES, vocab_size=100, tie_word_embeddings=True),
    ),
    "mixtral": (
        "MixtralForCausalLM",
        lambda: _build_config("MixtralConfig", **_SIZES, num_key_value_heads=2, vocab_size=100, num_local_experts=4),
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        lambda: _build_config("GPT2Config", n_embd=64, n_layer=4, n_head=4, vocab_size=100, **_TOKENS),
    ),
    "t5": (
        "T5ForConditionalGeneration",
        lambda: _build_config("T5Config", d_model=64, d_ff=128, num_layers=4, num_heads=4, d_kv=16, vocab_size=100),
    ),
    "vit": ("ViTModel", lambda: _build_config("ViTConfig", **_SIZES, image_size=32, patch_size=8)),
}


def build_model(name):
    kind, config = MODELS[name]
    return getattr(transformers, kind)(config())


class Weight(nn.Module):
    """Layer of exactly the given number of bytes."""

    def __init__(self, num_bytes):
        super().__init__()
        self.w = nn.Parameter(torch.empty(num_bytes, dtype=torch.int8, device="meta"), requires_grad=False)


def build_layers(*sizes):
    return nn.Sequential(*(Weight(size) for size in sizes))


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)


class Chain(nn.Module):
    """Embedding, blocks, and a head tied to the embedding."""

    def __init__(self, num_blocks, width=16):
        super().__init__()
        self.embedding = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 100, bias=False)
        self.head.weight = self.embedding.weight
