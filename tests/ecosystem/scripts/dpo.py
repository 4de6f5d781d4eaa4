"""TRL's DPO on preferences: with a reference model, with LoRA, with precomputed reference values, and with TRL's defaults.

With TRL's defaults, both models compute in bf16.
"""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_language import gpt2, lines, record_history, save_and_reload, train_tokenizer
from transformers import set_seed
from trl import DPOConfig, DPOTrainer

from tests.scripts.evidence import Evidence

way = sys.argv[1]
set_seed(7)
words = train_tokenizer()
texts = lines(66)
pairs = Dataset.from_dict({"prompt": texts[:22], "chosen": texts[22:44], "rejected": texts[44:]})
options = {
    "reference": {"gradient_accumulation_steps": 2, "sync_ref_model": True, "ref_model_sync_steps": 2},
    "lora": {"bf16": True},
    "ahead": {"precompute_ref_log_probs": True},
    "defaults": {"gradient_checkpointing": True, "bf16": None},
}[way]
args = DPOConfig(
    "out", per_device_train_batch_size=4, per_device_eval_batch_size=4, num_train_epochs=2, learning_rate=3e-3, logging_steps=1,
    eval_strategy="epoch", save_strategy="no", report_to="none", use_cpu=True,
    **{"bf16": False, "gradient_checkpointing": False, **options},
)  # fmt: skip
model = save_and_reload(gpt2(words))
trainer = DPOTrainer(
    model, None, args=args, train_dataset=pairs, eval_dataset=pairs.select(range(6)), processing_class=words,
    peft_config=LoraConfig(r=4, target_modules=["c_attn"]) if way == "lora" else None,
)  # fmt: skip
trainer.train()

evidence = Evidence("evidence", trainer.accelerator.process_index)
record_history(evidence, trainer)
evidence.parameters(trainer.accelerator.unwrap_model(trainer.model))
if trainer.ref_model is not None:
    evidence.parameters(trainer.accelerator.unwrap_model(trainer.ref_model), name="reference")
evidence.add("random", torch.rand(2))
evidence.write()
