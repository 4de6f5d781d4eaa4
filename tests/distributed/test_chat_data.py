"""Training on conversations: two ranks equal one process, and a killed Trainer run continues exactly."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from headway import Accelerator, ChatDataset
from tests.distributed.ranks import run_ranks
from tests.unit.language_data.chat.chat_tokenizers import make_messages, make_tokenizer

NUM_ROWS = 24
BATCH = 4


def build_data() -> ChatDataset:
    """Return conversations whose responses have very different lengths."""
    answers = ["4", "It is sunny and warm. " * 6, "Hi.", "Hello there, how are you today? " * 3]
    rows = [make_messages(f"What is {at}?", answers[at % 4].strip()) for at in range(NUM_ROWS)]
    return ChatDataset(rows, make_tokenizer())


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(make_tokenizer()), use_cache=False, **sizes)).double()


def pad(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    def stack(values: list[list[int]], filler: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, values)), True, filler)

    tokens = [sample["input_ids"] for sample in samples]
    return {
        "input_ids": stack(tokens, 0),
        "attention_mask": stack([[1] * len(each) for each in tokens], 0),
        "labels": stack([sample["labels"] for sample in samples], -100),
    }


def get_weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def train() -> list[torch.Tensor]:
    accelerator = Accelerator(cpu=True)
    model = build_model()
    loader = DataLoader(build_data(), batch_size=BATCH // accelerator.num_processes, collate_fn=pad)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3), loader)
    for batch in loader:
        with accelerator.accumulate(model):
            labels = batch.pop("labels")[:, 1:]
            logits = model(**batch).logits[:, :-1]  # the model itself computes losses in float32
            loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels)
            accelerator.backward(loss, weight=(labels != -100).sum())
            optimizer.step()
            optimizer.zero_grad()
    return get_weights(accelerator.unwrap_model(model))


def train_in_plain_torch() -> list[torch.Tensor]:
    """Train with losses that are means over the trained tokens of four rows, each of which is computed on its own."""
    model, data = build_model(), build_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for start in range(0, NUM_ROWS, BATCH):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for index in range(start, start + BATCH):
            tokens, labels = (torch.tensor([data[index][name]]) for name in ("input_ids", "labels"))
            logits = model(input_ids=tokens).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum")
            count += int((labels[0, 1:] != -100).sum())
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return get_weights(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_trained_token_has_the_same_weight_on_any_number_of_ranks(world_size: int) -> None:
    expected = train_in_plain_torch()
    for found in run_ranks(train, world_size):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def run_script(folder: Path, kill_after: int) -> int:
    command = [sys.executable, "-m", "tests.distributed.chat_script", str(folder), str(kill_after)]
    return subprocess.run(command, timeout=300).returncode


@pytest.mark.slow
def test_killed_trainer_run_on_packed_conversations_continues_exactly(tmp_path: Path) -> None:
    def read_result(name: str) -> Any:
        return json.loads((tmp_path / name / "result.json").read_text())

    assert run_script(tmp_path / "whole", 0) == 0
    assert run_script(tmp_path / "killed", 7) == -signal.SIGKILL
    assert not (tmp_path / "killed" / "result.json").exists()
    assert run_script(tmp_path / "killed", 0) == 0
    assert read_result("killed") == read_result("whole")
    assert read_result("whole")["updates"] == 12
