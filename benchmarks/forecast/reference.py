"""BERT-large as it was trained in 2022, when its memory on an RTX 3090 was published.

transformers and torch have changed since then, and so has their memory. In 2022, attention kept its scores until its end, the
optimizer updated parameters one by one, gradients were zeroed but not freed, and checkpointing was reentrant. This file reimplements
that behavior.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

PUBLISHED = {(1, False): 8590, (1, True): 7078, (8, False): 20314, (8, True): 8030}
"""MiB in use on the GPU after the training, by (batch size, checkpointing), from a tutorial of 2022 with sequences of 512 tokens."""
PUBLISHED_V100 = {
    (1, True, False, False): 6775,
    (1, True, True, True): 4847,
    (1, False, False, False): 8681,
    (4, False, False, False): 14949,
    (4, False, False, True): 12295,
    (4, False, True, False): 13939,
}
"""MiB from a later edition, on a V100 with 16 GB, by (batch, checkpointing, fp16, Adafactor). Batches of 1 are accumulated."""
LARGEST = 120
"""Largest batch with checkpointing that the tutorial fit into 24 GB."""
ATTENTION = "attention_of_2022"


class AdamWOf2022(torch.optim.Optimizer):
    """AdamW that updates one parameter after the other, with one temporary tensor of the parameter's size."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 5e-5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters; return nothing."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["mean"].mul_(0.9).add_(parameter.grad, alpha=0.1)
                state["square"].mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
                root = state["square"].sqrt().add_(1e-8)
                parameter.addcdiv_(state["mean"], root, value=-group["lr"])


def compute_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention in separate steps with a tensor each; the attention weights live until the end."""
    scores = torch.matmul(query, key.transpose(-1, -2))
    scores = scores / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = scores + mask
    weights = nn.functional.softmax(scores, dim=-1)
    weights = nn.functional.dropout(weights, options.get("dropout", 0.0), module.training)
    return torch.matmul(weights, value).permute(0, 2, 1, 3).contiguous(), weights


def build_model() -> nn.Module:
    """Build BERT-large for the classification of sequences into two classes."""
    from transformers import AttentionInterface, BertConfig, BertForSequenceClassification

    AttentionInterface.register(ATTENTION, compute_attention)
    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    config._attn_implementation = ATTENTION
    return BertForSequenceClassification(config)


def enable_checkpointing(model: nn.Module) -> None:
    """Enable reentrant activation checkpointing."""
    model.gradient_checkpointing_enable({"use_reentrant": True})  # type: ignore[operator]


def make_batch(size: int) -> dict[str, torch.Tensor]:
    """Return a batch of `size` sequences of 512 tokens, with labels."""
    return {"input_ids": torch.zeros(size, 512, dtype=torch.long), "labels": torch.zeros(size, dtype=torch.long)}
