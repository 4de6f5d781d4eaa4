"""Fine-tuning of a BERT classifier with Accelerate.

Run: --as accelerate

Fault: The attention mask of the batch is not passed to the model, which attends to padding.
Expect: nothing leaks: padding changes the outputs; attention_mask is not passed, line of the model's call
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification


def collate(rows):
    length = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for n, (row, _) in enumerate(rows):
        ids[n, : len(row)], mask[n, : len(row)] = row, 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([label for _, label in rows])}


def main():
    set_seed(0)
    accelerator = Accelerator()
    rows = [(torch.randint(3, 50, (4 + n % 9,)), n % 2) for n in range(96)]
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    loader = DataLoader(rows, batch_size=8 // accelerator.num_processes, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for batch in loader:
            outputs = model(input_ids=batch["input_ids"], labels=batch["labels"])
            accelerator.backward(outputs.loss)
            optimizer.step()
            optimizer.zero_grad()


main()
