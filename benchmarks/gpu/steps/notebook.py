"""The tutorial notebook's four trainings of BERT-large, through Headway's Trainer: memory beside the published figures."""

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Row, scratch
from headway import Trainer, TrainingArguments
from headway.core.memory.printed import MIB, read_occupied_gpu_memory
from headway.core.memory.use import memory_use

PUBLISHED_ON = "published, RTX 3090"


@dataclass(frozen=True)
class Training:
    """One of the notebook's cells, and what it printed."""

    micro_batch: int
    steps: int
    checkpointing: bool
    megabytes: int
    samples_per_second: float


# In the order of the memory that they take, so that no row finds more reserved than it needs.
TRAININGS = (
    Training(1, 4, True, 7078, 8.09),
    Training(8, 8, True, 8030, 11.00),
    Training(1, 4, False, 8590, 10.63),
    Training(8, 8, False, 20314, 14.94),
)
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 1000,
}


def run(bench: Bench) -> None:
    """The four rows; on a CPU at a small size, where the published figures say nothing."""
    bench.row(
        Row(
            "before the first",
            round(occupied(bench) / MIB),
            "MB",
            note="the notebook began with 620 MB on its two cards",
        )
    )
    for training in TRAININGS:
        kind = f"micro-batch {training.micro_batch}, accumulation {training.steps}"
        kind += ", checkpointing" if training.checkpointing else ""
        with bench.attempt(kind):
            metrics = train(bench, training)
            published = (None, None) if bench.is_cpu else (training.megabytes, training.samples_per_second)
            use = memory_use(bench.device)
            held = occupied(bench)
            if hasattr(
                bench.module, "max_memory_reserved"
            ):  # Headway's Trainer gives back what is cached; the notebook's figures have it
                held += bench.module.max_memory_reserved(bench.device) - use.reserved
            note = f"tensors at most {use.peak / MIB:.0f} MiB, {use.reserved / MIB:.0f} MiB reserved afterwards"
            if bench.is_cpu:
                note = "resident memory of this process at most"
            bench.row(Row(f"{kind}: memory", round(held / MIB), "MB", published[0], PUBLISHED_ON, note=note))
            bench.row(
                Row(f"{kind}: speed", metrics["train_samples_per_second"], "samples/s", published[1], PUBLISHED_ON)
            )


def occupied(bench: Bench) -> int:
    """As the notebook measured it: what all processes hold on all cards; on a CPU the peak of this process."""
    held = None if bench.is_cpu else read_occupied_gpu_memory()
    return memory_use(bench.device).peak if held is None else held


def train(bench: Bench, training: Training) -> dict[str, Any]:
    """The notebook's training on fewer rows, which its memory does not depend on; returns the metrics."""
    from transformers import BertConfig, BertForSequenceClassification

    length, num_rows = bench.choose((512, 128), (64, 32), (16, 8))
    bench.release()
    if hasattr(bench.module, "reset_peak_memory_stats"):  # some kinds of device do not count it
        bench.module.reset_peak_memory_stats(bench.device)
    torch.manual_seed(0)
    with bench.device:
        model = BertForSequenceClassification(BertConfig(**bench.choose(LARGE, SMALL, SMALL)))
    tokens = torch.randint(100, bench.choose(30000, 1000, 1000), (num_rows, length))
    data = [{"input_ids": row, "labels": torch.tensor(0)} for row in tokens]
    arguments = TrainingArguments(
        output_dir=str(scratch() / "outputs"), per_device_train_batch_size=training.micro_batch,
        gradient_accumulation_steps=training.steps, gradient_checkpointing=training.checkpointing, num_train_epochs=1,
        log_level="error", report_to="none", save_strategy="no", use_cpu=bench.is_cpu,
    )  # fmt: skip
    return dict(Trainer(model=model, args=arguments, train_dataset=data).train().metrics)
