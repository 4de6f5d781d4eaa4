"""Teaches a UNet and its text encoder one subject from a few images; class images prevent them from forgetting the class."""

import argparse
import hashlib
import inspect
import itertools
import logging
import math
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration, set_seed
from evidence import Evidence
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

logger = get_logger(__name__)
TOKENS = {"a": 1, "photo": 2, "of": 3, "sks": 4, "dog": 5}


def tokenize(prompt):
    return torch.tensor([TOKENS[word] for word in prompt.split()] + [0] * (6 - len(prompt.split())))


class TextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, input_ids):
        return (self.layer(self.embedding(input_ids)),)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.text = nn.Linear(1, 16), nn.Linear(16, 16)
        self.enter, self.leave = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.middle = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, noisy, timesteps, states):
        condition = self.time(timesteps[:, None].float() / 100) + self.text(states.mean(dim=1))
        hidden = F.silu(self.enter(noisy) + condition[:, :, None, None])
        return self.leave(F.silu(self.middle(hidden)) + hidden)


class PromptDataset(Dataset):
    """A dataset that repeats the prompt for class images, with an index for each image."""

    def __init__(self, prompt, num_samples):
        self.prompt, self.num_samples = prompt, num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return {"prompt": self.prompt, "index": index}


class DreamBoothDataset(Dataset):
    def __init__(self, instance_prompt, class_prompt=None, class_data_root=None, num_instances=10):
        generator = torch.Generator().manual_seed(7)
        self.instances = torch.randn(num_instances, 3, 8, 8, generator=generator)
        self.class_images = None
        if class_data_root is not None:
            self.class_images = sorted(Path(class_data_root).glob("*.pt"))
        self.instance_prompt, self.class_prompt = instance_prompt, class_prompt
        self.length = max(len(self.instances), len(self.class_images or []))

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        example = {
            "instance_images": self.instances[index % len(self.instances)],
            "instance_prompt_ids": tokenize(self.instance_prompt),
        }
        if self.class_images:
            example["class_images"] = torch.load(self.class_images[index % len(self.class_images)])
            example["class_prompt_ids"] = tokenize(self.class_prompt)
        return example


def collate_fn(examples, with_prior_preservation=False):
    input_ids = [example["instance_prompt_ids"] for example in examples]
    pixel_values = [example["instance_images"] for example in examples]
    # Concat class and instance examples for prior preservation: this avoids two forward passes.
    if with_prior_preservation:
        input_ids += [example["class_prompt_ids"] for example in examples]
        pixel_values += [example["class_images"] for example in examples]
    return {"input_ids": torch.stack(input_ids), "pixel_values": torch.stack(pixel_values).float()}


def make_class_images(accelerator, args):
    """Create the missing class images. Each process creates a part of them."""
    class_images_dir = Path(args.class_data_dir)
    if accelerator.is_main_process:
        class_images_dir.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    missing = args.num_class_images - len(list(class_images_dir.iterdir()))
    if missing > 0:
        sample_dataloader = DataLoader(PromptDataset(args.class_prompt, missing), batch_size=4)
        sample_dataloader = accelerator.prepare(sample_dataloader)
        for example in tqdm(
            sample_dataloader, desc="Generating class images", disable=not accelerator.is_local_main_process
        ):
            for number in example["index"].tolist():
                image = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(number))
                torch.save(
                    image, class_images_dir / f"{number:03}-{hashlib.sha1(image.numpy().tobytes()).hexdigest()}.pt"
                )
    accelerator.wait_for_everyone()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", default="dreambooth-model")
    parser.add_argument("--class_data_dir", default="class_images")
    parser.add_argument("--instance_prompt", default="a photo of sks dog")
    parser.add_argument("--class_prompt", default="a photo of dog")
    parser.add_argument("--with_prior_preservation", action="store_true")
    parser.add_argument("--prior_loss_weight", type=float, default=1.0)
    parser.add_argument("--num_class_images", type=int, default=16)
    parser.add_argument("--train_text_encoder", action="store_true")
    parser.add_argument("--train_batch_size", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--max_train_steps", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--checkpointing_steps", type=int, default=4)
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in_order", action="store_true", help="no shuffling")
    parser.add_argument("--evidence", default=None)
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        project_config=ProjectConfiguration(project_dir=args.output_dir, logging_dir=Path(args.output_dir, "logs")),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=False)],
    )
    evidence = Evidence(args.evidence, accelerator.process_index)
    logging.basicConfig(level=logging.INFO)
    logger.info(accelerator.state, main_process_only=False)
    set_seed(args.seed)
    if args.with_prior_preservation:
        make_class_images(accelerator, args)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)

    text_encoder, unet, vae = TextEncoder(), UNet(), nn.Identity()
    vae.requires_grad_(False)
    if not args.train_text_encoder:
        text_encoder.requires_grad_(False)
    low_precision = (
        "Please make sure to always have all model weights in full float32 precision when starting training."
    )
    if accelerator.unwrap_model(unet).enter.weight.dtype != torch.float32:
        raise ValueError(f"Unet loaded as datatype {unet.enter.weight.dtype}. {low_precision}")

    params_to_optimize = (
        itertools.chain(unet.parameters(), text_encoder.parameters()) if args.train_text_encoder else unet.parameters()
    )
    optimizer = torch.optim.AdamW(params_to_optimize, lr=args.learning_rate)
    train_dataset = DreamBoothDataset(
        args.instance_prompt, args.class_prompt, args.class_data_dir if args.with_prior_preservation else None
    )
    train_dataloader = DataLoader(
        train_dataset, batch_size=args.train_batch_size, shuffle=not args.in_order,
        collate_fn=lambda examples: collate_fn(examples, args.with_prior_preservation),
    )  # fmt: skip
    lr_scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=1)
    if args.train_text_encoder:
        unet, text_encoder, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
            unet, text_encoder, optimizer, train_dataloader, lr_scheduler
        )
    else:
        unet, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
            unet, optimizer, train_dataloader, lr_scheduler
        )
    vae.to(accelerator.device)
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    num_train_epochs = math.ceil(args.max_train_steps / num_update_steps_per_epoch)
    if accelerator.is_main_process:
        accelerator.init_trackers("dreambooth", config=vars(args))
    alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-3, 5e-2, 100), dim=0)

    global_step = 0
    progress_bar = tqdm(range(args.max_train_steps), desc="Steps", disable=not accelerator.is_local_main_process)
    for _ in range(num_train_epochs):
        unet.train()
        if args.train_text_encoder:
            text_encoder.train()
        for batch in train_dataloader:
            models_to_accumulate = [unet, text_encoder] if args.train_text_encoder else [unet]
            with accelerator.accumulate(*models_to_accumulate):
                latents = vae(batch["pixel_values"])
                noise = torch.randn_like(latents)
                timesteps = torch.randint(0, 100, (latents.shape[0],), device=latents.device)
                kept = alphas_cumprod[timesteps][:, None, None, None]
                noisy = kept.sqrt() * latents + (1 - kept).sqrt() * noise
                encoder_hidden_states = text_encoder(batch["input_ids"])[0]
                model_pred = unet(noisy, timesteps, encoder_hidden_states)
                target = noise
                if args.with_prior_preservation:
                    # The first half of the batch are instance images, the second half class images.
                    model_pred, model_pred_prior = torch.chunk(model_pred, 2, dim=0)
                    target, target_prior = torch.chunk(target, 2, dim=0)
                    loss = F.mse_loss(model_pred.float(), target.float(), reduction="mean")
                    prior_loss = F.mse_loss(model_pred_prior.float(), target_prior.float(), reduction="mean")
                    loss = loss + args.prior_loss_weight * prior_loss
                else:
                    loss = F.mse_loss(model_pred.float(), target.float(), reduction="mean")
                evidence.add("loss", loss)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    params_to_clip = (
                        itertools.chain(unet.parameters(), text_encoder.parameters())
                        if args.train_text_encoder
                        else unet.parameters()
                    )
                    evidence.add("norm", accelerator.clip_grad_norm_(params_to_clip, args.max_grad_norm))
                    evidence.gradients(accelerator.unwrap_model(unet), accelerator.unwrap_model(text_encoder))
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad(set_to_none=False)

            if accelerator.sync_gradients:
                progress_bar.update(1)
                global_step += 1
                if accelerator.is_main_process:
                    if global_step % args.checkpointing_steps == 0:
                        save_path = os.path.join(args.output_dir, f"checkpoint-{global_step}")
                        accelerator.save_state(save_path)
                        logger.info(f"Saved state to {save_path}")
            logs = {"loss": loss.detach().item(), "lr": lr_scheduler.get_last_lr()[0]}
            progress_bar.set_postfix(**logs)
            accelerator.log(logs, step=global_step)
            if global_step >= args.max_train_steps:
                break

    accelerator.wait_for_everyone()
    evidence.parameters(accelerator.unwrap_model(unet), accelerator.unwrap_model(text_encoder))
    if accelerator.is_main_process:
        # Newer versions accept an argument that keeps the wrapper for fp32 outputs.
        accepts_keep_fp32_wrapper = "keep_fp32_wrapper" in set(
            inspect.signature(accelerator.unwrap_model).parameters.keys()
        )
        extra_args = {"keep_fp32_wrapper": True} if accepts_keep_fp32_wrapper else {}
        parts = {
            "unet": accelerator.unwrap_model(unet, **extra_args).state_dict(),
            "text_encoder": accelerator.unwrap_model(text_encoder, **extra_args).state_dict(),
        }
        torch.save(parts, Path(args.output_dir, "pipeline.pt"))
        evidence.add("names", len(torch.load(Path(args.output_dir, "pipeline.pt"))["unet"]))
    evidence.write()
    accelerator.end_training()


if __name__ == "__main__":
    main()
