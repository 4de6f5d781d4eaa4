"""Supervised fine-tuning with TRL: texts, conversations, packed sequences, prompts with completions, and LoRA."""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_language import gpt2, lines, llama, record_history, train_tokenizer
from transformers import set_seed
from trl import SFTConfig, SFTTrainer

from tests.scripts.evidence import Evidence

way = sys.argv[1]
set_seed(7)
words = train_tokenizer()
texts = lines(58)
questions = [
    {"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": other}]}
    for one, other in zip(texts[::2], texts[1::2])
]
data = {
    "text": {"text": texts},
    "packed": {"text": texts},
    "chat": {"messages": [each["messages"] for each in questions]},
    "prompts": {"prompt": texts[::2], "completion": texts[1::2]},
    "lora": {"text": texts},
}[way]
rows = Dataset.from_dict(data)
options = {
    "text": {"gradient_accumulation_steps": 3},
    "packed": {"packing": True, "max_length": 64},
    "chat": {"assistant_only_loss": True, "neftune_noise_alpha": 5},
    "prompts": {"bf16": True},
    "lora": {},
}[way]
model = llama(words) if way in ("packed", "chat") else gpt2(words)
args = SFTConfig(
    "out", per_device_train_batch_size=4, per_device_eval_batch_size=4, num_train_epochs=2, learning_rate=3e-3, logging_steps=1,
    eval_strategy="epoch", save_strategy="no", report_to="none",
    use_cpu=True, warmup_steps=2,
    **{"bf16": False, "gradient_checkpointing": False, **options},
)  # fmt: skip
trainer = SFTTrainer(
    model, args, train_dataset=rows, eval_dataset=rows.select(range(10)), processing_class=words,
    peft_config=LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1) if way == "lora" else None,
)  # fmt: skip
trainer.train()

evidence = Evidence("evidence", trainer.accelerator.process_index)
record_history(evidence, trainer)
evidence.parameters(trainer.accelerator.unwrap_model(trainer.model))
evidence.add("random", torch.rand(2))
evidence.write()
