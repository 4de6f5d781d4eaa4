"""The Trainer trains, evaluates and saves under pipeline and context parallelism, as on one process."""

import pytest
import torch
from torch.utils.data import Dataset

from tests.distributed.ranks import run_ranks

pytest.importorskip("transformers", reason="the model is a transformers Llama")


class Rows(Dataset):
    """Sequences of nine tokens. Every third has fewer labels that count."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        ids = (index + (1 + index % 2) * torch.arange(9)) % 37
        labels = ids.clone()
        labels[: 4 * (index % 3 == 0)] = -100
        return {"input_ids": ids, "labels": labels}


def train(layout, folder):
    """Train, and return all logged losses, ending with the evaluation loss."""
    import os

    from transformers import LlamaConfig, LlamaForCausalLM

    from headway import Trainer, TrainingArguments

    os.environ["HEADWAY_STRATEGY"] = layout
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=7,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
        seed=3,
    )
    trainer = Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=Rows(), eval_dataset=Rows())
    trainer.train()
    return [value for entry in trainer.state.log_history for name, value in entry.items() if name.endswith("loss")]


def test_trainer_with_pipeline_and_context_parallelism_matches_one_process(tmp_path):
    (expected,) = run_ranks(train, 1, "ddp", str(tmp_path / "one"))
    assert len(expected) > 4
    assert expected[-1] < expected[0]
    for layout in ("pp", "cp"):
        for losses in run_ranks(train, 2, layout, str(tmp_path / layout), timeout=200):
            assert losses == pytest.approx(expected, abs=2e-6), layout
        assert list((tmp_path / layout).rglob("manifest.json"))
