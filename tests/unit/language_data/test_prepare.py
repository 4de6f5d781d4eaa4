"""Test that a model prepared with a loader of packed sequences is checked before the first update."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from headway import Accelerator, PackedDataset, PackingCollator
from headway.errors import PrepareError
from tests.unit.language_data.test_boundary_check import Attending, Recurrent, make_model

DOCUMENTS = [[5, 6, 7], [8, 9], [4, 5, 6, 7, 8]]


def make_loader(**given: Any) -> DataLoader[Any]:
    return DataLoader(PackedDataset(DOCUMENTS, 8), batch_size=1, collate_fn=PackingCollator(**given))


def test_model_that_ignores_the_boundaries_is_not_prepared() -> None:
    for prepare in (
        lambda run: run.prepare(Recurrent(), make_loader()),
        lambda run: (run.prepare_model(Recurrent()), run.prepare_data_loader(make_loader())),
        lambda run: (run.prepare_data_loader(make_loader()), run.prepare_model(Recurrent())),
    ):
        with pytest.raises(PrepareError, match="Recurrent ignores the boundaries"):
            prepare(Accelerator(cpu=True))
    Accelerator(cpu=True).prepare(Recurrent(), make_loader(check_model=False))
    Accelerator(cpu=True).prepare(Attending(), make_loader())


def test_cache_of_keys_and_values_is_disabled() -> None:
    pytest.importorskip("transformers")
    model = make_model("LlamaForCausalLM", use_cache=True)
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(model, make_loader())
    assert model.config.use_cache is False
    batch = list(loader)[1]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][:, :3] += 10
    with torch.no_grad():
        assert torch.equal(model(**batch).logits[:, 3:], model(**changed).logits[:, 3:])


def test_models_that_do_not_read_tokens_are_not_checked() -> None:
    Accelerator(cpu=True).prepare(nn.Linear(2, 2), make_loader())
    teacher = Accelerator(cpu=True)
    teacher.prepare_model(Recurrent(), evaluation_mode=True)
    teacher.prepare(Attending(), make_loader())


def test_model_prepared_again_is_checked_again() -> None:
    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(Attending(), make_loader())
    accelerator.free_memory()
    model.is_masked = False
    with pytest.raises(PrepareError, match="Attending ignores the boundaries"):
        accelerator.prepare(model, make_loader())
