"""Trains a language model on sequences of very different lengths; the script averages each update's loss over its tokens itself."""

import argparse
import contextlib
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from evidence import Evidence
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel


def make_sequences(number):
    """Return sequences of 3 to 20 tokens that count upwards from a random start."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 21, (number,), generator=generator).tolist()
    starts = torch.randint(1, 40, (number,), generator=generator).tolist()
    return [torch.arange(start, start + length) % 40 + 1 for start, length in zip(starts, lengths)]


def collate_fn(sequences):
    longest = max(map(len, sequences))
    input_ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    labels = torch.full((len(sequences), longest), -100)
    for row, sequence in enumerate(sequences):
        input_ids[row, : len(sequence)] = sequence
        labels[row, : len(sequence)] = sequence
    # The model does not predict the first token of a row.
    labels[:, 0] = -100
    return {"input_ids": input_ids, "attention_mask": (input_ids > 0).long(), "labels": labels}


def get_batch_samples(iterator, num_batches, device):
    """Fetch the batches of one window, and count their tokens with a label."""
    batch_samples = []
    for _ in range(num_batches):
        try:
            batch_samples.append(next(iterator))
        except StopIteration:
            break
    num_items_in_batch = sum(batch["labels"].ne(-100).sum() for batch in batch_samples)
    return batch_samples, torch.as_tensor(num_items_in_batch, device=device)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--per_device_batch_size", type=int, default=3)
    parser.add_argument("--num_sequences", type=int, default=96)
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=5e-3)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--in_order", action="store_true", help="no shuffling")
    parser.add_argument("--evidence", default=None)
    args = parser.parse_args()

    gradient_accumulation_steps = args.gradient_accumulation_steps
    accelerator = Accelerator(gradient_accumulation_steps=gradient_accumulation_steps)
    evidence = Evidence(args.evidence, accelerator.process_index)
    set_seed(0)
    config = GPT2Config(
        vocab_size=41, n_positions=20, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    dataloader = DataLoader(
        make_sequences(args.num_sequences), batch_size=args.per_device_batch_size, shuffle=not args.in_order,
        collate_fn=collate_fn,
    )  # fmt: skip
    criterion = torch.nn.CrossEntropyLoss(reduction="sum", ignore_index=-100)
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)

    total_num_updates = 0
    for epoch in range(args.num_epochs):
        model.train()
        training_iterator = iter(dataloader)
        num_samples_in_epoch = len(dataloader)
        remainder = num_samples_in_epoch % gradient_accumulation_steps
        remainder = remainder if remainder != 0 else gradient_accumulation_steps
        total_gradient_updates = math.ceil(num_samples_in_epoch / gradient_accumulation_steps)
        for update_step in range(total_gradient_updates):
            # All batches of a window are fetched first, in order to count their tokens.
            is_last = update_step == total_gradient_updates - 1
            num_batches = remainder if is_last else gradient_accumulation_steps
            batch_samples, local_num_items = get_batch_samples(training_iterator, num_batches, accelerator.device)
            num_items_in_batch = accelerator.gather(local_num_items).sum().item()
            evidence.add("tokens", num_items_in_batch)

            losses = []
            for i, batch in enumerate(batch_samples):
                # Gradients are synchronized only with the last batch of the window.
                ctx = (
                    model.no_sync
                    if (i < len(batch_samples) - 1 and accelerator.num_processes > 1)
                    else contextlib.nullcontext
                )
                with ctx():
                    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
                    loss = criterion(logits[:, :-1].reshape(-1, logits.shape[-1]), batch["labels"][:, 1:].reshape(-1))
                    losses.append(loss.detach())
                    # This undoes backward()'s division by the number of steps, and the averaging of gradients over processes.
                    loss = (loss * gradient_accumulation_steps * accelerator.num_processes) / num_items_in_batch
                    accelerator.backward(loss)
            evidence.add("loss", *losses)
            evidence.add("norm", accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm))
            evidence.gradients(accelerator.unwrap_model(model))
            optimizer.step()
            optimizer.zero_grad()
            total_num_updates += 1
            mean_loss = accelerator.gather(sum(losses)).sum().item() / num_items_in_batch
            evidence.add("mean loss", mean_loss)
        accelerator.print(f"epoch {epoch}: {mean_loss:.4f} after {total_num_updates} updates")
    evidence.add("metrics", total_num_updates, mean_loss)
    evidence.parameters(accelerator.unwrap_model(model))
    evidence.write()
    accelerator.end_training()


if __name__ == "__main__":
    main()
