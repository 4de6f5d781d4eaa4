"""A classifier of short texts, with a vocabulary that is built from them.

Fault: the numbers of the words follow the order of a set of strings, which changes with the hash seed of each process.
Reported as gensim#1715 and UCL/TLOmodel#742.
Expect: a run repeats itself: other token numbers in batch 1 under another PYTHONHASHSEED; sort the set.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader

from headway import Accelerator, ProjectConfiguration, set_seed

ANIMALS = ["cat", "dog", "owl", "hen", "fox", "bee", "ant", "cow", "pig", "bat"]
VERBS = ["eats", "sees", "hears", "finds", "wants", "fears", "likes", "hunts"]


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/words", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    texts = [f"{a} {verb} {b}" for a in ANIMALS for verb in VERBS for b in ANIMALS[:1]]
    words = {word for text in texts for word in text.split()}
    numbers = {word: number for number, word in enumerate(words)}
    rows = [(torch.tensor([numbers[word] for word in text.split()]), int("a" in text.split()[0])) for text in texts]
    loader = DataLoader(rows, batch_size=8 // accelerator.num_processes, shuffle=True)
    model = nn.Sequential(nn.EmbeddingBag(len(words), 8), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()

    for _ in accelerator.epochs(1):
        for tokens, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(tokens), labels))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.num_updates % 2 == 0:
                accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
