"""Items that `split_between_processes` gives to ranks that share a sample, compared with plain PyTorch on one process."""

import pytest
import torch
from torch import nn

from headway import Accelerator, TensorParallelOptions
from headway.compat.accelerate.accelerator import AccelerateAccelerator
from headway.compat.accelerate.plugins import ParallelismConfig
from headway.compat.accelerate.state import PartialState
from tests.distributed.ranks import run_ranks

ITEMS = [0, 1, 2, 3, 4]
PLAN = TensorParallelOptions({"0": "colwise", "2": "rowwise"})


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def make_rows() -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def split_items(strategy: str) -> tuple[tuple[int, int], list[int], list[int]]:
    accelerator = Accelerator(cpu=True, strategy=strategy)
    with accelerator.split_between_processes(ITEMS) as part, accelerator.split_between_processes(ITEMS, True) as padded:
        pass
    return (accelerator.data_shard_index, accelerator.num_data_shards), part, padded


BY_LAYOUT = {
    "ddp": [(0, 2, [0, 1, 2], [0, 1, 2]), (1, 2, [3, 4], [3, 4, 4])],
    "fsdp": [(0, 2, [0, 1, 2], [0, 1, 2]), (1, 2, [3, 4], [3, 4, 4])],
    "tp": [(0, 1, ITEMS, ITEMS)] * 2,
    "cp": [(0, 1, ITEMS, ITEMS)] * 2,
    "pp": [(0, 1, ITEMS, ITEMS)] * 2,
    "fsdp+tp=2": [(0, 2, [0, 1, 2], [0, 1, 2])] * 2 + [(1, 2, [3, 4], [3, 4, 4])] * 2,
    "fsdp+cp=2": [(0, 2, [0, 1, 2], [0, 1, 2])] * 2 + [(1, 2, [3, 4], [3, 4, 4])] * 2,
    # The pipeline is the outermost axis: ranks 0 and 2 are the stages of one replica.
    "pp=2+fsdp=2": [(0, 2, [0, 1, 2], [0, 1, 2]), (1, 2, [3, 4], [3, 4, 4])] * 2,
    "ep=2+tp=2": [(0, 2, [0, 1, 2], [0, 1, 2])] * 2 + [(1, 2, [3, 4], [3, 4, 4])] * 2,
}


@pytest.mark.parametrize("strategy", BY_LAYOUT)
def test_ranks_of_one_replica_get_equal_items(strategy: str) -> None:
    expected = BY_LAYOUT[strategy]
    results = run_ranks(split_items, len(expected), strategy)
    assert results == [((index, count), part, padded) for index, count, part, padded in expected]


def infer(strategy: str) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    accelerator = Accelerator(cpu=True, strategy=strategy, kwargs_handlers=[PLAN])
    model = accelerator.prepare(make_model())
    with torch.no_grad(), accelerator.split_between_processes({"rows": make_rows(), "items": ITEMS}) as part:
        outputs = model(part["rows"])
    gathered = accelerator.gather_for_metrics(outputs)
    items = accelerator.gather_for_metrics(part["items"], use_gather_object=True)
    mean = accelerator.reduce_mean(outputs.sum(), outputs.numel())
    return gathered, items, mean


@pytest.mark.parametrize(("strategy", "num_ranks"), [("tp", 2), ("fsdp+tp=2", 4)])
def test_results_of_the_parts_are_those_of_one_process(strategy: str, num_ranks: int) -> None:
    with torch.no_grad():
        expected = make_model()(make_rows())
    for outputs, items, mean in run_ranks(infer, num_ranks, strategy):
        torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
        assert items == ITEMS
        torch.testing.assert_close(mean, expected.mean(), rtol=1e-12, atol=1e-12)


def split_under_the_name_of_accelerate() -> tuple[list[int], list[str]]:
    import logging

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("headway").addHandler(handler)
    accelerator = AccelerateAccelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    with accelerator.split_between_processes(ITEMS) as part, PartialState().split_between_processes(ITEMS) as of_state:
        assert part == of_state
    return part, [message for message in messages if "split_between_processes" in message]


def test_accelerates_name_splits_over_all_ranks_with_a_warning() -> None:
    first, second = run_ranks(split_under_the_name_of_accelerate, 2)
    assert (first[0], second[0]) == ([0, 1, 2], [3, 4])
    assert len(first[1]) == 1
    assert "data_shard_index" in first[1][0]
