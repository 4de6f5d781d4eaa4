"""Test states of torchao's and bitsandbytes' optimizers as plain values, and what is refused, on one process."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.errors import CheckpointError, UnsupportedError
from headway.layouts.low_bit import states
from headway.layouts.whole_updates.kinds import TrialRefused, UpdateKind, find_known_kind


def step_once(optimizer: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    torch.manual_seed(0)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p)
    optimizer.step()


def list_tensors(optimizer: Any) -> list[torch.Tensor]:
    from headway.core.weights.pieces import iterate_inner_tensors

    every = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return [
        each.view(torch.uint8) if each.dtype == torch.float8_e4m3fn else each for each in iterate_inner_tensors(every)
    ]


def check_round_trip(optimizer: Any) -> None:
    """Check that exported and quantized states equal the original ones."""
    before = [each.clone() for each in list_tensors(optimizer)]
    for parameter, entry in optimizer.state.items():
        found = optimizer.state[parameter] = states.export_state(optimizer, entry)
        moments = [value for name, value in found.items() if name != "step"]
        assert {type(value) for value in moments} == {torch.Tensor}
        assert {value.dtype for value in moments} == {torch.float32}
        assert {value.shape for value in moments} == {parameter.shape}
        assert states.export_state(optimizer, found).keys() == found.keys()
    states.quantize_states(optimizer)
    after = list_tensors(optimizer)
    assert len(after) == len(before)
    assert all(torch.equal(a, b) for a, b in zip(sorted(after, key=str), sorted(before, key=str)))


def make_parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    shapes = ((64, 64), (90, 77), (128, 40), (5,))
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@pytest.mark.filterwarnings("ignore")
def test_torchaos_states_are_restored_bit_for_bit(name, dtype, monkeypatch):
    optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    optimizer = getattr(optim, name)(make_parameters(dtype))
    step_once(optimizer, monkeypatch)
    assert find_known_kind(optimizer) is UpdateKind.LOCAL
    check_round_trip(optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW8bit", "AdamW", "Lion8bit", "AdEMAMix8bit", "AdEMAMix"])
@pytest.mark.filterwarnings("ignore")
def test_bitsandbytes_states_are_restored_bit_for_bit(name, monkeypatch):
    optim = pytest.importorskip("bitsandbytes.optim", reason="bitsandbytes is not installed")
    optimizer = getattr(optim, name)(make_parameters())
    step_once(optimizer, monkeypatch)
    assert find_known_kind(optimizer) is UpdateKind.LOCAL
    check_round_trip(optimizer)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_norms_of_whole_parameters_are_refused():
    optim = pytest.importorskip("bitsandbytes.optim", reason="bitsandbytes is not installed")
    for optimizer in (optim.LAMB8bit(make_parameters()), optim.LARS8bit(make_parameters(), lr=0.1, momentum=0.9)):
        with pytest.raises(TrialRefused, match="norms of full parameters"):
            find_known_kind(optimizer)


def test_cpu_offload_is_for_one_process():
    """torchao's class cannot be instantiated without a GPU."""
    kind = type("CPUOffloadOptimizer", (torch.optim.AdamW,), {"__module__": "torchao.optim.cpu_offload"})
    optimizer = kind(make_parameters())
    one, two = (SimpleNamespace(everyone=SimpleNamespace(world_size=count)) for count in (1, 2))
    states.prepare_optimizer(optimizer, one)
    with pytest.raises(UnsupportedError, match=r"before ranks have reduced them.*cpu_offload=True"):
        states.prepare_optimizer(optimizer, two)


@pytest.mark.filterwarnings("ignore")
def test_moments_of_another_package_are_refused():
    optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    optimizer = optim.AdamW8bit(make_parameters())
    parameter = optimizer.param_groups[0]["params"][0]
    optimizer.state[parameter] = {"step": 1, "state1": torch.zeros(64, 64), "state2": torch.zeros(64, 64)}
    with pytest.raises(
        CheckpointError, match="this AdamW8bit is of torchao, and the saved one was made by bitsandbytes"
    ):
        states.quantize_states(optimizer)


@pytest.mark.filterwarnings("ignore")
def test_stochastic_rounding_ignores_and_keeps_the_random_state(monkeypatch):
    optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    found = []
    for seed in (1, 2):
        torch.manual_seed(0)
        optimizer = optim.AdamW8bit(make_parameters(torch.bfloat16), bf16_stochastic_round=True)
        for _ in range(2):  # prepared again after `free_memory`
            states.prepare_optimizer(optimizer, SimpleNamespace(everyone=SimpleNamespace(world_size=2)))
        before = []
        optimizer.register_step_pre_hook(lambda *given, before=before: before.append(torch.get_rng_state()))
        monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.full_like(p, 0.1)
        torch.manual_seed(seed)
        expected = torch.get_rng_state()
        optimizer.step()
        assert torch.equal(torch.get_rng_state(), expected)
        assert not torch.equal(before[0], expected)
        found.append([p.detach() for group in optimizer.param_groups for p in group["params"]])
    assert all(torch.equal(a, b) for a, b in zip(*found))
