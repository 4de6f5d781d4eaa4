"""Values computed on the simulated device equal those of the CPU."""

import os
import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from headway import Accelerator

simulated_cuda = pytest.importorskip("simulated_cuda", reason="needs torch over the simulated runtime: make cuda")

BOTH = ("cpu", "cuda")


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8))


@pytest.mark.parametrize("kind", [{}, {"foreach": True}, {"fused": True}, {"amsgrad": True, "capturable": True}])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_optimizers_compute_the_values_of_the_cpu(make: type[torch.optim.Optimizer], kind: dict[str, bool]) -> None:
    if "amsgrad" in kind and make is not torch.optim.AdamW:
        pytest.skip("AdamW's own options")
    found = []
    for device in BOTH:
        model, generator = build_model().to(device), torch.Generator().manual_seed(1)
        options = {name: value for name, value in kind.items() if device == "cuda" or name != "capturable"}
        optimizer = make(model.parameters(), lr=1e-2, **options)
        for _ in range(4):
            x, y = (torch.randn(16, size, generator=generator).to(device) for size in (32, 8))
            F.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        found.append([parameter.detach().cpu() for parameter in model.parameters()])
    difference = max(float((one - other).abs().max()) for one, other in zip(*found))
    assert difference <= (1e-5 if "capturable" in kind else 0)  # capturable optimizers use a different formula


def test_headway_loop_with_accumulation_and_clipping_computes_the_values_of_the_cpu() -> None:
    found = []
    for device in BOTH:
        accelerator = Accelerator(gradient_accumulation_steps=2, cpu=device == "cpu")
        model = build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(inputs, inputs[:, :8])
        model, optimizer, loader = accelerator.prepare(
            model, optimizer, torch.utils.data.DataLoader(data, batch_size=8)
        )
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.mse_loss(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        found.append([parameter.detach().cpu() for parameter in model.parameters()])
        accelerator.end_training()
        accelerator.free_memory()
        from headway.core.runtime import process

        process.reset()
    assert all(map(torch.equal, *found))


KERNELS = {
    SDPBackend.EFFICIENT_ATTENTION: torch.float32,
    SDPBackend.FLASH_ATTENTION: torch.bfloat16,
    SDPBackend.CUDNN_ATTENTION: torch.bfloat16,
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("form", ["plain", "causal", "mask"])
def test_fused_attention_computes_the_values_of_the_cpu(kernel: SDPBackend, form: str) -> None:
    if form == "mask" and kernel is SDPBackend.FLASH_ATTENTION:
        pytest.skip("flash attention takes no mask")
    dtype, generator = KERNELS[kernel], torch.Generator().manual_seed(0)
    given = [torch.randn(2, 4, 16, 32, generator=generator).to(dtype) for _ in range(3)]
    mask = torch.rand(16, 16, generator=generator) > 0.2 if form == "mask" else None
    found = []
    for device in BOTH:
        parts = [tensor.to(device).clone().requires_grad_() for tensor in given]
        with sdpa_kernel(kernel) if device == "cuda" else nullcontext():
            out = F.scaled_dot_product_attention(
                *parts, attn_mask=mask if mask is None else mask.to(device), is_causal=form == "causal"
            )
        out.square().sum().backward()
        found.append([out.detach().cpu(), *(part.grad.cpu() for part in parts)])
    rounding = 1e-5 if dtype is torch.float32 else 4e-2
    assert all(torch.allclose(one, other, atol=rounding, rtol=rounding) for one, other in zip(*found))


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_uses_the_same_dropout_mask_in_backward(kernel: SDPBackend) -> None:
    """Check that backward uses forward's dropout mask.

    The output is linear in the values, so the gradient of the values shows which weights were dropped.
    """
    torch.manual_seed(0)
    query, key = (torch.randn(1, 1, 16, 32, device="cuda", dtype=KERNELS[kernel]) for _ in range(2))
    value = torch.zeros(1, 1, 16, 32, device="cuda", dtype=KERNELS[kernel]).requires_grad_()
    with torch.no_grad():
        value[..., :16] = torch.eye(16, device="cuda")
    with sdpa_kernel(kernel):
        out = F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    out[..., 0].sum().backward()  # the first column has the weights of the first key
    weights = out.detach()[0, 0, :, :16]
    assert (weights == 0).any()
    assert value.grad[0, 0, :, 0].float().tolist() == pytest.approx(weights.float().sum(0).tolist(), rel=2e-2)


def test_results_whose_shape_depends_on_values() -> None:
    given = torch.tensor([0.0, 1, 0, 2, 3, 3])
    found = []
    for device in BOTH:
        x = given.to(device)
        picked = x.clone()
        picked[x > 1] = 7
        tensors = [x.nonzero(), x[x > 0], x.long().unique(), x.long().bincount(), x.repeat_interleave(x.long()), picked]
        found.append(([tensor.tolist() for tensor in tensors], torch.equal(x, picked), bool((x == x).all())))
    assert found[0] == found[1]


def test_device_rng_state_is_restored_and_independent_of_the_host() -> None:
    torch.manual_seed(3)
    host = torch.get_rng_state()
    first = torch.rand(8, device="cuda")
    state = torch.cuda.get_rng_state()
    second, dropped = torch.rand(8, device="cuda"), F.dropout(torch.ones(64, device="cuda"))
    torch.cuda.set_rng_state(state)
    assert torch.equal(second, torch.rand(8, device="cuda"))
    assert torch.equal(dropped, F.dropout(torch.ones(64, device="cuda")))
    torch.cuda.manual_seed(3)
    assert torch.equal(first, torch.rand(8, device="cuda"))
    assert not torch.equal(first, second)
    assert torch.equal(host, torch.get_rng_state())


def test_autocast_uses_the_operation_lists_of_cuda() -> None:
    x = torch.rand(4, 4, device="cuda")
    with torch.autocast("cuda", torch.float16):
        assert (x @ x).dtype is torch.float16
        assert F.softmax((x @ x), -1).dtype is torch.float32  # autocast on a CPU keeps half precision here
        half = x @ x
    assert torch.allclose(half.float(), x @ x, atol=1e-2)


def test_backward_in_several_threads_computes_the_right_gradients() -> None:
    expected = torch.arange(4.0) * 2
    found: list[torch.Tensor] = []

    def work() -> None:
        x = torch.arange(4.0, device="cuda", requires_grad=True)
        x.square().sum().backward()
        found.append(x.grad.cpu())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(each, expected) for each in found)
    assert len(found) == 3


def test_convolutions_and_batch_norm_compute_the_values_of_the_cpu() -> None:
    found = []
    for device in BOTH:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 2, 3)).to(device)
        x = torch.linspace(0, 1, 3 * 128).reshape(2, 3, 8, 8).to(device).requires_grad_()
        out = model(x)
        out.square().sum().backward()
        found.append([out.detach().cpu(), x.grad.cpu(), model[1].running_mean.cpu(), model[0].weight.grad.cpu()])
    assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(*found))


IN_BFLOAT16 = """
import os
import sys

import torch
from torch import nn
found = []
for device in ("cpu", "cuda"):
    torch.manual_seed(0)
    layer = nn.Conv2d(16, 32, 3, padding=1).to(device, torch.bfloat16)
    x = torch.linspace(-1, 1, 4 * 16 * 32 * 32).reshape(4, 16, 32, 32).to(device, torch.bfloat16).requires_grad_()
    out = layer(x)
    if device == "cuda":
        weight = torch.zeros(8, 8, device="cuda", requires_grad=True)
        (weight @ weight).sum().backward()  # cuBLAS's workspace for backward
        gradient = torch.ones_like(out)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out.backward(gradient)
        print(torch.cuda.max_memory_allocated() - before - x.nbytes)
    else:
        out.backward(torch.ones_like(out))
    found.append([out.detach().cpu(), x.grad.cpu(), layer.weight.grad.cpu()])
assert all(torch.allclose(one, other, rtol=0.02, atol=0.1) for one, other in zip(*found))
# Autograd's device thread may still release Python objects. Python 3.11 ends such a thread by unwinding it, which
# aborts the process ("terminate called without an active exception") if the interpreter is shutting down.
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize(("kind", "columns"), [("t4", 16 * 9 * 32 * 32 * 2), ("a100-80gb", 0)])
def test_convolutions_without_cudnn_run_torchs_own_backward(kind: str, columns: int) -> None:
    environment = {**os.environ, "SIMULATED_CUDA": kind, "SIMULATED_CUDA_VALUES": "1"}
    command = [sys.executable, "-c", IN_BFLOAT16]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    assert columns <= int(result.stdout) < columns + (1 << 14)  # plus the weights' gradients


def test_operation_without_an_implementation_is_reported(allow_uncomputed_values: None) -> None:
    weight = torch.zeros(64, 64, dtype=torch.uint8, device="cuda")
    packed = torch._convert_weight_to_int4pack(weight, 2)
    assert packed.is_cuda
    (line,) = [line for line in simulated_cuda.not_computed() if "_convert_weight_to_int4pack" in line]
    assert line.endswith("there is no kernel of the CPU")
