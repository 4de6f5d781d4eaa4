"""Test packing in the Trainer: what is packed, contradicting arguments, and models refused before the first update."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from headway import PackedDataset, PackingCollator, Trainer, TrainingArguments
from headway.errors import ConfigError, DataError, PrepareError
from tests.unit.trainer.models import Speaker, llama, texts

LENGTH = 16


def make_trainer(folder: Path, model: Any, given: dict[str, Any] | None = None, **more: Any) -> Trainer:
    packing = {"packing": True, "packing_length": LENGTH} if given is None else given
    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=2, save_strategy="no", disable_tqdm=True, report_to="none",
        per_device_train_batch_size=2, per_device_eval_batch_size=2, **packing,
    )  # fmt: skip
    return Trainer(model, arguments, **{"train_dataset": texts(), **more})


def test_training_and_evaluation_are_packed_and_predictions_are_not(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, llama(), eval_dataset=texts(9))
    for loader in (trainer.get_train_dataloader(), trainer.get_eval_dataloader()):
        batch = next(iter(loader))
        assert batch["input_ids"].shape == batch["position_ids"].shape == (2, LENGTH)
        assert "attention_mask" not in batch
    assert trainer.get_train_dataloader().dataset is trainer.get_train_dataloader().dataset  # planned once
    assert len(trainer.get_test_dataloader(texts(9)).dataset) == 9
    trainer.train()
    assert trainer.predict(texts(9)).predictions.shape[0] == 9


def test_evaluation_with_metrics_gets_one_sample_per_row(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, llama(), eval_dataset=texts(9), compute_metrics=lambda found: {})
    assert len(trainer.get_eval_dataloader().dataset) == 9


def test_loss_of_an_evaluation_equals_that_of_single_samples(tmp_path: Path) -> None:
    model, rows = llama(), texts(9)
    total = count = 0.0
    for row in rows:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0]
        total += cross_entropy(logits[:-1], labels[1:], reduction="sum").item()
        count += int((labels[1:] != -100).sum())
    found = make_trainer(tmp_path, model).evaluate(rows)["eval_loss"]
    assert found == pytest.approx(total / count, rel=1e-6)


def test_packed_dataset_is_used_unchanged(tmp_path: Path) -> None:
    packed = PackedDataset(texts(), LENGTH, seed=5)
    trainer = make_trainer(tmp_path, llama(), given={}, train_dataset=packed)
    assert trainer.get_train_dataloader().dataset is packed
    trainer.train()
    for given in ({}, None):
        with pytest.raises(PrepareError, match="Reader"):
            make_trainer(tmp_path, RecurrentReader(), given=given, train_dataset=packed).train()
        with pytest.raises(PrepareError, match="Reader"):
            make_trainer(tmp_path, RecurrentReader(), given=given).evaluate(packed)


def test_flash_attention_gets_joined_rows(tmp_path: Path) -> None:
    model = llama()
    model.config._attn_implementation = "flash_attention_2"  # only the choice: the kernel needs a GPU
    batch = next(iter(make_trainer(tmp_path, model).get_train_dataloader()))
    assert batch["input_ids"].shape == (1, 2 * LENGTH)
    assert batch["cu_seq_lens_q"][-1] == 2 * LENGTH
    mask = next(iter(make_trainer(tmp_path, llama(), data_collator=PackingCollator("mask")).get_train_dataloader()))
    assert mask["attention_mask"].shape == (2, 1, LENGTH, LENGTH)


class RecurrentReader(nn.Module):
    """Recurrence over all tokens that accepts positions, and ignores them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.cell, self.head = nn.Embedding(60, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 60)

    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.head(self.cell(self.tokens(input_ids))[0])
        found = {"logits": logits}
        if labels is None:
            return found
        return {"loss": cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), **found}


def test_model_that_ignores_the_boundaries_is_refused_before_an_update(tmp_path: Path) -> None:
    reader = RecurrentReader()
    before = reader.head.weight.detach().clone()
    with pytest.raises(PrepareError, match="Reader ignores the boundaries of packed documents"):
        make_trainer(tmp_path, reader).train()
    assert torch.equal(reader.head.weight, before)
    assert reader.training
    with pytest.raises(PrepareError, match=r"Speaker.forward.* cannot be called with .*position_ids"):
        make_trainer(tmp_path, Speaker()).train()
    with pytest.raises(PrepareError, match="LlamaForCausalLM ignores the boundaries"):
        make_trainer(tmp_path, llama(), {"packing": True, "packing_length": LENGTH, "use_cache": True}).train()
    make_trainer(tmp_path, RecurrentReader(), data_collator=PackingCollator(check_model=False)).train()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"packing": True}, "packing=True needs packing_length"),
        ({"packing_length": 8}, "only with packing=True"),
        ({"packing": True, "packing_length": 0}, "packing_length=0"),
        ({"packing": True, "packing_length": 8, "packing_strategy": "bfd"}, "allowed: best_fit, in_order, split"),
        ({"packing": True, "packing_length": 8, "packing_long_samples": "drop"}, "allowed: error, split, truncate"),
        ({"packing": True, "packing_length": 8, "group_by_length": True}, "no lengths to group"),
    ],
)
def test_contradicting_arguments_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TrainingArguments(**given)


class Loading(Trainer):
    def get_train_dataloader(self) -> Any:
        return self._make_loader(self.train_dataset, 2)


def test_data_that_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="longer than a sequence of 8 tokens"):
        make_trainer(tmp_path, llama(), {"packing": True, "packing_length": 8}).train()
    with pytest.raises(DataError, match="has no length"):
        make_trainer(tmp_path, llama(), train_dataset=build_stream()).train()
    with pytest.raises(ConfigError, match="data_collator=function"):
        make_trainer(tmp_path, llama(), data_collator=lambda rows: rows)
    arguments = TrainingArguments(tmp_path, use_cpu=True, packing=True, packing_length=LENGTH, max_steps=1)
    with pytest.raises(ConfigError, match="returned a loader of a list"):
        Loading(llama(), arguments, train_dataset=texts()).train()


def build_stream() -> Any:
    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(texts())

    return Rows()


def test_largest_batch_is_searched_with_full_sequences(tmp_path: Path) -> None:
    given = {"packing": True, "packing_length": LENGTH}
    trainer = make_trainer(tmp_path, llama(), given)
    trainer.args.per_device_train_batch_size = "largest"
    shapes = []
    trainer.model.register_forward_pre_hook(
        lambda model, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    assert trainer.find_largest_batch_size() >= 1
    assert {shape[1] for shape in shapes} == {LENGTH}
