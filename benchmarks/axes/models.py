"""Models and batches for the parallel layouts."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.layouts.worker import GPT, VOCABULARY

WIDTH, BLOCKS, ROWS, LENGTH = 256, 4, 8, 128
NUM_MICROBATCHES = 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4, "num_key_value_heads": 4, "use_cache": False, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """A rank's batch: token ids and the ids that follow them, each (ROWS, LENGTH)."""

    ids: torch.Tensor
    labels: torch.Tensor


def make_batch(seed: int) -> Batch:
    """Return a batch of random tokens."""
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def compute_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy."""
    return cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


class LabelledGPT(GPT):
    """A GPT that can compute its loss."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(WIDTH, BLOCKS)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Return the loss, or the logits without labels."""
        logits = super().forward(ids)
        return logits if labels is None else compute_loss(logits, labels)


def build_llama() -> Any:
    """Build a small Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def build_mixtral() -> Any:
    """Build a small Mixtral with eight experts, two per token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(num_local_experts=8, num_experts_per_tok=2, **SIZES))
