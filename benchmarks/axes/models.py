"""The models that are split, and their batches."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.layouts.worker import GPT, WORDS

WIDTH, BLOCKS, ROWS, LENGTH = 256, 4, 8, 128
NUM_MICROBATCHES = 4
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4, "num_key_value_heads": 4, "use_cache": False, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """What a rank reads: numbers of words, and of those that follow."""

    ids: torch.Tensor
    labels: torch.Tensor


def batch(seed: int) -> Batch:
    """Random words."""
    words = torch.randint(0, WORDS, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(words[:, :-1].contiguous(), words[:, 1:].contiguous())


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy."""
    return cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1))


class LabelledGPT(GPT):
    """A GPT that computes its loss."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(WIDTH, BLOCKS)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Its loss; without labels, its logits."""
        logits = super().forward(ids)
        return logits if labels is None else loss_of(logits, labels)


def llama() -> Any:
    """A Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def mixtral() -> Any:
    """A Mixtral of eight experts, of which a word takes two."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(num_local_experts=8, num_experts_per_tok=2, **SIZES))
