"""LoRA and similar adapters of PEFT: trained by transformers' Trainer or by a loop, saved, and loaded again."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from datasets import Dataset
from peft import AdaLoraConfig, IA3Config, LoraConfig, PeftModel, get_peft_model
from tiny_language import gpt2, lines, llama, record_history, save_and_reload, train_tokenizer
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    get_linear_schedule_with_warmup,
    set_seed,
)

from tests.scripts.evidence import Evidence


def train_with_trainer(model, rows, collate, evidence):
    """Train with transformers' Trainer."""
    args = TrainingArguments(
        "out", per_device_train_batch_size=4, per_device_eval_batch_size=4, num_train_epochs=2, learning_rate=1e-2, logging_steps=1,
        eval_strategy="epoch", save_strategy="no", report_to="none", use_cpu=True,
        gradient_accumulation_steps=2, warmup_steps=2, label_names=["labels"], activation_checkpointing=True,
    )  # fmt: skip
    trainer = Trainer(model, args, collate, train_dataset=rows, eval_dataset=rows.select(range(10)))
    trainer.train()
    record_history(evidence, trainer)
    return trainer.accelerator


def train_with_loop(model, rows, collate, evidence, precision):
    """Train with a typical loop for Accelerate."""
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2, cpu=True)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    loader = DataLoader(rows, batch_size=4, collate_fn=collate)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 2 * len(loader))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    assert is_peft_model(accelerator.unwrap_model(model))
    for _ in range(2):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    evidence.add("grad_norm", accelerator.clip_grad_norm_(model.parameters(), 1.0))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            evidence.add("loss", accelerator.gather(loss.detach().repeat(4)).mean())
            evidence.add("learning_rate", schedule.get_last_lr()[0])
        model.eval()
        for batch in loader:
            with torch.no_grad():
                logits = model(**batch).logits
            right = logits.argmax(-1)[:, :-1] == batch["labels"][:, 1:]
            evidence.add("right", accelerator.gather_for_metrics(right.float().mean(1)).sum())
    return accelerator


way, kind, *precision = sys.argv[1:]
set_seed(7)
words = train_tokenizer()
config = {
    "lora": LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], modules_to_save=["ln_f"], fan_in_fan_out=True),
    "dora": LoraConfig(r=4, use_dora=True, use_rslora=True, target_modules=["q_proj", "v_proj"]),
    "adalora": AdaLoraConfig(total_step=12, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "ia3": IA3Config(target_modules=["c_attn"], feedforward_modules=[], fan_in_fan_out=True),
}[kind]
base = save_and_reload(llama(words) if kind in ("dora", "adalora") else gpt2(words))
model = get_peft_model(base, config)
rows = Dataset.from_list([words(text, truncation=True, max_length=40) for text in lines(42)])
collate = DataCollatorForLanguageModeling(words, mlm=False)

evidence = Evidence(None, 0)
run = train_with_trainer if way == "trainer" else train_with_loop
accelerator = run(model, rows, collate, evidence, *([] if way == "trainer" else [*precision, None][:1]))
evidence.path = Evidence("evidence", accelerator.process_index).path
trained = accelerator.unwrap_model(model)
evidence.parameters(trained)
accelerator.wait_for_everyone()
trained.save_pretrained("adapter", is_main_process=accelerator.is_main_process)
accelerator.wait_for_everyone()
again = PeftModel.from_pretrained(type(base).from_pretrained("model"), "adapter").eval()
text = words("def parse(self, arguments):", return_tensors="pt")
with torch.no_grad():
    evidence.add("again", (again(**text).logits - trained.eval()(**text).logits).abs().max())
    evidence.add("logits", again(**text).logits)
evidence.add("random", torch.rand(2))
evidence.write()
