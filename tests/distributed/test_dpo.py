"""examples/dpo.py: its loss is that of TRL's DPOTrainer, and its runs are those of plain PyTorch, on ranks and resumed."""

import json
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import ChatDataset, PreferenceCollator, PreferenceTokenizer
from tests.distributed.ranks import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "dpo.py"
WAYS = [("ddp", []), ("fsdp", []), ("ddp", ["--lora"]), ("fsdp", ["--lora"])]
UPDATES = 4
PAIRS_PER_UPDATE = 8
BETA = 0.1
NAMES = ["loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"]


def read_values(folder: Path) -> list[list[float]]:
    """Return the logged values of each update, those of a resumed run in place of those before it."""
    lines = map(json.loads, (folder / "log" / "log.jsonl").read_text().splitlines())
    values = {
        line["step"]: [line["values"][name] for name in NAMES] for line in lines if "loss" in line.get("values", {})
    }
    assert list(values) == list(range(1, len(values) + 1))
    return list(values.values())


def compute_in_float64() -> None:
    """Let models compute in float64, also where the example converts logits to float32."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = lambda self: self  # type: ignore[assignment,method-assign]


def run_example(folder: str, ways: list[tuple[str, list[str]]], updates: int = UPDATES) -> list[Any]:
    """Return the logged values of each update, and those of pairs that were not trained, for each way."""
    compute_in_float64()
    results = []
    for layout, options in ways:
        path = Path(folder, "-".join([layout, *options]))
        arguments = ["--out", str(path), "--layout", layout, "--updates", str(updates), *options]
        result = runpy.run_path(str(EXAMPLE))["main"](arguments)
        results.append((path, list(result.values())))
    return [(read_values(path), result) for path, result in results]


# ---------------------------------------------------------------- plain PyTorch


def score_pair(model: torch.nn.Module, sample: dict[str, list[int]]) -> torch.Tensor:
    """Return the log-probabilities of the chosen and the rejected response, one sequence at a time, without padding."""
    scores = []
    for side in ("chosen", "rejected"):
        tokens, labels = (torch.tensor(sample[f"{side}_{name}"]) for name in ("input_ids", "labels"))
        logits = model(input_ids=tokens[None]).logits[0]
        chances = logits.log_softmax(-1)
        scores.append(sum(chances[at - 1, tokens[at]] for at in range(1, len(tokens)) if labels[at] != -100))
    return torch.stack(scores)


def compute_pair_values(model: Any, reference: Any, sample: dict[str, list[int]]) -> list[torch.Tensor]:
    """Return the values of `NAMES` for one pair."""
    policy = score_pair(model, sample)
    with torch.no_grad():
        if reference is None:
            with model.disable_adapter():
                base = score_pair(model, sample)
        else:
            base = score_pair(reference, sample)
    chosen, rejected = BETA * (policy - base)
    loss = torch.log(1 + torch.exp(rejected - chosen))
    return [loss, chosen, rejected, (chosen > rejected).double(), chosen - rejected]


def train_in_plain_torch(num_pairs: int, samples: list[Any], tests: Any, lora: bool) -> Any:
    """Train on samples in the given order, `num_pairs` per update, and return what `run_example` returns for one way."""
    example = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(0)
    size = len(example["make_tokenizer"]())
    model, reference = example["make_model"](size), None
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    else:
        reference = example["make_model"](size)
        reference.load_state_dict(model.state_dict())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2 if lora else 1e-3)
    logged = []
    for update in range(UPDATES):
        pairs = samples[update * num_pairs : (update + 1) * num_pairs]
        values = torch.stack([torch.stack(compute_pair_values(model, reference, pair)) for pair in pairs]).mean(0)
        values[0].backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        logged.append(values.tolist())
    with torch.no_grad():
        rest = [torch.stack(compute_pair_values(model, reference, pair)) for pair in tests]
    return logged, torch.stack(rest).mean(0).tolist()


def run_alone(folder: str) -> tuple[list[Any], list[Any]]:
    """Return the results of the example and of plain PyTorch, of the whole model and of an adapter, on one process.

    The order of the pairs is recorded in the example.
    """
    found, expected = [], []
    collate = PreferenceCollator.__call__
    recorded: list[Any] = []

    def record(self: PreferenceCollator, samples: Any) -> Any:
        recorded.extend(samples)
        return collate(self, samples)

    for options in ([], ["--lora"]):
        recorded.clear()
        PreferenceCollator.__call__ = record  # type: ignore[method-assign]
        found += run_example(folder, [("ddp", options)])
        PreferenceCollator.__call__ = collate  # type: ignore[method-assign]
        example = runpy.run_path(str(EXAMPLE))
        tests = ChatDataset(example["make_pairs"](50, 2), PreferenceTokenizer(example["make_tokenizer"]()))
        expected.append(train_in_plain_torch(PAIRS_PER_UPDATE, list(recorded), tests, bool(options)))
    return found, expected


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_equal_plain_torch(tmp_path: Path) -> None:
    """The whole model and an adapter, with two micro-batches per update on one process, and sharded on two."""
    ((found, expected),) = run_ranks(run_alone, 1, str(tmp_path / "alone"), timeout=300)
    assert len(expected[0][0]) == UPDATES
    assert expected[0][1][4] > 0.3  # the model has learned
    assert expected[1][1][4] > 0.05
    both = run_ranks(run_example, 2, str(tmp_path / "both"), WAYS, timeout=300)
    assert both[0] == both[1]
    runs = [(found[0], expected[0]), (found[1], expected[1])]
    runs += [(result, expected[len(options)]) for result, (_, options) in zip(both[0], WAYS, strict=True)]
    for (logged, rest), (expected_logged, expected_rest) in runs:
        torch.testing.assert_close(torch.tensor(logged), torch.tensor(expected_logged), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(torch.tensor(rest), torch.tensor(expected_rest), rtol=1e-6, atol=1e-8)


KILLED = """
import os, signal, sys
from pathlib import Path
from headway import Accelerator
from tests.distributed.test_dpo import run_example

log = Accelerator.log
def log_or_die(self, *args, **kwargs):
    log(self, *args, **kwargs)
    if self.num_updates == 7:
        os.kill(os.getpid(), signal.SIGKILL)
Accelerator.log = log_or_die
run_example(sys.argv[1], [("ddp", [])], 8)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_run_continues_on_two_ranks(tmp_path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "killed")], timeout=300, cwd=Path(__file__).parents[2]
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(read_values(tmp_path / "killed" / "ddp")) == 7
    ((logged, rest),) = run_ranks(run_example, 2, str(tmp_path / "killed"), WAYS[:1], 8, timeout=300)[0]
    ((expected_logged, expected_rest),) = run_ranks(run_example, 1, str(tmp_path / "whole"), WAYS[:1], 8, timeout=300)[
        0
    ]
    assert len(logged) == 8
    torch.testing.assert_close(torch.tensor(logged), torch.tensor(expected_logged), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(torch.tensor(rest), torch.tensor(expected_rest), rtol=1e-6, atol=1e-8)


# ---------------------------------------------------------------- TRL


def test_loss_and_logged_values_are_those_of_trl(tmp_path: Path) -> None:
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    example: dict[str, Any] = runpy.run_path(str(EXAMPLE))
    tokenizer = example["make_tokenizer"]()
    # TRL also trains the line break after the end-of-turn token, which is left out here.
    tokenizer.chat_template = example["TEMPLATE"].replace("<|im_end|>\n", "<|im_end|>")
    tokenizer.pad_token = tokenizer.eos_token
    torch.manual_seed(0)
    model, reference = (example["make_model"](len(tokenizer)) for _ in range(2))
    rows = example["make_pairs"](6, 5)
    args = trl.DPOConfig(
        str(tmp_path), beta=example["BETA"], use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none"
    )
    trainer = trl.DPOTrainer(
        model, reference, args=args, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    inputs = trainer.data_collator([trainer.train_dataset[at] for at in range(6)])
    expected = trainer.compute_loss(model, inputs)
    expected.backward()
    expected_gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()

    data = ChatDataset(rows, PreferenceTokenizer(tokenizer))
    batch = PreferenceCollator()([data[at] for at in range(6)])
    policy = example["compute_log_probabilities"](model, batch)
    losses, values = example["compute_losses"](policy, example["compute_reference"](model, reference, batch))
    losses.mean().backward()
    torch.testing.assert_close(losses.mean(), expected, rtol=2e-6, atol=0)
    for parameter, gradient in zip(model.parameters(), expected_gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=2e-6)
    for name in NAMES[1:]:
        (logged,) = trainer._metrics["train"][name]
        assert values[name].mean().item() == pytest.approx(logged, rel=1e-5, abs=1e-6), name
    assert losses.std() > 0.02  # the models differ
