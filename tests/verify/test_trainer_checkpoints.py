"""Tests of the resume proof with checkpoints of transformers' Trainer and of a script for Accelerate."""

from pathlib import Path

import pytest

from tests.verify.sessions import Verifier

TRAINER = """import torch, transformers
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

transformers.set_seed(0)
config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
                    max_position_embeddings=16)
tokens = torch.randint(0, 40, (96, 8))
rows = [{{"input_ids": row, "labels": int(row[0] > row[1])}} for row in tokens]
arguments = TrainingArguments(output_dir={folder!r}, per_device_train_batch_size=4, max_steps=10, learning_rate=1e-3,
                              save_steps=500, report_to=[], use_cpu=True, disable_tqdm=True)

class Scaled(Trainer):
    num_calls = 0
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        self.num_calls += 1
        return super().compute_loss(model, inputs, return_outputs, **kwargs) * {scale}

trainer = Scaled(BertForSequenceClassification(config), arguments, train_dataset=rows)
trainer.train(resume_from_checkpoint={resume})
"""
LAST = "get_last_checkpoint(arguments.output_dir) if __import__('os').path.isdir(arguments.output_dir) else None"


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("scale", "status"), [("1", "PASS"), ("(1 + 1 / self.num_calls)", "FAIL")], ids=["correct", "counter_not_saved"]
)
def test_trainer_saves_on_request_of_verify(verifier: Verifier, tmp_path: Path, scale: str, status: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINER.format(folder="out/bert", scale=scale, resume=LAST))
    verdict = verifier.verify(script, flags="--as accelerate", only="resume")["resume"]
    assert verdict.status == status, verdict
    assert ("resumed after update 3" in verdict.reason) == (status == "PASS"), verdict


RESUMABLE = """import argparse, torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--resume_from_checkpoint")
args = parser.parse_args()
set_seed(0)
accelerator = Accelerator()
loader = DataLoader(TensorDataset(torch.randn(96, 4)), batch_size=8)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
start = 0
if args.resume_from_checkpoint:
    accelerator.load_state(args.resume_from_checkpoint)
    start = int(args.resume_from_checkpoint.rpartition("_")[2])
batches = accelerator.skip_first_batches(loader, {skip}) if start else loader
for number, (rows,) in enumerate(batches, start + 1):
    accelerator.backward(model(rows).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if number % 2 == 0:
        accelerator.save_state(f"{folder}/step_{{number}}")
"""


@pytest.mark.matrix
@pytest.mark.parametrize(("skip", "status"), [("start", "PASS"), ("0", "FAIL")])
@pytest.mark.parametrize("is_absolute", [False, True])
def test_script_with_an_argument_for_resuming_is_verified(
    verifier: Verifier, tmp_path: Path, skip: str, status: str, is_absolute: bool
) -> None:
    folder = str(tmp_path / "states") if is_absolute else "states"
    script = tmp_path / "train.py"
    script.write_text(RESUMABLE.format(skip=skip, folder=folder))
    resume_args = f"--resume_from_checkpoint {folder}/step_2"
    verdict = verifier.verify(script, flags="--as accelerate", only="resume", resume_args=resume_args)["resume"]
    assert verdict.status == status, verdict
    assert not (tmp_path / "states").exists()


@pytest.mark.matrix
def test_missing_resume_arguments_are_explained(verifier: Verifier, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RESUMABLE.format(skip="start", folder="states"))
    verdict = verifier.verify(script, flags="--as accelerate", only="resume")["resume"]
    assert verdict.status == "NOT CHECKED"
    assert "--resume_args" in verdict.reason + verdict.advice
