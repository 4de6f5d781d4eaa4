"""A GAN with a gradient penalty on scikit-learn's digits: two models that learn in turn, each in its own accumulate block.

    headway launch --cpu -n 2 examples/gan.py

Prints how far the average generated image is from the average digit, which falls from 0.3 per pixel (0 to 1) to less than 0.08.
examples/cookbook/gan.py is a shorter GAN with checkpoints.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, set_seed

NOISE_SIZE, NUM_EPOCHS = 16, 8
PENALTY_WEIGHT = 10  # as in the paper on WGAN-GP (Gulrajani et al. 2017)


def compute_penalty(critic: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """Return the gradient penalty: how far the norm of the critic's gradient between real and generated images is from 1."""
    mixed = torch.lerp(real, fake, torch.rand(len(real), 1, device=real.device)).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def main() -> float:
    """Train, and return the distance per pixel (0 to 1) of the average generated image from the average digit."""
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    pixels, _ = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32)
    loader = DataLoader(TensorDataset(images), batch_size=16, shuffle=True, drop_last=True)

    generator = nn.Sequential(nn.Linear(NOISE_SIZE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
    critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    generator, critic, generator_optimizer, critic_optimizer, loader = accelerator.prepare(
        generator, critic, generator_optimizer, critic_optimizer, loader
    )

    for epoch in range(NUM_EPOCHS):
        for (real,) in loader:
            noise = torch.randn(len(real), NOISE_SIZE, device=accelerator.device)
            with accelerator.accumulate(critic):
                fake = generator(noise).detach()
                penalty = PENALTY_WEIGHT * compute_penalty(critic, real, fake)
                accelerator.backward(critic(fake).mean() - critic(real).mean() + penalty)
                critic_optimizer.step()
                critic_optimizer.zero_grad()
            # The loss passes through the critic, but its gradients are not kept: this block trains the generator.
            with accelerator.accumulate(generator):
                accelerator.backward(-critic(generator(noise)).mean())
                generator_optimizer.step()
                generator_optimizer.zero_grad()
        with torch.no_grad():
            mean_image = generator(torch.randn(1000, NOISE_SIZE, device=accelerator.device)).mean(0)
        distance = (accelerator.reduce(mean_image, "mean").cpu() - images.mean(0)).abs().mean().item()
        accelerator.print(
            f"epoch {epoch}: the average generated image is {distance:.3f} per pixel from the average digit"
        )

    accelerator.end_training()
    return distance


if __name__ == "__main__":
    main()
