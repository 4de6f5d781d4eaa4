"""Trains a reward model on pairs of texts with TRL."""

import torch
from datasets import Dataset
from tiny_language import lines, record_history, train_tokenizer
from transformers import GPT2Config, GPT2ForSequenceClassification, set_seed
from trl import RewardConfig, RewardTrainer

from tests.scripts.evidence import Evidence

set_seed(7)
words = train_tokenizer()
texts = lines(44)
pairs = Dataset.from_dict({"chosen": texts[:22], "rejected": texts[22:]})
config = GPT2Config(
    vocab_size=len(words),
    n_embd=32,
    n_layer=2,
    n_head=2,
    n_positions=128,
    num_labels=1,
    pad_token_id=words.pad_token_id,
)
args = RewardConfig(
    "out", per_device_train_batch_size=4, per_device_eval_batch_size=4, num_train_epochs=2, learning_rate=3e-3, logging_steps=1,
    eval_strategy="epoch", save_strategy="no", report_to="none", use_cpu=True, bf16=False,
    gradient_checkpointing=False, center_rewards_coefficient=0.01,
)  # fmt: skip
trainer = RewardTrainer(
    GPT2ForSequenceClassification(config),
    args,
    train_dataset=pairs,
    eval_dataset=pairs.select(range(6)),
    processing_class=words,
)
trainer.train()

evidence = Evidence("evidence", trainer.accelerator.process_index)
record_history(evidence, trainer)
evidence.parameters(trainer.accelerator.unwrap_model(trainer.model))
evidence.add("random", torch.rand(2))
evidence.write()
