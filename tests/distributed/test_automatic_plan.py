"""Models without a tensor-parallel plan, split by one that is found in their structure, beside the whole models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from headway import Accelerator, TensorParallelOptions
from headway.errors import ConfigError
from headway.strategies.fully_sharded.dtensors import local
from headway.strategies.tensor.tensor_parallel import TensorParallel
from headway.weights.pieces import is_dtensor
from tests.distributed.ranks import run_ranks
from tests.distributed.test_tensor_parallel import full, mesh
from tests.sweep.models import CASES

OWN = TensorParallelOptions()
ON_PARTS = replace(OWN, sequence_parallel=True)
WITH_PARTS = ("GPT-2", "BERT", "RoBERTa", "DistilBERT", "T5", "BART", "Whisper")


def made(name: str) -> nn.Module:
    """A model whose values are all of one size: biases and tables of positions too."""
    model = CASES[name].make()
    for seed, parameter in enumerate(model.parameters()):
        values = 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        parameter.data.copy_(values + (1.0 if parameter.dim() == 1 else 0.0))
    return model.train()


def run_of(name: str, model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    loss, count = CASES[name].loss(model, *(each[:4] for each in CASES[name].rows()))
    (loss / count).backward()
    return float(full(loss.detach())), {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def apart(name: str, options: TensorParallelOptions) -> float:
    whole, cut = made(name), made(name)
    state = torch.get_rng_state()
    TensorParallel(cut, mesh(), options)
    assert torch.equal(state, torch.get_rng_state())
    assert any(local(p).shape != p.shape for p in cut.parameters())
    (loss, wanted), (cut_loss, grads) = run_of(name, whole), run_of(name, cut)
    assert wanted.keys() == grads.keys()
    largest = max(float(g.abs().max()) for g in wanted.values())
    return max(
        abs(loss - cut_loss) / loss, *(float((wanted[n] - grads[n]).abs().max()) / largest for n in wanted)
    )


def all_apart() -> dict[str, float]:
    found = {name: apart(name, OWN) for name in ("GPT-2", "BERT", "T5", "Whisper", "Swin")}
    found |= {f"{name}, sequences": apart(name, ON_PARTS) for name in WITH_PARTS}
    return found


def test_gradients_are_those_of_the_whole_model() -> None:
    found = run_ranks(all_apart, 2, timeout=300)[0]
    assert all(off < 5e-6 for off in found.values()), found
