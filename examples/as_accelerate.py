"""An unmodified script written for Accelerate, which runs on Headway.

    headway launch --as accelerate --cpu -n 2 examples/as_accelerate.py

It imports nothing from Headway. Run with `python`, it uses Accelerate, if that is installed.
"""

import accelerate
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    points = torch.rand(256, 2) * 2 - 1
    labels = (points.norm(dim=1) < 0.75).long()
    model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = DataLoader(TensorDataset(points, labels), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(15):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    is_right = [accelerator.gather_for_metrics(model(inputs).argmax(1) == labels) for inputs, labels in loader]
    library = "Headway" if hasattr(accelerate, "__headway_version__") else "Accelerate"
    accuracy = torch.cat(is_right).float().mean().item()
    accelerator.print(f"{library}, {accelerator.num_processes} process(es): accuracy {accuracy:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
