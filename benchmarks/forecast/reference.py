"""BERT-large as it was trained in 2022, when the memory that it took on an RTX 3090 was published.

transformers and torch have changed since, and what they hold with them: attention kept its scores until its end, the optimizer went
through the parameters one by one, gradients were zeroed and kept, and checkpointing was the reentrant kind. Written anew from what is
known of them.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

PUBLISHED = {(1, False): 8590, (1, True): 7078, (8, False): 20314, (8, True): 8030}
"""By batch and checkpointing: what the card had in use after the training, in MiB (a tutorial of 2022, sequences of 512)."""
PUBLISHED_V100 = {
    (1, True, False, False): 6775,
    (1, True, True, True): 4847,
    (1, False, False, False): 8681,
    (4, False, False, False): 14949,
    (4, False, False, True): 12295,
    (4, False, True, False): 13939,
}
"""A later edition's, on a V100 with 16 GB, by batch, checkpointing, fp16 and Adafactor; batches of 1 are accumulated."""
LARGEST = 120
"""The largest batch of the tutorial, with checkpointing, that 24 GB held."""
ATTENTION = "attention_of_2022"


class AdamWOf2022(torch.optim.Optimizer):
    """One parameter after the other, with one temporary of its size."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 5e-5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update; nothing is returned."""
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


def attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores in steps, each a tensor of its own; the last one lives until the end."""
    scores = torch.matmul(query, key.transpose(-1, -2))
    scores = scores / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = scores + mask
    shares = nn.functional.softmax(scores, dim=-1)
    shares = nn.functional.dropout(shares, options.get("dropout", 0.0), module.training)
    return torch.matmul(shares, value).permute(0, 2, 1, 3).contiguous(), shares


def model() -> nn.Module:
    """BERT-large for sequences of two classes."""
    from transformers import AttentionInterface, BertConfig, BertForSequenceClassification

    AttentionInterface.register(ATTENTION, attention)
    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    config._attn_implementation = ATTENTION
    return BertForSequenceClassification(config)


def recompute(made: nn.Module) -> None:
    """Checkpointing of the reentrant kind."""
    made.gradient_checkpointing_enable({"use_reentrant": True})  # type: ignore[operator]


def batch(size: int) -> dict[str, torch.Tensor]:
    """Sequences of 512 with the mask that a loader gives."""
    return {"input_ids": torch.zeros(size, 512, dtype=torch.long), "labels": torch.zeros(size, dtype=torch.long)}
