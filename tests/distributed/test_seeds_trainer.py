"""A notebook for the transformers Trainer runs cell by cell with only the import changed, on a BERT made from a small config."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The text between the `cell` lines is that of the notebook, except for the sizes and the import of the Trainer.
NOTEBOOK = """
import torch
torch.set_num_threads(1)
from headway import print_gpu_utilization, print_summary
from transformers import AutoModelForSequenceClassification, BertConfig

config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=30522)
model = AutoModelForSequenceClassification.from_config(config)
# cell 4
default_args = {
    "output_dir": "outputs",
    "evaluation_strategy": "no",
    "num_train_epochs": 1,
    "log_level": "error",
    "report_to": "none",
}
# cell 5
import numpy as np
from datasets import Dataset

seq_len, dataset_size = 16, 64
dummy_data = {
    "input_ids": np.random.randint(100, 30000, (dataset_size, seq_len)),
    "labels": np.random.randint(0, 1, (dataset_size)),
}
ds = Dataset.from_dict(dummy_data)
ds.set_format("pt")
# cell 7
from headway import TrainingArguments, Trainer

training_args = TrainingArguments(
    per_device_train_batch_size=1,
    gradient_accumulation_steps=4,
    gradient_checkpointing=True,
    **default_args
)

trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=ds
)

result = trainer.train()

print_summary(result)
print("cell", result.global_step, model.is_activation_checkpointing, type(trainer.optimizer).__name__)
# cell 6, the first time
from headway import TrainingArguments, Trainer

training_args = TrainingArguments(
    per_device_train_batch_size=8,
    gradient_accumulation_steps=8,
    gradient_checkpointing=True,
    **default_args
)

trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=ds
)

result = trainer.train()

print_summary(result)
print("cell", result.global_step, model.is_activation_checkpointing, type(trainer.optimizer).__name__)
# cell 6, the second time
from headway import TrainingArguments, Trainer

training_args = TrainingArguments(
    per_device_train_batch_size=60,
    gradient_accumulation_steps=1,
    gradient_checkpointing=True,
    **default_args
)

trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=ds
)

result = trainer.train()

print_summary(result)
print("cell", result.global_step, model.is_activation_checkpointing, type(trainer.optimizer).__name__)
"""


@pytest.mark.slow
def test_notebook_cells_run_one_after_another(tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    result = subprocess.run([sys.executable, "-c", NOTEBOOK], cwd=tmp_path, env={**kept, "HEADWAY_DEVICE": "cpu"},
                         capture_output=True, text=True, timeout=280)  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("cell")] == [
        "cell 16 False AdamW",
        "cell 1 False AdamW",
        "cell 2 False AdamW",
    ]
    assert sum(line.startswith("Time: ") for line in lines) == 3
    assert sum(line.startswith("Samples/second: ") for line in lines) == 3
    found = sorted(path.name for path in Path(tmp_path, "outputs", "checkpoints").glob("checkpoint_*"))
    assert found == ["checkpoint_0", "checkpoint_1", "checkpoint_2"], "no run removes checkpoints of another"
