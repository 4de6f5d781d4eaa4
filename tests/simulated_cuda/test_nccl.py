"""ProcessGroupNCCL between processes on simulated devices: its results equal those of gloo bit for bit."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from headway import Accelerator
from tests.distributed.ranks import run_ranks

pytest.importorskip("simulated_cuda", reason="needs torch over the simulated runtime: make cuda")
pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="a device for each rank: SIMULATED_CUDA_DEVICES=2"
)


def train(strategy: str, is_cpu: bool) -> tuple[str, list[float], float, list[torch.Tensor]]:
    accelerator = Accelerator(strategy=strategy, cpu=is_cpu)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 8)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs[:, :8]), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    whole = [getattr(each, "full_tensor", lambda each=each: each)().detach().cpu() for each in model.parameters()]
    backend = str(dist.get_backend())
    accelerator.end_training()
    return backend, losses, float(norm), whole


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_bitwise_like_gloo(strategy: str) -> None:
    for ours, gloo in zip(run_ranks(train, 2, strategy, False), run_ranks(train, 2, strategy, True)):
        assert (ours[0], gloo[0]) == ("cpu:gloo,cuda:nccl", "gloo")
        assert ours[1:3] == gloo[1:3]
        assert all(map(torch.equal, ours[3], gloo[3]))


def run_every_collective(dtype: torch.dtype, size: int) -> dict[str, Any]:
    rank, ranks = int(__import__("os").environ["RANK"]), 3
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks)

    def own(factor: int = 1) -> torch.Tensor:
        return (torch.arange(size * factor, device="cuda") % 7 + rank).to(dtype)

    found: dict[str, torch.Tensor] = {}
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        dist.all_reduce(summed := own(), operation)
        found[str(operation)] = summed
    dist.broadcast(sent := own(), 1)
    gathered = torch.empty(size * ranks, dtype=dtype, device="cuda")
    dist.all_gather_into_tensor(gathered, own())
    scattered, switched = torch.empty_like(sent), torch.empty_like(gathered)
    dist.reduce_scatter_tensor(scattered, own(ranks))
    dist.all_to_all_single(switched, own(ranks))
    dist.reduce(reduced := own(), 2)
    passed = torch.empty_like(sent)
    around = [dist.P2POp(dist.isend, own(), (rank + 1) % ranks), dist.P2POp(dist.irecv, passed, (rank - 1) % ranks)]
    for work in dist.batch_isend_irecv(around):
        work.wait()
    pair = dist.new_group([0, 2])
    together = own()
    if rank != 1:
        dist.all_reduce(together, group=pair)
    found |= {"broadcast": sent, "gathered": gathered, "scattered": scattered}
    found |= {"switched": switched, "passed": passed, "pair": together}
    if rank == 2:
        found["reduced"] = reduced
    return {name: tensor.cpu() for name, tensor in found.items()}


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="three ranks: SIMULATED_CUDA_DEVICES=3")
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 5), (torch.bfloat16, 1000), (torch.int64, 300_000)])
def test_every_collective_moves_the_data(dtype: torch.dtype, size: int) -> None:
    def of(rank: int, factor: int = 1) -> torch.Tensor:
        return (torch.arange(size * factor) % 7 + rank).to(dtype)

    total = of(0) + of(1) + of(2)
    for rank, found in enumerate(run_ranks(run_every_collective, 3, dtype, size)):
        expected = {
            "RedOpType.SUM": total, "RedOpType.MAX": of(2), "RedOpType.MIN": of(0), "broadcast": of(1),
            "gathered": torch.cat([of(0), of(1), of(2)]), "passed": of((rank - 1) % 3),
            "scattered": (of(0, 3) + of(1, 3) + of(2, 3)).chunk(3)[rank],
            "switched": torch.cat([of(other, 3).chunk(3)[rank] for other in range(3)]),
            "pair": of(1) if rank == 1 else of(0) + of(2),
        }  # fmt: skip
        if rank == 2:
            expected["reduced"] = total
        assert found.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
