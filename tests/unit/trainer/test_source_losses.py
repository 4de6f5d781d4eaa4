"""Test the loss by source in the Trainer's log against the cross entropies of single samples."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from headway import Mixture, PackedDataset, Trainer, TrainingArguments
from tests.distributed.ranks import run_ranks
from tests.unit.trainer.models import llama

LENGTH = 16
NUM_SAMPLES = 12


class Documents(Dataset[Any]):
    """Samples of different lengths, whose first labels do not count."""

    def __init__(self, seed: int, count: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = [torch.randint(4, 60, (3 + (seed + row) % 9,), generator=generator) for row in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.rows[index].clone()
        labels[:2] = -100
        return {"input_ids": self.rows[index], "labels": labels}


def build_mixture(**options: Any) -> Mixture:
    sources = {name: Documents(seed, 9) for seed, name in enumerate(("web", "code", "math"))}
    return Mixture(sources, weights=[0.5, 0.25, 0.25], num_samples=NUM_SAMPLES, seed=3, **options)


def compute_losses(model: Any, mixture: Mixture, positions: range, smoothing: float = 0.0) -> dict[str, float]:
    """Return the mean loss of each source over all labels that count, from single samples."""
    sums = {name: torch.zeros(2) for name in mixture.names}
    for position in positions:
        sample = mixture[position]
        with torch.no_grad():
            logits = model(input_ids=sample["input_ids"][None], use_cache=False).logits[0]
        labels = sample["labels"][1:]
        total = cross_entropy(logits[:-1], labels, reduction="sum", label_smoothing=smoothing)
        sums[mixture.names[sample["source"]]] += torch.tensor([total, (labels != -100).sum()])
    return {f"loss/{name}": float(total / count) for name, (total, count) in sums.items() if count}


def build_trainer(folder: Path, dataset: Any, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        **{
            "output_dir": folder, "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "report_to": "none",
            "per_device_train_batch_size": 3, "logging_steps": 1, "learning_rate": 0.0, "num_train_epochs": 1, **options,
        }
    )  # fmt: skip
    model = llama()
    model.config.pad_token_id = 0
    return Trainer(model, arguments, train_dataset=dataset)


def list_logs(trainer: Trainer) -> list[dict[str, float]]:
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{name: value for name, value in entry.items() if name.startswith("loss/")} for entry in entries]


@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}, {"dataloader_num_workers": 1}])
def test_each_update_logs_the_loss_of_its_sources(options: dict[str, Any], tmp_path: Path) -> None:
    mixture = build_mixture()
    trainer = build_trainer(tmp_path, mixture, **options)
    trainer.train()
    smoothing = options.get("label_smoothing_factor", 0.0)
    expected = [compute_losses(llama(), mixture, range(first, first + 3), smoothing) for first in range(0, 12, 3)]
    assert list_logs(trainer) == [pytest.approx(each, rel=1e-5) for each in expected]


@pytest.mark.parametrize("is_own", [False, True])
def test_packed_sequences_log_the_loss_of_their_documents(is_own: bool, tmp_path: Path) -> None:
    mixture = build_mixture()
    packing = {} if is_own else {"packing": True, "packing_length": LENGTH}
    dataset = PackedDataset(mixture, LENGTH, seed=1) if is_own else mixture
    trainer = build_trainer(tmp_path, dataset, logging_steps=100, logging_strategy="epoch", **packing)
    trainer.train()
    assert list_logs(trainer) == [pytest.approx(compute_losses(llama(), mixture, range(NUM_SAMPLES)), rel=1e-5)]


def test_mixture_without_sources_in_its_samples_logs_one_loss(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, build_mixture(adds_source=False), max_steps=1)
    trainer.train()
    assert list_logs(trainer) == [{}]


def test_override_that_computes_the_loss_itself_is_named(tmp_path: Path, caplog: Any) -> None:
    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    base = build_trainer(tmp_path, build_mixture(), max_steps=2)
    trainer = Own(base.model, base.args, train_dataset=base.train_dataset)
    trainer.train()
    assert list_logs(trainer) == [{}, {}]
    assert caplog.text.count("the loss of each source of the mixture is not logged") == 1


def train_and_resume(folder: str) -> list[dict[str, float]]:
    """Train two updates, save in the middle of a logging interval, and continue in a second Trainer."""
    options = {"logging_steps": 3, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 1}
    build_trainer(Path(folder), build_mixture(), max_steps=2, **options).train()
    trainer = build_trainer(Path(folder), build_mixture(), max_steps=3, **options)
    trainer.train(resume_from_checkpoint=True)
    return list_logs(trainer)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_resumed_run_logs_the_losses_before_its_checkpoint(num_ranks: int, tmp_path: Path) -> None:
    expected = compute_losses(llama(), build_mixture(), range(3 * num_ranks))
    for logs in run_ranks(train_and_resume, num_ranks, str(tmp_path)):
        assert logs == [pytest.approx(expected, rel=1e-5)]
