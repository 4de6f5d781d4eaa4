"""DeepSpeed ZeRO stages 1, 2 and 3, compared with plain PyTorch on one process, for several kinds of models."""

import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.common.optional import is_available
from tests.distributed.cut_models import llama, mixtral
from tests.distributed.ranks import RankFailed, run_ranks

pytestmark = [
    pytest.mark.skipif(not is_available("deepspeed"), reason="deepspeed is not installed: pip install deepspeed"),
    pytest.mark.matrix,
]

WORDS, ROWS, LENGTH, WINDOW, STEPS, UPDATES = 37, 48, 12, 8, 2, 6
STAGES = ("zero1", "zero2", "zero3")
CLOSE = 2e-6


class CNN(nn.Module):
    """Convolutional model with group norm. Batch statistics would depend on how batches are split."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.convolutions = nn.ModuleList(nn.Conv1d(8, 8, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(3))
        self.head = nn.Linear(8, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids).transpose(1, 2)
        for convolution, norm in zip(self.convolutions, self.norms):
            x = x + gelu(convolution(norm(x)))
        logits: torch.Tensor = self.head(x.transpose(1, 2))
        return logits


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                   hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=LENGTH)
    )  # fmt: skip


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
                 decoder_start_token_id=0, use_cache=False)
    )  # fmt: skip


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(llama(use_cache=False), config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": lambda: llama(use_cache=False), "BERT": bert, "T5": t5, "CNN": CNN, "Mixtral": mixtral, "LoRA": lora,
}  # fmt: skip


def make_parts(name: str) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = MODELS[name]()
    # Adam turns a gradient that is zero except for rounding into a full step, as for BERT's key biases. This eps
    # prevents it.
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, eps=1e-4)
    return model, optimizer, torch.randint(1, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def compute_loss(model: nn.Module, name: str, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean next-token loss. Each rank has equally many tokens."""
    found = model(input_ids=ids, labels=ids).logits if name == "T5" else model(ids)
    logits = getattr(found, "logits", found)
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train_by_hand(name: str) -> dict[str, Any]:
    model, optimizer, ids = make_parts(name)
    losses, norms = [], []
    for window in ids.split(WINDOW):
        loss = compute_loss(model, name, window)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": dict(model.named_parameters())}


def train_with_deepspeed(name: str, stage: str) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, strategy=stage, gradient_accumulation_steps=STEPS)
    model, optimizer, ids = make_parts(name)
    loader = DataLoader(TensorDataset(ids), batch_size=WINDOW // STEPS // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, norms, seen = [], [], []
    for (batch,) in loader:
        with accelerator.accumulate(model):
            loss = compute_loss(model, name, batch)
            accelerator.backward(loss)
            seen.append(loss.detach())
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                losses.append(float(accelerator.reduce(torch.stack(seen).mean(), "mean")))
                seen.clear()
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}
    accelerator.free_memory()
    return {"losses": losses, "norms": norms, "weights": weights}


def train_all(stage: str) -> dict[str, Any]:
    found = {}
    for name in MODELS:
        try:
            found[name] = train_with_deepspeed(name, stage)
        except Exception:  # ranks may be out of step now, so nothing else can run
            found[name] = traceback.format_exc()
            break
    return found


def measure(stage: str) -> dict[str, dict[str, float]]:
    """Return the largest differences between the ranks and plain PyTorch, by model and kind.

    Raises:
        RankFailed: If a rank raises.
    """
    by_rank, differences = run_ranks(train_all, 2, stage, timeout=280), {}
    for name in MODELS:
        expected, found = train_by_hand(name), [each.get(name, "not reached") for each in by_rank]
        if any(isinstance(each, str) for each in found):
            raise RankFailed("\n".join(map(str, found)))
        assert len(expected["losses"]) == len(found[0]["losses"]) == UPDATES
        differences[name] = {
            kind: max(abs(a - b) for each in found for a, b in zip(expected[kind], each[kind], strict=True))
            for kind in ("losses", "norms")
        }
        whole = found[0]["weights"]  # only rank 0 has whole weights
        differences[name]["weights"] = max(float((whole[n] - w).abs().max()) for n, w in expected["weights"].items())
    return differences


@pytest.mark.parametrize("stage", STAGES)
def test_models_match_plain_pytorch(stage: str) -> None:
    for name, differences in measure(stage).items():
        assert max(differences["losses"], differences["norms"]) < CLOSE, (name, differences)
        assert differences["weights"] < 1e-5, (name, differences)


if __name__ == "__main__":  # prints the table of differences
    torch.set_num_threads(1)
    for each in sys.argv[1:] or STAGES:
        for name, differences in measure(each).items():
            print(each, name, *(f"{kind} {value:.0e}" for kind, value in differences.items()), flush=True)
