"""float8 training on one CUDA device that supports it: every recipe, compiled and not, stays close to bf16 losses."""

import pytest
import torch

from headway import Accelerator, Float8Options

torchao = pytest.importorskip("torchao.float8", reason="torchao is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a CUDA device with float8 (compute capability 8.9); this machine shows none",
    ),
]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(256), torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def _train(precision: str, backend: str = "no", **options: object) -> list[float]:
    handlers = [Float8Options(**options)] if precision == "fp8" else []
    accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=handlers, dynamo_backend=backend)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Block() for _ in range(4)])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3, fused=True))
    losses = []
    for step in range(20):
        inputs = torch.randn(37, 256, device=accelerator.device, generator=torch.Generator("cuda").manual_seed(step))
        with accelerator.accumulate(model):
            loss = (model(inputs).float() - inputs.flip(1)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.free_memory()
    return losses


INDUCTOR = pytest.param("inductor", marks=pytest.mark.card("needs Triton; the same recipes run here without it"))


@pytest.mark.parametrize("backend", ["no", INDUCTOR])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_recipe_trains_close_to_bf16(recipe, backend):
    """Train on 37 tokens, which is no multiple of 16, so backward needs Headway's padding."""
    half, eighth = _train("bf16", backend), _train("fp8", backend, recipe=recipe)
    assert eighth[-1] < 0.9 * eighth[0]
    assert eighth == pytest.approx(half, rel=0.05)


def test_emulation_is_what_the_hardware_computes():
    real, emulated = _train("fp8"), _train("fp8", emulate=True)
    assert real[0] == pytest.approx(emulated[0], rel=1e-3)
