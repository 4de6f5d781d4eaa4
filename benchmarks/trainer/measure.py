"""Cost of a micro-batch in Headway's Trainer, in transformers' Trainer, and in the same loop in plain PyTorch.

One process, CPU, one thread. Only the loop is timed, from the first batch to the last update. A tiny module shows what the
libraries add, a small BERT what that means for a model.

`python benchmarks/run.py trainer` runs it, and rewrites the table in benchmarks/README.md.
"""

import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.timing import get_num_repeats, make_rows, save_result

STEPS = 2
BATCH = 4
ARGUMENTS = {
    "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": STEPS, "num_train_epochs": 1, "learning_rate": 1e-3,
    "logging_strategy": "no", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "report_to": "none",
    "train_sampling_strategy": "sequential", "log_level": "error",
}  # fmt: skip
SIZES = {"tiny module": 200, "small BERT": 40}


class Tiny(torch.nn.Module):
    """A perceptron of 16 inputs that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.body(x), labels)}


def build_model_and_rows(name: str) -> tuple[torch.nn.Module, list[dict[str, torch.Tensor]]]:
    """Build the model and its training rows."""
    torch.manual_seed(0)
    num_rows = SIZES[name] * BATCH
    if name == "tiny module":
        x = torch.randn(num_rows, 16)
        return Tiny(), [{"x": row, "labels": row.sum().reshape(1)} for row in x]
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256
    )
    tokens, labels = torch.randint(1, 1000, (num_rows, 32)), torch.randint(0, 2, (num_rows,))
    return BertForSequenceClassification(config), [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels)]


class LoopTimer:
    """Trainer callback that times the loop; it ignores all other events."""

    def __init__(self) -> None:
        self.elapsed = (0.0, 0.0)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    @contextmanager
    def timing(self) -> Iterator[None]:
        self.begin()
        yield
        self.end()

    def begin(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def end(self) -> None:
        self.elapsed = time.perf_counter() - self._wall, time.process_time() - self._cpu

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begin()

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self.end()


def train_plainly(name: str, timer: LoopTimer) -> None:
    """Run the floor: what both Trainers do for the same arguments, in plain PyTorch."""
    model, rows = build_model_and_rows(name)
    decayed = [p for n, p in model.named_parameters() if "bias" not in n and "LayerNorm" not in n]
    undecayed = [p for n, p in model.named_parameters() if "bias" in n or "LayerNorm" in n]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": undecayed}], lr=1e-3, weight_decay=0.0, fused=True)
    num_updates = SIZES[name] // STEPS
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 - update / num_updates)
    loader, total = DataLoader(rows, batch_size=BATCH), torch.zeros(())
    model.train()
    with timer.timing():
        for index, batch in enumerate(loader):
            loss = model(**batch)["loss"] / STEPS
            loss.backward()
            total += loss.detach()
            if index % STEPS == STEPS - 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


def train_with_headway(name: str, timer: LoopTimer) -> None:
    """Train with Headway's Trainer."""
    from headway import Trainer, TrainingArguments

    model, rows = build_model_and_rows(name)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(model, TrainingArguments(output_dir=folder, **ARGUMENTS), train_dataset=rows, callbacks=[timer]).train()


def train_with_transformers(name: str, timer: LoopTimer) -> None:
    """Train with transformers' Trainer."""
    from transformers import Trainer, TrainingArguments, default_data_collator

    model, rows = build_model_and_rows(name)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(output_dir=folder, **ARGUMENTS)
        Trainer(model, args, default_data_collator, rows, callbacks=[timer]).train()


def main() -> None:
    """Measure all variants in turn and write result.json."""
    repeats = get_num_repeats(20)
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    trainings: dict[str, Callable[[str, LoopTimer], None]] = {
        "by hand": train_plainly, "by hand, again (A/A)": train_plainly, "headway": train_with_headway,
    }  # fmt: skip
    if find_spec("transformers") is not None:
        trainings["transformers"] = train_with_transformers
    rows: dict[str, Any] = {}
    for name, num_batches in SIZES.items():
        times: dict[str, list[tuple[float, float]]] = {library: [] for library in trainings}
        for repeat in range(-1, repeats):  # the first repeat is a warm-up
            order = list(trainings)[repeat % len(trainings) :] + list(trainings)[: repeat % len(trainings)]
            for library in order:
                timer = LoopTimer()
                trainings[library](name, timer)
                if repeat >= 0:
                    times[library].append(timer.elapsed)
        model_rows = make_rows(times, 1e6 / num_batches)
        rows |= {f"{name}: {library}": model_rows[library] for library in trainings}
        for library in trainings:
            seconds = model_rows[library]["cpu"]["median"] / 1e6
            rows[f"{name}: {library}"]["samples per cpu second"] = round(BATCH / seconds, 1)
    save_result("trainer", "us per micro-batch", rows)


if __name__ == "__main__":
    main()
