"""A small handwritten GPT on rows of Headway's PackedDataset.

Fault: the model uses the position ids for its embeddings alone; its causal attention goes over the whole row, so
documents attend to those before them. check_model=False silences the check. A related report is nanoVLM#204.
Expect: nothing leaks: changing one document changes the losses of the next ones in its row; attention ignores
boundaries.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader

from headway import Accelerator, PackedDataset, PackingCollator, ProjectConfiguration, set_seed

WIDTH = 16


class SmallGPT(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(16, WIDTH)
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, input_ids, position_ids, labels=None):
        x = self.tokens(input_ids) + self.places(position_ids)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(x)
        targets = labels[:, 1:].flatten()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=-100)


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/unbounded", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    documents = [{"input_ids": torch.randint(1, 32, (3 + 7 * n % 6,)).tolist()} for n in range(160)]
    packed = PackedDataset(documents, sequence_length=16, seed=1)
    loader = DataLoader(
        packed,
        batch_size=4 // accelerator.num_processes,
        shuffle=True,
        collate_fn=PackingCollator(check_model=False),
        drop_last=True,
    )
    model = SmallGPT(32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()

    for _ in accelerator.epochs(1):
        for batch in loader:
            with accelerator.accumulate(model):
                count = (batch["labels"][:, 1:] != -100).sum()
                loss = model(batch["input_ids"], batch["position_ids"], batch["labels"])
                accelerator.backward(loss, weight=count)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.num_updates % 2 == 0:
                accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
