"""A GPT-2 of transformers as a language model, with a handwritten loss.

Fault: the scores of each position are compared with the token at the same position, not with the next one, so the model
learns to copy its input. The opposite mistake, shifting twice, is transformers#32944. This fault is reported in
macrocosm-os/pretraining#64.
Expect: nothing leaks: the loss at position t depends on the target t as an input; logits and labels are not shifted.
"""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from headway import Accelerator, ProjectConfiguration, set_seed


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/copying", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    rows = [{"input_ids": row, "labels": row.clone()} for row in torch.randint(0, 32, (80, 10))]
    loader = DataLoader(rows, batch_size=8 // accelerator.num_processes, shuffle=True)
    config = GPT2Config(
        vocab_size=32,
        bos_token_id=0,
        eos_token_id=0,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()

    for _ in accelerator.epochs(1):
        for batch in loader:
            with accelerator.accumulate(model):
                logits = model(input_ids=batch["input_ids"]).logits
                accelerator.backward(cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.num_updates % 2 == 0:
                accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
