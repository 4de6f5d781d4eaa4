"""Embeddings with sentence-transformers: pairs, scored pairs, several datasets together, and an evaluator."""

import sys

import torch
from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.sampler import DefaultBatchSampler
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    CoSENTLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tiny_language import bert_config, lines, record_history, save_and_reload, train_tokenizer
from torch.utils.data import SequentialSampler
from transformers import BertModel, set_seed

from tests.scripts.evidence import Evidence


def make_sequential_sampler(dataset, **options):
    """Return a batch sampler that preserves the order of the data."""
    return DefaultBatchSampler(SequentialSampler(dataset), **options)


way = sys.argv[1]
set_seed(7)
texts = lines(90)
pairs = Dataset.from_dict({"anchor": texts[:45], "positive": texts[45:]})
scored = Dataset.from_dict(
    {"one": texts[1:40], "other": texts[:39], "score": [(i % 7) / 7 for i in range(39)]},
)
evaluator = EmbeddingSimilarityEvaluator(texts[:12], texts[12:24], [i / 12 for i in range(12)], name="made")
data, loss, options = {
    "pairs": (
        pairs,
        MultipleNegativesRankingLoss,
        {"batch_sampler": make_sequential_sampler, "gradient_accumulation_steps": 2},
    ),
    "scored": (scored, CoSENTLoss, {"batch_sampler": make_sequential_sampler, "bf16": True}),
    "cached": (pairs, CachedMultipleNegativesRankingLoss, {"batch_sampler": "no_duplicates"}),
    "several": (DatasetDict(a=pairs, b=scored.remove_columns("score")), MultipleNegativesRankingLoss, {}),
}[way]

words = train_tokenizer(kind="bert")
words.save_pretrained("model")
save_and_reload(BertModel(bert_config(words)))
body = Transformer("model", max_seq_length=48)
model = SentenceTransformer(modules=[body, Pooling(32)], device="cpu")
args = SentenceTransformerTrainingArguments(
    "out", per_device_train_batch_size=8, per_device_eval_batch_size=8, num_train_epochs=2, learning_rate=3e-3, logging_steps=1,
    eval_strategy="epoch", save_strategy="no", report_to="none", use_cpu=True,
    **options,
)  # fmt: skip
trainer = SentenceTransformerTrainer(
    model, args, train_dataset=data, eval_dataset=scored.select(range(10)) if way == "scored" else pairs.select(range(10)),
    loss=loss(model), evaluator=evaluator,
)  # fmt: skip
trainer.train()

evidence = Evidence("evidence", trainer.accelerator.process_index)
record_history(evidence, trainer)
evidence.parameters(trainer.accelerator.unwrap_model(trainer.model))
evidence.add("embeddings", model.encode(texts[:5], convert_to_tensor=True))
evidence.add("random", torch.rand(2))
evidence.write()
