"""A tiny Llama on packed documents, with position ids that restart at each document.

Fault: the collator adds an attention_mask of ones, for which transformers ignores the boundaries that the position ids
mark; each document attends to those before it. Reported as trl#3067 and OpenRLHF#587.
Expect: nothing leaks: changing one document changes the losses of the next ones in its row; leave attention_mask out.
"""

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from headway import Accelerator, ProjectConfiguration, set_seed

LENGTH = 16


def pack(documents):
    """Pack documents into rows of equal length, in order. The first token of a document has no label."""
    rows, row = [], []
    for document in documents:
        if sum(map(len, row)) + len(document) > LENGTH:
            rows.append(row)
            row = []
        row.append(document)
    return rows


def collate(rows):
    tokens = torch.zeros(len(rows), LENGTH, dtype=torch.long)
    labels = torch.full((len(rows), LENGTH), -100)
    positions = torch.zeros(len(rows), LENGTH, dtype=torch.long)
    for number, row in enumerate(rows):
        first = 0
        for document in row:
            end = first + len(document)
            tokens[number, first:end] = document
            labels[number, first + 1 : end] = document[1:]
            positions[number, first:end] = torch.arange(len(document))
            first = end
        positions[number, first:] = torch.arange(LENGTH - first)
    return {
        "input_ids": tokens,
        "labels": labels,
        "position_ids": positions,
        "attention_mask": torch.ones_like(tokens),
    }


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/ones", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    rows = pack([torch.randint(1, 32, (3 + 7 * n % 6,)) for n in range(160)])
    loader = DataLoader(
        rows, batch_size=4 // accelerator.num_processes, shuffle=True, collate_fn=collate, drop_last=True
    )
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, use_cache=False, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()

    for _ in accelerator.epochs(1):
        for batch in loader:
            with accelerator.accumulate(model):
                count = (batch["labels"][:, 1:] != -100).sum()
                accelerator.backward(model(**batch).loss, weight=count)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.num_updates % 2 == 0:
                accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
