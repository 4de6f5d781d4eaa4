"""Trains a diffusion model with a class that accumulates gradients itself, keeps an EMA on rank 0, and saves with torch.save."""

import argparse
import copy
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from evidence import Evidence
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm


def exists(x):
    return x is not None


def cycle(dl):
    while True:
        for data in dl:
            yield data


def num_to_groups(num, divisor):
    groups, remainder = divmod(num, divisor)
    return [divisor] * groups + ([remainder] if remainder > 0 else [])


def divisible_by(numer, denom):
    return (numer % denom) == 0


class Denoiser(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.GELU(), nn.Linear(width, width))
        self.enter, self.middle = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.leave = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x, t):
        x = self.enter(x) + self.time(t[:, None].float() / 50)[:, :, None, None]
        return self.leave(F.gelu(self.middle(F.gelu(x))))


class GaussianDiffusion(nn.Module):
    def __init__(self, model, image_size=8, timesteps=50):
        super().__init__()
        self.model, self.image_size, self.num_timesteps = model, image_size, timesteps
        betas = torch.linspace(1e-3, 0.1, timesteps, dtype=torch.float64)
        self.register_buffer("betas", betas.float())
        self.register_buffer("alphas_cumprod", torch.cumprod(1 - betas, dim=0).float())

    @property
    def device(self):
        return self.betas.device

    def forward(self, img):
        t = torch.randint(0, self.num_timesteps, (img.shape[0],), device=img.device).long()
        noise = torch.randn_like(img)
        kept = self.alphas_cumprod[t][:, None, None, None]
        x = kept.sqrt() * img + (1 - kept).sqrt() * noise
        return F.mse_loss(self.model(x, t), noise)

    @torch.inference_mode()
    def sample(self, batch_size=4):
        img = torch.randn(batch_size, 1, self.image_size, self.image_size, device=self.device)
        for t in reversed(range(self.num_timesteps)):
            beta, kept = self.betas[t], self.alphas_cumprod[t]
            noise = self.model(img, torch.full((batch_size,), t, device=self.device))
            img = (img - beta / (1 - kept).sqrt() * noise) / (1 - beta).sqrt()
            if t > 0:
                img = img + beta.sqrt() * torch.randn_like(img)
        return img


class EMA(nn.Module):
    def __init__(self, model, beta=0.9, update_every=2):
        super().__init__()
        self.ema_model = copy.deepcopy(model).eval().requires_grad_(False)
        self.online = [model]
        self.beta, self.update_every = beta, update_every
        self.register_buffer("step", torch.tensor(0))

    @torch.no_grad()
    def update(self):
        self.step += 1
        if divisible_by(self.step.item(), self.update_every):
            for mean, parameter in zip(self.ema_model.parameters(), self.online[0].parameters()):
                mean.lerp_(parameter, 1 - self.beta)


class Digits(Dataset):
    def __init__(self, number):
        self.images = torch.tensor(load_digits().images[:number], dtype=torch.float32).unsqueeze(1) / 8 - 1

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index]


class Trainer:
    def __init__(
        self, diffusion_model, num_images=128, *, train_batch_size=16, gradient_accumulate_every=2, train_lr=1e-3,
        train_num_steps=12, save_and_sample_every=4, num_samples=4, results_folder="./results", amp=False,
        mixed_precision_type="bf16", split_batches=True, max_grad_norm=1.0, in_order=False, num_workers=0, evidence=None,
    ):  # fmt: skip
        self.accelerator = Accelerator(
            split_batches=split_batches, mixed_precision=mixed_precision_type if amp else "no"
        )
        self.evidence = Evidence(evidence, self.accelerator.process_index)
        self.model = diffusion_model
        assert math.isqrt(num_samples) ** 2 == num_samples, "number of samples must have an integer square root"
        self.num_samples, self.save_and_sample_every = num_samples, save_and_sample_every
        self.batch_size, self.gradient_accumulate_every = train_batch_size, gradient_accumulate_every
        assert (train_batch_size * gradient_accumulate_every) >= 16, "the effective batch size should be at least 16"
        self.train_num_steps, self.max_grad_norm = train_num_steps, max_grad_norm

        self.ds = Digits(num_images)
        dl = DataLoader(
            self.ds, batch_size=train_batch_size, shuffle=not in_order, pin_memory=False, num_workers=num_workers
        )
        dl = self.accelerator.prepare(dl)
        self.dl = cycle(dl)
        self.opt = Adam(diffusion_model.parameters(), lr=train_lr, betas=(0.9, 0.99))
        if self.accelerator.is_main_process:
            self.ema = EMA(diffusion_model)
            self.ema.to(self.device)
        self.results_folder = Path(results_folder)
        self.results_folder.mkdir(exist_ok=True, parents=True)
        self.step = 0
        self.model, self.opt = self.accelerator.prepare(self.model, self.opt)

    @property
    def device(self):
        return self.accelerator.device

    def save(self, milestone):
        if not self.accelerator.is_local_main_process:
            return
        data = {
            "step": self.step,
            "model": self.accelerator.get_state_dict(self.model),
            "opt": self.opt.state_dict(),
            "ema": self.ema.state_dict(),
            "scaler": self.accelerator.scaler.state_dict() if exists(self.accelerator.scaler) else None,
            "version": 1,
        }
        torch.save(data, str(self.results_folder / f"model-{milestone}.pt"))

    def load(self, milestone):
        accelerator = self.accelerator
        data = torch.load(str(self.results_folder / f"model-{milestone}.pt"), map_location="cpu", weights_only=True)
        model = self.accelerator.unwrap_model(self.model)
        model.load_state_dict(data["model"])
        self.step = data["step"]
        self.opt.load_state_dict(data["opt"])
        if self.accelerator.is_main_process:
            self.ema.load_state_dict(data["ema"])
        if exists(self.accelerator.scaler) and exists(data["scaler"]):
            self.accelerator.scaler.load_state_dict(data["scaler"])
        accelerator.print(f"loading from version {data['version']}")

    def train(self):
        accelerator, device = self.accelerator, self.accelerator.device
        with tqdm(initial=self.step, total=self.train_num_steps, disable=not accelerator.is_main_process) as pbar:
            while self.step < self.train_num_steps:
                self.model.train()
                total_loss = 0.0
                for _ in range(self.gradient_accumulate_every):
                    data = next(self.dl).to(device)
                    self.evidence.add("rows", len(data))
                    with self.accelerator.autocast():
                        loss = self.model(data)
                        loss = loss / self.gradient_accumulate_every
                        total_loss += loss.item()
                    self.accelerator.backward(loss)
                pbar.set_description(f"loss: {total_loss:.4f}")
                self.evidence.add("loss", total_loss)
                accelerator.wait_for_everyone()
                self.evidence.add("norm", accelerator.clip_grad_norm_(self.model.parameters(), self.max_grad_norm))
                self.evidence.gradients(accelerator.unwrap_model(self.model))
                self.opt.step()
                self.opt.zero_grad()
                accelerator.wait_for_everyone()
                self.step += 1
                if accelerator.is_main_process:
                    self.ema.update()
                    if self.step != 0 and divisible_by(self.step, self.save_and_sample_every):
                        self.ema.ema_model.eval()
                        with torch.inference_mode():
                            milestone = self.step // self.save_and_sample_every
                            batches = num_to_groups(self.num_samples, self.batch_size)
                            # Sampling restores the RNG state, so that training draws the same numbers with and without it.
                            with torch.random.fork_rng(devices=[]):
                                all_images = [self.ema.ema_model.sample(batch_size=n) for n in batches]
                        self.evidence.add("samples", torch.cat(all_images).double().sum())
                        self.save(milestone)
                pbar.update(1)
        accelerator.print("training complete")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results_folder", default="results")
    parser.add_argument("--train_num_steps", type=int, default=12)
    parser.add_argument(
        "--batch_per_process", action="store_true", help="use the batch size for each process, not for all"
    )
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--num_workers", type=int, default=0)
    parser.add_argument("--in_order", action="store_true", help="no shuffling")
    parser.add_argument("--evidence", default=None)
    args = parser.parse_args()
    torch.manual_seed(0)
    trainer = Trainer(
        GaussianDiffusion(Denoiser()), train_num_steps=args.train_num_steps, results_folder=args.results_folder,
        amp=args.amp, in_order=args.in_order, num_workers=args.num_workers,
        split_batches=not args.batch_per_process, evidence=args.evidence,
    )  # fmt: skip
    trainer.train()
    accelerator, evidence = trainer.accelerator, trainer.evidence
    evidence.parameters(accelerator.unwrap_model(trainer.model))
    if accelerator.is_main_process:
        evidence.parameters(trainer.ema.ema_model, name="ema")
    # Load a milestone and continue training from it.
    accelerator.wait_for_everyone()
    trainer.load(milestone=1)
    evidence.add("step", trainer.step)
    evidence.parameters(accelerator.unwrap_model(trainer.model), name="loaded")
    trainer.train_num_steps = trainer.step + 2
    trainer.train()
    evidence.parameters(accelerator.unwrap_model(trainer.model))
    evidence.write()
    accelerator.end_training()


if __name__ == "__main__":
    main()
