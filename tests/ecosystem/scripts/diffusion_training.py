"""Trains a diffusion model like public scripts: accumulation, clipping, EMA, hooks that save models, and checkpoints.

Argument: the mixed precision.
"""

import os
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration, set_seed
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel

from tests.scripts.evidence import Evidence

logger = get_logger(__name__, log_level="INFO")


def build_model() -> UNet2DModel:
    """Build a UNet for images of 8 x 8 pixels."""
    return UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4, attention_head_dim=8,
    )  # fmt: skip


def main(mixed_precision: str) -> None:
    """Train for two epochs, load the state after the first epoch, and train one more epoch."""
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        mixed_precision=mixed_precision,
        project_config=ProjectConfiguration(project_dir="out", logging_dir="out/logs", total_limit=3),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=False)],
    )
    evidence = Evidence("evidence", accelerator.process_index)
    set_seed(0)
    model = build_model()
    ema = EMAModel(
        model.parameters(), decay=0.99, use_ema_warmup=True, inv_gamma=1.0, power=0.75, model_cls=UNet2DModel,
        model_config=model.config,
    )  # fmt: skip

    def save_model_hook(models: list, weights: list, output_dir: str) -> None:
        if accelerator.is_main_process:
            ema.save_pretrained(os.path.join(output_dir, "unet_ema"))
            for each in models:
                accelerator.unwrap_model(each).save_pretrained(os.path.join(output_dir, "unet"))
                weights.pop()

    def load_model_hook(models: list, input_dir: str) -> None:
        loaded = EMAModel.from_pretrained(os.path.join(input_dir, "unet_ema"), UNet2DModel)
        ema.load_state_dict(loaded.state_dict())
        ema.to(accelerator.device)
        for _ in range(len(models)):
            each = accelerator.unwrap_model(models.pop())
            stored = UNet2DModel.from_pretrained(input_dir, subfolder="unet")
            each.register_to_config(**stored.config)
            each.load_state_dict(stored.state_dict())

    accelerator.register_save_state_pre_hook(save_model_hook)
    accelerator.register_load_state_pre_hook(load_model_hook)

    scheduler = DDPMScheduler(num_train_timesteps=20, beta_schedule="squaredcos_cap_v2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.95, 0.999), weight_decay=1e-6)
    images = torch.rand(48, 1, 8, 8) * 2 - 1
    # Other scripts test the order of shuffled data on several ranks.
    loader = torch.utils.data.DataLoader(images, batch_size=4, shuffle=accelerator.num_processes == 1)
    lr_scheduler = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=4, num_training_steps=22)
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
    ema.to(accelerator.device)
    accelerator.init_trackers("diffusion")
    evidence.add("type", float(isinstance(accelerator.unwrap_model(model), UNet2DModel)), len(loader))

    global_step, timesteps = 0, torch.Generator().manual_seed(3)
    for epoch in range(3):
        if epoch == 2:
            accelerator.load_state("out/epoch-0")
            evidence.parameters(accelerator.unwrap_model(model), name="loaded")
            evidence.add("ema loaded", *(each.sum() for each in ema.shadow_params))
        model.train()
        for clean in loader:
            noise = torch.randn(clean.shape, generator=timesteps)
            steps = torch.randint(0, 20, (clean.shape[0],), generator=timesteps).long()
            noisy = scheduler.add_noise(clean, noise, steps)
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(noisy, steps, return_dict=False)[0].float(), noise.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    evidence.add("norm", accelerator.clip_grad_norm_(model.parameters(), 1.0))
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            evidence.add("loss", accelerator.gather(loss.repeat(4)).mean())
            if accelerator.sync_gradients:
                ema.step(model.parameters())
                global_step += 1
                if global_step % 4 == 0 and epoch < 2:
                    if not os.path.isdir(f"out/checkpoint-{global_step}"):
                        accelerator.save_state(f"out/checkpoint-{global_step}")
                    logger.info(f"saved {global_step}")
            accelerator.log({"loss": loss.detach().item(), "lr": lr_scheduler.get_last_lr()[0]}, step=global_step)
            evidence.add("lr", lr_scheduler.get_last_lr()[0], optimizer.param_groups[0]["lr"])
            evidence.add("step", global_step)
        accelerator.wait_for_everyone()
        if epoch == 0:
            accelerator.save_state("out/epoch-0")
    unet = accelerator.unwrap_model(model)
    evidence.parameters(unet)
    ema.store(unet.parameters())
    ema.copy_to(unet.parameters())
    evidence.parameters(unet, name="averaged")
    if accelerator.is_main_process:
        pipeline = DDPMPipeline(unet=unet, scheduler=scheduler)
        pipeline.set_progress_bar_config(disable=True)
        drawn = pipeline(
            batch_size=2, generator=torch.Generator().manual_seed(1), num_inference_steps=3, output_type="np"
        )
        evidence.add("images", torch.as_tensor(drawn.images))
        pipeline.save_pretrained("pipeline")
    ema.restore(unet.parameters())
    evidence.parameters(unet, name="restored")
    accelerator.end_training()
    evidence.write()


main(sys.argv[1])
