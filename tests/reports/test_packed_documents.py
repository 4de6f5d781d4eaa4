"""Tests that the Trainer keeps documents separate when they are packed into one row, in training and evaluation."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headway import Trainer, TrainingArguments
from tests.distributed.ranks import run_ranks

transformers = pytest.importorskip("transformers")

DOCUMENTS = [[5, 9, 2, 7, 1], [3, 3, 8], [6, 1, 4, 4, 2, 9, 8], [2, 7, 1, 8]]


def build_model() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=12, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # so that attention affects the loss
    return model


def train_one_step(folder: str, settings: dict[str, Any], uses_cache: bool) -> tuple[float, float]:
    """Return the losses of one update at a learning rate of 0 and of an evaluation."""
    rows: Any = [{"input_ids": ids} for ids in DOCUMENTS]
    model = build_model()
    if uses_cache:
        model.config.use_cache = True  # transformers' Trainer overrides it as well
    size = len(DOCUMENTS) // (2 if settings.pop("ranks") == 2 else 1)
    args = TrainingArguments(
        output_dir=folder, max_steps=1, learning_rate=0.0, per_device_train_batch_size=size, use_cpu=True,
        per_device_eval_batch_size=size, save_strategy="no", disable_tqdm=True, report_to=[], **settings,
    )  # fmt: skip
    collator = transformers.DataCollatorWithFlattening()
    trainer = Trainer(model, args, data_collator=collator, train_dataset=rows, eval_dataset=rows)
    loss = trainer.train().training_loss
    return loss, trainer.evaluate()["eval_loss"]


def compute_loss_by_hand() -> float:
    """Return the mean loss over all predicted tokens, with each document in its own forward pass."""
    model, total, count = build_model(), 0.0, 0
    for ids in DOCUMENTS:
        row = torch.tensor([ids])
        with torch.no_grad():
            total += float(model(input_ids=row, labels=row).loss) * (len(ids) - 1)
        count += len(ids) - 1
    return total / count


@pytest.mark.parametrize(
    ("ranks", "settings", "uses_cache"),
    [
        (1, {}, False),
        pytest.param(1, {}, True, marks=pytest.mark.matrix),
        pytest.param(1, {"gradient_checkpointing": True}, False, marks=pytest.mark.matrix),
        pytest.param(2, {}, False, marks=pytest.mark.matrix),
    ],
)
def test_loss_matches_that_of_separate_documents(
    ranks: int, settings: dict[str, Any], uses_cache: bool, tmp_path: Path
) -> None:
    losses = run_ranks(train_one_step, ranks, str(tmp_path), {**settings, "ranks": ranks}, uses_cache)[0]
    assert losses == pytest.approx((compute_loss_by_hand(), compute_loss_by_hand()), rel=1e-4)


def test_cache_can_be_enabled(tmp_path: Path) -> None:
    model = build_model()
    Trainer(model, TrainingArguments(output_dir=str(tmp_path), use_cpu=True, use_cache=True))
    assert model.config.use_cache is True
    Trainer(model, TrainingArguments(output_dir=str(tmp_path), use_cpu=True))
    assert model.config.use_cache is False
