"""Buffers and frozen parameters of types that gloo cannot send: every rank has rank 0's bits, at prepare and after an update."""

from typing import Any

import pytest
import torch

from tests.distributed.ranks import run_ranks

DTYPES = (
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float16", "bfloat16", "float64", "complex64", "complex128"),
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
)


class Holder(torch.nn.Module):
    def __init__(self, rank: int, dtype: torch.dtype, is_parameter: bool) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
        odd = make_values(rank, dtype)
        if is_parameter:
            self.odd = torch.nn.Parameter(odd, requires_grad=False)
        else:
            self.register_buffer("odd", odd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))  # type: ignore[no-any-return]


def make_values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(6) + rank).to(dtype)


def read_bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().contiguous().view(torch.uint8).tolist()


def train_each(layout: str | None, is_parameter: bool) -> dict[str, Any]:
    from headway import Accelerator

    accelerator: Any = Accelerator(cpu=True, **({"strategy": layout} if layout else {}))
    seen = {}
    for name in DTYPES:
        torch.manual_seed(0)
        dtype = getattr(torch, name)
        net = Holder(accelerator.process_index, dtype, is_parameter)
        model, optimizer = accelerator.prepare(
            net, torch.optim.SGD([*net.up.parameters(), *net.down.parameters()], lr=0.1)
        )
        at_prepare = [read_bits(each) for key, each in accelerator.get_state_dict(model).items() if key == "odd"]
        if not is_parameter and accelerator.process_index:
            net.odd.copy_(make_values(2, dtype))  # of rank 0 alone, as those that a forward changes
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        after = [read_bits(each) for key, each in accelerator.get_state_dict(model).items() if key == "odd"]
        seen[name] = (at_prepare, after, None if is_parameter else read_bits(net.odd))
        accelerator.free_memory()
    return seen


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        (None, 1),
        ("ddp", 2),
        pytest.param("fsdp", 2, marks=pytest.mark.matrix),
        pytest.param("tp", 2, marks=pytest.mark.matrix),
    ],
)
@pytest.mark.parametrize("is_parameter", [False, True], ids=["buffer", "parameter"])
def test_all_ranks_hold_the_bits_of_rank_0(layout, world_size, is_parameter):
    for rank, seen in enumerate(run_ranks(train_each, world_size, layout, is_parameter)):
        for name in DTYPES:
            wanted = read_bits(make_values(0, getattr(torch, name)))
            at_prepare, after, buffer = seen[name]
            is_here = rank == 0 or layout in (None, "ddp")  # sharded layouts bring whole weights to rank 0
            assert at_prepare == after == ([wanted] if is_here else []), name
            assert buffer in (None, wanted), name
