"""A tiny Llama on packed documents, with position ids that restart at each document, weighted by labels."""

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from headway import Accelerator, PackedDataset, PackingCollator, ProjectConfiguration, set_seed


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/packed", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    documents = [{"input_ids": torch.randint(4, 48, (3 + 5 * number % 11,)).tolist()} for number in range(120)]
    packed = PackedDataset(documents, sequence_length=16, seed=1)
    loader = DataLoader(
        packed, batch_size=4 // accelerator.num_processes, shuffle=True, collate_fn=PackingCollator(), drop_last=True
    )
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=48, **sizes))
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
