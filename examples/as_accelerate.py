"""An unmodified script written for Accelerate, which runs on Headway.

    headway launch --as accelerate --cpu -n 2 examples/as_accelerate.py

It imports nothing from Headway. Run with `python`, it uses Accelerate, if that is installed. The last line names the library that
ran, and the accuracy, about 98%.
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

    num_correct, num_samples = 0, 0
    for inputs, labels in loader:
        with torch.no_grad():
            predictions = model(inputs).argmax(dim=1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        num_correct += (predictions == labels).sum().item()
        num_samples += len(labels)
    library = "Headway" if hasattr(accelerate, "__headway_version__") else "Accelerate"
    accelerator.print(f"{library}, {accelerator.num_processes} process(es): accuracy {num_correct / num_samples:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
