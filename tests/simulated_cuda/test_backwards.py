"""Scratch memory of backward for attention, softmax and embeddings: torch's allocator compared with the forecast's rules."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from headway.forecasting.device.devices import find_device
from headway.forecasting.device.memory_rules import list_rules
from tests.simulated_cuda.operations import END_PROCESS

DTYPES = {"float32": torch.float32, "float16": torch.float16}
# (operation, dtype, sizes, whether the gradient has the layout that the kernel reads). Sizes of attention: batch, heads,
# queries, head size, keys. Sizes of an embedding: indices, rows, width.
CASES: list[tuple[str, str, list[int], bool]] = [
    ("efficient", "float32", [2, 3, 384, 64, 384], True), ("efficient", "float32", [2, 3, 200, 64, 200], False),
    ("efficient", "float16", [2, 3, 384, 64, 384], True), ("efficient", "float16", [2, 3, 256, 160, 256], True),
    ("efficient", "float16", [2, 3, 256, 128, 300], False), ("efficient", "float32", [2, 3, 256, 128, 256], True),
    ("flash", "float16", [2, 4, 256, 64, 256], True), ("flash", "float16", [2, 4, 256, 64, 256], False),
    ("softmax", "float32", [2, 3, 128, 128], True), ("safe_softmax", "float32", [2, 3, 128, 128], True),
    ("embedding", "float32", [6144, 1000, 768], True), ("embedding", "float16", [6144, 700, 768], True),
    ("embedding", "float32", [3000, 1000, 768], True), ("embedding", "float32", [6144, 20, 768], True),
]  # fmt: skip
MEASURE = """
import json, sys, torch
from torch.nn.attention import SDPBackend, sdpa_kernel

def recorded(run):
    torch.cuda.memory._record_memory_history(max_entries=100000, context=None)
    result = run()
    history = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    return [event["size"] for event in history if event["action"] == "alloc"]

def attention(kernel, dtype, samples, heads, length, width, keys, in_rows):
    def made(length):
        laid = torch.empty(samples, length, heads, width, device="cuda", dtype=dtype).transpose(1, 2)
        return laid.requires_grad_()
    tensors = [made(length), made(keys), made(keys)]
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        outputs = torch.nn.functional.scaled_dot_product_attention(*tensors)
    gradient = outputs.detach().clone() if in_rows else torch.empty(outputs.shape, device="cuda", dtype=dtype)
    return recorded(lambda: torch.autograd.grad(outputs, tensors, gradient))

def measured(name, dtype, sizes, in_rows):
    dtype = getattr(torch, dtype)
    if name in ("efficient", "flash"):
        kernel = {"efficient": "EFFICIENT_ATTENTION", "flash": "FLASH_ATTENTION"}[name]
        return attention(kernel, dtype, *sizes, in_rows)
    if name == "embedding":
        table = torch.nn.Embedding(*sizes[1:], device="cuda", dtype=dtype)
        outputs = table(torch.zeros(sizes[0], dtype=torch.long, device="cuda"))
        gradient = torch.empty_like(outputs)
        return recorded(lambda: torch.autograd.grad(outputs, table.weight, gradient))
    values = torch.empty(sizes, device="cuda", dtype=dtype, requires_grad=True)
    if name == "safe_softmax":
        return recorded(lambda: torch.ops.aten._safe_softmax(values.detach(), -1))
    outputs = values.softmax(-1)
    gradient = torch.empty_like(outputs)
    return recorded(lambda: torch.autograd.grad(outputs, values, gradient))

print(json.dumps([measured(*case) for case in json.loads(sys.argv[1])]))
"""


def predict_sizes(name: str, dtype: torch.dtype, sizes: list[int], in_rows: bool) -> tuple[list[int], list[int]]:
    """Return the sizes in bytes of the scratch memory that the forecast counts, and those of the results."""

    rules = list_rules(find_device("h100")).after

    def meta(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    if name in ("efficient", "flash"):
        samples, heads, length, width, keys = sizes
        query, key = (
            meta(samples, length, heads, width).mT.transpose(2, 3).transpose(1, 2),
            meta(samples, heads, keys, width),
        )
        gradient = query if in_rows else meta(samples, heads, length, width)
        args: tuple[Any, ...] = (gradient, query, key, key, query)
        found = rules[f"aten::_scaled_dot_product_{name}_attention_backward"](args)
        return found, [query.nbytes, key.nbytes, key.nbytes]
    if name == "embedding":
        indices, rows, width = sizes
        args = meta(indices, width), meta(indices, of=torch.long), rows
        return rules["aten::embedding_dense_backward"](args), [rows * width * dtype.itemsize]
    values = meta(*sizes)
    operation = {"softmax": "_softmax_backward_data", "safe_softmax": "_safe_softmax"}[name]
    args = (values, -1, None) if name == "safe_softmax" else (values, values, -1, dtype)
    return rules[f"aten::{operation}"](args), [values.nbytes]


@pytest.mark.parametrize("kind", ["h100", "a100-80gb"])
def test_predicted_scratch_memory_matches_torchs_kernels(kind: str) -> None:
    pytest.importorskip("simulated_cuda")
    environment = {**os.environ, "SIMULATED_CUDA": kind, "SIMULATED_CUDA_VALUES": "0"}
    command = [sys.executable, "-c", MEASURE + END_PROCESS, json.dumps(CASES)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    for (name, dtype, sizes, in_rows), real in zip(CASES, json.loads(result.stdout.splitlines()[-1]), strict=True):
        found, results = predict_sizes(name, DTYPES[dtype], sizes, in_rows)
        # Small requests use a separate pool. Examples are the indices and flags of a sort.
        counted = sorted(size for size in (*found, *results) if size > 1 << 17)
        assert sorted(size for size in real if size > 1 << 17) == pytest.approx(counted, rel=1e-3), (name, dtype, sizes)
