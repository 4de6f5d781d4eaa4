"""Injected NCCL faults: calls that never end, that fail at once or while they run, and that run out of memory."""

import os
from pathlib import Path

import pytest
import torch

from tests.distributed.ranks import run_ranks
from tests.distributed.test_launch import start_launch

pytest.importorskip("simulated_cuda", reason="needs torch over the simulated runtime: make cuda")
from tests.simulated_cuda.test_out_of_memory import train_in_pieces

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="a device for each rank: SIMULATED_CUDA_DEVICES=2"
)

TRAINING = """
import torch
from headway import Accelerator
accelerator = Accelerator(STRATEGY)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
data = torch.utils.data.TensorDataset(torch.randn(320, 64))
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters()), torch.utils.data.DataLoader(data, batch_size=8))
for (x,) in loader:
    loss = (model(x) - x).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    loss.item()
print("the end", flush=True)
"""


def run_with_fault(folder: Path, body: str, fault: str = "", *flags: str) -> tuple[int, str, str]:
    process = start_launch(folder, body, "-n", "2", "-q", "--log_dir", "logs", *flags, SIMULATED_CUDA_NCCL_FAULT=fault)
    try:
        out, err = process.communicate(timeout=180)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("ddp", "this run hangs: rank 1 of 2 is missing from all_reduce, where rank 0 has waited for"),
        ("fsdp", "but not in the same operation: rank 1 cannot leave an earlier one, or their order differs"),
    ],
)
def test_rank_stuck_in_a_call_is_reported(tmp_path: Path, strategy: str, message: str) -> None:
    body = TRAINING.replace("STRATEGY", f"strategy={strategy!r}")
    code, out, err = run_with_fault(tmp_path, body, "stuck:1:12", "--timeout", "8")
    assert code == 1, err
    assert "the end" not in out
    assert message in err


def test_call_that_hangs_on_all_ranks_is_reported_as_a_network_problem(tmp_path: Path) -> None:
    code, out, err = run_with_fault(tmp_path, TRAINING.replace("STRATEGY", ""), "hang:1:12", "--timeout", "8")
    assert code == 1
    assert "the end" not in out
    assert "this run hangs: all 2 ranks have waited for" in err
    assert "the likely cause is the network between them" in err


@pytest.mark.parametrize("kind", ["error", "memory", "async"])
def test_failed_call_ends_the_run_with_its_message(tmp_path: Path, kind: str) -> None:
    code, out, err = run_with_fault(tmp_path, TRAINING.replace("STRATEGY", ""), f"{kind}:1:12")
    assert code == (134 if kind == "async" else 1)
    assert "the end" not in out
    assert "rank 1 of 2 failed first" in err
    assert {"error": "a simulated failure of the network", "memory": "out of memory", "async": "SIGABRT"}[kind] in err


def test_run_without_a_fault_finishes(tmp_path: Path) -> None:
    code, out, err = run_with_fault(tmp_path, TRAINING.replace("STRATEGY", ""))
    assert (code, out.count("the end")) == (0, 2), err


def train_with_limit_on_rank_1(limit: int | None) -> tuple[list[int], list[torch.Tensor], int]:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    return train_in_pieces(limit if rank == 1 else None)


@pytest.mark.parametrize("limit", [112, 160], ids=["no room to compare the ranks' weights", "room for pieces"])
def test_memory_that_runs_out_on_one_rank_is_replayed_on_both(limit: int) -> None:
    whole = run_ranks(train_with_limit_on_rank_1, 2, None)
    pieces = run_ranks(train_with_limit_on_rank_1, 2, limit << 20)
    assert [errors for *_, errors in whole] == [0, 0]
    assert pieces[0][2] == 0 < pieces[1][2]
    for (sizes, weights, _), (_, expected, _) in zip(pieces, whole, strict=True):
        assert min(sizes) < 2048
        assert all(
            torch.allclose(one, other, rtol=1e-4, atol=1e-7) for one, other in zip(weights, expected, strict=True)
        )
    assert all(map(torch.equal, pieces[0][1], pieces[1][1]))
