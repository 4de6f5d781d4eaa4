"""Test transformers' `DataCollatorWithFlattening`, with which a model that keeps a cache mixes the packed documents."""

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM, DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

from headway import Accelerator
from headway.compat.accelerate.accelerator import AccelerateAccelerator
from headway.errors import PrepareError

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def make_llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))


def make_loader(collator):
    generator = torch.Generator().manual_seed(1)
    documents = [{"input_ids": torch.randint(4, 64, (6,), generator=generator).tolist()} for _ in range(4)]
    return documents, DataLoader(documents, batch_size=2, collate_fn=collator)


def compute_separate_logits(model, documents):
    return torch.cat(
        [model(input_ids=torch.tensor([each["input_ids"]]), use_cache=False).logits for each in documents], 1
    )


@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}])
def test_documents_stay_separate(options):
    accelerator = Accelerator(cpu=True)
    documents, loader = make_loader(DataCollatorWithFlattening(**options))
    model = make_llama()
    expected = compute_separate_logits(model, documents[:2])
    batch = next(iter(loader))
    kept = {name: batch[name] for name in ("input_ids", "position_ids")}
    assert not torch.allclose(model(**kept).logits, expected, atol=1e-3)  # with the cache, the default
    model, loader = accelerator.prepare(model, loader)
    assert model.config.use_cache is False
    batch = next(iter(loader))
    torch.testing.assert_close(model(**{name: batch[name] for name in kept}).logits, expected)


def test_model_that_mixes_documents_is_refused_or_left_alone():
    accelerator = Accelerator(cpu=True)
    collator = DataCollatorWithFlattening()
    _, loader = make_loader(collator)
    with pytest.raises(
        PrepareError, match=r"In training each document would see parts of others.*collator.check_model = False"
    ):
        accelerator.prepare(BertForMaskedLM(BertConfig(**SIZES)), loader)
    collator.check_model = False
    Accelerator(cpu=True).prepare(BertForMaskedLM(BertConfig(**SIZES)), loader)


def test_accelerates_name_only_warns(caplog):
    accelerator = AccelerateAccelerator(cpu=True)
    _, loader = make_loader(DataCollatorWithFlattening())
    model, loader = accelerator.prepare(make_llama(), loader)
    assert model.config.use_cache is True
    assert caplog.text.count("ignores the boundaries of packed documents") == 1
