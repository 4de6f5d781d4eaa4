"""A GAN: two models that learn in turn, each with its own optimizer, saved and resumed together.

Run: headway launch --cpu -n 2 examples/cookbook/gan.py

Each model has its own `accumulate` block. The generator's loss passes through the discriminator, and leaves no gradient there.
Prints the mean radius of the generated points, which approaches 1. examples/gan.py adds a gradient penalty and accumulation.
"""

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

NOISE_SIZE = 4


def make_ring(num_points: int) -> TensorDataset:
    """Return points near the unit circle."""
    angles = torch.rand(num_points) * 2 * torch.pi
    points = torch.stack((angles.cos(), angles.sin()), dim=1)
    return TensorDataset(points + 0.02 * torch.randn(num_points, 2))


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/gan")
    parser.add_argument("--epochs", type=int, default=30)
    args = parser.parse_args(arguments)

    set_seed(0)
    project = ProjectConfiguration(args.folder, automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(project_config=project)
    loader = DataLoader(make_ring(1024), batch_size=64 // accelerator.num_data_shards, shuffle=True, drop_last=True)
    generator = nn.Sequential(nn.Linear(NOISE_SIZE, 64), nn.ReLU(), nn.Linear(64, 2))
    discriminator = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    generator, discriminator, generator_optimizer, discriminator_optimizer, loader = accelerator.prepare(
        generator, discriminator, generator_optimizer, discriminator_optimizer, loader
    )
    accelerator.resume()  # restores both models, both optimizers, the position in the data and the RNG state

    radius = 0.0
    for epoch in accelerator.epochs(args.epochs):
        for (real,) in loader:
            fake = generator(torch.randn(len(real), NOISE_SIZE, device=accelerator.device))
            with accelerator.accumulate(discriminator):
                loss = softplus(discriminator(fake.detach())) + softplus(-discriminator(real))
                accelerator.backward(loss.mean())
                discriminator_optimizer.step()
                discriminator_optimizer.zero_grad()
            with accelerator.accumulate(generator):
                accelerator.backward(softplus(-discriminator(fake)).mean())
                generator_optimizer.step()
                generator_optimizer.zero_grad()
        with torch.no_grad():
            points = generator(torch.randn(500, NOISE_SIZE, device=accelerator.device))
        radius = accelerator.reduce(points.norm(dim=1).mean(), "mean").item()
        if epoch % 10 == 9:
            accelerator.print(f"epoch {epoch}: the mean radius of generated points is {radius:.3f}")
            accelerator.save_state()

    accelerator.end_training()
    return {"radius": radius}


if __name__ == "__main__":
    main()
