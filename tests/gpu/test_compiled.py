"""Compiled models on one CUDA device: inductor with Triton, for whole models and for regions, and CUDA graphs with accumulation."""

import pytest
import torch

from headway import Accelerator, TorchDynamoPlugin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.card("needs Triton's kernels; tests/distributed/test_compiled.py compares compiled losses on CPUs"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine shows none"),
]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.wide(x)))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = torch.nn.ModuleList(Block() for _ in range(3)), torch.nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _train(plugin: TorchDynamoPlugin | None, precision: str) -> list[float]:
    torch._dynamo.reset()
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2, dynamo_plugin=plugin)
    torch.manual_seed(0)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 1e-2))
    batches = torch.randn(6, 8, 64, device=accelerator.device)
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(batch).float().square().mean()
            accelerator.backward(loss)
            losses.append(loss.detach().clone())
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses).tolist()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("regional", [True, False])
@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-4), ("bf16", 2e-2)])
def test_losses_are_those_without_the_compiler(mode: str, regional: bool, precision: str, tolerance: float) -> None:
    plugin = TorchDynamoPlugin("inductor", mode=mode, use_regional_compilation=regional)
    assert _train(plugin, precision) == pytest.approx(_train(None, precision), abs=tolerance)
