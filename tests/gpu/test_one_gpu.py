"""Behavior of one CUDA device that a CPU cannot show: placement, pinned copies, fp16, fused optimizer steps, and freed memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, DataLoaderConfiguration
from headway.core.runtime import process
from headway.layouts.pipeline.stage_rng import advance_generators, isolate_generators

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine shows none"),
]


def _data(num_rows: int = 64) -> TensorDataset:
    inputs = torch.randn(num_rows, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def _model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def _train(precision: str, num_epochs: int = 20) -> list[float]:
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(_data(), batch_size=8))
    losses = []
    for _ in range(num_epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def test_model_and_batches_go_to_the_device() -> None:
    accelerator = Accelerator()
    model, loader = accelerator.prepare(_model(), DataLoader(_data(), batch_size=8))
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    assert all(tensor.device == accelerator.device for batch in loader for tensor in batch)


def test_pinned_batches_are_copied_without_waiting_and_arrive_whole() -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True))
    data = _data(4096)
    loader = accelerator.prepare(DataLoader(data, batch_size=512, pin_memory=True))
    seen = torch.cat([inputs for inputs, _ in loader])
    assert torch.equal(seen.cpu(), data.tensors[0])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns_like_full_precision(precision: str) -> None:
    full, mixed = _train("no"), _train(precision)
    assert full[-1] < full[0] / 2
    assert mixed[-1] == pytest.approx(full[-1], rel=0.3)


def test_fused_optimizer_skips_an_overflow_and_says_so() -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = model(torch.randn(4, 8, device=accelerator.device)).float().sum() * 1e38
    accelerator.backward(loss)
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped
    assert accelerator.num_updates == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_free_memory_gives_the_device_back() -> None:
    accelerator = Accelerator()
    before = torch.cuda.memory_allocated()
    model = accelerator.prepare(torch.nn.Linear(4096, 4096))
    assert torch.cuda.memory_allocated() - before >= 4096 * 4096 * 4
    (model,) = accelerator.free_memory(model)
    assert torch.cuda.memory_allocated() <= before


def test_the_self_check_passes_on_the_device() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "headway", "test"], capture_output=True, text=True, timeout=300, env=dict(os.environ)
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "cuda" in result.stdout


def test_the_first_use_of_the_device_is_named(tmp_path: Path) -> None:
    script = tmp_path / "first.py"
    script.write_text(
        "import torch\nfrom headway.common import scope\nfrom headway.core.runtime import device, first_use\n"
        "torch.ones(1, device='cuda')\nprint(scope.get_or_create(first_use.FirstUse).place)\n"
    )
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert result.stdout.startswith(f"{script}:4:")


def test_a_stage_of_a_pipeline_gives_back_the_streams_of_host_and_device():
    accelerator = Accelerator()
    torch.manual_seed(3)
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    drawn = []
    for stage in (0, 1):
        with isolate_generators(process.current().hardware) as micro_batch_generators:
            micro_batch_generators.seed_micro_batch(stage, 0)
            drawn.append((torch.rand(2), torch.rand(2, device="cuda")))
        assert micro_batch_generators.used == {"torch", "device"}
        assert torch.equal(torch.get_rng_state(), before[0])
        assert torch.equal(torch.cuda.get_rng_state(), before[1])
    assert torch.equal(drawn[0][0], drawn[1][0]), "random numbers on the host must be the same on all stages"
    assert not torch.equal(drawn[0][1], drawn[1][1])
    advance_generators(micro_batch_generators.used, accelerator.device)
    assert not torch.equal(torch.get_rng_state(), before[0])
    assert not torch.equal(torch.cuda.get_rng_state(), before[1])
    accelerator.end_training()
