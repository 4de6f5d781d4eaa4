"""Static types of the public API. mypy and Pyright check this file (test_types.py); it is not executed."""

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from typing_extensions import assert_type

from headway import Accelerator, Trainer, TrainingArguments, set_seed
from headway.core.checkpoint.resume.comparison import RestoreResult


class Net(torch.nn.Module):
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens


def train(loader_of_rows: DataLoader[torch.Tensor]) -> None:
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    assert_type(accelerator, Accelerator)
    set_seed(1)
    net = Net()
    model, optimizer, loader, schedule = accelerator.prepare(
        net, AdamW(net.parameters()), loader_of_rows, StepLR(AdamW([]), 1)
    )
    assert_type(model, Net)
    assert_type(optimizer, AdamW)
    assert_type(loader, DataLoader[torch.Tensor])
    assert_type(schedule, StepLR)
    assert_type(accelerator.prepare(net), Net)
    assert_type(accelerator.unwrap_model(model), Net)
    assert_type(accelerator.resume("latest"), RestoreResult | None)
    for epoch in accelerator.epochs(3):
        assert_type(epoch, int)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model.embed(batch).sum()
                assert_type(loss, torch.Tensor)
                accelerator.backward(loss)
                assert_type(accelerator.clip_grad_norm_(model.parameters(), 1.0), torch.Tensor)
                optimizer.step()
            assert_type(accelerator.gather({"loss": loss}), dict[str, torch.Tensor])
    assert_type(accelerator.is_main_process, bool)
    assert_type(accelerator.device, torch.device)


def fine_tune(net: Net) -> None:
    trainer = Trainer(net, TrainingArguments(output_dir="runs", learning_rate=1e-3))
    assert_type(trainer, Trainer)
    trainer.train()
