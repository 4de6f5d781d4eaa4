"""Test which optimizers can train sharded models, and the errors for the others."""

import pytest
import torch

from headway.core.strategies.fully_sharded.optimizer_checks import check_optimizer
from headway.errors import UnsupportedError


def test_optimizers_that_work_on_shards_are_accepted():
    weight = [torch.nn.Parameter(torch.ones(2, 2))]
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Muon, torch.optim.LBFGS):
        check_optimizer(kind(weight, lr=0.1))


def test_optimizers_that_need_full_parameters_are_refused_with_their_subclasses():
    class Mine(torch.optim.Adafactor):
        pass

    for kind in (torch.optim.Adafactor, Mine):
        with pytest.raises(
            UnsupportedError, match=f"{kind.__name__} cannot train a sharded model: it needs full matrices"
        ):
            check_optimizer(kind([torch.nn.Parameter(torch.ones(2, 2))]))
    foreign = type("Adam8bit", (torch.optim.SGD,), {"__module__": "bitsandbytes.optim.adam"})
    with pytest.raises(UnsupportedError, match=r"plain tensors only.*use torchao's AdamW8bit"):
        check_optimizer(foreign([torch.nn.Parameter(torch.ones(2))], lr=0.1))


def test_fused_steps_without_dtensor_support_are_refused():
    weight = [torch.nn.Parameter(torch.ones(2, 2))]
    for kind in (torch.optim.SGD, torch.optim.Adagrad):
        check_optimizer(kind(weight, lr=0.1, foreach=True))
        with pytest.raises(
            UnsupportedError, match=rf"{kind.__name__} does not support DTensor; use {kind.__name__}\(foreach"
        ):
            check_optimizer(kind(weight, lr=0.1, fused=True))
        with pytest.raises(UnsupportedError, match="fused"):
            check_optimizer(kind([{"params": weight, "fused": True}], lr=0.1))
    check_optimizer(torch.optim.AdamW(weight, fused=True))
    with pytest.raises(
        UnsupportedError, match="Rprop cannot train a sharded model: it changes elements of gradients by a mask"
    ):
        check_optimizer(torch.optim.Rprop(weight))


def test_optimizers_of_other_packages_are_refused():
    weight = [torch.nn.Parameter(torch.ones(2, 2))]
    for package, name, message in (
        ("transformers.optimization", "Adafactor", "means over rows and columns"),
        ("torchao.optim.cpu_offload", "CPUOffloadOptimizer", r"use ShardingOptions\(cpu_offload=True\)"),
        ("torchao.optim.adam", "AdamW4bit", "use torchao's AdamW8bit"),
    ):
        kind = type(name, (torch.optim.AdamW,), {"__module__": package})
        with pytest.raises(UnsupportedError, match=f"{name} cannot train a sharded model: .*{message}"):
            check_optimizer(kind(weight))
