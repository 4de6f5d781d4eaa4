"""Four trainings of BERT-large from a tutorial notebook, with Headway's Trainer: memory compared with the published figures.

`python -m benchmarks.gpu notebook` runs only this step; with `--device cpu`, at a small size.
"""

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Row, get_scratch_folder
from headway import Trainer, TrainingArguments
from headway.core.memory.printed import MIB, read_occupied_gpu_memory
from headway.core.memory.use import memory_use

PUBLISHED = "published, RTX 3090"


@dataclass(frozen=True)
class NotebookTraining:
    """One of the notebook's trainings.

    Attributes:
        micro_batch: Samples per device and step.
        steps: Accumulated steps per update.
        checkpointing: Whether activations are recomputed.
        megabytes: GPU memory in use that the notebook printed.
        samples_per_second: Speed that the notebook printed.
    """

    micro_batch: int
    steps: int
    checkpointing: bool
    megabytes: int
    samples_per_second: float


# In the order of the memory that they take, so that no training starts with more reserved memory than it needs.
TRAININGS = (
    NotebookTraining(1, 4, True, 7078, 8.09),
    NotebookTraining(8, 8, True, 8030, 11.00),
    NotebookTraining(1, 4, False, 8590, 10.63),
    NotebookTraining(8, 8, False, 20314, 14.94),
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
    """Add the rows of the four trainings. On a CPU the size is small and nothing is compared with the published figures."""
    bench.add_row(
        Row(
            "memory in use before the first training",
            round(measure_used_memory(bench) / MIB),
            "MB",
            note="the notebook started with 620 MB on its two GPUs",
        )
    )
    for training in TRAININGS:
        name = f"micro-batch {training.micro_batch}, accumulation {training.steps}"
        name += ", checkpointing" if training.checkpointing else ""
        with bench.attempt(name):
            metrics = train(bench, training)
            published = (None, None) if bench.is_cpu else (training.megabytes, training.samples_per_second)
            use = memory_use(bench.device)
            used = measure_used_memory(bench)
            # Headway's Trainer frees cached memory at its end, but the notebook's figures include it.
            if hasattr(bench.module, "max_memory_reserved"):
                used += bench.module.max_memory_reserved(bench.device) - use.reserved
            note = f"peak of tensors {use.peak / MIB:.0f} MiB, {use.reserved / MIB:.0f} MiB reserved afterwards"
            if bench.is_cpu:
                note = "peak resident memory of this process"
            bench.add_row(Row(f"{name}: memory", round(used / MIB), "MB", published[0], PUBLISHED, note=note))
            bench.add_row(
                Row(f"{name}: speed", metrics["train_samples_per_second"], "samples/s", published[1], PUBLISHED)
            )


def measure_used_memory(bench: Bench) -> int:
    """Return the bytes in use as the notebook measured them: of all processes on all GPUs; on a CPU, this process's peak."""
    used = None if bench.is_cpu else read_occupied_gpu_memory()
    return memory_use(bench.device).peak if used is None else used


def train(bench: Bench, training: NotebookTraining) -> dict[str, Any]:
    """Run one of the notebook's trainings on fewer samples, which does not change its memory. Return the metrics."""
    from transformers import BertConfig, BertForSequenceClassification

    length, num_rows = bench.choose((512, 128), (64, 32), (16, 8))
    bench.release()
    if hasattr(bench.module, "reset_peak_memory_stats"):  # some kinds of devices do not count it
        bench.module.reset_peak_memory_stats(bench.device)
    torch.manual_seed(0)
    with bench.device:
        model = BertForSequenceClassification(BertConfig(**bench.choose(LARGE, SMALL, SMALL)))
    tokens = torch.randint(100, bench.choose(30000, 1000, 1000), (num_rows, length))
    data = [{"input_ids": row, "labels": torch.tensor(0)} for row in tokens]
    arguments = TrainingArguments(
        output_dir=str(get_scratch_folder() / "outputs"), per_device_train_batch_size=training.micro_batch,
        gradient_accumulation_steps=training.steps, gradient_checkpointing=training.checkpointing, num_train_epochs=1,
        log_level="error", report_to="none", save_strategy="no", use_cpu=bench.is_cpu,
    )  # fmt: skip
    return dict(Trainer(model=model, args=arguments, train_dataset=data).train().metrics)
