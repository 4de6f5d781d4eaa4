"""A generator and a discriminator, each in its own accumulate block, optionally with loss.backward(). Accelerate has one counter."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.scripts.evidence import Evidence


def main():
    steps, style = int(sys.argv[1]), sys.argv[2]
    set_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    evidence = Evidence("evidence", accelerator.process_index)
    d = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    g = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    opt_d, opt_g = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (d, g))
    loader = DataLoader(TensorDataset(*torch.randn(2, 48, 4)), batch_size=4)
    d, g, opt_d, opt_g, loader = accelerator.prepare(d, g, opt_d, opt_g, loader)
    for real, noise in loader:
        with accelerator.accumulate(d):
            loss = d(g(noise).detach()).mean() - d(real).mean()
            evidence.add("d", loss)
            loss.backward() if style == "raw" else accelerator.backward(loss)
            opt_d.step()
            opt_d.zero_grad()
        with accelerator.accumulate(g):
            loss = -d(g(noise)).mean()
            evidence.add("g", loss)
            loss.backward() if style == "raw" else accelerator.backward(loss)
            opt_g.step()
            opt_g.zero_grad()
        evidence.add("sync", accelerator.sync_gradients)
    for model in (d, g):
        evidence.add("weights", sum(p.detach().double().abs().sum() for p in model.parameters()))
    evidence.write()


if __name__ == "__main__":
    main()
