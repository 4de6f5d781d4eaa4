"""Calls of `backward(weight=)` and of clipping that only some ranks make raise an error with its cause on all ranks."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.errors import CollectiveError, LossError
from tests.distributed.layouts import build_seeded
from tests.distributed.ranks import run_ranks

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"strategy": "fsdp"},
    {"strategy": "tp"},
    {"gradient_accumulation_steps": 2},
    {"microbatching": "auto"},
    {"strategy": "fsdp", "microbatching": "auto"},
]


class Net(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        self.tp_plan = {"0": "colwise", "2": "rowwise"}


def prepare_training(options: dict[str, Any]) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(cpu=True, **options)
    model = build_seeded(0, Net)
    loader = DataLoader(TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1))), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    return accelerator, model, optimizer, loader


def train(options: dict[str, Any], run_backward: Callable[[Accelerator, torch.Tensor], None], **clip: Any) -> None:
    """Train on all batches. The keywords are arguments of the call that clips, if any."""
    accelerator, model, optimizer, loader = prepare_training(options)
    try:
        for (rows,) in loader:
            for piece in accelerator.microbatches(rows):
                with accelerator.accumulate(model):
                    run_backward(accelerator, model(piece).square().mean())
                    if clip.get("ranks") is None or accelerator.process_index in clip["ranks"]:
                        clip_gradients(accelerator, model, clip)
                    optimizer.step()
                    optimizer.zero_grad()
    finally:
        accelerator.free_memory()


def clip_gradients(accelerator: Accelerator, model: torch.nn.Module, clip: dict[str, Any]) -> None:
    if "max_norm" in clip:
        accelerator.clip_grad_norm_(model.parameters(), clip["max_norm"][accelerator.process_index])
    elif "clip_value" in clip:
        accelerator.clip_grad_value_(model.parameters(), clip["clip_value"])


def run_mean_backward(accelerator: Accelerator, loss: torch.Tensor) -> None:
    accelerator.backward(loss, weight=2)


def weigh_on_one_rank(accelerator: Accelerator, loss: torch.Tensor) -> None:
    accelerator.backward(loss, weight=2 if accelerator.is_main_process else None)


def stop_weighing_on_one_rank(accelerator: Accelerator, loss: torch.Tensor) -> None:
    is_stopped = accelerator.num_updates >= 2 and not accelerator.is_main_process
    accelerator.backward(loss, weight=None if is_stopped else 2)


def check_weights(options: dict[str, Any], name: str) -> None:
    with pytest.raises(
        LossError, match=r"(?s)weight= on some ranks only:\n  rank 0: with weight= at .*rank 1: without"
    ):
        train(options, globals()[name])


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_a_weight_on_one_rank_is_an_error_on_all_ranks(options: dict[str, Any]) -> None:
    run_ranks(check_weights, 2, options, "weigh_on_one_rank")


@pytest.mark.parametrize("options", [each for each in LAYOUTS if each.get("strategy") != "tp"], ids=str)
def test_a_weight_that_one_rank_omits_later_is_an_error_on_all_ranks(options: dict[str, Any]) -> None:
    run_ranks(check_weights, 2, options, "stop_weighing_on_one_rank")


def check_standalone_weights() -> None:
    accelerator, model, _, loader = prepare_training({})
    (rows,) = next(iter(loader))
    with pytest.raises(LossError, match="weight= on some ranks only"):
        weigh_on_one_rank(accelerator, model(rows).square().mean())
    accelerator.free_memory()


def test_a_weight_on_one_rank_outside_accumulate_is_an_error_on_all_ranks() -> None:
    run_ranks(check_standalone_weights, 2)


def train_stages(name: str, clips: bool) -> None:
    accelerator = Accelerator(cpu=True, strategy="pp=2")
    blocks = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2)]
    model = torch.nn.Sequential(*blocks)
    loader = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    try:
        for (rows,) in loader:
            with accelerator.accumulate(model):
                globals()[name](accelerator, model(rows).square().mean())
                if clips and accelerator.is_main_process:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    finally:
        accelerator.free_memory()


def check_stages(name: str, clips: bool) -> None:
    error, message = (
        (CollectiveError, "rank 0: clip_grad_norm_") if clips else (LossError, "weight= on some ranks only")
    )
    with pytest.raises(error, match=message):
        train_stages(name, clips)


@pytest.mark.parametrize(("name", "clips"), [("weigh_on_one_rank", False), ("run_mean_backward", True)])
def test_calls_of_one_stage_are_an_error_on_all_ranks(name: str, clips: bool) -> None:
    run_ranks(check_stages, 2, name, clips)


class CapturedLog(logging.Handler):
    """Handler that collects messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def reduce_differently() -> tuple[list[str], list[torch.Tensor]]:
    accelerator, model, optimizer, loader = prepare_training({})
    log = CapturedLog()
    logging.getLogger("headway").addHandler(log)
    for (rows,) in loader:
        with accelerator.accumulate(model):
            errors = model(rows).square()
            is_sum = accelerator.is_main_process
            accelerator.backward(errors.sum() if is_sum else errors.mean(), reduction="sum" if is_sum else "mean")
            optimizer.step()
            optimizer.zero_grad()
    logging.getLogger("headway").removeHandler(log)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    accelerator.free_memory()
    return [text for text in log.texts if "reduction=" in text], weights


def test_different_reductions_are_exact_and_warned_of_once() -> None:
    (texts, weights), _ = run_ranks(reduce_differently, 2)
    assert len(texts) == 1
    assert "'sum' on rank 0, 'mean' on rank 1" in texts[0]
    torch.testing.assert_close(weights, run_ranks(switch_weights, 2, 1, True, False)[0])


def switch_weights(num_steps: int, is_inside: bool, is_switched: bool) -> list[torch.Tensor]:
    """Pass weights in some updates only, on all ranks. They equal the default weights, so they change nothing."""
    accelerator, model, optimizer, loader = prepare_training({"gradient_accumulation_steps": num_steps})
    for index, (rows,) in enumerate(loader):
        weight = 2 if is_switched and index % 6 >= 3 else None
        if is_inside:
            with accelerator.accumulate(model):
                accelerator.backward(model(rows).square().mean(), weight=weight)
                optimizer.step()
                optimizer.zero_grad()
        else:
            accelerator.backward(model(rows).square().mean(), weight=weight)
            optimizer.step()
            optimizer.zero_grad()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    accelerator.free_memory()
    return weights


@pytest.mark.parametrize(("num_steps", "is_inside"), [(1, True), (2, True), (1, False)])
def test_all_ranks_may_begin_and_stop_to_pass_weights(num_steps: int, is_inside: bool) -> None:
    switched, constant = (run_ranks(switch_weights, 2, num_steps, is_inside, each) for each in (True, False))
    torch.testing.assert_close(switched, constant)


def check_clipping(options: dict[str, Any], clip: dict[str, Any], message: str) -> None:
    with pytest.raises(CollectiveError, match=message):
        train(options, run_mean_backward, **clip)


@pytest.mark.parametrize("options", [each for each in LAYOUTS if each != {"microbatching": "auto"}], ids=str)
@pytest.mark.parametrize(
    ("clip", "message"),
    [
        ({"max_norm": (0.5, 0.5), "ranks": [0]}, r"rank 0: clip_grad_norm_ #\d+ at .* of max_norm=0.5, norm_type=2"),
        ({"clip_value": 0.5, "ranks": [0]}, r"rank 0: clip_grad_value_ #\d+ at .* of clip_value=0.5"),
        ({"max_norm": (0.5, 0.1)}, r"(?s)of max_norm=0.5, norm_type=2.*of max_norm=0.1"),
    ],
    ids=["norm", "value", "different"],
)
def test_clipping_on_one_rank_is_an_error_on_all_ranks(
    options: dict[str, Any], clip: dict[str, Any], message: str
) -> None:
    run_ranks(check_clipping, 2, options, clip, message)
