"""Every `Example::` block in the docstrings of src/headway runs, on one CPU process, with the objects that it names."""

import ast
import functools
import gzip
import socket
import struct
import sys
import textwrap
import types
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import headway
from headway.core.runtime import process
from tests.docs.pages import ROOT

SOURCE = ROOT / "src" / "headway"
SKIPPED = {
    "PreferenceTokenizer": "needs a tokenizer with a chat template; docs/language_models.md runs the same lines",
    "DeepSpeedPlugin": "DeepSpeed is an optional package that needs a GPU",
    "WeightChannel": "its two ends are in two processes; docs/generating.md runs them",
    "verify": "runs a training script several times; tests/verify covers it",
}
PACKAGES = {
    "Float8Options": "torchao",
    "Workload": "transformers",
    "chunk_loss": "transformers",
    "init_trackers": "tensorboard",
}
"""Optional packages by the name of the example that needs them."""
UNPREPARED = ("Preemption", "MatrixOptimizer", "Trainer", "dispatch_model", "offload_pace")
"""Examples that prepare, train or dispatch the model themselves."""


def list_examples() -> Iterator[tuple[str, str]]:
    """Yield pairs of (name of the function or class, code of its example)."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                lines = (ast.get_docstring(node) or "").split("\n")
                if "Example::" in lines:
                    yield node.name, read_block(lines[lines.index("Example::") + 1 :])


def read_block(lines: list[str]) -> str:
    """Return the indented block at the start of these lines."""
    block = []
    for line in lines:
        if line and not line.startswith("    "):
            break
        block.append(line)
    return textwrap.dedent("\n".join(block)).strip() + "\n"


class Scores(nn.Module):
    """Model with repeated blocks that accepts tensors, and returns an object with a loss if it gets labels."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(64, 10)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = inputs
        for block in self.blocks:
            hidden = block(hidden)
        scores = self.head(hidden)
        if labels is None:
            return scores
        return types.SimpleNamespace(loss=nn.functional.cross_entropy(scores, labels), logits=scores)


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Map-style dataset of rows for the Trainer."""

    def __init__(self, num_rows: int = 16) -> None:
        self.inputs = torch.randn(num_rows, 64)
        self.labels = torch.randint(0, 10, (num_rows,))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


class SmallLanguageModel:
    """Replacement of transformers' AutoModelForCausalLM that downloads nothing."""

    @staticmethod
    def from_pretrained(name: str) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
        return GPT2LMHeadModel(config)


def make_batch(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(num_rows, 64), torch.zeros(num_rows, dtype=torch.long)


def make_objects(name: str) -> dict[str, Any]:
    """Return the objects that examples refer to, by name.

    Args:
        name: Name of the function or class whose example will run.
    """
    torch.manual_seed(0)
    accelerator = headway.Accelerator(project_config=make_project(name))
    inputs, targets = torch.randn(8, 64), torch.randint(0, 10, (8,))
    model: nn.Module = Scores()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    samples = [torch.arange(n) for n in (3, 5, 7)]
    loader: Any = DataLoader(TensorDataset(torch.randn(16, 64), torch.randint(0, 10, (16,))), batch_size=8)
    objects = {
        "model": model, "optimizer": optimizer, "loader": loader, "scheduler": scheduler, "accelerator": accelerator,
        "inputs": inputs, "targets": targets, "labels": targets, "tokens": torch.randint(0, 64, (2, 8)),
        "predictions": targets, "loss_fn": nn.functional.cross_entropy, "outputs": model(inputs).detach(),
        "batch": {"inputs": inputs, "labels": targets}, "dataset": TensorDataset(inputs, targets), "samples": samples,
        "lengths": [len(each) for each in samples] * 40, "web": torch.arange(100), "code": torch.arange(50),
        "packed": headway.PackedDataset(samples, 8), "mixture": headway.Mixture({"web": Rows(), "code": Rows()}),
        "train_data": Rows(), "eval_data": Rows(), "data": Rows(), "num_processes": 1, "batch_size": 8,
        "metric": types.SimpleNamespace(update=lambda *_: None), "build_model": Scores, "make_batch": make_batch,
        "args": headway.TrainingArguments("args", num_train_epochs=1), "AutoModelForCausalLM": SmallLanguageModel,
        "download_and_tokenize": list, "pad": torch.stack, "collate": list, "evaluate": str, "train": str,
        "torch": torch, "F": nn.functional, "DataLoader": DataLoader, "functools": functools, "socket": socket,
        "timedelta": timedelta, "headway": headway,
    }  # fmt: skip
    if name not in UNPREPARED:
        prepared = accelerator.prepare(model, optimizer, loader, scheduler)
        objects |= dict(zip(("model", "optimizer", "loader", "scheduler"), prepared), eval_loader=prepared[2])
        objects["loss"] = nn.functional.cross_entropy(prepared[0](inputs), targets)
    prepare_example(name, objects)
    return objects


def make_project(name: str) -> headway.ProjectConfiguration:
    """Return the project of an example: with automatic names of checkpoints, unless it names checkpoints itself."""
    is_automatic = name not in ("save_state", "load_state")
    return headway.ProjectConfiguration(
        "project", automatic_checkpoint_naming=is_automatic, keep_best="min" if is_automatic else None
    )


def prepare_example(name: str, objects: dict[str, Any]) -> None:
    """Write the files and create the objects that only this example needs."""
    accelerator = objects["accelerator"]
    if name == "load_state":
        accelerator.save_state("checkpoints/step_100")
    elif name == "load_checkpoint_and_dispatch":
        accelerator.save_model(objects["model"], "weights")
    elif name == "SourceLosses":
        objects["loader"] = accelerator.prepare(DataLoader(objects["mixture"], batch_size=8))
    elif name == "ShardedDataset":
        Path("data").mkdir()
        Path("data", "0.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n{"text": "two"}\n'))
    elif name == "TokenDataset":
        Path("tokens").mkdir()
        header = struct.pack("<256i", 20240520, 1, 5000, *[0] * 253)  # of llm.c
        Path("tokens", "0.bin").write_bytes(header + bytes(2 * 5000))
        objects["model"] = SmallLanguageModel.from_pretrained("gpt2")
    elif name == "Workload":
        objects["model"] = SmallLanguageModel.from_pretrained("gpt2")
    elif name == "print_summary":
        objects["trainer"] = headway.Trainer(Scores(), objects["args"], train_dataset=objects["data"])
    elif name == "reconstruct_average":
        averages = [
            headway.ExponentialMovingAverage(objects["model"], headway.PowerDecay(width), name=str(width))
            for width in (0.05, 0.1)
        ]
        for update in (1, 2):
            accelerator.backward(objects["loss_fn"](objects["model"](objects["inputs"]), objects["targets"]))
            objects["optimizer"].step()
            objects["optimizer"].zero_grad()
            for average in averages:
                average.save_snapshot(Path("snapshots", f"{average.name}-{update}"))


@pytest.mark.parametrize(("name", "code"), [pytest.param(*each, id=each[0]) for each in list_examples()])
def test_example_runs(name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in SKIPPED:
        pytest.skip(SKIPPED[name])
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWAY_CPU", "true")
    process.reset()
    module = types.ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)
    objects = make_objects(name)
    used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)} - objects.keys()
    vars(module).update({each: getattr(headway, each) for each in used if hasattr(headway, each)} | objects)
    cloudpickle.register_pickle_by_value(module)  # its functions are sent to other processes
    try:
        exec(compile(code, name, "exec"), vars(module))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
        process.reset()


def test_examples_are_found() -> None:
    assert len(list(list_examples())) > 80
