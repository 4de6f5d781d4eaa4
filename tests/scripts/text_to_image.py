"""Trains a small UNet to denoise latents of captioned digits, with EMA weights that are part of the checkpoints."""

import argparse
import logging
import math
import os
import shutil
from copy import deepcopy
from pathlib import Path

import accelerate
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration, set_seed
from evidence import Evidence
from packaging import version
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import nn
from tqdm.auto import tqdm

logger = get_logger(__name__, log_level="INFO")


class Pretrained(nn.Module):
    """A module that can be saved to a folder and loaded from it."""

    def save_pretrained(self, folder):
        os.makedirs(folder, exist_ok=True)
        save_file(self.state_dict(), os.path.join(folder, "weights.safetensors"))

    def load_pretrained(self, folder):
        self.load_state_dict(load_file(os.path.join(folder, "weights.safetensors")))


class UNet(Pretrained):
    def __init__(self, channels=8, width=16):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.text = nn.Linear(16, width)
        self.enter = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, width)
        self.drop = nn.Dropout(0.1)
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.leave = nn.Conv2d(2 * width, channels, 3, padding=1)

    def forward(self, latents, timesteps, hidden_states):
        condition = self.time(timesteps[:, None].float() / 1000) + self.text(hidden_states)
        first = F.silu(self.enter(latents) + condition[:, :, None, None])
        return self.leave(torch.cat([first, self.up(self.drop(F.silu(self.norm(self.down(first)))))], dim=1))


class EMAModel:
    """An exponential moving average of parameters whose decay warms up."""

    def __init__(self, parameters, decay=0.99):
        self.shadow_params = [p.clone().detach() for p in parameters]
        self.decay, self.optimization_step = decay, 0
        self.temp_stored_params = None

    @torch.no_grad()
    def step(self, parameters):
        self.optimization_step += 1
        decay = min(self.decay, (1 + self.optimization_step) / (10 + self.optimization_step))
        for shadow, parameter in zip(self.shadow_params, parameters):
            shadow.sub_((1 - decay) * (shadow - parameter))

    def copy_to(self, parameters):
        for shadow, parameter in zip(self.shadow_params, parameters):
            parameter.data.copy_(shadow.data)

    def store(self, parameters):
        self.temp_stored_params = [p.detach().cpu().clone() for p in parameters]

    def restore(self, parameters):
        for stored, parameter in zip(self.temp_stored_params, parameters):
            parameter.data.copy_(stored.data)
        self.temp_stored_params = None

    def to(self, device):
        self.shadow_params = [p.to(device) for p in self.shadow_params]

    def save_pretrained(self, folder):
        os.makedirs(folder, exist_ok=True)
        tensors = {str(number): tensor for number, tensor in enumerate(self.shadow_params)}
        tensors["step"] = torch.tensor(self.optimization_step)
        save_file(tensors, os.path.join(folder, "ema.safetensors"))

    def load_pretrained(self, folder):
        tensors = load_file(os.path.join(folder, "ema.safetensors"))
        self.optimization_step = int(tensors.pop("step"))
        self.shadow_params = [tensors[str(number)] for number in range(len(tensors))]


class CaptionedDigits(torch.utils.data.Dataset):
    def __init__(self, number):
        digits = load_digits()
        self.images = torch.tensor(digits.images[:number], dtype=torch.float32).unsqueeze(1) / 8 - 1
        self.labels = digits.target[:number]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"pixel_values": self.images[index], "input_ids": torch.tensor([1, 2 + int(self.labels[index])])}


def collate_fn(examples):
    pixel_values = torch.stack([example["pixel_values"] for example in examples])
    pixel_values = pixel_values.to(memory_format=torch.contiguous_format).float()
    return {"pixel_values": pixel_values, "input_ids": torch.stack([example["input_ids"] for example in examples])}


def compute_snr(alphas_cumprod, timesteps):
    return (alphas_cumprod / (1 - alphas_cumprod))[timesteps]


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", default="sd-model")
    parser.add_argument("--num_images", type=int, default=64)
    parser.add_argument("--train_batch_size", type=int, default=4)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--max_train_steps", type=int, default=None)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--scale_lr", action="store_true")
    parser.add_argument("--lr_warmup_steps", type=int, default=4)
    parser.add_argument("--snr_gamma", type=float, default=None)
    parser.add_argument("--use_ema", action="store_true")
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--report_to", default=None)
    parser.add_argument("--logging_dir", default="logs")
    parser.add_argument("--checkpointing_steps", type=int, default=4)
    parser.add_argument("--checkpoints_total_limit", type=int, default=None)
    parser.add_argument("--resume_from_checkpoint", default=None)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--in_order", action="store_true", help="no shuffling")
    parser.add_argument("--evidence", default=None)
    return parser.parse_args()


def main():
    args = parse_args()
    logging_dir = os.path.join(args.output_dir, args.logging_dir)
    accelerator_project_config = ProjectConfiguration(project_dir=args.output_dir, logging_dir=logging_dir)
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        log_with=args.report_to,
        project_config=accelerator_project_config,
    )
    evidence = Evidence(args.evidence, accelerator.process_index)
    logging.basicConfig(format="%(asctime)s - %(levelname)s - %(name)s - %(message)s", level=logging.INFO)
    logger.info(accelerator.state, main_process_only=False)
    if args.seed is not None:
        set_seed(args.seed)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)

    def deepspeed_zero_init_disabled_context_manager():
        deepspeed_plugin = AcceleratorState().deepspeed_plugin if accelerate.state.is_initialized() else None
        return [] if deepspeed_plugin is None else [deepspeed_plugin.zero3_init_context_manager(enable=False)]

    assert deepspeed_zero_init_disabled_context_manager() == []
    text_encoder, vae, unet = nn.Embedding(12, 16), nn.Conv2d(1, 8, 2, stride=2), UNet()
    vae.requires_grad_(False)
    text_encoder.requires_grad_(False)
    unet.train()
    betas = torch.linspace(1e-4, 2e-2, 1000)
    alphas_cumprod = torch.cumprod(1 - betas, dim=0)
    if args.use_ema:
        ema_unet = EMAModel(unet.parameters())

    # `accelerate` 0.16.0 will have better support for customized saving
    if version.parse(accelerate.__version__) >= version.parse("0.16.0"):

        def save_model_hook(models, weights, output_dir):
            if accelerator.is_main_process:
                if args.use_ema:
                    ema_unet.save_pretrained(os.path.join(output_dir, "unet_ema"))
                for model in models:
                    accelerator.unwrap_model(model).save_pretrained(os.path.join(output_dir, "unet"))
                    # make sure to pop weight so that corresponding model is not saved again
                    weights.pop()

        def load_model_hook(models, input_dir):
            if args.use_ema:
                ema_unet.load_pretrained(os.path.join(input_dir, "unet_ema"))
                ema_unet.to(accelerator.device)
            for _ in range(len(models)):
                # pop models so that they are not loaded again
                model = models.pop()
                accelerator.unwrap_model(model).load_pretrained(os.path.join(input_dir, "unet"))

        accelerator.register_save_state_pre_hook(save_model_hook)
        accelerator.register_load_state_pre_hook(load_model_hook)

    if args.scale_lr:
        args.learning_rate = (
            args.learning_rate * args.gradient_accumulation_steps * args.train_batch_size * accelerator.num_processes
        )
    optimizer = torch.optim.AdamW(unet.parameters(), lr=args.learning_rate, weight_decay=1e-2)
    with accelerator.main_process_first():
        train_dataset = CaptionedDigits(args.num_images)
    train_dataloader = torch.utils.data.DataLoader(
        train_dataset, shuffle=not args.in_order, collate_fn=collate_fn, batch_size=args.train_batch_size
    )

    # Scheduler and math around the number of training steps.
    overrode_max_train_steps = False
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    if args.max_train_steps is None:
        args.max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
        overrode_max_train_steps = True
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / (args.lr_warmup_steps * accelerator.num_processes))
    )
    unet, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        unet, optimizer, train_dataloader, lr_scheduler
    )
    if args.use_ema:
        ema_unet.to(accelerator.device)
    weight_dtype = torch.float32
    if accelerator.mixed_precision == "fp16":
        weight_dtype = torch.float16
    elif accelerator.mixed_precision == "bf16":
        weight_dtype = torch.bfloat16
    text_encoder.to(accelerator.device, dtype=weight_dtype)
    vae.to(accelerator.device, dtype=weight_dtype)

    # The size of the training dataloader may have changed.
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    if overrode_max_train_steps:
        args.max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
    args.num_train_epochs = math.ceil(args.max_train_steps / num_update_steps_per_epoch)
    if accelerator.is_main_process:
        accelerator.init_trackers("text2image-fine-tune", config=vars(args))

    total_batch_size = args.train_batch_size * accelerator.num_processes * args.gradient_accumulation_steps
    logger.info("***** Running training *****")
    logger.info(f"  Total train batch size (w. parallel, distributed & accumulation) = {total_batch_size}")
    logger.info(f"  Total optimization steps = {args.max_train_steps}")
    global_step, first_epoch, resume_step = 0, 0, 0
    if args.resume_from_checkpoint:
        if args.resume_from_checkpoint != "latest":
            path = os.path.basename(args.resume_from_checkpoint)
        else:
            dirs = [d for d in os.listdir(args.output_dir) if d.startswith("checkpoint")]
            dirs = sorted(dirs, key=lambda x: int(x.split("-")[1]))
            path = dirs[-1] if len(dirs) > 0 else None
        if path is None:
            accelerator.print(f"Checkpoint '{args.resume_from_checkpoint}' does not exist. Starting a new run.")
            args.resume_from_checkpoint = None
        else:
            accelerator.print(f"Resuming from checkpoint {path}")
            accelerator.load_state(os.path.join(args.output_dir, path))
            global_step = int(path.split("-")[1])
            resume_global_step = global_step * args.gradient_accumulation_steps
            first_epoch = global_step // num_update_steps_per_epoch
            resume_step = resume_global_step % (num_update_steps_per_epoch * args.gradient_accumulation_steps)

    progress_bar = tqdm(
        range(args.max_train_steps), initial=global_step, desc="Steps", disable=not accelerator.is_local_main_process
    )
    for epoch in range(first_epoch, args.num_train_epochs):
        unet.train()
        train_loss = 0.0
        active_dataloader = train_dataloader
        if resume_step and epoch == first_epoch:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        for batch in active_dataloader:
            with accelerator.accumulate(unet):
                latents = vae(batch["pixel_values"].to(weight_dtype))
                noise = torch.randn_like(latents)
                bsz = latents.shape[0]
                timesteps = torch.randint(0, 1000, (bsz,), device=latents.device).long()
                kept = alphas_cumprod[timesteps][:, None, None, None]
                noisy_latents = kept.sqrt() * latents + (1 - kept).sqrt() * noise
                encoder_hidden_states = text_encoder(batch["input_ids"]).mean(dim=1)
                model_pred = unet(noisy_latents, timesteps, encoder_hidden_states)
                if args.snr_gamma is None:
                    loss = F.mse_loss(model_pred.float(), noise.float(), reduction="mean")
                else:
                    snr = compute_snr(alphas_cumprod, timesteps)
                    weights = torch.stack([snr, args.snr_gamma * torch.ones_like(snr)], dim=1).min(dim=1)[0] / snr
                    loss = F.mse_loss(model_pred.float(), noise.float(), reduction="none")
                    loss = (loss.mean(dim=list(range(1, len(loss.shape)))) * weights).mean()

                # Gather the losses across all processes for logging (if we use distributed training).
                avg_loss = accelerator.gather(loss.repeat(args.train_batch_size)).mean()
                train_loss += avg_loss.item() / args.gradient_accumulation_steps
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    evidence.add("norm", accelerator.clip_grad_norm_(unet.parameters(), args.max_grad_norm))
                    evidence.gradients(accelerator.unwrap_model(unet))
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

            if accelerator.sync_gradients:
                if args.use_ema:
                    ema_unet.step(unet.parameters())
                progress_bar.update(1)
                global_step += 1
                evidence.add("loss", train_loss)
                accelerator.log({"train_loss": train_loss}, step=global_step)
                train_loss = 0.0
                if global_step % args.checkpointing_steps == 0:
                    if accelerator.is_main_process:
                        if args.checkpoints_total_limit is not None:
                            checkpoints = [d for d in os.listdir(args.output_dir) if d.startswith("checkpoint")]
                            checkpoints = sorted(checkpoints, key=lambda x: int(x.split("-")[1]))
                            # before we save the new checkpoint, we need to have at _most_ `limit - 1` checkpoints
                            if len(checkpoints) >= args.checkpoints_total_limit:
                                for removing in checkpoints[: len(checkpoints) - args.checkpoints_total_limit + 1]:
                                    shutil.rmtree(os.path.join(args.output_dir, removing))
                        save_path = os.path.join(args.output_dir, f"checkpoint-{global_step}")
                        accelerator.save_state(save_path)
                        logger.info(f"Saved state to {save_path}")

            logs = {"step_loss": loss.detach().item(), "lr": lr_scheduler.get_last_lr()[0]}
            evidence.add("lr", logs["lr"])
            progress_bar.set_postfix(**logs)
            if global_step >= args.max_train_steps:
                break

    accelerator.wait_for_everyone()
    evidence.parameters(accelerator.unwrap_model(unet))
    if accelerator.is_main_process:
        unet = deepcopy(accelerator.unwrap_model(unet))
        if args.use_ema:
            ema_unet.copy_to(unet.parameters())
        evidence.parameters(unet, name="ema")
        unet.save_pretrained(Path(args.output_dir, "unet"))
        evidence.add(
            "checkpoints", *sorted(int(p.name.split("-")[1]) for p in Path(args.output_dir).glob("checkpoint-*"))
        )
    evidence.write()
    accelerator.end_training()


if __name__ == "__main__":
    main()
