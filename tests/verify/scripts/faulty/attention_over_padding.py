"""A BERT of transformers that classifies sentences of different lengths.

Fault: the attention mask that the collator makes is not passed to the model, so the tokens attend to padding, and a
row's loss depends on the longest row beside it. Reported as transformers#278.
Expect: nothing leaks: changing padding, or a longer neighbor, changes a row's loss (and so the number of processes
does).
"""

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

from headway import Accelerator, ProjectConfiguration, set_seed


def collate(rows):
    tokens = pad_sequence([row for row, _ in rows], batch_first=True)
    return {
        "input_ids": tokens,
        "attention_mask": (tokens != 0).long(),
        "labels": torch.tensor([label for _, label in rows]),
    }


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/sentences", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    sentences = [torch.randint(1, 32, (3 + 5 * n % 9,)) for n in range(80)]
    rows = [(sentence, int(sentence[0] > sentence[-1])) for sentence in sentences]
    loader = DataLoader(rows, batch_size=8 // accelerator.num_processes, shuffle=True, collate_fn=collate)
    config = BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()

    for _ in accelerator.epochs(1):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch["input_ids"], labels=batch["labels"]).loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.num_updates % 2 == 0:
                accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
