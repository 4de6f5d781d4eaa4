"""TRL's GRPO: transformers generates completions, and a function computes their rewards."""

import torch
from datasets import Dataset
from tiny_language import gpt2, lines, record_history, save_and_reload, train_tokenizer
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer

from tests.scripts.evidence import Evidence


def reward(completions, **kwargs):
    """Return the share of letters in each completion."""
    return [sum(map(str.isalpha, each)) / (len(each) + 1) for each in completions]


set_seed(7)
words = train_tokenizer()
prompts = Dataset.from_dict({"prompt": lines(12)})
args = GRPOConfig(
    "out", per_device_train_batch_size=4, num_generations=4, max_completion_length=12, max_steps=6, learning_rate=3e-3,
    logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, beta=0.04,
    num_iterations=2, per_device_eval_batch_size=4, eval_strategy="steps", eval_steps=3, shuffle_dataset=False,
    gradient_accumulation_steps=2,
)  # fmt: skip
model = save_and_reload(gpt2(words, dropout=0.0))
trainer = GRPOTrainer(
    model, reward, args=args, train_dataset=prompts, eval_dataset=prompts.select(range(8)), processing_class=words
)
trainer.train()

evidence = Evidence("evidence", trainer.accelerator.process_index)
record_history(evidence, trainer)
evidence.parameters(trainer.accelerator.unwrap_model(trainer.model))
evidence.add("random", torch.rand(2))
evidence.write()
