"""Weights that are stored in float8 or bf16 and cast to another dtype for computation: outputs and stored values."""

import sys

import torch
from accelerate import PartialState
from accelerate.big_modeling import attach_layerwise_casting_hooks
from accelerate.hooks import LayerwiseCastingHook
from transformers import BertConfig, BertForSequenceClassification

from tests.scripts.evidence import Evidence

storage, compute = (getattr(torch, each) for each in sys.argv[1:])
evidence = Evidence("evidence", PartialState(cpu=True).process_index)
torch.manual_seed(0)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32,
    )
)  # fmt: skip
model.eval().to(compute).requires_grad_(False)
images = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 2))
images.to(compute).requires_grad_(False)
attach_layerwise_casting_hooks(model, storage, compute, skip_modules_pattern=["classifier", "layer.1.output"])
attach_layerwise_casting_hooks(images, storage, compute, skip_modules_classes=(torch.nn.Flatten,), non_blocking=True)
for root in (model, images):
    for module in root.modules():
        hook = getattr(module, "_hf_hook", None)
        evidence.add("hooked", isinstance(hook, LayerwiseCastingHook))
        for tensor in module.parameters(recurse=False):
            evidence.add("bytes", tensor.element_size())
tokens = torch.randint(3, 60, (2, 7))
pixels = torch.rand(2, 3, 8, 8, dtype=compute)
for _ in range(2):
    evidence.add("logits", model(input_ids=tokens).logits)
    evidence.add("convolved", images(pixels))
evidence.add("stored", *(each.float().sum() for each in (*model.parameters(), *images.parameters())))
evidence.write()
