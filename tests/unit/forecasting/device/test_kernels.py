"""Test the kernel of attention on CUDA. tests/simulated_cuda/test_attention.py compares whole grids with torch's choice."""

import pytest
import torch
from torch.nn import functional as F

from headway.forecasting.device.attention import AttentionRules
from headway.forecasting.device.devices import find_device
from headway.forecasting.tracing.recipe import StepRecipe
from headway.forecasting.tracing.trace_step import trace_step

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
H100, A100, T4 = (9, 0), (8, 0), (7, 5)


@pytest.mark.parametrize(
    ("capability", "version", "dtype", "width", "groups", "mask", "p", "kernel"),
    [
        (H100, (2, 14), BF16, 64, 8, False, 0.0, "cudnn"),
        ((10, 0), (2, 14), FP16, 64, 8, False, 0.0, "cudnn"),
        (H100, (2, 14), BF16, 60, 8, False, 0.0, "flash"),
        (H100, (2, 14), FP32, 64, 8, False, 0.0, "efficient"),
        (H100, (2, 11), BF16, 64, 2, True, 0.0, "cudnn"),
        (H100, (2, 11), BF16, 64, 8, False, 0.1, "cudnn"),
        (H100, (2, 12), BF16, 64, 8, False, 0.1, "flash"),
        (H100, (2, 13), BF16, 160, 8, False, 0.0, "cudnn"),
        (H100, (2, 14), BF16, 160, 8, False, 0.0, "flash"),
        (A100, (2, 14), BF16, 64, 8, False, 0.0, "flash"),
        (A100, (2, 13), BF16, 64, 2, True, 0.0, "math"),
        (A100, (2, 14), BF16, 64, 2, True, 0.0, "efficient"),
        (A100, (2, 14), BF16, 60, 8, True, 0.0, "math"),
        (T4, (2, 14), FP16, 64, 8, False, 0.0, "efficient"),
        (T4, (2, 14), BF16, 64, 8, False, 0.0, "math"),
        (T4, (2, 14), FP32, 30, 8, False, 0.0, "efficient"),
    ],
)
def test_attention_kernel_is_that_of_torch_on_each_capability(
    capability, version, dtype, width, groups, mask, p, kernel
):
    query, key = torch.empty(2, 8, 16, width, dtype=dtype), torch.empty(2, groups, 16, width, dtype=dtype)
    added = torch.empty(2, 1, 16, 16, dtype=dtype) if mask else None
    assert AttentionRules(capability, version).choose_kernel(query, key, added, p, False, True) == kernel


LENGTH = 1024
SCORES = 2 * 4 * LENGTH * LENGTH * 4
"""Bytes: of two samples and four heads, in float32, as torch computes them where there is no kernel."""


class Attention(torch.nn.Module):
    """Four heads of queries, and two of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.into = torch.nn.Linear(256, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.into(x).split((256, 128, 128), -1)
        heads = [part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in (query, key, value)]
        mask = torch.zeros(2, 1, LENGTH, LENGTH, dtype=query.dtype)
        return F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize(("name", "has_scores"), [("t4", True), ("h100", False), ("b200", False)])
def test_scores_are_counted_where_they_are_kept(name, has_scores):
    recipe = StepRecipe(None, lambda out, _: out.sum(), "bf16")
    found = trace_step(Attention, lambda: torch.zeros(2, LENGTH, 256), recipe, find_device(name))
    assert (max(event.num_bytes for event in found.events if event.kind != "workspaces") >= SCORES) is has_scores
