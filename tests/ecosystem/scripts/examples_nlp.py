"""The complete language example: fine-tuning with a schedule, accumulation, tracking, checkpoints, and resuming."""

import argparse
import os

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DistributedType
from accelerate.utils import set_seed
from examples_material import evaluate, make_bert, pair_loaders
from torch.optim import AdamW
from transformers import get_linear_schedule_with_warmup

from tests.scripts.evidence import Evidence

MAX_GPU_BATCH_SIZE = 8


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", default=None)
    parser.add_argument("--checkpointing_steps", default=None)
    parser.add_argument("--resume_from_checkpoint", default=None)
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--use_seedable_sampler", action="store_true")
    args = parser.parse_args()

    loading = DataLoaderConfiguration(use_seedable_sampler=args.use_seedable_sampler)
    accelerator = Accelerator(
        cpu=True, mixed_precision=args.mixed_precision, log_with="tensorboard", project_dir=args.output_dir,
        dataloader_config=loading,
    )  # fmt: skip
    evidence = Evidence("evidence", accelerator.process_index)
    accelerator.init_trackers("complete_nlp", {"lr": 2e-3, "num_epochs": 2, "seed": 42, "batch_size": 16})
    batch_size, gradient_accumulation_steps = 16, 1
    if batch_size > MAX_GPU_BATCH_SIZE and accelerator.distributed_type != DistributedType.XLA:
        gradient_accumulation_steps = batch_size // MAX_GPU_BATCH_SIZE
        batch_size = MAX_GPU_BATCH_SIZE
    set_seed(42)
    with accelerator.main_process_first():
        train_loader, eval_loader = pair_loaders(batch_size)
    model = make_bert().to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=2e-3)
    schedule = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=2, num_training_steps=len(train_loader) * 2 // gradient_accumulation_steps
    )
    model, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, schedule
    )
    overall_step = starting_epoch = 0
    resume_step = None
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        word, number = os.path.basename(args.resume_from_checkpoint).rsplit("_", 1)
        if word == "epoch":
            starting_epoch = int(number) + 1
        else:
            starting_epoch, resume_step = divmod(int(number), len(train_loader))
    for epoch in range(starting_epoch, 2):
        model.train()
        total_loss, active = 0.0, train_loader
        if epoch == starting_epoch and resume_step is not None:
            active = accelerator.skip_first_batches(train_loader, resume_step)
            overall_step += resume_step
        for step, batch in enumerate(active):
            batch.to(accelerator.device) if hasattr(batch, "to") else None
            loss = model(**batch).loss / gradient_accumulation_steps
            total_loss += loss.detach().float()
            evidence.add("loss", loss)
            accelerator.backward(loss)
            if step % gradient_accumulation_steps == 0:
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            overall_step += 1
            if args.checkpointing_steps not in (None, "epoch") and overall_step % int(args.checkpointing_steps) == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{overall_step}"))
        found = evaluate(accelerator, model, eval_loader)
        evidence.add("metrics", found["accuracy"], found["seen"])
        accelerator.log(
            {"accuracy": found["accuracy"], "train_loss": total_loss.item() / len(train_loader), "epoch": epoch},
            step=epoch,
        )
        if args.checkpointing_steps == "epoch":
            accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))
    saved = sorted(name for name in os.listdir(args.output_dir) if name.partition("_")[0] in ("step", "epoch"))
    if accelerator.is_main_process and saved:
        evidence.add("files", *(os.path.isfile(os.path.join(args.output_dir, saved[-1], name)) for name in FILES))
    evidence.parameters(accelerator.unwrap_model(model))
    evidence.write()
    accelerator.end_training()


FILES = ("model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl")
if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
