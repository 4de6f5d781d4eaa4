"""Accumulation for language models: the summed loss of each window is divided by its number of tokens on all processes."""

import contextlib

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from examples_material import make_pairs
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from tests.scripts.evidence import Evidence

STEPS = 3


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for index, row in enumerate(rows):
        ids[index, : len(row["input_ids"])] = labels[index, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
evidence = Evidence("evidence", accelerator.process_index)
set_seed(1)
config = GPT2Config(
    vocab_size=60, n_positions=20, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0,
    embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
model = GPT2LMHeadModel(config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
loader = DataLoader(make_pairs(58, 5), batch_size=4, shuffle=True, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()
for _ in range(2):
    batches, num_left = iter(loader), len(loader)
    while num_left:
        window = [next(batches) for _ in range(min(STEPS, num_left))]
        num_left -= len(window)
        num_tokens = torch.stack([(batch["labels"] != -100).sum() for batch in window]).sum()
        num_tokens = accelerator.gather(num_tokens).sum().item()
        evidence.add("tokens", num_tokens)
        for index, batch in enumerate(window):
            # Gradients are synchronized only with the last batch of the window.
            is_local = index + 1 < len(window) and accelerator.num_processes > 1
            with model.no_sync() if is_local else contextlib.nullcontext():
                logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
                loss = torch.nn.functional.cross_entropy(
                    logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
                )
                loss = loss * STEPS * accelerator.num_processes / num_tokens
                accelerator.backward(loss)
                evidence.add("loss", loss)
        evidence.add("norm", torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0))
        optimizer.step()
        optimizer.zero_grad()
evidence.parameters(accelerator.unwrap_model(model))
evidence.write()
accelerator.end_training()
