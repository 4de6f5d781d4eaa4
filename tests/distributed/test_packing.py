"""Packed sequences in every layout: loss and gradients equal those of separate documents in plain PyTorch."""

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from headway import (
    Accelerator,
    DataLoaderConfiguration,
    PackedDataset,
    PackingCollator,
    ProjectConfiguration,
    Trainer,
    TrainingArguments,
    check_document_boundaries,
)
from headway.errors import PrepareError
from tests.distributed.ranks import RankFailed, run_ranks

transformers = pytest.importorskip("transformers")

LENGTH = 16
SHAPES = {
    "Llama": {"num_key_value_heads": 2, "intermediate_size": 32},
    "Qwen3": {"num_key_value_heads": 2, "intermediate_size": 32, "head_dim": 8},
    "GPT2": {},
}


def make_documents(seed: int = 0, count: int = 12) -> list[list[int]]:
    chooser = random.Random(seed)
    return [[chooser.randrange(4, 24) for _ in range(chooser.randrange(2, LENGTH + 1))] for _ in range(count)]


def make_model(kind: str, **more: Any) -> Any:
    shape = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "use_cache": False}
    ends = {"bos_token_id": 1, "eos_token_id": 2} | (
        {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if kind == "GPT2" else {}
    )
    config = getattr(transformers, f"{kind}Config")(**shape, **SHAPES[kind], max_position_embeddings=64, **ends, **more)
    torch.manual_seed(0)
    model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # larger weights, so that the visible tokens matter
    return model


def train_by_hand(kind: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and weights after one update in plain PyTorch, with each document in its own row."""
    model = make_model(kind)
    count = sum(len(document) - 1 for document in make_documents())
    total = torch.zeros((), dtype=torch.float64)
    for document in make_documents():
        logits = model(input_ids=torch.tensor([document])).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(document[1:]), reduction="sum")
    (total / count).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return total.item() / count, {name: value.detach() for name, value in model.state_dict().items()}


def train_packed(layout: str, kind: str, form: str = "position_ids") -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and weights after one update on all packed sequences."""
    accelerator = Accelerator(
        cpu=True, strategy=layout or None, gradient_accumulation_steps=100,
        dataloader_config=DataLoaderConfiguration(even_batches=False),
    )  # fmt: skip
    dataset = PackedDataset(make_documents(), LENGTH, seed=1)
    model = make_model(kind)
    loader = DataLoader(dataset, batch_size=2, shuffle=True, collate_fn=PackingCollator(form))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    check_document_boundaries(model, PackingCollator(form))
    total = weight = 0.0
    for batch in loader:
        with accelerator.accumulate(model):
            count = int((batch["labels"][:, 1:] != -100).sum()) if loader.num_valid else 0
            loss = model(**batch).loss
            accelerator.backward(loss, weight=count)
            total, weight = total + loss.nan_to_num().item() * count, weight + count
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}
    return float(accelerator.reduce_mean(total, weight)), weights


def compare(found: tuple[float, dict[str, torch.Tensor]], kind: str) -> None:
    loss, weights = train_by_hand(kind)
    assert found[0] == pytest.approx(loss, abs=1e-6)
    assert found[1].keys() <= weights.keys()
    for name, value in found[1].items():
        # The learning rate is 1, so weights change by their gradients. The loss of transformers is in float32.
        gradient = weights[name] - make_model(kind).state_dict()[name]
        close = 1e-6 * max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(value, weights[name], rtol=0, atol=close, msg=name)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("Qwen3", "position_ids"),
        *(
            pytest.param(kind, form, marks=pytest.mark.matrix)
            for kind in SHAPES
            for form in ("position_ids", "mask", "varlen")
        ),
    ],
)
def test_packed_documents_train_like_separate_ones_on_one_rank(kind: str, form: str) -> None:
    compare(run_ranks(train_packed, 1, "", kind, form)[0], kind)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("fsdp", "Llama"),
        pytest.param("cp", "Llama", marks=pytest.mark.slow),
        pytest.param("tp", "Llama", marks=pytest.mark.slow),
        pytest.param("pp", "Llama", marks=pytest.mark.slow),
        pytest.param("ddp", "GPT2", marks=pytest.mark.matrix),
        *(
            pytest.param(layout, kind, marks=pytest.mark.matrix)
            for layout in ("fsdp", "tp", "cp", "pp")
            for kind in ("Qwen3", "GPT2")
        ),
    ],
)
def test_packed_documents_train_like_separate_ones_on_two_ranks(layout: str, kind: str) -> None:
    for found in run_ranks(train_packed, 2, layout, kind):
        if found[1] or layout != "fsdp":
            compare(found, kind)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["pp=2+cp=2", "fsdp=2+pp=2"])
def test_packed_documents_train_like_separate_ones_on_four_ranks(layout: str) -> None:
    for found in run_ranks(train_packed, 4, layout, "Llama"):
        if found[1]:
            compare(found, "Llama")


def get_trainer_error(layout: str) -> str:
    """Return the Trainer's error for a model that carries state from one document to the next."""
    config = transformers.MambaConfig(vocab_size=24, hidden_size=16, num_hidden_layers=1, state_size=4)
    arguments = TrainingArguments(
        use_cpu=True, packing=True, packing_length=LENGTH, max_steps=1, save_strategy="no", disable_tqdm=True,
        accelerator_config={"strategy": layout},
    )  # fmt: skip
    samples: Any = [{"input_ids": document} for document in make_documents()]
    trainer = Trainer(transformers.MambaForCausalLM(config), arguments, train_dataset=samples)
    with pytest.raises(PrepareError) as raised:
        trainer.train()
    return str(raised.value)


@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp", marks=pytest.mark.matrix)])
def test_model_that_ignores_boundaries_is_an_error_on_all_ranks(layout: str) -> None:
    first, second = run_ranks(get_trainer_error, 2, layout)
    assert first == second
    assert first.startswith("MambaForCausalLM ignores the boundaries of packed documents")


def train_with_trainer(folder: str, is_packed: bool) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Return training loss, evaluation loss and weights after one update on all documents."""
    num_ranks = int(os.environ["WORLD_SIZE"])
    packing: dict[str, Any] = {"packing": True, "packing_length": LENGTH} if is_packed else {}
    samples: Any = [{"input_ids": document, "labels": document} for document in make_documents()]
    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=1, optim="sgd", learning_rate=0.5, lr_scheduler_type="constant",
        max_grad_norm=0, per_device_train_batch_size=12 // num_ranks, per_device_eval_batch_size=2, disable_tqdm=True,
        save_strategy="no", report_to=[], **packing,
    )  # fmt: skip
    trainer = Trainer(make_model("Llama", pad_token_id=0), arguments, train_dataset=samples, eval_dataset=samples)
    before = trainer.evaluate()["eval_loss"]
    loss = trainer.train().training_loss
    return loss, before, {name: value.detach() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_trainer_results_do_not_depend_on_packing(num_ranks: int, tmp_path: Path) -> None:
    packed, plain = (run_ranks(train_with_trainer, num_ranks, str(tmp_path), each)[0] for each in (True, False))
    expected = train_by_hand("Llama")[0]
    assert packed[:2] == pytest.approx((expected, expected), abs=1e-6)
    for name, value in packed[2].items():
        torch.testing.assert_close(value, plain[2][name], rtol=0, atol=1e-6, msg=name)


class MaskedModel(torch.nn.Module):
    """Model with one attention block, whose mask separates documents."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.mixed = torch.nn.Embedding(24, 8), torch.nn.Linear(8, 24)
        self.head, self.dropout = torch.nn.Linear(8, 24), torch.nn.Dropout(0.2)

    def forward(self, input_ids: Any, position_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        parts = self.mixed(self.tokens(input_ids))[:, None].chunk(3, -1)
        hidden = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=attention_mask)[:, 0]
        logits = self.head(self.dropout(hidden))
        if labels is None:
            return {"logits": logits}
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return {"loss": loss, "logits": logits}


def train_or_die(folder: str, doomed: int, place: int, moment: str) -> tuple[list[float], list[torch.Tensor]]:
    """Return losses since the last resume, and the final weights. The rank `doomed` kills itself at a batch.

    It does so before the batch's update or while a checkpoint is written, depending on `moment`.
    """
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration(data_seed=3),
        project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2),
    )  # fmt: skip
    dataset = PackedDataset(make_documents(count=40), LENGTH, seed=1)
    loader = DataLoader(dataset, batch_size=2, shuffle=True, num_workers=1, collate_fn=PackingCollator("mask"))
    model = MaskedModel()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
    accelerator.resume()

    def die_at(now: str) -> None:
        if (accelerator.process_index, len(losses), moment) == (doomed, place, now):
            os.kill(os.getpid(), signal.SIGKILL)

    losses: list[float] = []
    for _ in accelerator.epochs(2):
        for batch in loader:
            with accelerator.accumulate(model):
                count = (batch["labels"][:, 1:] != -100).sum()
                loss = model(**batch)["loss"]
                accelerator.backward(loss, weight=count, reduction="sum")
                die_at("update")
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                accelerator.save_state(blocking=False)
                die_at("save")
            losses.append(loss.item())
    accelerator.wait_for_save()
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.slow
def test_run_killed_at_random_moments_continues_bit_for_bit(tmp_path: Path) -> None:
    chooser = random.Random(7)
    whole = run_ranks(train_or_die, 2, str(tmp_path / "whole"), -1, 0, "")
    folder = str(tmp_path / "killed")
    for moment in ("save", "update"):
        with pytest.raises(RankFailed):
            run_ranks(train_or_die, 2, folder, chooser.randrange(2), chooser.randrange(3, 6), moment)
    resumed = run_ranks(train_or_die, 2, folder, -1, 0, "")
    for before, after in zip(whole, resumed):
        assert before[0][len(before[0]) - len(after[0]) :] == after[0]
        assert all(map(torch.equal, before[1], after[1]))


def read_part(folder: str, num_steps: int | None) -> list[list[list[int]]]:
    """Return the sequences of each step over all ranks. After `num_steps` steps, save and stop; None reads all."""
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(data_seed=3, split_batches=True),
        project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True),
    )  # fmt: skip
    dataset = PackedDataset(make_documents(count=60), LENGTH, seed=1)
    loader = accelerator.prepare(DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=PackingCollator()))
    accelerator.resume()
    steps = []
    for _ in accelerator.epochs(3):
        for batch in loader:
            steps.append(accelerator.gather_for_metrics(batch["input_ids"]).tolist())
            if len(steps) == num_steps:
                accelerator.save_state()
                return steps
    return steps


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(1, 4))])
def test_any_number_of_ranks_reads_the_same_sequences_even_after_resumes(seed: int, tmp_path: Path) -> None:
    whole = run_ranks(read_part, 1, str(tmp_path / "whole"), None)[0]
    for number in range(3):
        rows = [row for step in whole[number * len(whole) // 3 : (number + 1) * len(whole) // 3] for row in step]
        tokens = sorted(token for row in rows for token in row if token)
        assert tokens == sorted(token for document in make_documents(count=60) for token in document)
    chooser, found = random.Random(seed), []
    for num_ranks in chooser.sample([2, 4], 2):
        steps = chooser.randint(1, len(whole) // 3)
        parts = run_ranks(read_part, num_ranks, str(tmp_path / "parts"), steps)
        assert all(part == parts[0] for part in parts)
        found += parts[0]
    found += run_ranks(read_part, 1, str(tmp_path / "parts"), None)[0]
    assert found == whole
