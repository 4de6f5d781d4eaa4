"""Small models for tests of tensor parallelism, and a plan that splits one of them."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

GPT_PLAN = {
    "blocks.*.attention.q": "colwise",
    "blocks.*.attention.k": "colwise",
    "blocks.*.attention.v": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim, self.dropout = width // num_heads, dropout
        self.q, self.k, self.v, self.out = (
            # The gradient of k's bias is zero except for rounding errors, and AdamW would turn these into full steps.
            nn.Linear(width, width, bias=name != "k")
            for name in ("q", "k", "v", "out")
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        dropout = self.dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.before_attention, self.before_up = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop, self.drop_within = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.before_attention(x)))
        return x + self.drop(self.down(self.drop_within(nn.functional.gelu(self.up(self.before_up(x))))))


class GPT(nn.Module):
    """Small GPT whose head can be tied to its embedding. No tested number of ranks divides its vocabulary of 37 tokens."""

    def __init__(
        self, vocabulary: int = 37, width: int = 16, num_heads: int = 4, num_blocks: int = 2, dropout: float = 0.0,
        tied: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Parameter(0.1 * torch.randn(24, width))
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.2)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def llama(**changes: Any) -> nn.Module:
    """Return a transformers Llama with random weights, four query heads and two key-value heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    chosen = {
        "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": True,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**chosen, **changes}))


def mixtral() -> nn.Module:
    """Return a transformers Mixtral with four experts. They run one by one, because grouped matrix products exist only in float32."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, num_local_experts=4, num_experts_per_tok=2, use_cache=False, pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    model.set_experts_implementation("eager")
    return model


def compute_logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of a model that returns a tensor or a transformers output."""
    found = model(tokens)
    return getattr(found, "logits", found)
